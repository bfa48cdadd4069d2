"""Kernels that work on each number or id by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.core.element import Array
from penstock.kernels.compiling import (
    DOUBLE,
    FLAGS,
    FLOAT,
    FLOATS,
    IDS,
    NUMBER,
    OUT_FLAGS,
    OUT_FLOATS,
    OUT_IDS,
    VOID,
    WORD,
    floor_mod,
    inlined,
    kernel,
    reciprocal,
)
from penstock.kernels.elementary import exponential, logarithm, precise_logarithm
from penstock.kernels.features import UnfitFeatureError
from penstock.kernels.lists import find_slot, hash_table

COUNTED = 256  # borders: with more, a search is faster than counting
COUNT_BLOCK = 2048  # values whose counts lie in the cache that is nearest
SMALLEST = 1e-6  # what BoxCox takes a logarithm or a power of
LEAST_POWER = 1e-10  # below it (x ** power - 1) / power is the logarithm of x to the last place
DAY_S = 86400
DAY_RECIPROCAL = reciprocal(DAY_S)
HOUR_RECIPROCAL = -(-(1 << 32) // 3600)  # a second of the day times this, of which 32 bits are dropped, is its hour
FLOAT_ONE = np.float32(1)


@kernel((VOID, FLOATS, FLOATS, FLAGS, OUT_IDS), (VOID, IDS, IDS, FLAGS, OUT_IDS))
def _bucketize(values: Any, borders: Any, doubled: Any, out: Any) -> None:
    if borders.size <= COUNTED:
        # Counting the borders below compares many values at once, which a search cannot.
        counts = np.empty(COUNT_BLOCK, np.int32)
        for start in range(0, values.size, COUNT_BLOCK):
            block = values[start : start + COUNT_BLOCK]
            below = counts[: block.size]
            below[:] = 0
            for k in range(borders.size):
                border = borders[k]
                for i in range(block.size):
                    below[i] += np.int32(1) if border < block[i] else np.int32(0)
            for i in range(block.size):
                out[start + i] = below[i]
    else:
        for i in range(values.size):
            first, count = 0, borders.size
            while count > 0:
                half = count >> 1
                if borders[first + half] < values[i]:
                    first += half + 1
                    count -= half + 1
                else:
                    count = half
            out[i] = first
    if doubled.any():
        for i in range(values.size):
            place = out[i]
            if place < borders.size and doubled[place] and borders[place] == values[i]:
                out[i] = place + 1


@lru_cache(maxsize=4096)
def _prepared_borders(borders: tuple[float, ...], whole: bool) -> tuple[Array, Array, int]:
    """Return borders as numbers of the values' own type, which of them are doubled, and how many are below them all.

    Each is rounded down, so that `border < value` says the same as with the border itself.
    """
    exact = list(borders)
    below = sum(border < -(2**63) for border in exact) if whole else 0
    exact = exact[below:]
    if whole:
        rounded: Array = np.array([min(math.floor(border), 2**63 - 1) for border in exact], np.int64)
    else:
        with np.errstate(over="ignore"):
            rounded = np.array(exact, np.float64).astype(np.float32)
        high = rounded.astype(np.float64) > np.array(exact, np.float64)
        rounded[high] = np.nextafter(rounded[high], np.float32(-np.inf))
    doubled = np.array(
        [i + 1 < len(exact) and border == exact[i + 1] == rounded[i].item() for i, border in enumerate(exact)], np.bool_
    )
    return rounded, doubled, below


def bucketize(values: Array, borders: tuple[float, ...]) -> Array:
    """Return for each value in which bucket it lies: bucket i is above border i - 1, up to border i."""
    rounded, doubled, below = _prepared_borders(borders, values.dtype.kind == "i")
    if not len(rounded):
        return np.full(len(values), below, np.int64)
    out = np.empty(len(values), np.int64)
    _bucketize(values, rounded, doubled, out)
    return out + below if below else out


@kernel((VOID, FLOATS, FLOAT, FLOAT, OUT_FLOATS), (VOID, IDS, NUMBER, NUMBER, OUT_IDS))
def _clamp(values: Any, low: Any, high: Any, out: Any) -> None:
    for i in range(values.size):
        value = values[i]
        value = low if value < low else value
        out[i] = high if value > high else value


def clamper(low: float, high: float) -> Callable[[Array], Array]:
    """Return what makes of each value the bound that it lies beyond, if it does; NaN stays."""
    # The loop is so short that a conversion of the bounds at each call would show.
    as_floats = np.float32(low), np.float32(high)

    def clamped(values: Array) -> Array:
        out = np.empty(len(values), values.dtype)
        if values.dtype.kind == "i":
            _clamp(values, _whole(low), _whole(high), out)
        else:
            _clamp(values, *as_floats, out)
        return out

    return clamped


def _whole(bound: float) -> int:
    if math.isinf(bound):
        return 2**63 - 1 if bound > 0 else -(2**63)
    if bound != int(bound):
        raise UnfitFeatureError(f"Clamp takes whole bounds for whole numbers, and not {bound}")
    return max(-(2**63), min(2**63 - 1, int(bound)))


@kernel((VOID, IDS, NUMBER, WORD, OUT_IDS))
def _positive_modulus(values: Any, divisor: Any, by: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = floor_mod(values[i], divisor, by)


def positive_modulus(values: Array, divisor: int) -> Array:
    """Return the remainders, which are never negative."""
    if divisor & (divisor - 1) == 0:
        return values & np.int64(divisor - 1)
    out = np.empty(len(values), np.int64)
    _positive_modulus(values, divisor, reciprocal(divisor), out)
    return out


@inlined
def _hour(second: Any) -> Any:
    """Return the hour of a second of the day, or of the next one."""
    second = second - DAY_S if second >= DAY_S else second
    return (second * HOUR_RECIPROCAL) >> 32


@kernel((VOID, IDS, NUMBER, OUT_IDS))
def _local_hour(times: Any, offset_s: Any, out: Any) -> None:
    for i in range(times.size):
        out[i] = _hour(floor_mod(times[i], DAY_S, DAY_RECIPROCAL) + offset_s)


@kernel((VOID, IDS, IDS, OUT_IDS))
def _local_hours(times: Any, offsets_s: Any, out: Any) -> None:
    for i in range(times.size):
        out[i] = _hour(floor_mod(times[i], DAY_S, DAY_RECIPROCAL) + floor_mod(offsets_s[i], DAY_S, DAY_RECIPROCAL))


def local_hour(times_s: Array, offset_s: int | Array) -> Array:
    """Return the hour of the day, 0 to 23, of seconds since 1970 in a zone so far ahead of UTC."""
    out = np.empty(len(times_s), np.int64)
    if isinstance(offset_s, int):
        _local_hour(times_s, offset_s % DAY_S, out)
    else:
        _local_hours(times_s, offset_s, out)
    return out


@kernel((VOID, IDS, IDS, IDS, FLAGS, NUMBER, OUT_IDS, OUT_FLAGS))
def _map_ids(ids: Any, keys: Any, targets: Any, used: Any, default: Any, out: Any, found: Any) -> None:
    for i in range(ids.size):
        slot = find_slot(keys, used, ids[i])
        found[i] = used[slot]
        out[i] = targets[slot] if used[slot] else default


@lru_cache(maxsize=1024)
def _mapping_table(mapping: tuple[tuple[int, int], ...]) -> tuple[Array, Array, Array]:
    return hash_table(mapping)


def map_ids(ids: Array, mapping: tuple[tuple[int, int], ...], default: int) -> tuple[Array, Array]:
    """Return what each id is mapped to, or the default, and which ids have an entry."""
    keys, targets, used = _mapping_table(mapping)
    out, found = np.empty(len(ids), np.int64), np.empty(len(ids), np.bool_)
    _map_ids(ids, keys, targets, used, default, out, found)
    return out, found


@kernel((VOID, IDS, IDS, OUT_IDS))
def _map_by_place(ids: Any, table: Any, out: Any) -> None:
    for i in range(ids.size):
        out[i] = 0 if ids[i] < 0 else table[ids[i] % table.size]


def map_by_place(ids: Array, table: Sequence[int]) -> Array:
    """Return the entry that each id has in a table that is read round and round; 0 for a negative one."""
    out = np.empty(len(ids), np.int64)
    _map_by_place(ids, _as_array(tuple(table)), out)
    return out


@lru_cache(maxsize=1024)
def _as_array(numbers: tuple[int, ...]) -> Array:
    return np.array(numbers, np.int64)


@kernel((VOID, IDS, IDS, IDS, FLAGS, NUMBER, OUT_IDS))
def _add_index(ids: Any, keys: Any, places: Any, used: Any, factor: Any, out: Any) -> None:
    for i in range(ids.size):
        slot = find_slot(keys, used, ids[i])
        if used[slot]:
            out[i] += factor * places[slot]


def mixed_radix(features: Sequence[Array], vocabularies: tuple[tuple[int, ...], ...]) -> Array:
    """Return one id for each row of several features: their places in the vocabularies as digits, the first lowest."""
    out = np.zeros(len(features[0]), np.int64)
    factor = 1
    for ids, vocabulary in zip(features, vocabularies):
        keys, places, used = _mapping_table(tuple((id, place) for place, id in enumerate(vocabulary)))
        _add_index(ids, keys, places, used, factor, out)
        factor *= len(vocabulary)
    return out


@kernel((VOID, FLOATS, DOUBLE, DOUBLE, NUMBER, OUT_IDS))
def _onehot_places(values: Any, low: Any, width: Any, count: Any, out: Any) -> None:
    for i in range(values.size):
        place = (np.float64(values[i]) - low) / width
        out[i] = np.int64(place) if 0 <= place < count else -1


@kernel((VOID, FLOATS, DOUBLE, DOUBLE, NUMBER, OUT_FLOATS))
def _onehot_vectors(values: Any, low: Any, width: Any, count: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = 0
    for i in range(values.size):
        place = (np.float64(values[i]) - low) / width
        if 0 <= place < count:
            out[i * count + np.int64(place)] = 1


def onehot_places(values: Array, low: float, high: float, count: int) -> Array:
    """Return in which of `count` equal parts of low to high each number lies; -1: in none."""
    out = np.empty(len(values), np.int64)
    _onehot_places(values, low, (high - low) / count, count, out)
    return out


def onehot_vectors(values: Array, low: float, high: float, count: int) -> Array:
    """Return `count` numbers for each: 1 for the part of low to high that it lies in, and 0 for the others."""
    out = np.empty(len(values) * count, np.float32)
    _onehot_vectors(values, low, (high - low) / count, count, out)
    return out


@kernel((VOID, FLOATS, FLOAT, FLOAT, OUT_FLOATS))
def _shifted_logs(values: Any, shift: Any, least: Any, out: Any) -> None:
    for i in range(values.size):
        value = values[i] + shift
        out[i] = logarithm(least if value < least else value)


@kernel((VOID, FLOATS, FLOAT, FLOAT, DOUBLE, OUT_FLOATS))
def _shifted_powers(values: Any, shift: Any, least: Any, power: Any, out: Any) -> None:
    scale = 1.0 / power
    for i in range(values.size):
        value = values[i] + shift
        value = least if value < least else value
        out[i] = np.float32((exponential(power * precise_logarithm(value)) - 1.0) * scale)


def boxcox(values: Array, lambda1: float, lambda2: float) -> Array:
    """Return the power transform of numbers: a logarithm, where lambda1 is 0."""
    out = np.empty_like(values)
    shift, least, power = np.float32(lambda2), np.float32(SMALLEST), float(np.float32(lambda1))
    if abs(power) < LEAST_POWER:
        _shifted_logs(values, shift, least, out)
    else:
        _shifted_powers(values, shift, least, power, out)
    return out


@kernel((VOID, FLOATS, FLOAT, FLOAT, OUT_FLOATS))
def _log_odds(values: Any, low: Any, high: Any, out: Any) -> None:
    for i in range(values.size):
        value = values[i]
        value = low if value < low else value
        value = high if value > high else value
        out[i] = logarithm(value / (FLOAT_ONE - value))


def logit(values: Array, epsilon: float) -> Array:
    """Return the logarithm of the odds of probabilities that are kept `epsilon` away from 0 and 1."""
    out = np.empty_like(values)
    _log_odds(values, np.float32(epsilon), np.float32(1 - epsilon), out)
    return out


KERNELS = {
    "Bucketize": (_bucketize,),
    "BoxCox": (_shifted_logs, _shifted_powers),
    "Clamp": (_clamp,),
    "Logit": (_log_odds,),
    "PositiveModulus": (_positive_modulus,),
    "GetLocalHour": (_local_hour, _local_hours),
    "MapId": (_map_ids, _map_by_place),
    "NGram": (_add_index,),
    "Onehot": (_onehot_places, _onehot_vectors),
}
