"""Arrays as bytes: their memory, the names of their types, and arrays over what arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.errors import CodecError
from penstock.core.leaves import UnsendableError

Array = np.ndarray[Any, Any]
Buffer = bytes | bytearray | memoryview


def array_bytes(array: Array) -> Buffer:
    """Return an array's memory in C order: its own if that is how it lies, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b""


def dtype_name(dtype: np.dtype[Any]) -> str | dict[str, Any]:
    """Return what `named_dtype` makes the same type of."""
    if dtype.hasobject:
        raise UnsendableError("structured arrays of objects, and numpy's own strings, do not travel")
    if dtype.subdtype is not None:
        return {"base": dtype_name(dtype.subdtype[0]), "shape": list(dtype.subdtype[1])}
    if dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        return {
            "names": list(dtype.names),
            "formats": [dtype_name(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    return dtype.name if dtype.isbuiltin == 2 else dtype.str  # 2: a registered extension type such as bfloat16


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


def array_over(buffer: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
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
