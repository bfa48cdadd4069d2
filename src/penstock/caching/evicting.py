"""Which entries stay where there is room for some: those that save most, together, within so many bytes.

Greedy by saved seconds per byte loses what it leaves unused at the end of the room, which is much where entries are few
and large. So few are put together the best way there is, in steps of a thousandth of the room; of many, the greedy
order loses next to nothing. `caching.catalogue` asks this whenever something new comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

FEW = 200
STEPS = 2000  # in which the room is dealt out among a few


class KeptValue(msgspec.Struct, frozen=True):
    """An entry, as far as this decision goes."""

    name: str
    nbytes: int
    saves_s: float


def choose_kept(entries: Sequence[KeptValue], capacity_bytes: int) -> frozenset[str]:
    """Return the names of those that stay.

    >>> some = [KeptValue("a", 6, 7.0), KeptValue("b", 5, 5.0), KeptValue("c", 5, 5.0)]
    >>> sorted(choose_kept(some, 10))
    ['b', 'c']
    """
    order = sorted(entries, key=lambda entry: (-entry.saves_s / max(1, entry.nbytes), entry.name))
    greedy = _filled([], order, capacity_bytes)
    if len(entries) > FEW:
        return frozenset(entry.name for entry in greedy)
    best = max(greedy, _filled(_best_in_steps(order, capacity_bytes), order, capacity_bytes), key=_saved)
    return frozenset(entry.name for entry in best)


def _filled(kept: list[KeptValue], order: Sequence[KeptValue], capacity_bytes: int) -> list[KeptValue]:
    left = capacity_bytes - sum(entry.nbytes for entry in kept)
    taken = {entry.name for entry in kept}
    for entry in order:
        if entry.nbytes <= left and entry.name not in taken:
            kept.append(entry)
            left -= entry.nbytes
    return kept


def _best_in_steps(entries: Sequence[KeptValue], capacity_bytes: int) -> list[KeptValue]:
    """Return the best of all selections whose sizes, each rounded up to whole steps, fit."""
    step = max(1.0, capacity_bytes / STEPS)
    saved = np.zeros(int(capacity_bytes / step) + 1)
    """By steps of room: the most that what was looked at saves in them."""
    takes: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    for entry in entries:
        size = int(-(-entry.nbytes // step))
        better = np.zeros(len(saved), np.bool_)
        if size < len(saved):
            with_it = saved[: len(saved) - size] + entry.saves_s
            better[size:] = with_it > saved[size:]
            saved[size:] = np.maximum(saved[size:], with_it)
        takes.append(better)
    kept, room = [], len(saved) - 1
    for entry, better in zip(reversed(entries), reversed(takes)):
        if better[room]:
            kept.append(entry)
            room -= int(-(-entry.nbytes // step))
    return kept


def _saved(kept: Sequence[KeptValue]) -> float:
    return sum(entry.saves_s for entry in kept)
