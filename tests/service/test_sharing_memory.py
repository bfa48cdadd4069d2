"""64 trainers read one job from one worker: how much memory that process takes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import penstock as ps

from .checks import Background

pytestmark = pytest.mark.alone

MIB = 1 << 20
WINDOW_BYTES = 48 * MIB  # forty batches' worth: each trainer reads twice as many
READERS, TRAINERS_EACH, STEPS = 8, 8, 80
READ_WITHIN_S = 240.0  # some ten on a machine that is not busy

READER = """
    import sys, time
    import numpy as np
    import penstock as ps

    service, names, steps, row_s = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), float(sys.argv[4])

    def block(i):
        if row_s:
            time.sleep(row_s)
        return np.full((160, 1024), i, np.float32)

    dataset = ps.range(100_000).map(block).batch(2)  # 1.25 MiB
    shares = [ps.Share("skip", name, window_bytes=WINDOW_BYTES) for name in names]
    limits = ps.Limits(timeout_s=60)
    loaders = [dataset.distribute(service, job="many", sharing=share, limits=limits) for share in shares]
    iterators = [iter(loader) for loader in loaders]
    kept = []
    for step in range(steps):
        for number, iterator in enumerate(iterators):
            batch = next(iterator)
            assert (batch[0, ::64] == batch[0, 0, 0]).all() and batch[1, 0, 0] == batch[0, 0, 0] + 1
            if step % 5 == number % 5:
                kept = [*kept[-3:], batch]  # a slow reader's: they stay in the worker's memory
    print(min(loader.statistics().elements for loader in loaders), flush=True)
    sys.stdin.readline()
"""


class Memory:
    """What a process has of its own and in memory that it shares, watched from now on."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._own_before = self._now()[0]
        self.most_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> tuple[int, int]:
        fields = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) << 10, int(fields["RssShmem"].split()[0]) << 10

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            own, shared = self._now()  # all the shared memory it has touched is the windows': that counts in full
            self.most_bytes = max(self.most_bytes, own - self._own_before + shared)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(10)


@pytest.mark.parametrize("row_s", [0.0, 0.003], ids=["rows that cost nothing", "rows that take 3 ms"])
def test_64_trainers_are_served_within_the_windows_budget_and_a_fifth(tmp_path: Path, row_s: float) -> None:
    script = tmp_path / "reader.py"
    script.write_text(textwrap.dedent(READER).replace("WINDOW_BYTES", str(WINDOW_BYTES)))
    readers: list[subprocess.Popen[str]] = []

    def start(service: ps.LocalService, names: list[str], steps: int) -> Background:
        command = [sys.executable, str(script), str(service.service_file), ",".join(names), str(steps), str(row_s)]
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        readers.append(reader)
        assert reader.stdout is not None
        return Background(reader.stdout.readline)

    with ps.LocalService(workers=1) as service:
        try:
            assert start(service, ["first"], 3).result() == "3\n"  # now the process has all it has without a window
            runner = next(iter(service.worker_pids().values()))
            memory = Memory(runner)
            reading = [start(service, [f"t{p}.{n}" for n in range(TRAINERS_EACH)], STEPS) for p in range(READERS)]
            assert [each.result(READ_WITHIN_S) for each in reading] == [f"{STEPS}\n"] * READERS
            memory.stop()
            assert next(iter(service.worker_pids().values())) == runner
        finally:
            for reader in readers:
                reader.kill()
                reader.communicate()
    # A copy for each reader, or a window for each, would be several times as much.
    assert memory.most_bytes <= 1.2 * WINDOW_BYTES, f"{memory.most_bytes / MIB:.1f} MiB"
