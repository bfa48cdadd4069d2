"""Arrays as bytes: their memory, the names of their types, and arrays over what arrived.

Many small arrays lie in one buffer, without a gap, each aligned as its type needs: in the order of falling alignment,
those of one type and shape together, else as they stand in the element. A type's size is a multiple of its alignment,
so each begins where it may. Both sides derive the order from the types and shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.core.errors import CodecError
from penstock.core.leaves import UnsendableError

Array = np.ndarray[Any, Any]
Buffer = bytes | bytearray | memoryview

ROWS_FROM = 4  # so many alike are made of one array faster than each by itself


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


# Many in one buffer


class ArrayKind(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _alike(kinds: Sequence[ArrayKind]) -> list[tuple[ArrayKind, list[int]]]:
    """Return each kind and the numbers of its arrays, in the order in which they lie."""
    alike: dict[ArrayKind, list[int]] = {}
    for number, kind in enumerate(kinds):
        numbers = alike.get(kind)
        if numbers is None:
            alike[kind] = [number]
        else:
            numbers.append(number)
    return sorted(alike.items(), key=lambda item: -item[0].dtype.alignment)


def packing_order(kinds: Sequence[ArrayKind]) -> list[int]:
    """Return the numbers of the arrays, in the order in which they lie.

    >>> one, eight = ArrayKind(np.dtype("u1"), (3,)), ArrayKind(np.dtype("f8"), (2,))
    >>> packing_order([one, eight, one, eight])
    [1, 3, 0, 2]
    """
    return [number for _, numbers in _alike(kinds) for number in numbers]


def pack_arrays(arrays: Sequence[Array]) -> bytes:
    """Return the buffer; the arrays are given in the order in which they lie."""
    try:
        return b"".join(arrays)  # type: ignore[arg-type]
    except (BufferError, ValueError, TypeError):  # not contiguous, or of a type that Python's buffers do not have
        return b"".join(map(array_bytes, arrays))


class Unpacking:
    """Makes the arrays of such a buffer. Made once for all elements of a structure."""

    def __init__(self, kinds: Sequence[ArrayKind]) -> None:
        """`kinds` are given as they stand in the element."""
        alike = _alike(kinds)
        self.order = [number for _, numbers in alike for number in numbers]
        """The numbers of the arrays, as `arrays` gives them."""
        self._groups: list[tuple[ArrayKind, int, int]] = []
        """A kind, where its arrays begin, and how many there are."""
        self._nbytes = 0
        for kind, numbers in alike:
            self._groups.append((kind, self._nbytes, len(numbers)))
            self._nbytes += kind.nbytes * len(numbers)
        self._alignment = max((kind.dtype.alignment for kind, _ in alike), default=1)

    def arrays(self, buffer: Any) -> list[Array]:
        """Return the arrays, in the order in which they lie."""
        content = bytes_over(buffer)
        if content.nbytes != self._nbytes:
            raise CodecError(f"{content.nbytes} bytes for arrays of {self._nbytes}")
        if content.nbytes and content.__array_interface__["data"][0] % self._alignment:
            content = content.copy()
        arrays: list[Array] = []
        for (dtype, shape), start, count in self._groups:
            if count >= ROWS_FROM and shape and 0 not in shape and dtype.itemsize:
                arrays.extend(np.ndarray((count, *shape), dtype, content, start))
                continue
            step = math.prod(shape) * dtype.itemsize
            if not step:
                arrays.extend(np.empty(shape, dtype) for _ in range(count))
            else:
                offsets = range(start, start + count * step, step)
                arrays.extend([np.ndarray(shape, dtype, content, at) for at in offsets])
        return arrays
