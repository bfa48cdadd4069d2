"""Is a sample the same when it is made again? One in a thousand is made twice, to find datasets for which it is not.

A worker that dies has its samples made again elsewhere, and a resumed run makes those again that were on their way.
With the global generators seeded for each sample that changes nothing, unless a dataset draws from a generator of its
own.

The second time a twin of the dataset is asked: objects and generators in it are copies, arrays, files and all that is
large are the same. So whatever the dataset counts or draws, it goes on as if it had been asked once.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.core.element import leaves
from penstock.core.errors import PenstockError
from penstock.torch.seeding import GlobalStates

EVERY = 1_000
DEEPEST = 4  # a dataset, its transform, the steps of that, and what they hold
MOST_PARTS = 64  # a longer list is data, not parts of the dataset
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_SHARED = (str, bytes, int, float, complex, np.ndarray, torch.Tensor, type, type(None))


class NonDeterministicSampleError(PenstockError):
    """A dataset gave another sample for the same index and the same random numbers."""


class NonDeterministicSampleWarning(UserWarning):
    """A dataset gave another sample for the same index and the same random numbers."""


def is_chosen(*parts: Any) -> bool:
    """Say whether the sample with this identity is one that is made twice: the same ones wherever it is made."""
    return zlib.crc32(repr(parts).encode()) % EVERY == 0


def difference(dataset: Any, key: Any, sample: Any, twin: Any) -> str | None:
    """Make a sample again, of the twin, and return what to say if it is another; None: it is the same.

    The global generators must be as they were before the first time, and are left as they are found.
    """
    before = GlobalStates.now()
    try:
        again = twin[key]
    except Exception:
        return None  # a twin need not be able to do all that the dataset is
    finally:
        before.put_back()
    if _equal(sample, again):
        return None
    return (
        f"{type(dataset).__name__}[{key!r}] gave another sample when it was asked again with the same random numbers, "
        "so a run that loses a worker or is resumed is not repeated exactly. If it draws from a generator of its own, "
        "draw from random, numpy.random or torch instead, which are seeded for each sample, or make the generator in "
        "__getitem__ from the index"
    )


def twin_of(value: Any, depth: int = DEEPEST) -> Any:
    """Return a copy of a dataset that shares its data, and nothing that changes while samples are made."""
    if isinstance(value, _SHARED) or depth < 0:
        return value
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, _GENERATORS):
        return copy.deepcopy(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return value if len(value) > MOST_PARTS else type(value)(twin_of(part, depth - 1) for part in value)
    if type(value) is dict:
        return value if len(value) > MOST_PARTS else {key: twin_of(part, depth - 1) for key, part in value.items()}
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or callable(getattr(value, "read", None)):
        return value  # of a builtin class, or an open file
    try:
        made = copy.copy(value)
    except Exception:
        return value
    for name, part in own.items():
        made.__dict__[name] = twin_of(part, depth - 1)
    return made


def _equal(one: Any, other: Any) -> bool:
    """Compare samples by type and content; what cannot be compared is taken to be equal."""
    first, second = list(leaves(one)), list(leaves(other))
    return len(first) == len(second) and all(map(_same_leaf, first, second))


def _same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (torch.Tensor, np.ndarray)) and (one.shape != other.shape or one.dtype != other.dtype):
        return False
    if isinstance(one, torch.Tensor):
        return _same_values(one, other)
    if isinstance(one, np.ndarray):
        return bool(one.dtype.hasobject or one.tobytes() == other.tobytes())
    if isinstance(one, (str, bytes, int, float, complex, np.generic, type(None))):
        return bool(one == other) or one != one
    if isinstance(one, Mapping) or not callable(getattr(one, "tobytes", None)):
        return True
    return bool(one.tobytes() == other.tobytes())  # images and the like


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point():
        one, other = torch.nan_to_num(one), torch.nan_to_num(other)
    return torch.equal(one, other)
