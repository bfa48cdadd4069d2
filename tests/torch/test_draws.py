"""A sampler is asked, and random numbers are drawn, when and as often as torch does: states are equal byte for byte.

Workers' answers do not matter for that, so that they are made here, in place of processes; `test_workers.py` has those.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from penstock.torch import DataLoader
from penstock.torch import loader as loader_module
from penstock.torch.channels import Channel
from penstock.torch.seeding import undisturbed
from tests.torch.datasets import LazySampler, Squares

COUNT = 12
SAMPLERS = {
    "random": lambda: RandomSampler(range(COUNT)),
    "replacing": lambda: RandomSampler(range(COUNT), replacement=True, num_samples=40),
    "weighted": lambda: WeightedRandomSampler(np.arange(COUNT) + 1.0, COUNT),
    "distributed": lambda: DistributedSampler(range(COUNT), num_replicas=2, rank=1),
    "lazy": lambda: LazySampler(COUNT),
}


class AnswersHere(Channel):
    """Draws as a feed does, as far ahead as it may, and answers in this process without touching its generators."""

    def open(self):
        waiting, source, received = [], iter(self.orders), 0
        while True:
            while len(waiting) < self._ahead and (order := next(source, None)) is not None:
                waiting.append(order)
            if not waiting:
                return
            with undisturbed():
                answer = self._pipeline.node.collate.resolve()(waiting.pop(0))
            received += 1
            yield answer


def states():
    python, numpy = random.getstate(), np.random.get_state()
    return python, numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes()


def trace(kind, sampler, workers, *, set_epoch=False, **given):
    """Return, after each step: the indices, the states, and what a model would draw. The first epoch is left early."""
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    made = SAMPLERS[sampler]()
    options = {"multiprocessing_context": "fork", **given} if workers else given
    loader = kind(Squares(COUNT), batch_size=2, sampler=made, num_workers=workers, collate_fn=list, **options)
    seen = []
    for epoch, steps in enumerate((2, 100)):
        if set_epoch:
            made.set_epoch(epoch)
        iterator = iter(loader)
        seen.append(states())
        for _, batch in zip(range(steps), iterator):
            seen.append(([int(square) for square in batch], states(), torch.rand(()).item()))
        del iterator
    return seen


@pytest.fixture
def answers_here(monkeypatch):
    monkeypatch.setattr(loader_module, "Channel", AnswersHere)


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_global_states_equal_torchs_after_every_step(sampler, workers, answers_here):
    assert trace(DataLoader, sampler, workers) == trace(TorchDataLoader, sampler, workers)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_that_are_seeded_here_leave_the_trainers_draws_as_they_are(sampler):
    assert trace(DataLoader, sampler, 0, seed_samples=True) == trace(TorchDataLoader, sampler, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_of_a_distributed_sampler_is_the_users_alone(workers, answers_here):
    ours, torchs = (trace(kind, "distributed", workers, set_epoch=True) for kind in (DataLoader, TorchDataLoader))
    assert ours == torchs
    assert ours != trace(DataLoader, "distributed", workers)


def test_one_order_ahead_is_one(answers_here):
    assert trace(DataLoader, "lazy", 1, prefetch_factor=1) == trace(TorchDataLoader, "lazy", 1, prefetch_factor=1)


def test_an_eager_sampler_is_iterated_over_as_often(answers_here):
    class Counting:
        asked = 0

        def __iter__(self):
            self.asked += 1
            return iter([0, 1, 2])

    ours, torchs = Counting(), Counting()
    for sampler, kind in ((ours, DataLoader), (torchs, TorchDataLoader)):
        for _ in range(2):
            list(kind(Squares(3), sampler=sampler, num_workers=1, multiprocessing_context="fork"))
    assert ours.asked == torchs.asked
