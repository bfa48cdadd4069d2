"""Pipelines for PyTorch: as tensors, and as an `IterableDataset`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock as ps
from penstock.torch import PipelineDataset, tensors


def rows(count=12):
    return ps.range(count).map(lambda x: {"x": np.full(3, x, np.float32), "name": f"n{x}", "nothing": None})


def test_arrays_arrive_as_tensors_over_the_same_memory():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    (batch,) = tensors(ps.range(1).map(lambda _: {"x": array, "text": "t", "parts": [np.zeros(2), None]}))
    assert batch["x"].dtype == torch.int16 and batch["text"] == "t" and batch["parts"][1] is None
    batch["x"] += 1
    assert array[0, 0] == 1, "no copy was made, and it may be written to"


def test_what_is_no_tensor_stays_what_it_is():
    dates = np.array(["2024-01-01"], "datetime64[D]")
    (batch,) = tensors(ps.range(1).map(lambda _: {"date": dates, "big": np.arange(3, dtype=">i4")}))
    assert batch["date"] is dates and batch["big"].tolist() == [0, 1, 2]


def test_a_loader_of_tensors_resumes():
    loader = tensors(rows().shuffle(seed=4).batch(2))
    iterator = iter(loader)
    head = [next(iterator)["x"][:, 0].tolist() for _ in range(2)]
    state = loader.state_dict()
    rest = [batch["x"][:, 0].tolist() for batch in iterator]
    again = tensors(rows().shuffle(seed=4).batch(2))
    again.load_state_dict(state)
    assert [batch["x"][:, 0].tolist() for batch in again] == rest and len(head) + len(rest) == len(loader) == 6
    assert sorted(x for batch in head + rest for x in batch) == list(range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_has_no_duplicates_under_workers(workers):
    dataset = PipelineDataset(rows().shuffle().batch(2))
    loader = TorchDataLoader(dataset, batch_size=None, num_workers=workers)
    orders = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        seen = [int(value) for batch in loader for value in batch["x"][:, 0]]
        assert sorted(seen) == list(range(12))
        orders.append(seen)
    assert orders[0] != orders[1] and len(loader) == 6


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(ps.InvalidArgumentError, match="takes a dataset or a loader, not list"):
        tensors([1])
    with pytest.raises(ps.InvalidArgumentError, match="has processes of its own"):
        PipelineDataset(rows().distribute())
