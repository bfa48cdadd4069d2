"""1 KB elements (256 float32), taken one by one from a worker process; how long a single `next()` takes; and what the
codecs take for a batch of 3,000 leaves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from harness import HERE, OUR_PYTHON, SOURCE, THEIR_PYTHON, Bench, BenchError, environment, main, ours, peer, say
from report import paired_costs

COUNTS = {"ours.service": 1_000_000, "peers.tf_service": 20_000}
QUANTILES = ("p50", "p99", "p99.9")
PATIENCE_S = 600
LEAVES_LIMIT_MS = 1.0


def quantiles_us(module: str, elements: int, source: Path = SOURCE) -> dict[str, float]:
    """Return quantiles of `next()`; with `ours`, of Penstock's from these sources."""
    found = seconds([module, "latencies", str(elements)], source)
    return {name: value * 1e6 for name, value in found.items()}


def codec_ms(source: Path = SOURCE) -> dict[str, float]:
    """Return what a batch of 3,000 leaves takes, by case."""
    return {name: value * 1e3 for name, value in seconds(["ours.leaves"], source).items()}


def seconds(module: list[str], source: Path) -> dict[str, float]:
    """Return what a module of the peers, or of ours with these sources, prints."""
    python, env = (OUR_PYTHON, environment(source)) if module[0].startswith("ours") else (THEIR_PYTHON, None)
    command = [str(python), "-m", *module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE, env=env, timeout=PATIENCE_S)
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return found


def run(bench: Bench) -> None:
    run_leaves(bench)
    tf_service = peer("tf.data service", "peers.tf_service:elements")
    for path in ("slabs", "sockets"):
        mine = ours("ours.service:elements", path=path)
        bench.compare(f"1 KB elements, {path}", mine, [tf_service], unit="elements/s", target=200.0)
    if not any(bench.wants(f"{name} of next(), slabs") for name in QUANTILES):
        return
    runs, part = (1, 10) if bench.options.quick else (5, 1)
    if bench.options.against is not None:
        count = COUNTS["ours.service"] // part

        def measure(source: Path) -> dict[str, float]:
            found = quantiles_us("ours.service", count, source)
            return {f"{name} of next(), slabs": found[name] for name in QUANTILES}

        bench.alternate("us", measure, bench.options.against)
        return
    say(f"elements/next(), one by one: {runs} pairs")
    pairs = [[quantiles_us(module, count // part) for module, count in COUNTS.items()] for _ in range(runs)]
    for name in QUANTILES:
        found = [(mine[name], theirs[name]) for mine, theirs in pairs]
        bench.add(paired_costs(bench.name, f"{name} of next(), slabs", "tf.data service", "us", found))


def run_leaves(bench: Bench) -> None:
    if not bench.wants("3,000 leaves"):
        return
    if bench.options.against is not None:
        bench.alternate("ms", codec_ms, bench.options.against)
        return
    runs = [codec_ms() for _ in range(bench.options.pairs)]
    for case in runs[0]:
        bench.limit(case, [found[case] for found in runs], LEAVES_LIMIT_MS, unit="ms")


if __name__ == "__main__":
    main("elements", run, trees_by_case=True)
