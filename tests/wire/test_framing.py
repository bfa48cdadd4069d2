"""A header and its buffers, cut into messages of one frame and put together again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from penstock.core.errors import CodecError
from penstock.wire.framing import FOLLOW_FROM_BYTES, ONE_FRAME_BYTES, Assembly, pack, unpack


@dataclass
class Arrived:
    buffer: memoryview


def sent_and_put_together(header: bytes, buffers: list[bytes]) -> tuple[bytes, list[bytes], int]:
    frame, following = pack(header, buffers)
    assembly = Assembly()
    found = [assembly.add(Arrived(memoryview(bytearray(part)))) for part in [frame, *following]]
    *early, whole = found
    assert early == [None] * len(following) and whole is not None
    return bytes(whole[0]), [bytes(part.buffer) for part in whole[1]], len(following)


@pytest.mark.parametrize(
    ("sizes", "messages_after"),
    [
        ([], 0),
        ([0], 0),
        ([3, 0, 5], 0),
        ([ONE_FRAME_BYTES - 1], 0),
        ([ONE_FRAME_BYTES], 1),
        ([5, ONE_FRAME_BYTES, FOLLOW_FROM_BYTES - 1, FOLLOW_FROM_BYTES, 0], 2),
        ([ONE_FRAME_BYTES, ONE_FRAME_BYTES + 1], 2),
    ],
)
def test_what_is_large_follows_and_all_comes_back_in_order(sizes: list[int], messages_after: int) -> None:
    rng = np.random.default_rng(0)
    buffers = [rng.bytes(size) for size in sizes]
    assert sent_and_put_together(b"\x93header", buffers) == (b"\x93header", buffers, messages_after)


def test_an_assembly_takes_the_next_message_after_a_whole_one() -> None:
    assembly = Assembly()
    for size in (10, ONE_FRAME_BYTES, 0, ONE_FRAME_BYTES):
        frame, following = pack(b"\x90", [bytes(size)])
        parts = [Arrived(memoryview(part)) for part in [frame, *following]]
        *_, whole = [assembly.add(part) for part in parts]
        assert whole is not None and whole[1][0].buffer.nbytes == size


@pytest.mark.parametrize("length", [1, 8, 12, 20])
def test_a_torn_frame_is_no_message(length: int) -> None:
    frame, _ = pack(b"header", [b"abc", b"de"])
    with pytest.raises(CodecError):
        unpack(memoryview(frame[:length]))
