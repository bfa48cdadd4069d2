"""Coordinated reads: what synchronous ranks gain when all batches of a step have one length. The shape of figure 11.

python experiments/coordinated.py [--quick]     or: make experiment E=coordinated

Sentences with lengths as in text corpora (a long tail, up to 512 tokens) in batches of 16 rows for 2 to 8 consumers,
each a process. A step is simulated: each rank sleeps 0.1 ms for each token of its padded length, then waits for the
others. So a step costs what its longest batch costs. Compared are

- `uncoordinated`: rows as they come, each batch padded to its longest row (the baseline of the paper),
- `buckets alone`: batches of one bucket, another one for each rank,
- `coordinated`: `coordinated=True`, with buckets of 64 and of 128 tokens,
- `tf.data service`: its coordinated reads of the same sentences, in the same run.

Ways are interleaved and repeated; medians count. It prints a table and writes a plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steps import BATCH, SECONDS_A_TOKEN, WARM_UP, Outcome, boundaries, run_ranks, sentence_lengths

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers" / "bin" / "python"
WORKERS = 2
WIDTHS = (64, 128)
SLACK_ROWS = 40_000  # windows that are still being filled when the last step is taken

UNCOORDINATED, BUCKETS, COORDINATED, TF = "uncoordinated", "buckets alone", "coordinated", "tf.data service"


def rank(consumer: int, consumers: int, *, service: str, way: str, width: int, rows: int) -> Iterator[Any]:
    """Read as one consumer of a job."""
    import numpy as np

    import penstock as ps

    lengths = sentence_lengths(rows)
    sentences = ps.range(rows).map(lambda i: np.full(lengths[i], i + 1))
    if way == UNCOORDINATED:
        batches = sentences.padded_batch(BATCH)
    else:
        batches = sentences.bucket_by_length(len, boundaries=boundaries(width), batch_size=BATCH)
    return iter(
        batches.distribute(
            service,
            job=f"{way}-{width}",
            ranks=ps.Ranks(consumers, consumer, coordinated=way == COORDINATED),
            limits=ps.Limits(timeout_s=120),
        )
    )


def ours(way: str, consumers: int, width: int, steps: int) -> Outcome:
    import penstock as ps

    rows = rows_for(consumers, steps)
    with ps.LocalService(workers=WORKERS, threads=1) as service:
        arguments = {"service": str(service.service_file), "way": way, "width": width, "rows": rows}
        return run_ranks(rank, consumers, steps, arguments)


def tf_service(consumers: int, width: int, steps: int) -> Outcome:
    given = {
        "consumers": consumers,
        "width": width,
        "steps": steps,
        "workers": WORKERS,
        "rows": rows_for(consumers, steps),
    }
    ran = subprocess.run(
        [str(PEERS), str(Path(__file__).with_name("tf_coordinated.py")), json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ran.returncode:
        raise SystemExit(f"tf.data service did not run:\n{ran.stderr[-2000:]}")
    return Outcome(**json.loads(ran.stdout.splitlines()[-1]))


def rows_for(consumers: int, steps: int) -> int:
    return (WARM_UP + steps) * consumers * BATCH + SLACK_ROWS


def measure(consumers: tuple[int, ...], steps: int, repeats: int, peers: bool) -> dict[tuple[int, str], list[Outcome]]:
    """Return the outcomes of each (consumers, way)."""
    found: dict[tuple[int, str], list[Outcome]] = {}
    for m in consumers:
        for _ in range(repeats):
            runs = [(UNCOORDINATED, lambda m=m: ours(UNCOORDINATED, m, 0, steps))]
            runs += [(f"{BUCKETS}, {WIDTHS[0]}", lambda m=m: ours(BUCKETS, m, WIDTHS[0], steps))]
            for width in WIDTHS:
                runs += [(f"{COORDINATED}, {width}", lambda m=m, width=width: ours(COORDINATED, m, width, steps))]
                if peers:
                    runs += [(f"{TF}, {width}", lambda m=m, width=width: tf_service(m, width, steps))]
            for way, run in runs:
                outcome = run()
                found.setdefault((m, way), []).append(outcome)
                say(f"{m} consumers, {way}: {outcome.steps_per_s:.1f} steps/s, padding {outcome.padding_share:.0%}")
    return found


def median(outcomes: list[Outcome], name: str) -> float:
    return statistics.median(getattr(outcome, name) for outcome in outcomes)


def table(found: dict[tuple[int, str], list[Outcome]]) -> Iterator[str]:
    yield f"{'consumers':>9}  {'way':<24}{'steps/s':>9}{'speed-up':>10}{'tokens/s':>10}{'padding':>9}{'of it':>8}"
    for (m, way), outcomes in found.items():
        base = found[m, UNCOORDINATED]
        speed, padding = median(outcomes, "steps_per_s"), median(outcomes, "padding_share")
        faster, tokens = speed / median(base, "steps_per_s"), median(outcomes, "tokens_per_s")
        less = padding / median(base, "padding_share")
        yield f"{m:>9}  {way:<24}{speed:>9.1f}{faster:>9.2f}x{tokens:>10,.0f}{padding:>9.0%}{less:>8.0%}"


def claims(found: dict[tuple[int, str], list[Outcome]], peers: bool) -> Iterator[tuple[str, bool]]:
    """Return what the experiment must show, and whether it does."""
    most = max(m for m, _ in found)
    base = found[most, UNCOORDINATED]
    for width in WIDTHS:
        outcomes = found[most, f"{COORDINATED}, {width}"]
        speed = median(outcomes, "steps_per_s")
        faster = speed / median(base, "steps_per_s")
        less = median(outcomes, "padding_share") / median(base, "padding_share")
        yield f"buckets of {width}, {most} consumers: {faster:.2f}x the steps of uncoordinated reads (2x)", faster >= 2
        yield f"buckets of {width}, {most} consumers: {less:.2f} of the padding (a third)", less <= 1 / 3
        if peers:
            theirs = speed / median(found[most, f"{TF}, {width}"], "steps_per_s")
            yield f"buckets of {width}, {most} consumers: {theirs:.2f}x the steps of tf.data service (1x)", theirs >= 1


def plot(found: dict[tuple[int, str], list[Outcome]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speeds, paddings) = pyplot.subplots(1, 2, figsize=(11, 4))
    consumers = sorted({m for m, _ in found})
    ways = list(dict.fromkeys(way for _, way in found))
    for number, way in enumerate(ways):
        at = [x + (number - len(ways) / 2) * 0.8 / len(ways) for x in range(len(consumers))]
        for axes, name in ((speeds, "steps_per_s"), (paddings, "padding_share")):
            axes.bar(at, [median(found[m, way], name) for m in consumers], 0.8 / len(ways), label=way, align="edge")
    for axes, label in ((speeds, "steps/s"), (paddings, "padding for each token")):
        axes.set_xticks(range(len(consumers)), [str(m) for m in consumers])
        axes.set_xlabel("consumers")
        axes.set_ylabel(label)
    speeds.legend(fontsize="small")
    figure.suptitle(f"a step sleeps {1000 * SECONDS_A_TOKEN:g} ms for each token of its longest padded batch")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 and 8 consumers, fewer steps, once")
    parser.add_argument("--no-peers", action="store_true", help="without tf.data service")
    parser.add_argument("--plot", type=Path, default=ROOT / "build" / "experiments" / "coordinated.png")
    options = parser.parse_args()
    peers = not options.no_peers and PEERS.exists()
    if not peers:
        say("tf.data service is left out: its environment is not there, or was not wanted")
    consumers, steps, repeats = ((2, 8), 60, 1) if options.quick else ((2, 4, 8), 300, 3)
    found = measure(consumers, steps, repeats, peers)
    print("\n".join(table(found)))
    shown = list(claims(found, peers))
    for text, holds in shown:
        print(f"{'yes' if holds else 'NO '}  {text}")
    plot(found, options.plot)
    print(f"plot: {options.plot}")
    sys.exit(0 if all(holds for _, holds in shown) else 1)


if __name__ == "__main__":
    main()
