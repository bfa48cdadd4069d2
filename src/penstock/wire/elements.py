"""Elements to a small header and a list of buffers, and back.

The header is msgpack: the structure with one descriptor per leaf. Arrays go as their own memory, untouched; what is not
contiguous is copied once. Only leaves of `core.element` travel: anything else is refused with its path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.core.element import Element, Ragged, is_namedtuple
from penstock.core.errors import CodecError

Buffer = bytes | bytearray | memoryview
TakeBuffer = Callable[[int], Any]

DICT, LIST, TUPLE, NAMED, ARRAY, RAGGED, OBJECTS, SCALAR, PLAIN, BYTES, SURROGATES = range(11)
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
        if isinstance(value, np.ma.MaskedArray):
            raise _refused(value, path, "its mask would be lost; send the mask as a leaf of its own")
        return _describe_array(value, buffers, path)
    if isinstance(value, Ragged):
        return [RAGGED, _describe_array(value.values, buffers, path), _describe_array(value.offsets, buffers, path)]
    if isinstance(value, np.generic):
        return [SCALAR, dtype_name(value.dtype, path), value.tobytes()]
    if isinstance(value, (bytes, bytearray)):
        buffers.append(bytes(value))
        return [BYTES]
    if isinstance(value, _PLAIN):
        if isinstance(value, int) and not isinstance(value, bool):
            return [PLAIN, int(value)] if value in _INT64 else [PLAIN, str(int(value)), True]
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:  # names of files may hold what is not Unicode
                return [SURROGATES, value.encode("utf-8", "surrogatepass")]
            return [PLAIN, str(value)]
        return [PLAIN, float(value) if isinstance(value, float) else value]
    raise _refused(value, path, "only arrays, scalars, str, bytes, None and Ragged travel")


def _describe_array(array: np.ndarray[Any, Any], buffers: list[Buffer], path: str) -> list[Any]:
    if array.dtype == object:
        parts = [_describe(part, buffers, f"{path}[{i}]") for i, part in enumerate(array.ravel())]
        return [OBJECTS, list(array.shape), parts]
    name = dtype_name(array.dtype, path)
    buffers.append(array_bytes(array))
    return [ARRAY, name, list(array.shape)]


def array_bytes(array: np.ndarray[Any, Any]) -> Buffer:
    """Return an array's memory in C order: its own if that is how it lies, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b""


def dtype_name(dtype: np.dtype[Any], path: str) -> str | dict[str, Any]:
    """Return what `named_dtype` makes the same type of."""
    if dtype.hasobject:
        raise _refused(dtype, path, "structured arrays of objects, and numpy's own strings, do not travel")
    if dtype.subdtype is not None:
        return {"base": dtype_name(dtype.subdtype[0], path), "shape": list(dtype.subdtype[1])}
    if dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        return {
            "names": list(dtype.names),
            "formats": [dtype_name(field[0], path) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    return dtype.name if dtype.isbuiltin == 2 else dtype.str  # 2: a registered extension type such as bfloat16


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
        return array_over(take(), named_dtype(description[1]), description[2])
    if kind == RAGGED:
        return Ragged(_rebuild(description[1], take), _rebuild(description[2], take))
    if kind == OBJECTS:
        objects = np.empty(len(description[2]), object)
        for i, part in enumerate(description[2]):
            objects[i] = _rebuild(part, take)
        return objects.reshape(description[1])
    if kind == SCALAR:
        dtype = named_dtype(description[1])
        return np.frombuffer(description[2], dtype)[0] if dtype.itemsize else dtype.type()
    if kind == BYTES:
        return bytes(take())
    if kind == PLAIN:
        return int(description[1]) if len(description) == 3 else description[1]
    if kind == SURROGATES:
        return str(description[1], "utf-8", "surrogatepass")
    raise CodecError(f"unknown kind of leaf {kind!r}")


def array_over(buffer: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return an array over a buffer, writable if that is; one that is not aligned is copied."""
    content = bytes_over(buffer)
    if not content.nbytes:
        if math.prod(shape) * dtype.itemsize:
            raise CodecError(f"no bytes for an array of shape {tuple(shape)}")
        return np.empty(shape, dtype)
    array = content.view(dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def bytes_over(buffer: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    # A buffer that is an array stays its own base: the lease it may hold must live as long as any view of it.
    return buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)


def named_dtype(name: str | list[Any] | dict[str, Any]) -> np.dtype[Any]:
    if isinstance(name, dict):
        if "base" in name:
            return np.dtype((named_dtype(name["base"]), tuple(name["shape"])))
        parts: Any = {key: name[key] for key in ("names", "offsets", "itemsize")}
        parts["formats"] = [named_dtype(part) for part in name["formats"]]
        structured: np.dtype[Any] = np.dtype(parts, align=bool(name["aligned"]))
        return structured
    if isinstance(name, list):  # as caches of older releases have it
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
