"""The names of dtypes, and many small arrays in one buffer.

Small arrays lie in their buffer without a gap, each aligned as its type needs: in the order of falling alignment, those
of one type and shape together, else as they stand in the element. A type's size is a multiple of its alignment, so each
begins where it may. Both sides derive the order from the types and shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.core.element import Array
from penstock.core.errors import CodecError
from penstock.core.leaves import UnsendableError

ROWS_FROM = 4  # so many alike are made of one array faster than each by itself


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
        try:
            import ml_dtypes  # type: ignore[import-not-found, unused-ignore]  # registers bfloat16 and its kin
        except ImportError:
            raise CodecError(f"dtype {name!r} is not known here; install ml_dtypes") from None
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


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
        return b"".join(array.tobytes() for array in arrays)


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

    def arrays(self, content: np.ndarray[Any, np.dtype[np.uint8]]) -> list[Array]:
        """Return the arrays over a buffer, in the order in which they lie."""
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
