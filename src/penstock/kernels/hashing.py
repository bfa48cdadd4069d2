"""Hashes of 64 bits, and the kernels that are made of them.

`mixed` scrambles a word, `combined` makes one word of two. All arithmetic is on unsigned words and wraps: a kernel sees
ids through `.view(uint64)`.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from penstock.core.element import Array
from penstock.core.keyed import offsets_of
from penstock.kernels.compiling import (
    IDS,
    NUMBER,
    OUT_FLAGS,
    OUT_IDS,
    VOID,
    WORD,
    WORDS,
    floor_mod,
    inlined,
    kernel,
    reciprocal,
)
from penstock.kernels.features import Lists

W = np.uint64
_MUL = np.uint64(0x9DDFEA08EB382D69)
WORD_MASK = (1 << 64) - 1


@inlined
def mixed(word: Any) -> Any:
    word = (~word) + (word << W(21))
    word ^= word >> W(24)
    word = word + (word << W(3)) + (word << W(8))
    word ^= word >> W(14)
    word = word + (word << W(2)) + (word << W(4))
    word ^= word >> W(28)
    return word + (word << W(31))


@inlined
def combined(upper: Any, lower: Any) -> Any:
    a = (lower ^ upper) * _MUL
    a ^= a >> W(47)
    b = (upper ^ a) * _MUL
    b ^= b >> W(47)
    return b * _MUL


def _word(number: int) -> np.uint64:
    return np.uint64(number & WORD_MASK)


@kernel((VOID, WORDS, WORD, NUMBER, WORD, OUT_IDS))
def _sigrid_hash(words: Any, salt: Any, max_value: Any, by: Any, out: Any) -> None:
    for i in range(words.size):
        out[i] = floor_mod(np.int64(combined(salt, mixed(words[i]))), max_value, by)


@kernel((VOID, WORDS, WORD, WORD, OUT_IDS))
def _sigrid_hash_masked(words: Any, salt: Any, mask: Any, out: Any) -> None:
    for i in range(words.size):
        out[i] = np.int64(combined(salt, mixed(words[i])) & mask)


def sigrid_hash(ids: Array, salt: int, max_value: int) -> Array:
    """Return the salted hash of each id, modulo `max_value`: 0 to max_value - 1."""
    out = np.empty(len(ids), np.int64)
    if max_value & (max_value - 1) == 0:  # a power of two divides 2**64, so that the sign does not matter
        _sigrid_hash_masked(ids.view(np.uint64), _word(salt), _word(max_value - 1), out)
    else:
        _sigrid_hash(ids.view(np.uint64), _word(salt), max_value, reciprocal(max_value), out)
    return out


@kernel((VOID, WORDS, IDS, WORDS, IDS, IDS, OUT_IDS))
def _cartesian(one: Any, one_offsets: Any, other: Any, other_offsets: Any, offsets: Any, out: Any) -> None:
    for row in range(offsets.size - 1):
        at, stop = offsets[row], offsets[row + 1]
        for i in range(one_offsets[row], one_offsets[row + 1]):
            if at == stop:
                break
            upper = mixed(one[i])
            for j in range(other_offsets[row], min(other_offsets[row + 1], other_offsets[row] + stop - at)):
                out[at] = np.int64(combined(upper, mixed(other[j])))
                at += 1


def cartesian(one: Lists, other: Lists, limit: int) -> Lists:
    """Return an id for each pair of ids of two lists, the first list's ids outermost, and at most `limit` of them."""
    offsets = offsets_of(np.minimum(one.lengths * other.lengths, limit))
    out = np.empty(int(offsets[-1]), np.int64)
    _cartesian(one.values.view(np.uint64), one.offsets, other.values.view(np.uint64), other.offsets, offsets, out)
    return Lists(out, offsets)


@kernel((VOID, WORDS, IDS, NUMBER, WORD, IDS, OUT_IDS))
def _window_hashes(words: Any, offsets: Any, n: Any, salt: Any, out_offsets: Any, out: Any) -> None:
    scrambled = np.empty(words.size, np.uint64)
    for i in range(words.size):
        scrambled[i] = mixed(words[i])
    for row in range(offsets.size - 1):
        size = min(n, offsets[row + 1] - offsets[row])
        first = offsets[row] - out_offsets[row]
        for at in range(out_offsets[row], out_offsets[row + 1]):
            word = salt
            for i in range(first + at, first + at + size):
                word = combined(word, scrambled[i])
            out[at] = np.int64(word)


def _windows(lists: Lists, n: int) -> Array:
    """Return how many windows each list has: none if it is empty, one if it is shorter than a window."""
    lengths = lists.lengths
    return cast(Array, np.where(lengths >= n, lengths - (n - 1), (lengths > 0).astype(np.int64)))


def hashed_windows(lists: Lists, n: int, salt: int) -> Lists:
    """Return the hash of each n ids that follow each other; of all of them, where there are fewer."""
    offsets = offsets_of(_windows(lists, n))
    out = np.empty(int(offsets[-1]), np.int64)
    _window_hashes(lists.values.view(np.uint64), lists.offsets, n, _word(salt), offsets, out)
    return Lists(out, offsets)


@kernel((VOID, IDS, IDS, NUMBER, IDS, OUT_IDS))
def _flat_windows(values: Any, offsets: Any, n: Any, out_offsets: Any, out: Any) -> None:
    for row in range(offsets.size - 1):
        at = out_offsets[row]
        size = min(n, offsets[row + 1] - offsets[row])
        first = offsets[row]
        while at < out_offsets[row + 1]:
            for i in range(size):
                out[at + i] = values[first + i]
            at += size
            first += 1


def flat_windows(lists: Lists, n: int) -> Lists:
    """Return the ids of all windows of n, one window after the other."""
    offsets = offsets_of(_windows(lists, n) * np.minimum(lists.lengths, n))
    out = np.empty(int(offsets[-1]), np.int64)
    _flat_windows(lists.values, lists.offsets, n, offsets, out)
    return Lists(out, offsets)


@kernel((VOID, WORDS, WORDS, WORD, WORD, OUT_FLAGS))
def _sampled(files: Any, rows: Any, seed: Any, threshold: Any, out: Any) -> None:
    for i in range(rows.size):
        out[i] = combined(combined(seed, mixed(files[i])), mixed(rows[i])) < threshold


def sampled(files: Array, rows: Array, seed: int, rate: float) -> Array:
    """Return which rows are kept: those whose hash of seed, file and row lies below rate * 2**64."""
    if rate >= 1:
        return np.ones(len(rows), np.bool_)
    out = np.empty(len(rows), np.bool_)
    threshold = np.uint64(int(rate * 2.0**64))
    _sampled(files.view(np.uint64), rows.view(np.uint64), _word(seed), threshold, out)
    return out


KERNELS = {
    "SigridHash": (_sigrid_hash, _sigrid_hash_masked),
    "Cartesian": (_cartesian,),
    "NGram": (_window_hashes, _flat_windows),
    "Sampling": (_sampled,),
}
