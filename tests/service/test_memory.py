"""What batches in shared memory cost, and when that ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.client.reader import EpochReader
from penstock.runtime.iterator import Run
from penstock.wire.slabs import Arena
from penstock.worker.streams import Pump
from tests.waiting import wait_until

MB = 1 << 20


def slab_bytes(pid: int) -> int:
    """Return how much memory the arena of a process takes."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        try:
            if "memfd:penstock" in os.readlink(path):
                return os.stat(path).st_blocks * 512
        except FileNotFoundError:
            continue  # closed meanwhile
    return 0


def mapped_arenas() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:penstock" in line for line in maps)


class Newcomers:
    """Objects of some kinds that were made since this was: other tests of this process may have left theirs."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds
        self._before = self._all()  # kept, so that nothing else gets their ids
        self._known = set(map(id, self._before))

    def _all(self) -> list[Any]:
        return [thing for thing in gc.get_objects() if type(thing) in self._kinds]

    def alive(self) -> list[Any]:
        return [thing for thing in self._all() if id(thing) not in self._known]


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.alone
def test_batches_read_as_fast_as_they_come_take_little_memory(three_workers: ps.LocalService) -> None:
    most = 0
    with ps.range(500 * 16_384).batch(16_384).distribute(three_workers) as loader:
        for epoch in range(16):
            loader.set_epoch(epoch)
            assert sum(1 for _ in loader) == 500
            most = max(most, sum(map(slab_bytes, three_workers.worker_pids().values())))
    assert 0 < most <= 128 * MB


def test_batches_that_are_not_looked_at_are_free_when_the_next_epoch_begins_or_the_loader_closes() -> None:
    dataset = ps.range(64).map(lambda x: np.full(MB // 4, x)).batch(1)
    arenas = Newcomers(Arena)
    with ps.LocalService(workers=0, inline=1) as service, dataset.distribute(service) as loader:
        for epoch in range(4):
            loader.set_epoch(epoch)
            iterator = iter(loader)
            batch = next(iterator)
            (arena,) = arenas.alive()
            wait_until(lambda arena=arena: len(arena.leases) > 32, "batches to be under way")  # type: ignore[misc]
            assert len(arena.leases) <= 64 + 1, f"epoch {epoch}: those of one epoch, and the batch held"
        del batch, iterator
        loader.close()
        wait_until(lambda: len(arena.leases) == 0, "all of them to be free")
        assert not arena._closed, "the runner was to hear of it, not to end"


def test_loaders_that_are_closed_or_dropped_give_their_memory_back_at_once(
    one_worker: ps.LocalService, without_collector: None
) -> None:
    dataset = ps.range(20).map(lambda x: np.full(MB, x)).batch(1)
    before = mapped_arenas()
    for number in range(12):
        loader = dataset.distribute(one_worker, job=f"memory-{number}")
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(20)]
        assert mapped_arenas() == before + 1 and [int(batch[0, 9]) for batch in kept] == list(range(20))
        if number % 2:
            loader.close()
        del loader, iterator, kept
        assert mapped_arenas() == before, f"loader {number}"


def test_epochs_leave_nothing_for_the_garbage_collector(without_collector: None) -> None:
    dataset = ps.range(61).shuffle(16, seed=1).map(lambda x, rng: x + rng.integers(3)).batch(8)
    runs, readers = Newcomers(Pump, Run), Newcomers(EpochReader)
    with ps.LocalService(workers=0, inline=1) as service, dataset.distribute(service) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert sum(1 for _ in loader) == 8
        wait_until(lambda: not runs.alive(), "the runs of past epochs to be free")
        assert len(readers.alive()) == 1, "that of the last epoch: it can still be asked for its state"
    del loader, service
    wait_until(lambda: not readers.alive(), "the reader to be free")


def test_a_tensor_over_a_batch_keeps_its_memory(one_worker: ps.LocalService) -> None:
    torch = pytest.importorskip("torch")
    kept = []
    with ps.range(120).map(lambda x: np.full(MB // 4, x)).batch(1).distribute(one_worker) as loader:
        for step, batch in enumerate(loader):
            if step % 10 == 0:
                kept.append((int(batch[0, 0]), torch.from_numpy(batch)[:, 5:]))
    assert len(kept) == 12 and all(bool((tensor == value).all()) for value, tensor in kept)


_TORCH_SCRIPT = """
import torch
import penstock as ps

if __name__ == "__main__":
    loader = ps.range(1 << 20).batch(1 << 18).distribute(1)
    iterator = iter(loader)
    torch.kept = [torch.from_numpy(next(iterator)) for _ in range(2)]  # to the end of all modules
    assert sorted(int(tensor[0]) for tensor in torch.kept)[0] % (1 << 18) == 0
"""


def test_a_torch_script_that_closes_nothing_ends_without_a_word(tmp_path: Any) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(_TORCH_SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
