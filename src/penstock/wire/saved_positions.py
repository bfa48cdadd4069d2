"""Positions as a state has them: lists without the defaults they end with, which msgspec writes and need not read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.wire.jobs import Cut, Named, Position, Stride


def shorten(positions: Iterable[list[Any]]) -> None:
    """Leave out of plain positions what they, and the records in them, end with and is the default.

    >>> plain = [[3, 7, [["@", 0], 0, [[0, 0, [4], False]], 1, None], [], False, True, False, None, [], []]]
    >>> shorten(plain); plain
    [[3, 7, [['@', 0], 0, [[0, 0, [4]]]], [], False, True]]
    """
    for position in positions:
        _, _, cut, trail, *_ = position
        _, _, named, *_ = cut
        _shorten(position, _POSITION)
        _shorten(cut, _CUT)
        for splits in named:
            _shorten(splits, _NAMED)
        for stride in trail:
            _shorten(stride, _STRIDE)


def _shorten(values: list[Any], defaults: list[Any]) -> None:
    while values and values[-1] == defaults[len(values) - 1]:
        values.pop()


def _defaults_of(record: type[msgspec.Struct]) -> list[Any]:
    """Return the default of each field as it is in a state; of one that has none, what equals nothing else."""
    fields = msgspec.structs.fields(record)
    encode, decode = msgspec.json.encode, msgspec.json.decode
    return [each.default if each.required else decode(encode(each.default)) for each in fields]


_POSITION, _CUT, _NAMED, _STRIDE = [_defaults_of(record) for record in (Position, Cut, Named, Stride)]
