"""Kernels over lists of ids, and the tables of ids that they look into.

A table has open addresses: keys, what belongs to each, and which slots are used. A table of a row's ids is used again
for the next row: a slot counts only if its stamp is that row's number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from penstock.core.element import Array
from penstock.core.keyed import offsets_of
from penstock.kernels.compiling import FLAG, FLOATS, IDS, NUMBER, OUT_FLOATS, OUT_IDS, VOID, inlined, kernel
from penstock.kernels.features import Lists

ScoreMode: TypeAlias = Literal[
    "has_id_overlap",
    "id_overlap_count",
    "get_max_count",
    "jaccard",
    "cosine",
    "score_sum",
    "score_min",
    "score_max",
]
MODES = get_args(ScoreMode)
_HAS, _COUNT, _MAX_COUNT, _JACCARD, _COSINE, _SUM, _MIN, _MAX = range(len(MODES))
W = np.uint64
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@inlined
def _first_slot(id: Any, mask: Any) -> Any:
    return np.int64((np.uint64(id) * _SPREAD) >> _HALF) & mask


@inlined
def find_slot(keys: Any, used: Any, id: Any) -> Any:
    """Return the slot of an id, or the free one where it would stand."""
    mask = keys.size - 1
    slot = _first_slot(id, mask)
    while used[slot] and keys[slot] != id:
        slot = (slot + 1) & mask
    return slot


@inlined
def _row_slot(keys: Any, stamps: Any, stamp: Any, id: Any) -> Any:
    mask = keys.size - 1
    slot = _first_slot(id, mask)
    while stamps[slot] == stamp and keys[slot] != id:
        slot = (slot + 1) & mask
    return slot


def hash_table(entries: Iterable[tuple[int, int]]) -> tuple[Array, Array, Array]:
    """Return keys, targets and used slots of a table: at most half of it is used, so that searches are short."""
    entries = list(entries)
    size = 1 << max(1, (2 * len(entries)).bit_length())
    keys, targets, used = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.bool_)
    for key, target in entries:
        slot = (((key * int(_SPREAD)) & ((1 << 64) - 1)) >> 32) & (size - 1)
        while used[slot]:
            slot = (slot + 1) & (size - 1)
        keys[slot], targets[slot], used[slot] = key, target, True
    return keys, targets, used


# FirstX


@kernel(
    (VOID, IDS, IDS, IDS, OUT_IDS),
    (VOID, FLOATS, IDS, IDS, OUT_FLOATS),
)
def _copy_firsts(values: Any, offsets: Any, out_offsets: Any, out: Any) -> None:
    # A signed index may count from the end: that it does not is asked for each item, unless it is unsigned.
    for row in range(offsets.size - 1):
        first, at = W(offsets[row]), W(out_offsets[row])
        for i in range(W(out_offsets[row + 1]) - at):
            out[at + W(i)] = values[first + W(i)]


@kernel((VOID, IDS, NUMBER, OUT_IDS))
def _first_offsets(offsets: Any, x: Any, out: Any) -> None:
    end = out[0] = 0
    for row in range(offsets.size - 1):
        end += min(offsets[row + 1] - offsets[row], x)
        out[row + 1] = end


@kernel((VOID, IDS, IDS, IDS, OUT_IDS))
def _best_places(ranks: Any, offsets: Any, out_offsets: Any, out: Any) -> None:
    """Write which items are kept: of each list those of the highest ranks, the first of equals, in their order."""
    for row in range(offsets.size - 1):
        start, stop, at = offsets[row], offsets[row + 1], out_offsets[row]
        kept = out_offsets[row + 1] - at
        if kept == 0:
            continue
        # The highest rank that `kept` items reach lies from `low` to `high`: no sorting, and no list is too long.
        low, high = ranks[start], ranks[start]
        for i in range(start, stop):
            low, high = min(low, ranks[i]), max(high, ranks[i])
        while low < high:
            middle = low + ((high - low + 1) >> 1)
            reach = 0
            for i in range(start, stop):
                reach += ranks[i] >= middle
            if reach >= kept:
                low = middle
            else:
                high = middle - 1
        equals = kept
        for i in range(start, stop):
            equals -= ranks[i] > low
        for i in range(start, stop):
            if ranks[i] > low or (ranks[i] == low and equals > 0):
                equals -= ranks[i] == low
                out[at] = i
                at += 1


def _ranks(weights: Array) -> Array:
    """Return whole numbers that are ordered as the weights are; NaN counts as -inf."""
    bits = (np.where(np.isnan(weights), np.float32(-np.inf), weights) + np.float32(0)).view(np.int32).astype(np.int64)
    ranks: Array = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return ranks


def first_x(lists: Lists, x: int) -> Lists:
    """Return the first x items of each list."""
    offsets = np.empty(len(lists.offsets), np.int64)
    _first_offsets(lists.offsets, x, offsets)
    values = np.empty(int(offsets[-1]), lists.values.dtype)
    _copy_firsts(lists.values, lists.offsets, offsets, values)
    weights = None
    if lists.weights is not None:
        weights = np.empty(len(values), np.float32)
        _copy_firsts(lists.weights, lists.offsets, offsets, weights)
    return Lists(values, offsets, weights)


def best_x(lists: Lists, weights: Array, x: int) -> Lists:
    """Return the x items of each list that have the highest weights, in the list's order."""
    offsets = offsets_of(np.minimum(lists.lengths, x))
    places = np.empty(int(offsets[-1]), np.int64)
    _best_places(_ranks(weights), lists.offsets, offsets, places)
    return Lists(lists.values[places], offsets, weights[places])


# Two lists


@kernel((NUMBER, IDS, IDS, IDS, IDS, FLAG, OUT_IDS, OUT_IDS))
def _intersect(ids: Any, offsets: Any, others: Any, other_offsets: Any, distinct: Any, out: Any, places: Any) -> Any:
    longest = 1
    for row in range(other_offsets.size - 1):
        longest = max(longest, other_offsets[row + 1] - other_offsets[row])
    size = 4
    while size < 2 * longest:
        size *= 2
    keys, stamps = np.empty(size, np.int64), np.zeros(size, np.int64)
    taken = np.zeros(size, np.int64)
    at = 0
    out[0] = 0
    for row in range(offsets.size - 1):
        stamp = row + 1
        for j in range(other_offsets[row], other_offsets[row + 1]):
            slot = _row_slot(keys, stamps, stamp, others[j])
            keys[slot], stamps[slot] = others[j], stamp
        for i in range(offsets[row], offsets[row + 1]):
            slot = _row_slot(keys, stamps, stamp, ids[i])
            if stamps[slot] == stamp and not (distinct and taken[slot] == stamp):
                taken[slot] = stamp
                places[at] = i
                at += 1
        out[row + 1] = at
    return at


def intersect(lists: Lists, others: Lists, distinct: bool) -> Lists:
    """Return the items of each list whose ids stand in the other list too, as they stand."""
    offsets, places = np.empty(len(lists.offsets), np.int64), np.empty(len(lists.values), np.int64)
    count = _intersect(lists.values, lists.offsets, others.values, others.offsets, distinct, offsets, places)
    kept = places[:count]
    weights = None if lists.weights is None else lists.weights[kept]
    return Lists(lists.values[kept], offsets, weights)


@kernel((VOID, IDS, IDS, FLOATS, IDS, IDS, FLOATS, NUMBER, OUT_FLOATS))
def _compute_score(
    ids: Any, offsets: Any, scores: Any, others: Any, other_offsets: Any, other_scores: Any, mode: Any, out: Any
) -> None:
    longest = 1
    for row in range(offsets.size - 1):
        longest = max(longest, offsets[row + 1] - offsets[row] + other_offsets[row + 1] - other_offsets[row])
    size = 4
    while size < 2 * longest:
        size *= 2
    keys, stamps = np.empty(size, np.int64), np.zeros(size, np.int64)
    counts, other_counts = np.empty(size, np.int64), np.empty(size, np.int64)
    sums, other_sums = np.empty(size, np.float64), np.empty(size, np.float64)
    slots = np.empty(longest, np.int64)
    for row in range(offsets.size - 1):
        stamp, distinct = row + 1, 0
        first, length = offsets[row], offsets[row + 1] - offsets[row]
        other_first, other_length = other_offsets[row], other_offsets[row + 1] - other_offsets[row]
        for i in range(length + other_length):
            own = i < length
            id = ids[first + i] if own else others[other_first + i - length]
            slot = _row_slot(keys, stamps, stamp, id)
            if stamps[slot] != stamp:
                keys[slot], stamps[slot] = id, stamp
                counts[slot], other_counts[slot], sums[slot], other_sums[slot] = 0, 0, 0.0, 0.0
                slots[distinct] = slot
                distinct += 1
            if own:
                counts[slot] += 1
                sums[slot] += scores[first + i] if scores.size else 1.0
            else:
                other_counts[slot] += 1
                other_sums[slot] += other_scores[other_first + i - length] if other_scores.size else 1.0
        overlap, most, dot, norm, other_norm = 0, 0, 0.0, 0.0, 0.0
        for k in range(distinct):
            slot = slots[k]
            overlap += min(counts[slot], other_counts[slot])
            if counts[slot] and other_counts[slot]:
                most += max(counts[slot], other_counts[slot])
                dot += sums[slot] * other_sums[slot]
            norm += sums[slot] * sums[slot]
            other_norm += other_sums[slot] * other_sums[slot]
        total, low, high, found = 0.0, 0.0, 0.0, False
        if mode >= _SUM:
            for j in range(other_first, other_first + other_length):
                slot = _row_slot(keys, stamps, stamp, others[j])
                if counts[slot]:
                    score = np.float64(other_scores[j]) if other_scores.size else 1.0
                    total += score
                    if not np.isnan(score):
                        low = score if not found or score < low else low
                        high = score if not found or score > high else high
                        found = True
        if mode == _HAS:
            result = 1.0 if overlap else 0.0
        elif mode == _COUNT:
            result = float(overlap)
        elif mode == _MAX_COUNT:
            result = float(most)
        elif mode == _JACCARD:
            union = length + other_length - overlap
            result = overlap / union if union else 0.0
        elif mode == _COSINE:
            product = np.sqrt(norm) * np.sqrt(other_norm)
            result = 0.0 if product == 0.0 else dot / product
        elif mode == _SUM:
            result = total
        elif mode == _MIN:
            result = low
        else:
            result = high
        out[row] = result


_NO_SCORES = np.empty(0, np.float32)


def compute_score(lists: Lists, others: Lists, mode: ScoreMode) -> Array:
    """Return one number a row that says how alike two lists are."""
    out = np.empty(len(lists), np.float32)
    scores, other_scores = (_NO_SCORES if each.weights is None else each.weights for each in (lists, others))
    _compute_score(
        *(lists.values, lists.offsets, scores),
        *(others.values, others.offsets, other_scores, MODES.index(mode), out),
    )
    return out


@kernel((VOID, IDS, OUT_FLOATS))
def _positions(offsets: Any, out: Any) -> None:
    for row in range(offsets.size - 1):
        for i in range(offsets[row], offsets[row + 1]):
            out[i] = i - offsets[row]


def enumerated(lists: Lists) -> Lists:
    """Return the lists with each item's position as its weight."""
    out = np.empty(len(lists.values), np.float32)
    _positions(lists.offsets, out)
    return replace(lists, weights=out)


KERNELS = {
    "FirstX": (_first_offsets, _copy_firsts, _best_places),
    "IdListTransform": (_intersect,),
    "ComputeScore": (_compute_score,),
    "Enumerate": (_positions,),
}
