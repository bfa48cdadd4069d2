"""Tells a torn end of a write-ahead log from damage in its middle, before SQLite reads it.

SQLite stops at the first frame whose checksum is wrong and goes on as if nothing had followed: right for a write that a
crash tore, wrong for a bit that flipped in the middle, where committed transactions would vanish without a word. With
full sync a transaction is on disk before the next one is begun. So if anything of a later transaction follows the first
bad frame, that frame was once good: the log is damaged. If nothing does, its transaction was never acknowledged, or is
the very last one, and is dropped.

The format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from operator import mul
from pathlib import Path

from penstock.core.errors import JournalCorruptError

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
MAGIC = 0x377F0682  # the lowest bit says whether checksums are over big-endian words
MASK = 0xFFFFFFFF


class Checksum:
    """The log's running checksum, for inputs of one length.

    SQLite's loop (s0 += x[i] + s1; s1 += x[i+1] + s0) is linear: every word enters with a Fibonacci number as its
    weight. A sum of products is several times faster here than the loop.
    """

    def __init__(self, words: int) -> None:
        fibonacci = [0, 1]
        while len(fibonacci) < words + 2:
            fibonacci.append((fibonacci[-1] + fibonacci[-2]) & MASK)
        # The word n places before the end reaches s1 as fibonacci[n + 1] and s0 as fibonacci[n].
        self._first = [fibonacci[words - 1 - i] for i in range(words)]
        self._second = [fibonacci[words - i] for i in range(words)]
        self._carry = (fibonacci[words - 1], fibonacci[words], fibonacci[words + 1])

    def after(self, before: tuple[int, int], words: Sequence[int]) -> tuple[int, int]:
        low, mid, high = self._carry
        s0, s1 = before
        return (
            (sum(map(mul, self._first, words)) + low * s0 + mid * s1) & MASK,
            (sum(map(mul, self._second, words)) + mid * s0 + high * s1) & MASK,
        )


def check_log(path: Path) -> bool:
    """Return whether the log ends in something torn; raise if it is damaged before its end."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    if len(content) < HEADER_BYTES + FRAME_HEADER_BYTES:
        return len(content) > 0
    magic, _, page_bytes, _, *salts = struct.unpack_from(">6I", content)
    stored = struct.unpack_from(">2I", content, 24)
    swap = (magic & 1 == 1) == (sys.byteorder == "little")
    running = Checksum(6).after((0, 0), _words(content[:24], swap))
    header_is_good = magic & ~1 == MAGIC and running == stored
    if not header_is_good:
        # Only a size is needed to see whether transactions follow; ours are all written with SQLite's default.
        page_bytes, salts = 4096, list(struct.unpack_from(">2I", content, HEADER_BYTES + 8))
    step = FRAME_HEADER_BYTES + page_bytes
    starts = range(HEADER_BYTES, len(content) - step + 1, step)
    if not header_is_good:
        return _torn_or_damaged(path, content, starts, salts, first_bad=0)
    checksum = Checksum((8 + page_bytes) // 4)
    whole = 0
    for number, start in enumerate(starts):
        _, size_after, *rest = struct.unpack_from(">6I", content, start)
        if rest[:2] == salts:
            frame = content[start : start + 8] + content[start + FRAME_HEADER_BYTES : start + step]
            running = checksum.after(running, _words(frame, swap))
        if rest[:2] != salts or running != tuple(rest[2:]):
            return _torn_or_damaged(path, content, starts, salts, first_bad=number)
        if size_after:
            whole = start + step
    return whole < len(content)


def _torn_or_damaged(path: Path, content: bytes, starts: Sequence[int], salts: list[int], *, first_bad: int) -> bool:
    """Frames of an earlier life of the file have other salts and say nothing."""
    committed = False
    seen = 0
    for start in starts[first_bad:]:
        _, size_after, *rest = struct.unpack_from(">6I", content, start)
        if rest[:2] != salts:
            continue
        seen += 1
        if committed:
            raise JournalCorruptError(
                str(path), None, f"damaged at byte {starts[first_bad]}: whole transactions follow a broken one"
            )
        committed = size_after != 0
    return seen > 0


def _words(content: bytes, swap: bool) -> array[int]:
    words = array("I", content)
    if swap:
        words.byteswap()
    return words
