"""The global generators of `random`, numpy and torch: seeded for one sample, saved, and put back.

What a transform draws for a sample follows from the loader's seed, the epoch and the sample, so that it depends on
neither the number of workers, nor on failures, nor on where a run was resumed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_NUMPY_SEEDS = 1 << 32


def seed_globals(*parts: Any) -> None:
    """Seed the three generators with what follows from `parts`."""
    seed = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks at every accelerator: ten times the cost


@dataclass(frozen=True, slots=True)
class GlobalStates:
    """Where the three generators stand."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @staticmethod
    def now() -> GlobalStates:
        return GlobalStates(random.getstate(), np.random.get_state(), torch.default_generator.get_state())

    def put_back(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the three generators as they were found."""
    before = GlobalStates.now()
    try:
        yield
    finally:
        before.put_back()
