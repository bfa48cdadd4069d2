"""What a `DataLoader` asks its workers for, one order a batch, as the whole numbers that a feed can send.

An order says which of the loader's batches it is, with which seed and in which epoch, and what the sampler gave. Lists
of indices from 0 on travel as they are. Other keys (text, tuples, slices, ...) travel as MessagePack, seven bytes a
number, so that nothing is unpickled for them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.core.errors import InvalidArgumentError

LARGEST = (1 << 63) - 1  # numbers of an order are below it
_HEAD = 7
_LIST, _KEY = 0, 1
_HALF = 32
_BYTES = 7  # of a key in one number


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrder:
    """One batch that a worker is to make."""

    task: int
    """Its number in the epoch, from 0 on; of an iterable dataset ended streams count along."""
    base_seed: int
    """That of torch, which workers are told of: another one in each epoch."""
    seed: int
    """The loader's, which samples are seeded with: one for all epochs."""
    epoch: int
    key: Any
    """What the sampler gave: an index, a list of them, or whatever the dataset is asked with."""


def write_order(order: BatchOrder) -> list[int]:
    """Return an order as numbers.

    >>> read_order(write_order(BatchOrder(task=3, base_seed=1 << 62, seed=5, epoch=1, key=["a", (1, None)]))).key
    ['a', (1, None)]
    """
    head = [order.task, *_halves(order.base_seed), *_halves(order.seed), order.epoch]
    key = order.key
    if type(key) is list and set(map(type, key)) == {int} and min(key) >= 0 and max(key) < LARGEST:
        return [*head, _LIST, *key]
    packed = msgspec.msgpack.encode(_plain(key))
    words = [int.from_bytes(packed[start : start + _BYTES], "little") for start in range(0, len(packed), _BYTES)]
    return [*head, _KEY, len(packed), *words]


def read_order(numbers: Sequence[int]) -> BatchOrder:
    task, high, low, seed_high, seed_low, epoch, form = numbers[:_HEAD]
    key: Any = list(numbers[_HEAD:])
    if form == _KEY:
        length, *words = key
        packed = b"".join(word.to_bytes(_BYTES, "little") for word in words)[:length]
        key = _key(msgspec.msgpack.decode(packed))
    base_seed, seed = (high << _HALF) | low, (seed_high << _HALF) | seed_low
    return BatchOrder(task=task, base_seed=base_seed, seed=seed, epoch=epoch, key=key)


def _halves(seed: int) -> tuple[int, int]:
    return seed >> _HALF, seed & ((1 << _HALF) - 1)


def _plain(key: Any) -> Any:
    """Return a key as MessagePack has it: tuples and slices are marked."""
    if key is None or type(key) in (bool, float, str, bytes):
        return key
    if isinstance(key, list):
        return [_plain(part) for part in key]
    if isinstance(key, tuple):
        return {"t": [_plain(part) for part in key]}
    if isinstance(key, dict):
        return {"d": [[_plain(name), _plain(part)] for name, part in key.items()]}
    if isinstance(key, slice):
        return {"s": [_plain(part) for part in (key.start, key.stop, key.step)]}
    try:
        return operator.index(key)  # of Python, numpy or torch
    except TypeError:
        pass
    if hasattr(key, "tolist"):
        return _plain(key.tolist())
    raise InvalidArgumentError(
        f"the sampler gave {key!r}, of {type(key).__name__}, which workers cannot be sent: give numbers, text, bytes, "
        "or lists, tuples and slices of them"
    )


def _key(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_key(part) for part in plain]
    if isinstance(plain, dict):
        ((mark, parts),) = plain.items()
        if mark == "d":
            return {_key(name): _key(part) for name, part in parts}
        return slice(*map(_key, parts)) if mark == "s" else tuple(map(_key, parts))
    return plain
