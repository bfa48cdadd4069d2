"""Does offloading find the fastest way to read? Seven workloads shaped as FastFlow's, each way measured beside ours.

python experiments/offloading.py [--only T,S] [--conditions free] [--minutes 8]     or: make experiment E=offloading

It runs as root. Of each workload under each condition (a cell) six ways are read at the same time, each by a trainer
with a service of its own: everything here, everything there, both places at each cut, and `ps.offload` as a user calls
it. So whatever else the machine does happens to all of them, and each pair of windows is of the same seconds. Ratios
are medians of windows, with the lowest beside it. FastFlow's rule is the pace that its share gives of those measured.
What is lost until all have found their pace is what ours has read less by then than the best of the other ways.

A service is another network namespace (no shared memory) with two workers, its trainer's has two guests; links are
`tc tbf`. A host has two processors and a disk, whoever uses them (`offloading_trainer.py`); work waits while it holds
one, so that twelve hosts fit on two cores. `offloading.toml` has the figures, fixed before the policy was tuned on
them. Files only here are real ones, below the trainer's working folder, which workers elsewhere do not find. Two
conditions change in mid-epoch, and are measured from ten seconds later on: the remote host becomes four times slower,
its workers are killed; that epoch is read to its end, and every element has to come once.

Cells are appended to --results as they are measured, and what is there is not measured again, so that it may be
stopped at any time; --minutes begins no cell after so long. Printed is a table of the cells asked for, then every claim
beside what was seen; it ends with 1 if one does not hold, with 3 if cells are still to be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from fleet_claims import Claim, at_least, at_most
from offloading_trainer import CHANGES, FILES_HERE, PLACES, SLOWER, STEP_S

from penstock.graph.cutting import ALL_THERE, READ_HERE
from penstock.policies.fastflow import decide_share, pace_at
from penstock.policies.offloading import CutPace, OffloadProfile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from hosts import Network  # noqa: E402

FIGURES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("offloading.toml").read_text())
WORKLOADS = ("T", "G", "C", "S", "R", "M", "L")
CONDITIONS = ("free", "throttled link", "slow disk there", "slow disk here", FILES_HERE, *CHANGES)
PREPARED_HERE = "before map(Prepare)"
OURS = "ours"
PORT = 5050
MEMORY_BYTES = 256 << 20  # of each process: there are some forty
WINDOWS = 6
SLOW_DOWN = 4.0
SETTLED_S = 10.0  # after a change
PATIENCE_S = 300.0  # an epoch that slowed down is read to its end
TRAINING_S = 300.0
NEVER_BELOW, OF_THE_SUM, OF_THE_BEST, ASKING, PROFILING = 0.97, 0.95, 0.97, 0.01, 0.03


@dataclass(frozen=True)
class Way:
    name: str
    cut: str = ""
    """Empty: it is found."""
    place: str = ""


def ways(condition: str) -> list[Way]:
    cuts = (ALL_THERE, READ_HERE if condition == FILES_HERE else PREPARED_HERE)
    fixed = [Way(f"{cut}, {place}", cut, place) for cut in cuts for place in ("there", "both")]
    return [Way("here", ALL_THERE, "here"), *fixed, Way(OURS)]


HERE, THERE = "here", f"{ALL_THERE}, there"


class Lane:
    """Two hosts: a service on one, a trainer on the other."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        self._folder = folder
        for side in ("here", "there"):
            (folder / side).mkdir(parents=True)
            for name in (*(f"processor-{n}" for n in range(PLACES)), "disk"):
                (folder / side / name).touch()
        self._network = closing.enter_context(Network(["trainer", "remote"]))
        python, keys, address = [sys.executable, "-m", "penstock"], folder / "keys", self._network.addresses["remote"]
        subprocess.run([*python, "keys", "make", str(keys)], check=True, stdout=subprocess.DEVNULL)
        serve = ["serve", "--bind", address, "--port", str(PORT), "--keys", str(keys / "server.json")]
        serve += ["--workers", str(PLACES), "--threads", "1"]
        self.service = self._start("remote", [*python, *serve], closing, stdout=subprocess.DEVNULL)
        trainer = [sys.executable, str(ROOT / "experiments/offloading_trainer.py"), f"tcp://{address}:{PORT}"]
        trainer += [str(keys / "agent.json"), json.dumps(FIGURES), str(folder)]
        self._trainer = self._start(
            "trainer", trainer, closing, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder / "here"
        )
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _start(self, host: str, command: list[str], closing: ExitStack, **how: Any) -> subprocess.Popen[Any]:
        environment = {
            **os.environ,
            "PENSTOCK_KEYS": str(self._folder / "keys/trainer.json"),
            "PENSTOCK_MEMORY_BYTES": str(MEMORY_BYTES),
            "SLURM_CPUS_PER_TASK": str(PLACES),  # so many processors the host has
        }
        process = subprocess.Popen([*self._network.within(host), *command], env=environment, **how)
        closing.callback(process.wait)
        closing.callback(process.terminate)
        return process

    def _listen(self) -> None:
        for line in self._trainer.stdout or ():
            self._said.put(json.loads(line))
        self._said.put({"failed": "the trainer has ended"})

    def tell(self, **order: Any) -> None:
        assert self._trainer.stdin is not None
        self._trainer.stdin.write(json.dumps(order) + "\n")
        self._trainer.stdin.flush()

    def hear(self) -> dict[str, Any]:
        return self._said.get(timeout=PATIENCE_S)

    def shape(self, rate: str) -> None:
        for host in ("trainer", "remote"):
            tc = [*self._network.within(host), "tc", "qdisc"]
            subprocess.run([*tc, "del", "dev", "eth0", "root"], check=False, capture_output=True)
            if rate:
                tbf = ["tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
                subprocess.run([*tc, "add", "dev", "eth0", "root", *tbf], check=True)

    def change(self, condition: str) -> None:
        """Let happen what the condition says."""
        if condition == "slowed there":
            (self._folder / "there" / SLOWER).write_text(str(SLOW_DOWN))
        elif condition == "killed there":
            for pid in self._network.pids("remote"):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("ps-") and name not in ("ps-agent", "ps-dispatcher"):
                    os.kill(pid, signal.SIGKILL)

    def restore(self) -> None:
        (self._folder / "there" / SLOWER).unlink(missing_ok=True)


def measure(lanes: list[Lane], workload: str, condition: str, window_s: float) -> dict[str, Any]:
    """Read a cell in all ways at once; return what was seen."""
    reading: dict[str, Lane] = {}
    found: dict[str, dict[str, Any]] = {}
    for lane, way in zip(lanes, ways(condition), strict=True):
        lane.restore()
        lane.shape(FIGURES["link"]["throttled"] if condition == "throttled link" else "")
        lane.tell(workload=workload, condition=condition, cut=way.cut, place=way.place)
        reading[way.name] = lane
    for name, lane in list(reading.items()):
        if "ready" not in (said := lane.hear()):
            found[name] = said
            del reading[name]
    if condition in CHANGES:
        for lane in reading.values():
            lane.change(condition)
        time.sleep(SETTLED_S)
    begin = time.monotonic()
    for lane in reading.values():
        lane.tell(begin=begin, end=begin + WINDOWS * window_s)
    found |= {name: lane.hear() for name, lane in reading.items()}
    if OURS not in found or "arrivals" not in found[OURS]:
        raise SystemExit(f"ours could not be measured: {found.get(OURS)}")
    edges = [begin + n * window_s for n in range(WINDOWS + 1)]
    return summary(workload, condition, found, edges)


def summary(workload: str, condition: str, found: dict[str, dict[str, Any]], edges: list[float]) -> dict[str, Any]:
    ours = found[OURS]
    arrivals = {name: one.get("arrivals", []) for name, one in found.items()}
    whole = {name: pace(times, edges[0], edges[-1]) for name, times in arrivals.items()}
    best = max((name for name in whole if name != OURS), key=lambda name: whole[name])
    read = {name: sum(at < edges[0] for at in arrivals[name]) for name in (OURS, best)}
    later = ours["asked_at"] - found[best]["asked_at"]
    cuts = tuple(
        CutPace(cut=cut, per_s=whole[f"{cut}, there"], here_cpu_s=ours["overheads"].get(cut, 0.0))
        for cut in dict.fromkeys(way.cut for way in ways(condition) if way.place == "there")
        if whole[f"{cut}, there"]
    )
    measured = OffloadProfile(step_per_s=1 / STEP_S, here_per_s=whole[HERE], cores=PLACES, cuts=cuts)
    share = decide_share(measured)
    there = whole.get(f"{share.cut}, there", 0.0)
    return {
        "workload": workload,
        "condition": condition,
        "whole": whole,
        "windows": {
            name: [pace(times, low, high) for low, high in pairwise(edges)] for name, times in arrivals.items()
        },
        "fastflow": pace_at(share, step_per_s=1 / STEP_S, here_per_s=whole[HERE], there_per_s=there),
        "chosen": ours["chosen"],
        "reason": ours["reason"],
        "decided_s": ours["decided_s"],
        "lost_s": (read[best] - read[OURS]) / whole[best] - later,
        "reconnects": ours["reconnects"],
        "once": ours["once"],
        "failures": {name: one["failed"] for name, one in found.items() if "failed" in one},
    }


def pace(arrivals: list[float], low: float, high: float) -> float:
    """Return outputs a second: the slope of their number, for where a window begins and ends is chance."""
    inside = [at for at in arrivals if low <= at < high]
    if len(inside) < 3:
        return len(inside) / (high - low)
    return float(np.polyfit(inside, np.arange(len(inside)), 1)[0])


def ratios(seen: dict[str, Any], *against: str) -> tuple[float, float]:
    """Return the median over windows of ours over the sum of others, and the lowest."""
    windows = seen["windows"]
    each = [ours / max(1e-9, sum(windows[name][n] for name in against)) for n, ours in enumerate(windows[OURS])]
    return float(np.median(each)), min(each)


def row(seen: dict[str, Any]) -> str:
    whole = seen["whole"]
    best = max((way for way in whole if way != OURS), key=lambda way: whole[way])
    numbers = "".join(f"{n:8.2f}" for n in (whole[HERE], whole[THERE], seen["fastflow"], whole[OURS], whole[best]))
    low = ratios(seen, best)
    return f"{seen['workload']:2}{seen['condition']:16}{numbers}  {low[0]:5.2f}{low[1]:6.2f}  {seen['chosen']} ({best})"


HEAD = (
    "outputs/s            here   there fastflow    ours    best  of it lowest  chosen by ours (the best way measured)"
)


def claims(seen: dict[str, Any]) -> list[Claim]:
    whole, name = seen["whole"], f"{seen['workload']}, {seen['condition']}"
    better = max((HERE, THERE), key=lambda way: whole[way])
    best = max((way for way in whole if way != OURS), key=lambda way: whole[way])
    total = whole[HERE] + whole[THERE]
    unsaturated = whole[THERE] > 0 and total < 0.9 / STEP_S
    changed = seen["condition"] in CHANGES

    def of(what: str, target: float, *ways: str) -> Claim:
        median, lowest = ratios(seen, *ways)
        return at_least(f"{name}: of {what} (lowest {lowest:.2f})", median, target)

    made = [of("the best way measured", OF_THE_SUM if changed else OF_THE_BEST, best)]
    if not changed:
        made.append(of("the better of here and there", NEVER_BELOW, better))
    if unsaturated:
        made.append(of("here + there", OF_THE_SUM, HERE, THERE))
    if changed:
        made.append(at_least(f"{name}: every element came once", float(seen["once"]), 1.0))
    elif whole[HERE] * 1.1 >= 1 / STEP_S:
        made.append(at_least(f"{name}: nothing is offloaded", float(seen["chosen"] == "nothing, here"), 1.0))
        made.append(at_most(f"{name}: lost by having asked, of 5 minutes", seen["lost_s"] / TRAINING_S, ASKING))
    else:
        made.append(at_most(f"{name}: lost by measuring, of 5 minutes", seen["lost_s"] / TRAINING_S, PROFILING))
    if seen["condition"] == FILES_HERE and whole[HERE] * 1.1 < 1 / STEP_S:
        made.append(at_least(f"{name}: read here", float(seen["chosen"].startswith(READ_HERE)), 1.0))
    return made


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each condition: a group of bars for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    conditions = list(dict.fromkeys(seen["condition"] for seen in found))
    figure, axes = pyplot.subplots(len(conditions), 1, figsize=(9, 2.6 * len(conditions)), squeeze=False)
    for axis, condition in zip(axes.flat, conditions):
        cells = [seen for seen in found if seen["condition"] == condition]
        bars = {
            "here": [seen["whole"][HERE] for seen in cells],
            "there": [seen["whole"][THERE] for seen in cells],
            "FastFlow's rule": [seen["fastflow"] for seen in cells],
            "ours": [seen["whole"][OURS] for seen in cells],
            "best way": [max(n for way, n in seen["whole"].items() if way != OURS) for seen in cells],
        }
        for number, (label, values) in enumerate(bars.items()):
            axis.bar(np.arange(len(cells)) + 0.17 * (number - 2), values, 0.16, label=label)
        axis.set_xticks(range(len(cells)), [seen["workload"] for seen in cells])
        axis.set(title=condition, ylabel="outputs/s")
    axes.flat[0].legend(fontsize="x-small", ncols=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)


def read_results(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(seen["workload"], seen["condition"]): seen for seen in map(json.loads, lines)}


def run(cells: list[tuple[str, str]], results: Path, window_s: float, until: float) -> None:
    """Measure cells one by one, and append each."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        lanes = [Lane(folder / str(number), closing) for number in range(len(ways("free")))]
        for workload, condition in cells:
            if time.monotonic() > until:
                return
            seen = measure(lanes, workload, condition, window_s)
            with results.open("a") as file:
                file.write(json.dumps(seen) + "\n")
            print(row(seen), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, with commas between them")
    parser.add_argument("--conditions", default=",".join(CONDITIONS), help="with commas between them")
    parser.add_argument("--window-s", type=float, default=5.0, help=f"each way is measured in {WINDOWS} of them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after so long no cell is begun")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "experiments" / "offloading.jsonl")
    parser.add_argument("--plot", type=Path, default=ROOT / "build" / "experiments" / "offloading.png")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces and processes are not left behind
    cells = [(one, condition) for one in arguments.only.split(",") for condition in arguments.conditions.split(",")]
    print(HEAD, flush=True)
    known = read_results(arguments.results)
    missing = [cell for cell in cells if cell not in known]
    for cell in cells:
        if cell in known:
            print(row(known[cell]))
    if missing:
        run(missing, arguments.results, arguments.window_s, time.monotonic() + 60 * arguments.minutes)
    known = read_results(arguments.results)
    found = [known[cell] for cell in cells if cell in known]
    made = [claim for seen in found for claim in claims(seen)]
    print("\n" + "\n".join(claim.line() for claim in made))
    plot(found, arguments.plot)
    print(f"plot: {arguments.plot}; results: {arguments.results}")
    missed = sum(not claim.holds for claim in made)
    print(f"{missed} of {len(made)} targets missed; {len(cells) - len(found)} cells are still to be measured")
    return 1 if missed else 3 if len(found) < len(cells) else 0


if __name__ == "__main__":
    sys.exit(main())
