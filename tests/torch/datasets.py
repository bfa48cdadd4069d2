"""Datasets, samplers and functions of the tests, in a module of their own: workers load them as they are."""

from __future__ import annotations

import collections
import os
import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


class Noisy(Dataset):
    """Samples that draw from all three global generators."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"index": index, "drawn": torch.tensor(drawn, dtype=torch.float64)}


class OwnGenerator(Dataset):
    """Draws from a generator of its own, as samples come."""

    def __init__(self, count):
        self.count, self.rng = count, np.random.default_rng(7)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.rng.random()


class Squares(Dataset):
    def __init__(self, count, factor=1):
        self.count, self.factor = count, factor

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == 13:
            raise LookupError("thirteen")
        return torch.tensor([index * index * self.factor])


class Exhausted(Squares):
    """Asks something that has ended for one of its samples."""

    def __init__(self):
        super().__init__(3)

    def __getitem__(self, index):
        return next(iter([])) if index == 1 else index


class Deadly(Squares):
    """Ends the process of one of its samples."""

    def __init__(self):
        super().__init__(6)

    def __getitem__(self, index):
        if index == 2:
            os._exit(5)
        return index


class Together(Squares):
    def __getitems__(self, indices):
        return [torch.tensor([index, len(indices)]) for index in indices]


class Keyed(Dataset):
    def __getitem__(self, key):
        return repr(key)


class Informed(Dataset):
    """Says which worker it is in."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        return [index, info.id, info.num_workers, info.seed - info.id, getattr(self, "greeting", -1)]


def greet(worker_id):
    info = get_worker_info()
    info.dataset.greeting = info.id == worker_id


class Divided(IterableDataset):
    """Each worker's own part, as torch's documentation does it; parts are of unequal length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for value in range(first, self.count, step):
            if step == 1 or value < self.count // 2 or info.id == 0:
                yield value


class Counting(IterableDataset):
    """Has a state of its own: the next value. It says how often it was begun."""

    def __init__(self, count):
        self.count, self.next, self.begun = count, None, 0

    def state_dict(self):
        return {"next": self.next, "more": [1, (2, 3)]}

    def load_state_dict(self, state):
        assert state["more"] == [1, (2, 3)]
        self.next = state["next"]

    def __iter__(self):
        self.begun += 1
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        start, self.next = self.next if self.next is not None else first, None
        for value in range(start, self.count, step):
            self.next = value + step
            yield value


class LazySampler(Sampler):
    """Draws each index when it is asked for it, from two global generators."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        for _ in range(self.count):
            yield (int(torch.randint(self.count, ())) + random.randrange(self.count)) % self.count


Point = collections.namedtuple("Point", "x y")


def pairs(samples):
    return [tuple(sample.tolist()) for sample in samples]


def sets(samples):
    return {"values": set(range(len(samples)))}
