"""Several hosts: dispatcher, two workers and a trainer, each in its own network namespace, with keys.

A host's cable is pulled in the middle of an epoch and put back: every element still arrives exactly once. Needs root
and iproute2.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Bench, BenchError, main, say
from hosts import Network
from report import figures, machine, our_versions, paired

from trainers import Trainer, exactly_once

HOSTS = ["dispatcher", "worker1", "worker2", "trainer"]
PORT = 5050
ELEMENTS, QUICK_ELEMENTS = 40_000, 12_000
WORK_S = 0.001
CUT_S, QUICK_CUT_S = 12.0, 7.0
STALL_S = 60.0
PENSTOCK = [sys.executable, "-m", "penstock"]


class Fleet:
    """The processes of a service, one a host."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self._folder = network, folder
        self._running: list[subprocess.Popen[bytes]] = []
        self.keys = folder / "keys"
        made = subprocess.run([*PENSTOCK, "keys", str(self.keys)], capture_output=True, text=True, check=False)
        if made.returncode:
            raise BenchError(f"penstock keys failed: {made.stderr}")
        self.address = f"tcp://{network.addresses['dispatcher']}:{PORT}"

    def start(self) -> None:
        server = ["--keys", str(self.keys / "server.json")]
        bind = ["--bind", self._network.addresses["dispatcher"], "--port", str(PORT)]
        self._run("dispatcher", ["dispatcher", *bind, *server, "--journal", str(self._folder / "journal")])
        for host in ("worker1", "worker2"):
            where = ["--bind", self._network.addresses[host]]
            self._run(
                host, ["worker", "--dispatcher", self.address, *where, *server, "--processes", "1", "--threads", "1"]
            )

    def _run(self, host: str, arguments: Sequence[str]) -> None:
        with (self._folder / f"{host}.log").open("ab") as log:
            command = [*self._network.within(host), *PENSTOCK, *arguments]
            self._running.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            )

    def look(self) -> None:
        for process in self._running:
            if process.poll() is not None:
                logs = "\n".join(
                    f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}"
                    for path in sorted(self._folder.glob("*.log"))
                )
                raise BenchError(f"a process ended with {process.returncode}: {process.args}\n{logs}")

    def close(self) -> None:
        for process in self._running:
            process.kill()  # what it started ends with it
            process.wait()


def epoch(
    network: Network, folder: Path, *, cut: str | None, elements: int, cut_s: float, order: str
) -> dict[str, Any]:
    """Read an epoch; after a third of it pull one host's cable for so long. Return the counts and the longest pause."""
    fleet = Fleet(network, folder)
    arguments = {
        "service": fleet.address,
        "job": "hosts",
        "elements": elements,
        "order": order,
        "seed": 7,
        "work_s": WORK_S,
        "padding_bytes": 2_000,
    }
    prefix = [*network.within("trainer"), "env", f"PENSTOCK_KEYS={fleet.keys / 'client.json'}"]
    trainer = Trainer(folder / "trainer", arguments, prefix)
    longest, before, moved = 0.0, 0, time.monotonic()
    healed_at: float | None = None
    to_cut = cut
    try:
        fleet.start()
        trainer.start()
        while not trainer.finished():
            trainer.look()
            fleet.look()
            now, progress = time.monotonic(), trainer.progress()
            if progress != before:
                if before:
                    longest = max(longest, now - moved)
                before, moved = progress, now
            elif now - moved > STALL_S:
                raise BenchError(f"{cut} cut: no new element for {STALL_S:g} s after {progress}")
            if to_cut is not None and progress > elements // 3:
                network.cut(to_cut)
                to_cut, healed_at = None, now + cut_s
            if healed_at is not None and now > healed_at:
                network.heal(str(cut))
                healed_at = None
            time.sleep(0.01)
    finally:
        if cut is not None:
            network.heal(cut)
        trainer.close()
        fleet.close()
    if to_cut is not None:
        raise BenchError("the epoch ended before the cable was pulled")
    once, lost, twice = exactly_once(trainer.received(), elements)
    return {"once": once, "lost": lost, "more_than_once": twice, "longest_pause_s": figures(longest)}


def run(bench: Bench) -> None:
    quick = bench.options.quick
    elements, cut_s = (QUICK_ELEMENTS, QUICK_CUT_S) if quick else (ELEMENTS, CUT_S)
    common = {"versions": our_versions(), "machine": machine()}
    with Network(HOSTS) as network:
        for order in ("relaxed",) if quick else ("relaxed", "deterministic"):
            for cut in (None, "worker1", "dispatcher", "trainer"):
                say(f"hosts: {order}, {f'the cable of {cut} is pulled for {cut_s:g} s' if cut else 'undisturbed'}")
                with tempfile.TemporaryDirectory() as folder:
                    found = epoch(network, Path(folder), cut=cut, elements=elements, cut_s=cut_s, order=order)
                case = f"{order}, {f'{cut} cut off and back' if cut else 'undisturbed'}: exactly once"
                pairs = [(float(found.pop("once")), float(elements))]
                bench.add(paired(bench.name, case, "the epoch", "elements", pairs, 1.0, **found, **common))


if __name__ == "__main__":
    main("hosts", run)
