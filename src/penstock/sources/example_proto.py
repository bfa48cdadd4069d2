"""`tf.train.Example` records without TensorFlow or protobuf.

An Example is a map from names to features; a feature is a list of bytes, of float32 or of int64. Nothing in a record
says whether a list of one value was meant as a scalar, so the caller says it: without `features`, everything is a
list or a 1-D array, however many values a record happens to hold.

    Example { features = 1 }   Features { repeated entry = 1 }   entry { key = 1; value = 2 }
    Feature { bytes_list = 1 | float_list = 2 | int64_list = 3 }   each list { repeated value = 1 }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from penstock.core.errors import CorruptRecordError, DataError, InvalidArgumentError, choice

FeatureKind: TypeAlias = Literal["bytes", "bytes_list", "int", "ints", "float", "floats"]

BYTES, FLOATS, INTS = 1, 2, 3  # the field of Feature that holds the list
LIST_NAMES = {BYTES: "a bytes list", FLOATS: "a float list", INTS: "an int64 list"}
KINDS: dict[str, tuple[int, bool]] = {  # kind -> (list, exactly one value)
    "bytes": (BYTES, True),
    "bytes_list": (BYTES, False),
    "int": (INTS, True),
    "ints": (INTS, False),
    "float": (FLOATS, True),
    "floats": (FLOATS, False),
}
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
VARINT_BYTES = 10  # the longest varint: 64 bits, 7 a byte
FEW_BYTES = 64  # up to here a Python loop is faster than the dozen numpy calls that decode any number of varints
WHAT = "tf.train.Example"


def decode_example(record: bytes, features: Mapping[str, FeatureKind] | None = None) -> dict[str, Any]:
    """Return the features of a serialized Example.

    Without `features`: all of them; float lists as float32 arrays, int64 lists as int64 arrays, bytes as lists. With
    `features`: exactly the named ones, as `"bytes"`, `"int"` (np.int64) or `"float"` (np.float32) for one value and
    `"bytes_list"`, `"ints"` or `"floats"` for any number; a feature that is missing or of another type is an error.

    >>> record = encode_example({"label": 7, "image": b"..."})
    >>> decode_example(record)
    {'label': array([7]), 'image': [b'...']}
    >>> decode_example(record, {"label": "int"})
    {'label': np.int64(7)}
    """
    try:
        found = _decode(record, features)
    except IndexError:
        raise _corrupt(record, len(record), "ends in the middle of a field") from None
    if features is None:
        return {name: value for name, (_, value) in found.items()}
    return {name: _as_kind(name, kind, found) for name, kind in features.items()}


def _decode(record: bytes, wanted: Mapping[str, Any] | None) -> dict[str, tuple[int, Any]]:
    found: dict[str, tuple[int, Any]] = {}
    for field, start, stop in _fields(record, 0, len(record)):
        if field != 1:
            continue
        for entry, entry_start, entry_stop in _fields(record, start, stop):
            if entry != 1:
                continue
            name, value_start, value_stop = "", entry_stop, entry_stop
            for part, part_start, part_stop in _fields(record, entry_start, entry_stop):
                if part == 1:
                    name = record[part_start:part_stop].decode()
                elif part == 2:
                    value_start, value_stop = part_start, part_stop
            if wanted is None or name in wanted:
                found[name] = _feature(record, value_start, value_stop)
    return found


def _feature(record: bytes, start: int, stop: int) -> tuple[int, Any]:
    kind: int = 0
    value: Any = []
    for field, list_start, list_stop in _fields(record, start, stop):
        if field in LIST_NAMES:
            kind, value = field, _list(record, list_start, list_stop, field)
    return kind, value


def _list(record: bytes, start: int, stop: int, kind: int) -> Any:
    if kind == BYTES:
        return [record[a:b] for field, a, b in _fields(record, start, stop) if field == 1]
    return _numbers(record, start, stop, kind)


def _numbers(record: bytes, start: int, stop: int, kind: int) -> np.ndarray[Any, Any]:
    """Return a list's values: packed (one field holds them all), one by one, or any mixture of both."""
    parts: list[np.ndarray[Any, Any]] = []
    while start < stop:
        tag, start = _varint(record, start, stop)
        if tag == 1 << 3 | DELIMITED:
            size, start = _varint(record, start, stop)
            if start + size > stop:
                raise _corrupt(record, start, "a list of numbers is longer than its feature")
            parts.append(_packed(record, start, start + size, kind))
            start += size
        elif tag == 1 << 3 | (VARINT if kind == INTS else FIXED32):
            end = _varint(record, start, stop)[1] if kind == INTS else min(start + 4, stop)
            parts.append(_packed(record, start, end, kind))
            start = end
        else:
            raise _corrupt(record, start, f"unexpected tag {tag} in a list of numbers")
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.empty(0, np.int64 if kind == INTS else np.float32), *parts])


def _packed(record: bytes, start: int, stop: int, kind: int) -> np.ndarray[Any, Any]:
    if kind == INTS:
        return _packed_varints(record, start, stop)
    if (stop - start) % 4:
        raise _corrupt(record, start, f"a float list of {stop - start} bytes is not a multiple of 4")
    # A copy: the record's bytes are read-only, an element must not be.
    return np.frombuffer(record, "<f4", (stop - start) // 4, start).copy()


def _packed_varints(record: bytes, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Decode all varints of a range at once: as many vector steps as the longest has bytes.

    >>> _packed_varints(bytes([1, 0x96, 1, 0]), 0, 4)
    array([  1, 150,   0])
    """
    if stop - start <= FEW_BYTES:
        few = []
        while start < stop:
            value, start = _varint(record, start, stop)
            few.append(value)
        return np.array(few, np.uint64).view(np.int64)
    raw = np.frombuffer(record, np.uint8, stop - start, start)
    last = np.flatnonzero(raw < 0x80)
    if not len(last) or last[-1] != len(raw) - 1:
        raise _corrupt(record, stop, "an int64 list ends in the middle of a number")
    if len(last) == len(raw):
        return raw.astype(np.int64)
    first = np.concatenate(([0], last[:-1] + 1))
    sizes = last - first + 1
    longest = int(sizes.max())
    if longest > VARINT_BYTES:
        raise _corrupt(record, start, f"a number of {longest} bytes in an int64 list")
    values = np.zeros(len(last), np.uint64)
    for i in range(longest):
        has = np.flatnonzero(sizes > i)
        values[has] |= (raw[first[has] + i] & 0x7F).astype(np.uint64) << np.uint64(7 * i)
    return values.view(np.int64)


def _fields(record: bytes, start: int, stop: int) -> Sequence[tuple[int, int, int]]:
    """Return (number, start, stop) of each length-delimited field; fields of other wire types are passed over."""
    found = []
    while start < stop:
        tag = record[start]
        start += 1
        if tag >= 0x80:
            tag, start = _varint(record, start - 1, stop)
        wire = tag & 7
        if wire == DELIMITED:
            size = record[start]
            start += 1
            if size >= 0x80:
                size, start = _varint(record, start - 1, stop)
            found.append((tag >> 3, start, start + size))
            start += size
        elif wire == VARINT:
            _, start = _varint(record, start, stop)
        elif wire in (FIXED64, FIXED32):
            start += 8 if wire == FIXED64 else 4
        else:
            raise _corrupt(record, start, f"unknown wire type {wire}")
    if start > stop:
        raise _corrupt(record, stop, "a field is longer than what holds it")
    return found


def _varint(record: bytes, start: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    for at in range(start, min(start + VARINT_BYTES, stop)):
        byte = record[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise _corrupt(record, start, "a number does not end")


def _corrupt(record: bytes, at: int, what: str) -> CorruptRecordError:
    return CorruptRecordError(WHAT, f"{what} (a record of {len(record)} bytes)", offset=at)


def _as_kind(name: str, kind: str, found: Mapping[str, tuple[int, Any]]) -> Any:
    if kind not in KINDS:
        raise choice(f"features[{name!r}]", kind, KINDS)
    wanted_list, single = KINDS[kind]
    have, value = found.get(name, (0, None))
    if have != wanted_list:
        if not have:
            raise DataError(WHAT, f"the record has no feature {name!r}")
        raise DataError(WHAT, f"feature {name!r} is {LIST_NAMES[have]}, not {LIST_NAMES[wanted_list]}")
    if not single:
        return value
    if len(value) != 1:
        raise DataError(
            WHAT, f"feature {name!r} has {len(value)} values, not one", remedy=f"read it as {_plural(kind)!r}"
        )
    return value[0]


def _plural(kind: str) -> str:
    return "bytes_list" if kind == "bytes" else kind + "s"


def encode_example(features: Mapping[str, Any]) -> bytes:
    """Return a serialized Example.

    bytes and str (as UTF-8) become bytes lists, floats float lists (as float32), ints and bools int64 lists; arrays are
    flattened. An empty Python list, which has no type, becomes a bytes list.
    """
    entries = []
    for name, value in features.items():
        feature = _delimited(1, name.encode()) + _delimited(2, _encode_feature(name, value))
        entries.append(_delimited(1, feature))
    return _delimited(1, b"".join(entries))


def _encode_feature(name: str, value: Any) -> bytes:
    if isinstance(value, (bytes, str)):
        value = [value]
    if isinstance(value, (list, tuple)) and all(isinstance(part, (bytes, str)) for part in value):
        parts = [part.encode() if isinstance(part, str) else part for part in value]
        return _delimited(BYTES, b"".join([_delimited(1, part) for part in parts]))
    array = np.asarray(value).ravel()
    if array.dtype.kind == "f":
        return _delimited(FLOATS, _delimited(1, array.astype("<f4").tobytes()))
    if array.dtype.kind in "iub" and not (array.dtype == np.uint64 and (array >> np.uint64(63)).any()):
        return _delimited(INTS, _delimited(1, _encode_varints(array.astype(np.int64).view(np.uint64))))
    raise InvalidArgumentError(
        f"feature {name!r}: a {type(value).__name__} of dtype {array.dtype} is not bytes, str, float or int64"
    )


def _delimited(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | DELIMITED]) + _encode_varints([len(content)]) + content


def _encode_varints(values: Sequence[int] | np.ndarray[Any, np.dtype[np.uint64]]) -> bytes:
    out = bytearray()
    for value in values.tolist() if isinstance(values, np.ndarray) else values:
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)
