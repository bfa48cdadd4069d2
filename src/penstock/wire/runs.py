"""Runs: many elements as columns in a few buffers, and back.

A run of one element is that element's own buffers, untouched. In a longer run the structure stands once and each leaf
is a column: arrays of one shape and type lie one behind the other and come back as rows of one array. What differs from
element to element goes leaf by leaf (`wire.elements`), the small ones together in one buffer.

Rows share a buffer but never overlap: a reader may write to any of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from penstock.core.element import Array, Element, Ragged, leaves
from penstock.core.errors import CodecError
from penstock.core.leaves import TypeName, UnsendableError, leaf_type, type_or_stand_in
from penstock.wire.arrays import dtype_name, named_dtype
from penstock.wire.elements import MALFORMED, Buffer, array_bytes, array_over, bytes_over, flatten, unflatten

ONE, MANY = range(2)
DICT, LIST, TUPLE, NAMED, RAGGED, ROWS, ZERO_DIM, SHAPES, SCALARS, PLAIN, BYTES, EACH, TYPED = range(13)
"""NAMED and RAGGED are found in older files only."""

LARGE_BYTES = 1 << 18  # such a row is worth a buffer of its own more than it costs
INLINE_BYTES = 4096  # such a column is not worth one
ALIGNMENT = 64
WIDE_FROM = 64  # leaves: of fewer, columns are as good and take fewer bytes
WIDE_RATIO = 4  # leaves of an element to elements of a run, from which on columns are too many for what is in them

PLACED_BYTES = 32 << 10  # so much is worth memory that others see

MOST_EMPTY = 1 << 20  # elements of a run that have less than a byte each: of others there are as many as bytes at most

FrameMemory: TypeAlias = Callable[[Sequence[int], Any], Array | None]
"""(shape, dtype) -> memory that others see; None: there is none."""

_PLAIN = {int, float, str, bool, type(None)}
_SCALAR_KINDS = "biufcmM"
_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")


class _Buffers(list[Buffer]):
    """The buffers of a run that is being encoded, and where memory for its columns comes from."""

    __slots__ = ("allocate",)

    def __init__(self, allocate: FrameMemory | None) -> None:
        super().__init__()
        self.allocate = allocate


def encode_run(elements: Sequence[Element], allocate: FrameMemory | None = None) -> tuple[bytes, list[Buffer]]:
    """Return the layout and the buffers of a run; columns that take a buffer are put where `allocate` says."""
    if len(elements) == 1:
        header, buffers = flatten(elements[0])
        return msgspec.msgpack.encode([ONE, header]), buffers
    columns = _Buffers(allocate)
    try:
        encode = _encode_wide if elements and _is_wide(elements[0], len(elements)) else _encode
        description = encode(elements, columns) if elements else []
    except (UnsendableError, CodecError) as error:
        for element in elements:
            flatten(element)  # one by one, the error says which leaf it is
        raise CodecError(f"elements that cannot be encoded together: {error}") from error
    return msgspec.msgpack.encode([MANY, len(elements), description]), columns


def _is_wide(element: Element, count: int) -> bool:
    """Say whether an element has so many leaves that a column of each would cost more than the elements themselves."""
    return len(leaves(element)) >= max(WIDE_FROM, WIDE_RATIO * count)


def decode_run(layout: bytes, buffers: Sequence[Any], *, stand_ins: bool = False) -> list[Element]:
    """Return all elements; see `ElementRun`."""
    return ElementRun(layout, buffers, stand_ins=stand_ins)[:]


class ElementRun:
    """Elements that are made when they are asked for: a slice is a list of them, and each is to be asked for once.

    Arrays are views of the buffers, writable if those are, and aligned. What is malformed is a `CodecError`, at once or
    when the elements are made.
    """

    __slots__ = ("_column",)

    def __init__(
        self, layout: bytes, buffers: Sequence[Any], *, count: int | None = None, stand_ins: bool = False
    ) -> None:
        """`count`: how many elements there must be; None: any number.

        A class that is not known here is an error, or, with `stand_ins`, its values are `StandIn`s that can be passed
        on.
        """
        try:
            self._column = _column_of(layout, buffers, count, stand_ins)
        except MALFORMED as error:
            raise _not_a_run(error) from error

    def __getitem__(self, rows: slice) -> list[Element]:
        try:
            return list(self._column[rows])
        except MALFORMED as error:
            raise _not_a_run(error) from error


def _column_of(layout: bytes, buffers: Sequence[Any], expected: int | None, stand_ins: bool) -> _Column:
    kind, *rest = msgspec.msgpack.decode(layout)
    count = 1 if kind == ONE else rest[0]
    if expected is not None and count != expected:
        raise CodecError(f"a run of {count} elements where {expected} were to be")
    if kind == ONE:
        return [unflatten(rest[0], buffers, stand_ins=stand_ins)]
    count, description = rest
    if count > MOST_EMPTY and count > len(layout) + sum(bytes_over(buffer).nbytes for buffer in buffers):
        raise CodecError(f"a run that claims {count:,} elements, more than it has bytes")
    return _Decoding(count, iter(buffers), stand_ins).column(description) if count else []


def _not_a_run(error: BaseException) -> CodecError:
    return CodecError(f"these bytes are not a run of elements: {error!r}")


def _encode(column: Sequence[Any], buffers: _Buffers) -> list[Any]:
    types = set(map(type, column))
    if types <= _PLAIN:
        return _encode_plain(column, buffers)
    if len(types) > 1:
        return _encode_each(column, buffers)
    kind = types.pop()
    if kind is np.ndarray:
        return _encode_arrays(column, buffers)
    if kind is bytes:
        sizes = np.fromiter(map(len, column), np.int64, len(column))
        return [BYTES, _put(array_bytes(sizes), buffers), _put(b"".join(column), buffers)]
    if kind not in (dict, list, tuple) and (entry := leaf_type(kind)).flatten is not None:
        return [TYPED, *entry.name, _encode(list(map(entry.flatten, column)), buffers)]
    if issubclass(kind, dict):
        return _encode_dicts(column, buffers)
    if issubclass(kind, (list, tuple)):
        return _encode_sequences(column, kind, buffers)
    if issubclass(kind, np.generic) and column[0].dtype.kind in _SCALAR_KINDS:
        dtype = column[0].dtype
        if dtype.kind not in "mM" or all(value.dtype == dtype for value in column):
            return [SCALARS, dtype_name(dtype), _put(array_bytes(np.array(column, dtype)), buffers)]
    return _encode_each(column, buffers)


def _encode_plain(column: Sequence[Any], buffers: _Buffers) -> list[Any]:
    try:
        return [PLAIN, _put(msgspec.msgpack.encode(column), buffers)]
    except (OverflowError, UnicodeEncodeError):
        return _encode_each(column, buffers)


def _encode_dicts(column: Sequence[Any], buffers: _Buffers) -> list[Any]:
    keys = tuple(column[0])
    # True, 1 and 1.0 are one key to Python, so only strings are compared by value alone.
    if not _all_are(keys, map(tuple, column), len(column)) or not all(isinstance(key, str) for key in keys):
        return _encode_each(column, buffers)
    return [DICT, list(keys), [_encode(list(map(itemgetter(key), column)), buffers) for key in keys]]


def _encode_sequences(column: Sequence[Any], kind: type[Any], buffers: _Buffers) -> list[Any]:
    if len(set(map(len, column))) > 1:
        return _encode_each(column, buffers)
    return [LIST if issubclass(kind, list) else TUPLE, [_encode(part, buffers) for part in zip(*column)]]


def _encode_arrays(column: Sequence[np.ndarray[Any, Any]], buffers: _Buffers) -> list[Any]:
    first = column[0]
    dtype, shape = first.dtype, first.shape
    if dtype.hasobject or not dtype.itemsize or not _same_dtype(column, dtype):
        return _encode_each(column, buffers)
    if not _all_are(shape, map(_shape_of, column), len(column)):
        return _encode_shapes(column, buffers)
    if first.nbytes >= LARGE_BYTES:
        return _encode_each(column, buffers)
    name = dtype_name(dtype)
    # Into memory of our own: by itself numpy keeps the order of axes of its inputs, and changes the order of bytes.
    if not shape:
        return [
            ZERO_DIM,
            name,
            _put(array_bytes(np.stack(column, out=_memory((len(column),), dtype, buffers))), buffers),
        ]
    rows = _memory((len(column) * shape[0], *shape[1:]), dtype, buffers)
    np.concatenate(column, out=rows)
    return [ROWS, name, list(shape), _put(array_bytes(rows), buffers)]


def _encode_shapes(column: Sequence[np.ndarray[Any, Any]], buffers: _Buffers) -> list[Any]:
    dimensions = {array.ndim for array in column}
    total = sum(array.nbytes for array in column)
    if len(dimensions) > 1 or total >= LARGE_BYTES * len(column):
        return _encode_each(column, buffers)
    shapes = np.array([array.shape for array in column], np.int64)
    flat = _memory((int(shapes.prod(axis=1).sum()),), column[0].dtype, buffers)
    np.concatenate([array.reshape(-1) for array in column], out=flat)
    sizes = _put(array_bytes(shapes), buffers)
    return [SHAPES, dtype_name(flat.dtype), shapes.shape[1], sizes, _put(array_bytes(flat), buffers)]


def _memory(shape: tuple[int, ...], dtype: np.dtype[Any], buffers: _Buffers) -> np.ndarray[Any, Any]:
    if dtype.names is not None:  # numpy does not copy the padding of structured types: what lay there would be sent
        return np.zeros(shape, dtype)
    found: Array | None = None
    if buffers.allocate is not None and math.prod(shape) * dtype.itemsize >= PLACED_BYTES:
        found = buffers.allocate(shape, dtype)
    return np.empty(shape, dtype) if found is None else found


def _same_dtype(column: Sequence[np.ndarray[Any, Any]], dtype: np.dtype[Any]) -> bool:
    return _all_are(dtype, map(_dtype_of, column), len(column))


def _all_are(wanted: Any, values: Iterable[Any], count: int) -> bool:
    """Say whether `count` values equal the wanted one. Counting costs half of what a set of them does."""
    return list(values).count(wanted) == count


def _encode_each(column: Sequence[Any], buffers: _Buffers) -> list[Any]:
    headers, counts, own = _flattened(column)
    sizes = [len(part) for part in own]
    if sum(sizes) >= LARGE_BYTES * len(sizes):
        buffers.extend(own)
        return [EACH, headers, counts, None, None]
    padded = [part for buffer, size in zip(own, sizes) for part in (buffer, bytes(-size % ALIGNMENT))]
    return [EACH, headers, counts, sizes, _put(b"".join(padded), buffers)]


def _encode_wide(elements: Sequence[Element], buffers: _Buffers) -> list[Any]:
    """Describe elements one by one: the small arrays of each lie together already."""
    headers, counts, own = _flattened(elements)
    buffers.extend(own)
    return [EACH, headers, counts, None, None]


def _flattened(column: Sequence[Any]) -> tuple[list[bytes], list[int], list[Buffer]]:
    headers, counts, own = [], [], []
    for value in column:
        header, parts = flatten(value)
        headers.append(header)
        counts.append(len(parts))
        own.extend(parts)
    return headers, counts, own


def _put(content: Buffer, buffers: _Buffers) -> bytes | None:
    """Return the content if it is small enough to stand in the layout; else make it the next buffer."""
    if len(content) <= INLINE_BYTES:
        return bytes(content)
    buffers.append(content)
    return None


class _Column(Protocol):
    """Values of which a slice can be gone through. A thousand views of one array take longer than a reader may wait
    for the first of them, so they are made by the slice.
    """

    def __getitem__(self, rows: slice, /) -> Any: ...


class _Made:
    """A column whose values are made of those of others."""

    __slots__ = ("_make", "_parts")

    def __init__(self, make: Callable[..., list[Any]], *parts: _Column) -> None:
        """`make` is given the same slice of each of the parts."""
        self._make, self._parts = make, parts

    def __getitem__(self, rows: slice) -> list[Any]:
        return self._make(*[part[rows] for part in self._parts])


class _Decoding:
    """One run that is being decoded."""

    __slots__ = ("count", "stand_ins", "taken")

    def __init__(self, count: int, taken: Iterator[Any], stand_ins: bool) -> None:
        self.count, self.taken, self.stand_ins = count, taken, stand_ins

    def column(self, description: list[Any]) -> _Column:
        kind, count, taken = description[0], self.count, self.taken
        if kind == ROWS:
            dtype, shape = named_dtype(description[1]), tuple(description[2])
            return array_over(_get(description[3], taken), dtype, (count, *shape))
        if kind == PLAIN:
            return _decode_plain(_get(description[1], taken), count)
        if kind == DICT:
            keys, parts = description[1:]
            return _Made(_maker_of_dicts(keys), *map(self.column, parts)) if parts else [{} for _ in range(count)]
        if kind in (TUPLE, LIST):
            rows = self._tuples(description[1])
            return rows if kind == TUPLE else _Made(_lists, rows)
        if kind == SCALARS:
            return array_over(_get(description[2], taken), named_dtype(description[1]), (count,))
        if kind == BYTES:
            return _decode_bytes(_get(description[1], taken), _get(description[2], taken), count)
        if kind == TYPED:
            _, style, module, qualname, fields, content = description
            return self._typed(TypeName(style, module, qualname, tuple(fields)), self.column(content))
        if kind == SHAPES:
            return _decode_shapes(description, count, taken)
        if kind == ZERO_DIM:
            return _Made(_zero_dim, array_over(_get(description[2], taken), named_dtype(description[1]), (count, 1)))
        if kind == EACH:
            return self._each(description)
        if kind == NAMED:
            _, name, fields, parts = description
            return self._typed(TypeName("namedtuple", "", name, tuple(fields)), self._tuples(parts))
        if kind == RAGGED:
            return _Made(_ragged, *map(self.column, description[1]))
        raise CodecError(f"unknown kind of column {kind!r}")

    def _tuples(self, parts: list[Any]) -> _Column:
        return _Made(_tuples, *map(self.column, parts)) if parts else [()] * self.count

    def _typed(self, name: TypeName, contents: _Column) -> _Column:
        unflatten = type_or_stand_in(name, stand_ins=self.stand_ins).unflatten

        def make(content: Iterable[Any]) -> list[Any]:
            try:
                return list(map(unflatten, content))
            except Exception as error:
                raise CodecError(f"a {name} cannot be made of what was sent: {error!r}") from error

        return _Made(make, contents)

    def _each(self, description: list[Any]) -> list[Any]:
        _, headers, counts, sizes, inline = description
        if not self.count == len(headers) == len(counts):
            raise CodecError(f"a column of {len(headers)} values in a run of {self.count}")
        taken = self.taken if sizes is None else _cut(bytes_over(_get(inline, self.taken)), sizes)
        return [
            unflatten(header, list(itertools.islice(taken, own)), stand_ins=self.stand_ins)
            for header, own in zip(headers, counts)
        ]


def _get(inline: bytes | None, taken: Iterator[Any]) -> Any:
    if inline is None:
        return next(taken)
    if not isinstance(inline, bytes):
        raise CodecError(f"{type(inline).__name__} where bytes belong")  # a bytearray of a number has so many bytes
    return bytearray(inline)  # what stands in the layout is shared with nobody: a copy that can be written to


def _decode_plain(content: Any, count: int) -> list[Any]:
    values: list[Any] = msgspec.msgpack.decode(content, type=list[Any])
    if len(values) != count:
        raise CodecError(f"a column of {len(values)} values in a run of {count}")
    return values


def _decode_bytes(sizes: Any, content: Any, count: int) -> list[bytes]:
    ends = np.cumsum(array_over(sizes, np.dtype(np.int64), (count,)))
    stops = ends.tolist()
    joined = bytes(content)
    if stops[-1] != len(joined) or min(ends[0], np.diff(ends).min(initial=0)) < 0:
        raise CodecError(f"sizes that add up to {stops[-1]} of {len(joined)} bytes")
    return [joined[start:stop] for start, stop in zip([0, *stops], stops)]


def _decode_shapes(description: list[Any], count: int, taken: Iterator[Any]) -> _Column:
    _, name, dimensions, inline_shapes, inline = description
    shapes = array_over(_get(inline_shapes, taken), np.dtype(np.int64), (count, dimensions))
    ends = np.cumsum(shapes.prod(axis=1)).tolist()
    flat = array_over(_get(inline, taken), named_dtype(name), (ends[-1],))

    def make(starts: list[int], stops: list[int], shapes: np.ndarray[Any, Any]) -> list[Any]:
        rows = [flat[start:stop] for start, stop in zip(starts, stops)]
        return rows if dimensions == 1 else list(map(np.reshape, rows, map(tuple, shapes.tolist())))

    return _Made(make, [0, *ends[:-1]], ends, shapes)


def _cut(content: np.ndarray[Any, Any], sizes: list[int]) -> Iterator[np.ndarray[Any, Any]]:
    start = 0
    for size in sizes:
        yield content[start : start + size]
        start += size + -size % ALIGNMENT


def _maker_of_dicts(keys: list[str]) -> Callable[..., list[dict[str, Any]]]:
    # Displays are three times as fast as `dict(zip(...))`, and most elements have few leaves.
    if len(keys) == 1:
        (k,) = keys
        return lambda column: [{k: a} for a in column]
    if len(keys) == 2:
        k, m = keys
        return lambda *columns: [{k: a, m: b} for a, b in zip(*columns)]
    if len(keys) == 3:
        k, m, o = keys
        return lambda *columns: [{k: a, m: b, o: c} for a, b, c in zip(*columns)]
    return lambda *columns: [dict(zip(keys, row)) for row in zip(*columns)]


def _tuples(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    return list(zip(*columns))


def _lists(rows: Iterable[Any]) -> list[list[Any]]:
    return list(map(list, rows))


def _zero_dim(rows: Iterable[Any]) -> list[Any]:
    return [row.reshape(()) for row in rows]


def _ragged(values: Iterable[Any], offsets: Iterable[Any]) -> list[Ragged]:
    return list(map(Ragged, values, offsets))
