"""Rounds as they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.element import Element
from penstock.core.errors import CodecError
from penstock.wire.jobs import Cut
from penstock.wire.runs import encode_run


@dataclass(slots=True, eq=False, kw_only=True)
class Frame:
    """`count` rounds from `seq` on, encoded; `cut` is the state after them."""

    seq: int
    count: int
    cut: Cut
    layout: bytes
    buffers: Sequence[Any]
    nbytes: int

    @property
    def after(self) -> int:
        return self.seq + self.count


def encode_frame(seq: int, elements: Sequence[Element], cut: Cut) -> Frame:
    """Encode one element a round. The buffers are the elements' own memory."""
    try:
        layout, buffers = encode_run(elements)
    except CodecError:
        for element in elements:
            encode_run([element])  # one by one, the error says which leaf it is
        raise
    nbytes = len(layout) + sum(memoryview(buffer).nbytes for buffer in buffers)
    return Frame(seq=seq, count=len(elements), cut=cut, layout=layout, buffers=buffers, nbytes=nbytes)
