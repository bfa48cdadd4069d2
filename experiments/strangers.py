"""Two thousand strangers at one door of a working service: what the attacked process and the job beside it notice.

    python experiments/strangers.py [--quick] [--seconds 30] [--connections 2000] [--rounds 2]

For both ways to a service (Unix sockets, as a service of one host has them, and CURVE over TCP) and both planes, a job
is read for a while beside an attack on that door, and, in turns with it, beside the same attack on the door of an idle
dispatcher: the attacker costs the same processors either way, so that the ratio is what the door costs. On a machine
that others use the ratio by the wall says little: beside it stands how much the job makes of the processor time it has.

Garbage is that of `tests/security/attack.py`. It prints what was seen beside what is wanted, then one JSON line, and
ends with 1 if a bound does not hold: 64 MB of growth, 0.9 of the throughput, every element read once, so many
connections held.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.security.listeners import listening_addresses  # noqa: E402
from tests.security.strangers import resident_mb  # noqa: E402

import penstock as ps  # noqa: E402
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses  # noqa: E402
from penstock.wire.addresses import Listening  # noqa: E402

MOST_GROWTH_MB = 64.0
LEAST_RATIO = 0.9
LEAST_HELD = 0.95  # of the connections asked for, in the middle of the attack
READY_S = 60.0
ELEMENTS = 1 << 40


def identity(value: int) -> int:
    return value


class MemoryWatch(threading.Thread):
    """The most memory a process had while this ran."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ended = pid, threading.Event()
        self.before_mb = self.most_mb = resident_mb(pid)

    def run(self) -> None:
        while not self._ended.wait(0.1):
            self.most_mb = max(self.most_mb, resident_mb(self._pid))

    def end(self) -> float:
        self._ended.set()
        self.join()
        return self.most_mb - self.before_mb


def start(kind: str) -> ServiceProcesses:
    listening = Listening() if kind == "curve" else None
    processes = ServiceProcesses(ServiceOptions(workers=1, listening=listening))
    processes.wait_ready(READY_S)
    return processes


def pid_of(processes: ServiceProcesses, part: str) -> int:
    return next(child.pid for child in processes.children() if part in child.entry)


def processor_s(*pids: int) -> float:
    """Return how much processor time processes have had."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def attacked_for(address: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.security.attack", address, str(options.connections), str(options.seconds)]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.PIPE, text=True
    )


class Reading:
    """A job that is read all the time; every element that arrives is counted once."""

    def __init__(self, service_file: Path) -> None:
        dataset = ps.range(ELEMENTS).map(identity).batch(64)
        self._loader = dataset.distribute(str(service_file), job="beside", limits=ps.Limits(timeout_s=READY_S))
        self._epoch = iter(self._loader)
        self._next = 0
        self.wrong = 0
        self.read()

    def read(self) -> None:
        for value in next(self._epoch):
            self.wrong += int(value) != self._next
            self._next = int(value) + 1

    def rates(self, attacker: subprocess.Popen[str], runner: int) -> tuple[float, float]:
        """Return how many batches came a second, and for a second of the two processors' time that the job has."""
        began, used, batches = time.monotonic(), processor_s(os.getpid(), runner), 0
        while attacker.poll() is None:
            for _ in range(20):
                self.read()
            batches += 20
        return batches / (time.monotonic() - began), batches / (processor_s(os.getpid(), runner) - used)

    def close(self) -> None:
        self._loader.close()


def measure(kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    working, idle = start(kind), start(kind)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "service.json"
        working.service_file().write(file)
        reading = Reading(file)
        try:
            runner = pid_of(working, "runner")
            idle_door = listening_addresses(pid_of(idle, "dispatcher"))[0]
            doors = {
                "control": (pid_of(working, "dispatcher"), listening_addresses(pid_of(working, "dispatcher"))[0]),
                "data": (runner, listening_addresses(runner)[0]),
            }
            for plane, (pid, door) in doors.items():
                ratios, by_processor, grown_mb, told = [], [], 0.0, {}
                for number in range(options.rounds):
                    rates: dict[str, tuple[float, float]] = {}
                    for attacked in (idle_door, door) if number % 2 == 0 else (door, idle_door):
                        watch = MemoryWatch(pid)
                        watch.start()
                        attacker = attacked_for(attacked, options)
                        rates[attacked] = reading.rates(attacker, runner)
                        grown = watch.end()
                        assert attacker.stdout is not None
                        if attacked == door:
                            grown_mb, told = max(grown_mb, grown), json.loads(attacker.stdout.read())
                    ratios.append(rates[door][0] / rates[idle_door][0])
                    by_processor.append(rates[door][1] / rates[idle_door][1])
                found.append(
                    {
                        "way": kind,
                        "door": door.partition(":")[0],
                        "plane": plane,
                        "ratio": round(statistics.median(ratios), 3),
                        "ratios": [round(ratio, 3) for ratio in ratios],
                        "by_processor_time": round(statistics.median(by_processor), 3),
                        "grown_mb": round(grown_mb, 1),
                        "wrong_elements": reading.wrong,
                        "same_process": pid_of(working, "runner") == runner,
                        "attack": told,
                    }
                )
        finally:
            reading.close()
            working.close()
            idle.close()
    return found


def judge(line: dict[str, Any], connections: int) -> bool:
    """Print what was seen at one door beside what is wanted; return whether all of it holds."""
    least = int(LEAST_HELD * connections)
    held = line["attack"]["held"]
    seen = [
        (f"{line['ratio']} of the throughput (at least {LEAST_RATIO})", line["ratio"] >= LEAST_RATIO),
        (f"{line['by_processor_time']} of it for a second of processor time", True),
        (f"{line['grown_mb']} MB more (at most {MOST_GROWTH_MB:g})", line["grown_mb"] <= MOST_GROWTH_MB),
        (f"{held:g} connections held (at least {least})", held >= least),
        (f"{line['wrong_elements']} wrong elements (0)", line["wrong_elements"] == 0),
        (f"{'the same' if line['same_process'] else 'another'} process", line["same_process"]),
    ]
    print(f"{line['way']}, {line['plane']}: " + "; ".join(text + ("" if ok else " MISSED") for text, ok in seen))
    return all(ok for _, ok in seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--connections", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=["one-host", "curve"], choices=["one-host", "curve"])
    parser.add_argument("--quick", action="store_true", help="five seconds of 300 connections, once")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.connections, options.rounds = 5.0, 300, 1
    found = [line for kind in options.ways for line in measure(kind, options)]
    verdicts = [judge(line, options.connections) for line in found]  # each is printed
    holds = all(verdicts)
    print(json.dumps({"experiment": "strangers", "seconds": options.seconds, "holds": holds, "doors": found}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
