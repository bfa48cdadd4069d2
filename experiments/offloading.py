"""Does offloading find the fastest way to read? Seven workloads shaped as FastFlow's, each way measured beside ours.

python experiments/offloading.py [--quick] [--only T,S] [--conditions free]   or: make experiment E=offloading (as root)

The remote side is another network namespace (no shared memory) with a dispatcher and two workers, the trainer's has two
guests; links are `tc tbf`. Work waits instead of computing, so that four places fit on two cores; `offloading.toml` has
the figures, fixed before the policy was tuned on them. A slow disk is a wait in the operator that reads, on its side.
Files only here are real ones, below the trainer's working folder, which workers elsewhere do not find.

For each workload and condition: everything here, everything there, both places at each cut, FastFlow's rule (the pace
that its share gives of the paces measured), and `ps.offload` as a user calls it. The oracle is the best of all ways
that were measured. --quick (five minutes) takes three workloads and three conditions. Printed is a table, then every
claim beside what was seen; it ends with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.graph.cutting import ALL_THERE, READ_HERE
from penstock.policies.fastflow import decide_share, pace_at
from penstock.policies.offloading import CutPace, OffloadProfile

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from hosts import Network  # noqa: E402

FIGURES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("offloading.toml").read_text())
WORKLOADS = ("T", "G", "C", "S", "R", "M", "L")
FILES_HERE = "files only here"
CONDITIONS = ("free", "throttled link", "slow disk there", "slow disk here", FILES_HERE)
QUICK_WORKLOADS, QUICK_CONDITIONS = ("T", "S", "M"), ("free", "throttled link", FILES_HERE)
FILES = 2_000
STEP_S = 0.1
PLACES = 2  # guests here, workers there: each side stands for 7 processors
PROCESSORS = 7
PORT = 5050
EPOCH = 100_000
WARM_S = 3.0  # processes start, and threads are added
NEVER_BELOW, OF_THE_SUM, OF_THE_ORACLE = 0.97, 0.95, 0.97


def namespace() -> int:
    return os.stat("/proc/self/ns/net").st_ino


@dataclass(frozen=True)
class Read:
    """Reads an output's raw bytes; waits for the disk of its side."""

    raw_bytes: int
    here: int
    slow_side: str
    slow_bytes_per_s: float

    def __call__(self, number: int) -> dict[str, Any]:
        side = "here" if namespace() == self.here else "there"
        if side == self.slow_side:
            time.sleep(self.raw_bytes / self.slow_bytes_per_s)
        return {"raw": np.zeros(self.raw_bytes, np.uint8)}


@dataclass(frozen=True)
class Prepare:
    seconds: float
    out_bytes: int

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self.seconds)
        return {"out": np.zeros(self.out_bytes, np.uint8)}


def pipeline(workload: str, condition: str) -> ps.Dataset:
    figures = FIGURES[workload]
    slow = {"slow disk there": "there", "slow disk here": "here"}.get(condition, "")
    read = Read(int(figures["raw_mb"] * 1e6), namespace(), slow, FIGURES["disk"]["slow_mb_per_s"] * 1e6)
    seconds = STEP_S * figures["processors"] * PLACES / PROCESSORS
    prepare = Prepare(seconds, int(figures["out_mb"] * 1e6))
    if condition == FILES_HERE:
        return ps.read_files(f"/proc/self/cwd/{raw_files(workload, read.raw_bytes)}/*.bin").map(prepare)
    return ps.range(EPOCH).map(read).map(prepare)


def raw_files(workload: str, raw_bytes: int) -> Path:
    """Return a folder of files below the working folder; they are one file, by many names."""
    folder = Path(f"raw {workload}")
    if not folder.exists():
        folder.mkdir()
        first = folder / "00000.bin"
        first.write_bytes(os.urandom(raw_bytes))
        for number in range(1, FILES):
            os.link(first, folder / f"{number:05}.bin")
    return folder


@dataclass
class Trainer:
    """Reads as a training would, on its own host."""

    address: str
    keys: str
    measure_s: float

    def pace(self, dataset: ps.Dataset, offloading: ps.Offloading) -> tuple[float, ps.OffloadLoader]:
        """Return outputs a second once the way is found and warm."""
        with ps.offload(dataset, self.address, offloading=offloading) as loader:
            begun, count, found = 0.0, 0, False
            for _ in loader:
                time.sleep(STEP_S)
                now = time.monotonic()
                if not found:  # what comes next is the first that is read in this way
                    found = loader.decision is not None
                    continue
                begun = begun or now + WARM_S
                count += now > begun
                if now > begun + self.measure_s:
                    break
            return count / (time.monotonic() - begun), loader

    def way(self, dataset: ps.Dataset, cut: str, place: Any) -> float:
        offloading = ps.Offloading(guests=PLACES, keys=self.keys, cut=cut, place=place)
        try:
            return self.pace(dataset, offloading)[0]
        except (ps.DataError, OSError):  # the files are not there
            return 0.0

    def run(self, workload: str, condition: str) -> dict[str, Any]:
        dataset = pipeline(workload, condition)
        here = self.way(dataset, ALL_THERE, "here")
        cuts: tuple[str, ...] = (ALL_THERE, READ_HERE)
        if condition != FILES_HERE:
            cuts = ps.offload(dataset, self.address, offloading=ps.Offloading(keys=self.keys)).cuts.names[:2]
        there = {cut: self.way(dataset, cut, "there") for cut in cuts}
        both = {cut: self.way(dataset, cut, "both") for cut in cuts}
        own = ps.Offloading(guests=PLACES, keys=self.keys, model=f"{workload} {condition} {time.time()}")
        ours, loader = self.pace(dataset, own)
        assert loader.decision is not None
        fastflow = self.fastflow(here, there, loader.profile)
        decision = loader.decision
        return {
            "workload": workload,
            "condition": condition,
            "here": here,
            "there": max(there.values()),
            "all there": there[ALL_THERE],
            "ways": {"here": here, **{f"{cut}, there": n for cut, n in there.items()}}
            | {f"{cut}, both": n for cut, n in both.items()},
            "fastflow": fastflow,
            "ours": ours,
            "chosen": f"{decision.cut or 'nothing'}, {decision.place}",
            "reason": decision.reason,
        }

    def fastflow(self, here: float, there: dict[str, float], profile: OffloadProfile | None) -> float:
        """Return the pace of its fixed share, of what was measured in this run."""
        overhead = {pace.cut: pace.here_cpu_s for pace in (profile.cuts if profile is not None else ())}
        cuts = tuple(CutPace(cut=cut, per_s=n, here_cpu_s=overhead.get(cut, 0.0)) for cut, n in there.items())
        measured = OffloadProfile(step_per_s=1 / STEP_S, here_per_s=here, cores=PLACES, cuts=cuts)
        chosen = decide_share(measured)
        return pace_at(chosen, step_per_s=1 / STEP_S, here_per_s=here, there_per_s=there.get(chosen.cut or "", 1e9))


def inside(arguments: argparse.Namespace) -> int:
    trainer = Trainer(arguments.inside, arguments.keys, arguments.measure_s)
    for workload in arguments.only.split(","):
        print(json.dumps(trainer.run(workload, arguments.condition)), flush=True)
    return 0


def serve(network: Network, folder: Path) -> subprocess.Popen[bytes]:
    python = [sys.executable, "-m", "penstock"]
    subprocess.run([*python, "keys", "make", str(folder / "keys")], check=True, stdout=subprocess.DEVNULL)
    where = ["--bind", network.addresses["remote"], "--port", str(PORT), "--keys", str(folder / "keys/server.json")]
    workers = ["--workers", str(PLACES), "--threads", "1"]
    return subprocess.Popen([*network.within("remote"), *python, "serve", *where, *workers], stdout=subprocess.DEVNULL)


def shape(network: Network, rate: str) -> None:
    tc = [*network.within("remote"), "tc", "qdisc"]
    subprocess.run([*tc, "del", "dev", "eth0", "root"], check=False, capture_output=True)
    if rate:
        tbf = ["tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
        subprocess.run([*tc, "add", "dev", "eth0", "root", *tbf], check=True)


def run_condition(network: Network, folder: Path, condition: str, workloads: str, measure_s: float) -> list[Any]:
    shape(network, FIGURES["link"]["throttled"] if condition == "throttled link" else "")
    command = [sys.executable, str(Path(__file__).resolve()), "--inside", f"tcp://{network.addresses['remote']}:{PORT}"]
    command += ["--keys", str(folder / "keys/agent.json"), "--condition", condition, "--only", workloads]
    command += ["--measure-s", str(measure_s)]
    environment = {**os.environ, "PENSTOCK_KEYS": str(folder / "keys/trainer.json")}
    found, where = [], folder / "trainer"
    where.mkdir(exist_ok=True)
    with subprocess.Popen(
        [*network.within("trainer"), *command], stdout=subprocess.PIPE, text=True, env=environment, cwd=where
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found.append(json.loads(line))
            print(row(found[-1]), flush=True)
    if process.returncode:
        raise SystemExit(f"the trainer's side ended with {process.returncode}")
    return found


def row(seen: dict[str, Any]) -> str:
    oracle = max(seen["ways"].values())
    numbers = "".join(
        f"{value:8.2f}" for value in (seen["here"], seen["all there"], seen["fastflow"], seen["ours"], oracle)
    )
    return f"{seen['workload']:3}{seen['condition']:17}{numbers}   {seen['chosen']}"


def claims(found: list[Any]) -> list[tuple[str, float, float]]:
    """Return each claim, its target and what was seen of it, which must not be less."""
    made: list[tuple[str, float, float]] = []
    for seen in found:
        name, ours = f"{seen['workload']}, {seen['condition']}", seen["ours"]
        made.append(
            (f"{name}: of the better of here and there", NEVER_BELOW, ours / max(seen["here"], seen["all there"]))
        )
        total = seen["here"] + seen["all there"]
        if total < 0.9 / STEP_S:
            made.append((f"{name}: of here + there", OF_THE_SUM, ours / total))
        made.append((f"{name}: of the best way measured", OF_THE_ORACLE, ours / max(seen["ways"].values())))
        if seen["here"] >= 1 / STEP_S / 1.1:
            made.append((f"{name}: no stall, nothing offloaded", 1.0, float(seen["chosen"] == "nothing, here")))
        elif seen["condition"] == FILES_HERE:
            made.append((f"{name}: read here", 1.0, float(seen["chosen"].startswith(READ_HERE))))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three workloads, two conditions, short windows")
    parser.add_argument("--only", help="workloads, with commas between them")
    parser.add_argument("--conditions", help=f"of {', '.join(CONDITIONS)}; with commas between them")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    parser.add_argument("--condition", help=argparse.SUPPRESS)
    parser.add_argument("--measure-s", type=float, default=6.0, help="how long each way is measured")
    arguments = parser.parse_args()
    if arguments.inside:
        return inside(arguments)
    workloads = arguments.only or ",".join(QUICK_WORKLOADS if arguments.quick else WORKLOADS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces and processes are not left behind
    found = []
    with tempfile.TemporaryDirectory() as folder, Network(["trainer", "remote"]) as network:
        service = serve(network, Path(folder))
        try:
            print("outputs/s           here   there  fastflow  ours  oracle   chosen by ours")
            usual = QUICK_CONDITIONS if arguments.quick else CONDITIONS
            for condition in arguments.conditions.split(",") if arguments.conditions else usual:
                measure_s = 3.0 if arguments.quick else arguments.measure_s
                found += run_condition(network, Path(folder), condition, workloads, measure_s)
        finally:
            service.terminate()
            service.wait()
    missed = 0
    print()
    for claim, target, value in claims(found):
        missed += value < target
        print(f"{'MISSED' if value < target else 'held':7}{claim}: {value:.2f}, at least {target:.2f}")
    print(f"\n{missed} claims missed" if missed else "\nall claims held")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
