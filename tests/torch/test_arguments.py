"""Arguments of `DataLoader` are torch's, and are kept under their names."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, SequentialSampler

import penstock as ps
from penstock.torch import DataLoader


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


WRONG = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"prefetch_factor": -1, "num_workers": 1},
    {"persistent_workers": True},
    {"batch_size": 0},
    {"batch_size": None, "drop_last": True},
    {"sampler": SequentialSampler(range(3)), "shuffle": True},
    {"batch_sampler": [[0]], "batch_size": 2},
    {"multiprocessing_context": "no such thing", "num_workers": 1},
]


@pytest.mark.parametrize("arguments", WRONG, ids=lambda each: ", ".join(each))
def test_wrong_arguments_are_refused_in_torchs_words(arguments):
    with pytest.raises((ValueError, TypeError)) as torchs:
        TorchDataLoader([1, 2, 3], **arguments)
    with pytest.raises(type(torchs.value)) as ours:
        DataLoader([1, 2, 3], **arguments)
    assert str(ours.value) == str(torchs.value)


def test_an_iterable_dataset_takes_no_sampler_or_shuffle():
    for arguments in ({"shuffle": True}, {"sampler": [0]}, {"batch_sampler": [[0]]}):
        with pytest.raises(ValueError, match="IterableDataset"):
            DataLoader(Endless(), **arguments)


def test_the_signature_is_torchs_and_more():
    torchs = inspect.signature(TorchDataLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    assert list(ours)[: len(torchs)] == list(torchs)
    assert {name: each.default for name, each in torchs.items()} == {name: ours[name].default for name in torchs}


def test_a_loader_can_be_made_again_of_its_attributes():
    loader = DataLoader([1, 2, 3], 2, service="tcp://nowhere:1", seed_samples=True, collate_in="trainer")
    names = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "shuffle"}
    kept = {name: getattr(loader, name) for name in names}
    assert kept["service"] == "tcp://nowhere:1" and kept["seed_samples"] and kept["collate_in"] == "trainer"
    again = type(loader)(**{**kept, "batch_sampler": None})
    assert [batch.tolist() for batch in again] == [[1, 2], [3]]


def test_an_attribute_that_torch_fixes_stays_fixed():
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        DataLoader([1, 2, 3]).batch_size = 4


def test_where_to_collate_is_one_of_two():
    with pytest.raises(ps.InvalidArgumentError, match="collate_in"):
        DataLoader([1], collate_in="nowhere")


def test_a_pipelines_loader_is_no_dataset():
    with pytest.raises(ps.InvalidArgumentError, match=r"penstock.torch.tensors\(loader\)"):
        DataLoader(ps.range(4).distribute(1))


def test_a_foreign_state_is_refused():
    known = DataLoader([1]).state_dict()
    for state in ({"_num_yielded": 3}, {}, None, {"version": 1, "tasks": 3}, {**known, "more": 1}):
        with pytest.raises(ps.StateMismatchError, match=r"not a state of penstock.torch.DataLoader"):
            DataLoader([1]).load_state_dict(state)


def test_set_epoch_is_told_to_the_sampler_and_chooses_the_samples_numbers():
    class Told(SequentialSampler):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

    class Draws(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.rand(()).item()

    sampler = Told(range(2))
    loader = DataLoader(Draws(), sampler=sampler, seed_samples=True, collate_fn=list)

    def read(epoch):
        loader.set_epoch(epoch)
        return [*loader]

    first, second, again = read(3), read(4), read(3)
    assert first == again != second and sampler.epoch == 3
