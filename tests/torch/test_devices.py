"""Pinning, copies on a stream of their own, and collating in the trainer; a fake accelerator tells what was asked."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch

from penstock.torch import DataLoader, OnDevice, tensors
from penstock.torch.iterating import WorkersIter
from tests.torch.datasets import Squares


class FakeAccelerator:
    """Writes down what is asked of it, in order."""

    def __init__(self):
        self.asked = []

    def pin(self, batch):
        self.asked.append(("pin", batch.tolist()))
        return batch

    @contextmanager
    def copying(self):
        self.asked.append("copies begin")
        yield
        self.asked.append("copies end")

    def move(self, tensor):
        self.asked.append(("move", tensor.tolist()))
        return tensor.clone()

    def wait_for_copies(self, moved):
        self.asked.append(("wait", [tensor.tolist() for tensor in moved]))


def test_the_next_batch_is_copied_before_the_present_one_is_handed_out():
    device = FakeAccelerator()
    batches = iter(OnDevice(DataLoader(range(6), batch_size=2), "cpu", accelerator=device))
    assert next(batches).tolist() == [0, 1]
    first, second = [[("pin", rows), "copies begin", ("move", rows), "copies end"] for rows in ([0, 1], [2, 3])]
    assert device.asked == [*first, ("wait", [[0, 1]]), *second]
    assert [batch.tolist() for batch in batches] == [[2, 3], [4, 5]]
    assert device.asked[-1] == ("wait", [[4, 5]])


def test_a_state_is_of_the_batch_handed_out_and_not_of_the_one_ahead():
    whole = [batch.tolist() for batch in DataLoader(range(10), batch_size=2)]
    for taken in range(len(whole) + 1):
        loader = OnDevice(DataLoader(range(10), batch_size=2), "cpu")
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = OnDevice(DataLoader(range(10), batch_size=2), "cpu")
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == whole[taken:]


def test_it_reads_pipelines_too():
    import penstock as ps

    assert [b["x"].tolist() for b in OnDevice(tensors(ps.range(4).map(lambda x: {"x": x}).batch(2)), "cpu")] == [
        [0, 1],
        [2, 3],
    ]


@pytest.fixture(scope="module")
def pinned():
    """What torch's pinning was given, in a process without a device: torch itself would leave batches as they are."""
    given = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WorkersIter, "_pinned", lambda self, data: given.append(data) or data)
        patched.setattr(torch.accelerator, "is_available", lambda: True)
        patched.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
        yield given


def test_batches_of_workers_are_pinned_in_the_trainer_after_a_collate_function_there(pinned):
    made = []

    class Unsendable:
        """Of a class that cannot travel: it is made in the trainer."""

        def __init__(self, rows):
            self.rows = rows

    def collate(samples):
        made.append(Unsendable(samples))
        return made[-1]

    with_workers = DataLoader(
        Squares(6), batch_size=3, num_workers=1, collate_fn=collate, collate_in="trainer", pin_memory=True
    )
    batches = list(with_workers)
    with_workers.close()
    assert batches == made == pinned
    assert [[int(row) for row in batch.rows] for batch in batches] == [[0, 1, 4], [9, 16, 25]]
