"""Batches made by `default_collate` in workers: torch's, in memory that the trainer maps and no file of `/dev/shm`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import _utils, default_collate, get_worker_info

from penstock.torch import DataLoader
from penstock.torch.collating import default_collate_into, no_shared_files
from penstock.wire.runs import decode_run, encode_run
from penstock.wire.slabs import Arena
from tests.torch.datasets import Squares
from tests.torch.kinds import same

SIDE = 256
LARGE = {
    "float32": torch.rand(SIDE, SIDE),
    "bfloat16": torch.rand(SIDE, SIDE).to(torch.bfloat16),
    "bool": torch.rand(SIDE, SIDE) > 0.5,
    "complex64": torch.rand(SIDE, SIDE, dtype=torch.complex64),
    "transposed": torch.rand(SIDE, 2 * SIDE).t(),
    "conjugated": torch.rand(SIDE, SIDE, dtype=torch.complex64).conj(),
    "array": np.arange(SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE),
    "Fortran array": np.asfortranarray(np.arange(SIDE * SIDE, dtype=np.int16).reshape(SIDE, SIDE)),
    "nested": {"image": np.ones((3, SIDE, SIDE), np.uint8), "label": 3, "name": "a"},
}


@pytest.fixture
def a_worker(monkeypatch):
    info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    monkeypatch.setattr(_utils.worker, "_worker_info", info)


@pytest.fixture
def arena():
    arena = Arena(64 << 20)
    yield arena
    arena.close()


@pytest.mark.parametrize("kind", LARGE)
def test_large_batches_are_those_of_default_collate(kind, arena):
    expected = default_collate([LARGE[kind]] * 3)
    assert same(default_collate_into([LARGE[kind]] * 3, arena.array), expected)


def test_batches_are_made_where_the_trainer_reads_them(arena, a_worker):
    batch = default_collate_into([(np.full((SIDE, SIDE), i, np.uint8), i) for i in range(4)], arena.array)
    free = arena.free_bytes
    layout, buffers = encode_run([batch])
    places = arena.place(buffers)
    assert free - arena.free_bytes < SIDE * SIDE, "the images were copied"
    (found,) = decode_run(layout, [np.array(view) for view in arena.views(places)])
    assert same(found, batch)


def test_a_tensor_that_was_changed_since_is_sent_as_it_is(arena):
    batch = default_collate_into([torch.zeros(SIDE, SIDE)] * 2, arena.array)
    for change in (lambda: batch.transpose_(0, 1), lambda: batch.resize_(3), lambda: batch.set_(torch.ones(2))):
        change()
        (found,) = decode_run(*encode_run([batch]))
        assert same(found, batch)


def test_unequal_tensors_are_refused_as_torch_refuses_them(arena, a_worker):
    unequal = [torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE + 1)]
    with pytest.raises(RuntimeError, match="equal size") as ours:
        default_collate_into(unequal, arena.array)
    with pytest.raises(RuntimeError) as torchs:
        torch.stack(unequal)
    assert str(ours.value) == str(torchs.value)


def test_a_collate_function_of_ones_own_gets_memory_of_its_own(a_worker):
    assert default_collate([torch.zeros(3)]).is_shared()
    with no_shared_files():
        assert not default_collate([torch.zeros(3)]).is_shared()
        assert get_worker_info() is not None
    assert default_collate([torch.zeros(3)]).is_shared(), "torch's own way is put back"


def test_what_was_registered_for_tensors_is_kept(monkeypatch, arena):
    monkeypatch.setitem(_utils.collate.default_collate_fn_map, torch.Tensor, lambda batch, collate_fn_map: "mine")
    assert default_collate_into([torch.zeros(3)], arena.array) == "mine"
    with no_shared_files():
        assert default_collate([torch.zeros(3)]) == "mine"


def is_shared(samples):
    return default_collate(samples).is_shared()


def test_no_batch_of_a_loader_lies_in_a_shared_file():
    loader = DataLoader(Squares(4), batch_size=2, num_workers=1, collate_fn=is_shared)
    assert list(loader) == [False, False]
    loader.close()
