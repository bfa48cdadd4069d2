"""Elements to a small header and a list of buffers, and back.

The header is msgpack: the structure with one descriptor per leaf. Arrays go as their own memory, untouched; what is not
contiguous is copied once. Only leaves of `core.element` travel: anything else is refused with its path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.core.element import Element, Ragged, is_namedtuple
from penstock.core.errors import CodecError

Buffer = bytes | bytearray | memoryview
TakeBuffer = Callable[[int], Any]

DICT, LIST, TUPLE, NAMED, ARRAY, RAGGED, OBJECTS, SCALAR, PLAIN, BYTES = range(10)
_PLAIN = (str, int, float, bool, type(None))
_INT64 = range(-(1 << 63), 1 << 64)


def flatten(element: Element) -> tuple[bytes, list[Buffer]]:
    """Return the header and the buffers of an element."""
    buffers: list[Buffer] = []
    return msgspec.msgpack.encode(_describe(element, buffers, "")), buffers


def _describe(value: Any, buffers: list[Buffer], path: str) -> list[Any]:
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) for key in value):
            raise _refused(value, path, "dict keys must be str or int")
        return [DICT, list(value), [_describe(part, buffers, f"{path}[{key!r}]") for key, part in value.items()]]
    if isinstance(value, (list, tuple)):
        parts = [_describe(part, buffers, f"{path}[{i}]") for i, part in enumerate(value)]
        if is_namedtuple(value):
            return [NAMED, type(value).__name__, list(type(value)._fields), parts]  # type: ignore[union-attr]
        return [LIST if isinstance(value, list) else TUPLE, parts]
    if isinstance(value, np.ndarray):
        return _describe_array(value, buffers, path)
    if isinstance(value, Ragged):
        return [RAGGED, _describe_array(value.values, buffers, path), _describe_array(value.offsets, buffers, path)]
    if isinstance(value, np.generic):
        return [SCALAR, _dtype_name(value.dtype, path), value.tobytes()]
    if isinstance(value, (bytes, bytearray)):
        buffers.append(bytes(value))
        return [BYTES]
    if isinstance(value, _PLAIN):
        if isinstance(value, int) and value not in _INT64:
            return [PLAIN, str(value), True]
        return [PLAIN, value]
    raise _refused(value, path, "only arrays, scalars, str, bytes, None and Ragged travel")


def _describe_array(array: np.ndarray[Any, Any], buffers: list[Buffer], path: str) -> list[Any]:
    if array.dtype == object:
        parts = [_describe(part, buffers, f"{path}[{i}]") for i, part in enumerate(array.ravel())]
        return [OBJECTS, list(array.shape), parts]
    name = _dtype_name(array.dtype, path)
    contiguous = np.ascontiguousarray(array).reshape(-1)
    buffers.append(contiguous.view(np.uint8).data if array.size else b"")
    return [ARRAY, name, list(array.shape)]


def _dtype_name(dtype: np.dtype[Any], path: str) -> str | list[Any]:
    if dtype.fields is not None:
        return dtype.descr
    if dtype.kind == "V" and dtype.name != dtype.str:  # a registered extension type such as bfloat16
        return dtype.name
    if dtype.hasobject:
        raise _refused(dtype, path, "structured arrays of objects do not travel")
    return dtype.str


def unflatten(header: Buffer, buffers: Sequence[Any]) -> Element:
    """Return the element; arrays are views of the buffers, writable if those are."""
    taken = iter(buffers)
    try:
        return _rebuild(msgspec.msgpack.decode(header), lambda: next(taken))
    except (msgspec.DecodeError, StopIteration, ValueError, TypeError, IndexError, KeyError) as error:
        raise CodecError(f"these bytes are not an element: {error!r}") from error


def _rebuild(description: list[Any], take: Callable[[], Any]) -> Element:
    kind = description[0]
    if kind == DICT:
        return dict(zip(description[1], [_rebuild(part, take) for part in description[2]]))
    if kind in (LIST, TUPLE):
        parts = [_rebuild(part, take) for part in description[1]]
        return parts if kind == LIST else tuple(parts)
    if kind == NAMED:
        return named_type(description[1], tuple(description[2]))(*[_rebuild(part, take) for part in description[3]])
    if kind == ARRAY:
        return np.frombuffer(take(), np.uint8).view(_dtype(description[1])).reshape(description[2])
    if kind == RAGGED:
        return Ragged(_rebuild(description[1], take), _rebuild(description[2], take))
    if kind == OBJECTS:
        objects = np.empty(len(description[2]), object)
        for i, part in enumerate(description[2]):
            objects[i] = _rebuild(part, take)
        return objects.reshape(description[1])
    if kind == SCALAR:
        return np.frombuffer(description[2], _dtype(description[1]))[0]
    if kind == BYTES:
        return bytes(take())
    if kind == PLAIN:
        return int(description[1]) if len(description) == 3 else description[1]
    raise CodecError(f"unknown kind of leaf {kind!r}")


def _dtype(name: str | list[Any]) -> np.dtype[Any]:
    if isinstance(name, list):
        return np.dtype([tuple(tuple(part) if isinstance(part, list) else part for part in field) for field in name])
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # type: ignore[import-not-found, unused-ignore]  # registers bfloat16 and its kin

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


_named: dict[tuple[str, tuple[str, ...]], type[Any]] = {}


def named_type(name: str, fields: tuple[str, ...]) -> type[Any]:
    """Return a namedtuple type: the same one for the same name and fields."""
    from collections import namedtuple

    key = (name, fields)
    if key not in _named:
        _named[key] = namedtuple(name, fields)
    return _named[key]


def _refused(value: object, path: str, why: str) -> CodecError:
    return CodecError(
        f"leaf {path or 'of the element'} is a {type(value).__qualname__}, which cannot be encoded: {why}"
    )
