"""What the transforms mean, in plain Python: one row at a time, with numbers that have no limit.

A row of a feature is a number, None (null), or a list; lists with weights are lists of pairs (id, weight).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from penstock.graph import transforms as tr

MASK = (1 << 64) - 1


def mixed(key: int) -> int:
    key &= MASK
    key = (~key + (key << 21)) & MASK
    key ^= key >> 24
    key = (key + (key << 3) + (key << 8)) & MASK
    key ^= key >> 14
    key = (key + (key << 2) + (key << 4)) & MASK
    key ^= key >> 28
    return (key + (key << 31)) & MASK


def combined(upper: int, lower: int) -> int:
    upper, lower = upper & MASK, lower & MASK
    a = ((lower ^ upper) * 0x9DDFEA08EB382D69) & MASK
    a ^= a >> 47
    b = ((upper ^ a) * 0x9DDFEA08EB382D69) & MASK
    b ^= b >> 47
    return (b * 0x9DDFEA08EB382D69) & MASK


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def f32(number: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def bucket(value: float, borders: tuple[float, ...]) -> int:
    if isinstance(value, float) and math.isnan(value):
        return 0
    place = sum(border < value for border in borders)
    return place + (place < len(borders) - 1 and value == borders[place + 1])


def each(row: Any, function: Any) -> Any:
    return None if row is None else [function(item) for item in row] if isinstance(row, list) else function(row)


def ids_of(row: Any) -> list[int]:
    return [] if row is None else row if isinstance(row, list) else [row]


def split(row: Any) -> tuple[list[int], list[float]]:
    items = ids_of(row)
    pairs = [item if isinstance(item, tuple) else (item, 1.0) for item in items]
    return [id for id, _ in pairs], [weight for _, weight in pairs]


def id_of(item: Any) -> int:
    return item[0] if isinstance(item, tuple) else item


def score(t: tr.ComputeScore, one: Any, other: Any) -> float:
    ids, weights = split(one)
    others, other_weights = split(other)
    counts, other_counts = Counter(ids), Counter(others)
    overlap = sum(min(counts[id], other_counts[id]) for id in counts)
    matching = [weight for id, weight in zip(others, other_weights) if id in counts]
    numbers = [weight for weight in matching if not math.isnan(weight)]
    match t.mode:
        case "has_id_overlap":
            return float(overlap > 0)
        case "id_overlap_count":
            return float(overlap)
        case "get_max_count":
            return float(sum(max(counts[id], other_counts[id]) for id in counts if id in other_counts))
        case "jaccard":
            union = len(ids) + len(others) - overlap
            return overlap / union if union else 0.0
        case "score_sum":
            return sum(matching, 0.0)
        case "score_min":
            return min(numbers, default=0.0)
        case "score_max":
            return max(numbers, default=0.0)
    sums: dict[int, list[float]] = {}
    for place, (own_ids, own_weights) in enumerate(((ids, weights), (others, other_weights))):
        for id, weight in zip(own_ids, own_weights):
            sums.setdefault(id, [0.0, 0.0])[place] += weight
    dot = sum((a * b for id, (a, b) in sums.items() if id in counts and id in other_counts), 0.0)
    norms = [math.sqrt(sum((pair[place] * pair[place] for pair in sums.values()), 0.0)) for place in (0, 1)]
    product = norms[0] * norms[1]
    return 0.0 if product == 0 else dot / product


def windows(items: list[int], n: int) -> list[list[int]]:
    if not items:
        return []
    return [items[i : i + n] for i in range(len(items) - n + 1)] or [items]


def window_hash(window: list[int], salt: int) -> int:
    word = salt & MASK
    for id in window:
        word = combined(word, mixed(id))
    return signed(word)


def best(row: list[tuple[int, float]], x: int) -> list[tuple[int, float]]:
    def rank(place: int) -> tuple[float, int]:
        weight = row[place][1]
        return (-(-math.inf if math.isnan(weight) else weight), place)

    return [row[place] for place in sorted(sorted(range(len(row)), key=rank)[:x])]


def onehot(t: tr.Onehot, x: float | None) -> list[float]:
    if x is None:
        return []
    place = (x - t.low) / ((t.high - t.low) / t.count)
    inside = 0 <= place < t.count
    if t.form == "index":
        return [int(place)] if inside else []
    return [float(inside and int(place) == part) for part in range(t.count)]


def apply(t: tr.FeatureTransform, *rows: Any) -> Any:
    """Return what a transform makes of one row of the features that it reads."""
    row = rows[0]
    match t:
        case tr.Bucketize() if len(t.border_sets) > 1:
            starts = [sum(len(b) + 1 for b in t.border_sets[:k]) for k in range(len(t.border_sets))]
            return [] if row is None else [bucket(row, b) + start for b, start in zip(t.border_sets, starts)]
        case tr.Bucketize():
            return each(row, lambda value: bucket(value, t.border_sets[0]))
        case tr.SigridHash():
            return each(row, lambda id: signed(combined(t.salt, mixed(id))) % t.max_value)
        case tr.PositiveModulus():
            return each(row, lambda id: id % t.divisor)
        case tr.Clamp():
            return each(row, lambda v: v if v != v else min(max(v, t.low), t.high))
        case tr.BoxCox():
            return each(row, lambda x: boxcox(x, t.lambda1, t.lambda2))
        case tr.Logit():
            return each(row, lambda x: logit(x, t.epsilon))
        case tr.MapId() if t.table:
            return each(row, lambda id: 0 if id < 0 else t.table[id % len(t.table)])
        case tr.MapId():
            mapping = dict(t.mapping)
            if not t.drop:
                return each(row, lambda id: mapping.get(id, t.default))
            if isinstance(row, list):
                return [mapping[id] for id in row if id in mapping]
            return mapping.get(row)
        case tr.GetLocalHour():
            if t.offset is None:
                return each(row, lambda ts: (ts + t.offset_s) // 3600 % 24)
            return None if None in rows else (row + rows[1]) // 3600 % 24
        case tr.FirstX():
            return best(row, t.x) if t.by == "score" else row[: t.x]
        case tr.EnumerateIds():
            return [(id_of(item), float(place)) for place, item in enumerate(ids_of(row))]
        case tr.ComputeScore():
            return score(t, *rows)
        case tr.IdListTransform():
            others, kept = {id_of(item) for item in ids_of(rows[1])}, []
            for item in ids_of(row):
                if id_of(item) in others and not (t.distinct and id_of(item) in map(id_of, kept)):
                    kept.append(item)
            return kept
        case tr.Cartesian():
            pairs = [(a, b) for a in ids_of(row) for b in ids_of(rows[1])]
            return [signed(combined(mixed(a), mixed(b))) for a, b in pairs[: t.limit]]
        case tr.NGram() if t.vocabularies:
            firsts = [ids_of(each)[0] if ids_of(each) else None for each in rows]
            if None in firsts:
                return None
            total, factor = 0, 1
            for id, vocabulary in zip(firsts, t.vocabularies):
                total += factor * (vocabulary.index(id) if id in vocabulary else 0)
                factor *= len(vocabulary)
            return total
        case tr.NGram():
            found = windows(ids_of(row), t.n)
            return [id for w in found for id in w] if t.form == "flat" else [window_hash(w, t.salt) for w in found]
        case tr.Onehot():
            return onehot(t, row)
    raise AssertionError(t)


def boxcox(x: float, lambda1: float, lambda2: float) -> float:
    if math.isnan(x):
        return x
    shifted = max(f32(x + f32(lambda2)), f32(1e-6))
    if lambda1 == 0:
        return math.log(shifted) if shifted < math.inf else math.inf
    try:
        return (shifted ** f32(lambda1) - 1) / f32(lambda1)
    except OverflowError:
        return math.copysign(math.inf, lambda1)


def logit(x: float, epsilon: float) -> float:
    if math.isnan(x):
        return x
    clamped = min(max(x, f32(epsilon)), f32(1 - epsilon))
    return math.log(clamped / (1 - clamped))
