"""One element in a thousand that is to be kept is made twice, step by step: a function that gives another is named.

What a function draws from a generator of its own, reads from a clock or counts would be frozen by keeping it, and be
another than what is computed elsewhere. Which elements are made again follows from their identities.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from penstock.caching.entries import decode_frame, encode_frame
from penstock.core.element import Element
from penstock.core.errors import CodecError, ImpureFunctionWarning
from penstock.runtime.contract import Chunk, Idents, Selected
from penstock.runtime.ordered import Outcome

EVERY = 1000
_SPREAD = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1

_named: set[str] = set()


def repeat_some(label: str, run: Callable[[Chunk], Outcome], chunk: Chunk) -> None:
    """Run a step twice more over one of the elements, if one is due, and say so once if the results differ."""
    if chunk.idents is None or label in _named:
        return
    for k in _due(chunk.idents)[:1]:
        try:
            first, second = (_made(run, chunk, k) for _ in range(2))
        except Exception:  # what cannot be copied cannot be kept; and what fails does so where it counts
            return
        if first != second:
            _named.add(label)
            where = chunk.marks.origin(k)
            element = "an element" if where is None else f"element {where.index} of split {where.split}"
            warnings.warn(
                f"{label} gave another result when it was called again with {element}: what autocache() keeps is one "
                "of them, which all later epochs get. Have it depend on its argument alone, take rng for random "
                "numbers, or put autocache() before it",
                ImpureFunctionWarning,
                stacklevel=2,
            )


def _due(idents: Idents) -> list[int]:
    """Return the places of those that are made again."""
    if len(idents) == 1:  # as they are where each takes long; and arrays take longer than numbers
        place, index = idents[0, :2].tolist()
        return [0] if ((place ^ (index + 1) * _SPREAD & _WORD) >> 24) % EVERY == 0 else []
    numbers = (idents[:, 0] ^ (idents[:, 1] + np.uint64(1)) * np.uint64(_SPREAD)) >> np.uint64(24)
    return np.flatnonzero(numbers % np.uint64(EVERY) == 0).tolist()


def _made(run: Callable[[Chunk], Outcome], chunk: Chunk, k: int) -> list[bytes]:
    """Return what becomes of a copy of an element: functions may change what they are given."""
    assert chunk.idents is not None
    copy = decode_frame(encode_frame([chunk.elements[k]]))
    outcome = run(Chunk(copy, Selected(chunk.marks, [k], len(chunk.elements)), chunk.idents[k : k + 1]))
    if outcome.error is not None:
        raise CodecError("it failed")
    return [_bytes(element) for element in outcome.chunk.elements]


def _bytes(element: Element) -> bytes:
    return encode_frame([element]).tobytes()
