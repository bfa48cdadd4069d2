"""Elements to a small header and a list of buffers, and back.

The header says the element's structure, and has its small values. Arrays go as their own memory, untouched; what is not
contiguous is copied once, and many small ones lie in one buffer (`wire.arrays`). Classes of the table in `core.leaves`
go as what they are made of, under their name. Anything else is refused, with its path and what to do.

Elements of a pipeline are alike. So both sides make a plan of each structure (containers, classes, dtypes, shapes)
once, and look it up after that: by the structure when writing, by the bytes that describe it when reading. What a
header says is complete all the same: it may be kept in a file, or read by somebody who has seen none before.

The buffers are: the one of small arrays, the other arrays, long `bytes`, and what the items of object arrays have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from penstock.core import keyed as keyed  # fills the table
from penstock.core.element import Array, Element, Ragged
from penstock.core.errors import CodecError
from penstock.core.leaf_types import has_mask, remedy_for
from penstock.core.leaves import TypeName, UnsendableError, leaf_type, type_or_stand_in, watch_table
from penstock.wire.arrays import ArrayKind, Unpacking, dtype_name, named_dtype, pack_arrays, packing_order
from penstock.wire.refusals import refusal
from penstock.wire.values import decode_values, encode_values, escaped

DICT, LIST, TUPLE, NAMED, ARRAY, RAGGED, OBJECTS, SCALAR, PLAIN, BYTES, SURROGATES = range(11)
PLANNED, TYPED, PACKED, VALUE = range(11, 15)
"""Named tuples, ragged arrays, objects, scalars and plain values of the first row are found in older files only."""
AS_IT_IS, AS_TUPLE, AS_SCALAR, AS_OBJECTS = range(4)

PACKED_BELOW_BYTES = 16 << 10  # a buffer of its own costs more than copying so much
PACKED_FROM = 4  # arrays: fewer are not worth looking for
LONG_BYTES = 4096  # such a value is worth a buffer of its own
MOST_LEAVES = 1 << 16  # of all plans that are kept: some 10 MB of them

Buffer: TypeAlias = bytes | bytearray | memoryview
Structure: TypeAlias = Any
"""What tells the structures of elements apart: nested tuples, None for a leaf."""

MALFORMED = (
    *(msgspec.DecodeError, StopIteration, ValueError, TypeError, IndexError, KeyError),
    *(OverflowError, RecursionError, AttributeError, MemoryError, SyntaxError),
)
"""What decoding bytes that are no element may raise."""
_NUMBERS_AND_TEXT = frozenset({str, int, float, bool, type(None)})
_LEAVES = _NUMBERS_AND_TEXT | {np.ndarray, bytes}
_KEYS = frozenset({str})
_dtype_of, _shape_of, _ndim_of = attrgetter("dtype"), attrgetter("shape"), attrgetter("ndim")


Plan = TypeVar("Plan")


class Plans(dict[Any, Plan]):
    """Plans by what they are for. Any thread may use it.

    When they become too many all are forgotten: where each element has a structure of its own, none helps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leaves = 0

    def keep(self, key: Any, plan: Plan, leaves: int) -> Plan:
        """Keep a plan for elements of so many leaves, and return it."""
        if self._leaves > MOST_LEAVES:
            self.forget()
        self[key] = plan
        self._leaves += leaves + 1
        return plan

    def forget(self) -> None:
        self.clear()
        self._leaves = 0


def flatten(element: Element) -> tuple[bytes, list[Buffer]]:
    """Return the header and the buffers of an element."""
    try:
        return _flatten(element)
    except UnsendableError as error:
        raise refusal(element, "", error, _flatten) from None


def _flatten(element: Element) -> tuple[bytes, list[Buffer]]:
    leaves: list[Any] = []
    structure = _walk(element, leaves)
    kinds = set(map(type, leaves))
    if kinds == {np.ndarray}:
        # Lengths say as much as the shapes of columns, and are no new objects: thousands of those wake the collector.
        extents = map(len, leaves) if set(map(_ndim_of, leaves)) == {1} else map(_shape_of, leaves)
        signature: Any = tuple(map(_dtype_of, leaves)), tuple(extents)
    else:
        signature = None if kinds <= _NUMBERS_AND_TEXT else tuple(map(_signature, leaves))
    key = (structure, signature)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _FlattenPlan(element, leaves), len(leaves))
    return plan.encode(leaves)


def _walk(value: Any, leaves: list[Any]) -> Structure:
    """Add the leaves of a value to a list, and return its structure."""
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
        return None
    if kind is dict:
        return _walk_dict(value, leaves)
    if kind is list or kind is tuple:
        if _NUMBERS_AND_TEXT.issuperset(map(type, value)):  # one leaf, however many there are: lists differ in length
            leaves.append(value)
            return None
        return (kind, *[_walk(part, leaves) for part in value])
    if issubclass(kind, np.generic):
        leaves.append(value)
        return None
    entry = leaf_type(kind)
    if entry.flatten is not None:
        return kind, _walk(entry.flatten(value), leaves)
    return _walk(_as_leaf(value), leaves)


def _walk_dict(value: dict[Any, Any], leaves: list[Any]) -> Structure:
    # True, 1 and 1.0 are one key to Python, so only strings are compared by value alone.
    keys = tuple(value)
    types = None
    if not _KEYS.issuperset(map(type, keys)):
        types = tuple(map(type, keys))
        if not all(issubclass(kind, (str, int)) for kind in types):
            raise UnsendableError("dict keys must be str or int")
    parts = value.values()
    if _LEAVES.issuperset(map(type, parts)):
        leaves.extend(parts)
        return dict, keys, types, None
    return dict, keys, types, tuple([_walk(part, leaves) for part in parts])


def _as_leaf(value: Any) -> Any:
    """Return a subclass's value as one of the class that is sent for it."""
    if isinstance(value, np.ndarray) and not has_mask(type(value)):
        return np.asarray(value)
    kinds: tuple[type[Any], ...] = (dict, list, tuple, str, int, float)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    raise UnsendableError(remedy_for(type(value)))


def _signature(leaf: Any) -> Any:
    """Return what the plan depends on, of a leaf."""
    kind = type(leaf)
    if kind is np.ndarray:
        return leaf.dtype, leaf.shape
    if kind is bytes:
        return len(leaf) >= LONG_BYTES
    if kind in _NUMBERS_AND_TEXT:
        return None
    return kind if kind is list or kind is tuple else leaf.dtype


class _FlattenPlan:
    """How the elements of one structure are written. `described` and the rest are in the order of the leaves."""

    def __init__(self, element: Element, leaves: Sequence[Any]) -> None:
        kinds = {i: ArrayKind(leaf.dtype, leaf.shape) for i, leaf in enumerate(leaves) if _is_numeric_array(leaf)}
        small = [i for i, kind in kinds.items() if kind.nbytes < PACKED_BELOW_BYTES]
        packed = set(small) if len(small) >= PACKED_FROM else set()
        described = iter([_describe_leaf(leaf, packed=i in packed) for i, leaf in enumerate(leaves)])
        self._tree = msgspec.msgpack.encode(_describe(element, described))
        order = packing_order([kinds[i] for i in small]) if packed else []
        self._packed = _getter([small[number] for number in order])
        self._arrays = [i for i in kinds if i not in packed]
        self._bytes = [i for i, leaf in enumerate(leaves) if _is_long(leaf)]
        values = [i for i, leaf in enumerate(leaves) if i not in kinds and not _is_long(leaf)]
        self._values = _getter(values)
        self._scalars = [at for at, i in enumerate(values) if isinstance(leaves[i], np.generic)]
        self._objects = [at for at, i in enumerate(values) if isinstance(leaves[i], np.ndarray)]

    def encode(self, leaves: Sequence[Any]) -> tuple[bytes, list[Buffer]]:
        buffers: list[Buffer] = []
        if self._packed is not None:
            buffers.append(pack_arrays(self._packed(leaves)))
        buffers += [array_bytes(leaves[i]) for i in self._arrays]
        buffers += [leaves[i] for i in self._bytes]
        values = [] if self._values is None else list(self._values(leaves))
        for at in self._scalars:
            values[at] = values[at].tobytes()
        for at in self._objects:
            values[at] = _describe_objects(values[at], buffers)
        try:
            return encode_values((PLANNED, self._tree, values)), buffers
        except (OverflowError, UnicodeEncodeError):  # names of files may hold what is not Unicode
            return encode_values((PLANNED, self._tree, escaped(values))), buffers


def _is_numeric_array(leaf: Any) -> bool:
    return type(leaf) is np.ndarray and leaf.dtype != object


def _is_long(leaf: Any) -> bool:
    return type(leaf) is bytes and len(leaf) >= LONG_BYTES


def _getter(numbers: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
    """Return what takes some of many, in one go."""
    if len(numbers) < 2:
        return (lambda values: [values[numbers[0]]]) if numbers else None
    return itemgetter(*numbers)


def _describe_leaf(leaf: Any, *, packed: bool) -> list[Any]:
    kind = type(leaf)
    if kind is np.ndarray:
        if leaf.dtype == object:
            return [VALUE, AS_OBJECTS, list(leaf.shape)]
        return [PACKED if packed else ARRAY, dtype_name(leaf.dtype), list(leaf.shape)]
    if kind is tuple:
        return [VALUE, AS_TUPLE]
    if _is_long(leaf):
        return [BYTES]
    return [VALUE, AS_SCALAR, dtype_name(leaf.dtype)] if isinstance(leaf, np.generic) else [VALUE, AS_IT_IS]


def _describe(value: Any, leaves: Iterator[list[Any]]) -> list[Any]:
    """Return a value's structure, with the next description for each leaf."""
    kind = type(value)
    if kind in _LEAVES or issubclass(kind, np.generic):
        return next(leaves)
    if kind is dict:
        return [DICT, list(value), [_describe(part, leaves) for part in value.values()]]
    if kind is list or kind is tuple:
        if _NUMBERS_AND_TEXT.issuperset(map(type, value)):
            return next(leaves)
        return [LIST if kind is list else TUPLE, [_describe(part, leaves) for part in value]]
    entry = leaf_type(kind)
    if entry.flatten is not None:
        return [TYPED, *entry.name, _describe(entry.flatten(value), leaves)]
    return _describe(_as_leaf(value), leaves)


def _describe_objects(array: Array, buffers: list[Buffer]) -> list[Any]:
    items = array.ravel().tolist()
    if _NUMBERS_AND_TEXT.issuperset(map(type, items)):
        return [items]
    header, own = _flatten(items)
    buffers += own
    return [header, len(own)]


# Arrays


def array_bytes(array: Array) -> Buffer:
    """Return an array's memory in C order: its own if that is how it lies, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b""


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


# Reading


def unflatten(header: Buffer, buffers: Sequence[Any], *, stand_ins: bool = False) -> Element:
    """Return the element; arrays are views of the buffers, writable if those are.

    A class that is not known here is an error, or, with `stand_ins`, its values are `StandIn`s that can be passed on.
    """
    try:
        kind, tree, *rest = decode_values(header)
        if kind != PLANNED:  # an older file, whose header is the description itself
            return _UnflattenPlan([kind, tree, *rest], stand_ins).decode((), iter(buffers))
        key = (tree, stand_ins)
        plan = _rebuilding.get(key)
        if plan is None:
            plan = _UnflattenPlan(decode_values(tree), stand_ins)
            if not plan.has_stand_ins:  # their classes may be imported later
                _rebuilding.keep(key, plan, plan.leaves)
        return plan.decode(rest[0], iter(buffers))
    except MALFORMED as error:
        raise CodecError(f"these bytes are not an element: {error!r}") from error


BuildValue: TypeAlias = Callable[[Iterator[Any]], Any]


class _UnflattenPlan:
    """How elements of one description are made.

    Leaves are made kind by kind into one list, the pool, and taken from there in the order in which they are needed.
    """

    def __init__(self, description: list[Any], stand_ins: bool) -> None:
        self._stand_ins = stand_ins
        self.has_stand_ins = False
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._places: list[tuple[int, int]] = []
        """Where each leaf lies: its part of the pool (packed, arrays, bytes, values, constants) and its number
        there."""
        self._packed: list[ArrayKind] = []
        self._arrays: list[ArrayKind] = []
        self._bytes = 0
        self._values: list[list[Any]] = []
        self._constants: list[Any] = []
        self._build = self._compiled(description)
        self._unpacking = Unpacking(self._packed) if self._packed else None
        self._changed = [(at, made) for at, how in enumerate(self._values) if (made := _maker(*how)) is not None]
        sizes = [len(self._packed), len(self._arrays), self._bytes, len(self._values), len(self._constants)]
        starts = [sum(sizes[:part]) for part in range(len(sizes))]
        packed_at = {number: at for at, number in enumerate(self._unpacking.order if self._unpacking else ())}
        self.leaves = len(self._places)
        order = [starts[part] + (packed_at[number] if part == 0 else number) for part, number in self._places]
        self._order = None if order == list(range(len(order))) else _getter(order)

    def decode(self, values: Sequence[Any], buffers: Iterator[Any]) -> Element:
        pool: list[Any] = [] if self._unpacking is None else self._unpacking.arrays(bytes_over(next(buffers)))
        pool += [array_over(next(buffers), dtype, shape) for dtype, shape in self._arrays]
        pool += map(bytes, islice(buffers, self._bytes))
        if len(values) != len(self._values):
            raise CodecError(f"{len(values)} values where {len(self._values)} belong")
        first = len(pool)
        pool += values
        for at, made in self._changed:
            pool[first + at] = made(values[at], buffers, self._stand_ins)
        pool += self._constants
        return self._build(iter(pool if self._order is None else self._order(pool)))

    def _compiled(self, description: list[Any]) -> BuildValue:
        kind, *rest = description
        if kind in (PACKED, ARRAY):
            named, shape = rest
            table = self._packed if kind == PACKED else self._arrays
            self._places.append((0 if kind == PACKED else 1, len(table)))
            table.append(ArrayKind(self._dtype(named), tuple(shape)))
        elif kind == VALUE:
            self._places.append((3, len(self._values)))
            self._values.append(rest)
        elif kind == BYTES:
            self._places.append((2, self._bytes))
            self._bytes += 1
        elif kind == DICT:
            return self._dict(*rest)
        elif kind in (LIST, TUPLE):
            return self._sequence(list if kind == LIST else tuple, *rest)
        elif kind == TYPED:
            style, module, qualname, fields, content = rest
            return self._typed(TypeName(style, module, qualname, tuple(fields)), content)
        else:
            return self._older(kind, *rest)
        return next

    def _dtype(self, named: Any) -> np.dtype[Any]:
        if not isinstance(named, str):
            return named_dtype(named)
        if named not in self._dtypes:
            self._dtypes[named] = named_dtype(named)
        return self._dtypes[named]

    def _dict(self, keys: list[Any], parts: list[Any]) -> BuildValue:
        if len(keys) != len(parts):
            raise CodecError(f"{len(keys)} keys of {len(parts)} values")
        makers = list(map(self._compiled, parts))
        if all(maker is next for maker in makers):
            return lambda leaves: dict(zip(keys, leaves))
        pairs = list(zip(keys, makers))
        return lambda leaves: {key: maker(leaves) for key, maker in pairs}

    def _sequence(self, kind: type[Any], parts: list[Any]) -> BuildValue:
        makers = list(map(self._compiled, parts))
        if all(maker is next for maker in makers):
            return lambda leaves: kind(islice(leaves, len(makers)))
        return lambda leaves: kind([maker(leaves) for maker in makers])

    def _typed(self, name: TypeName, content: list[Any]) -> BuildValue:
        make = self._compiled(content)
        entry = type_or_stand_in(name, stand_ins=self._stand_ins)
        self.has_stand_ins |= entry.stands_in
        unflatten = entry.unflatten

        def build(leaves: Iterator[Any]) -> Any:
            content = make(leaves)
            try:
                return unflatten(content)
            except Exception as error:
                raise CodecError(f"a {name} cannot be made of what was sent: {error!r}") from error

        return build

    def _older(self, kind: int, *rest: Any) -> BuildValue:
        """Compile what is found in files of older releases only."""
        if kind == NAMED:
            name, fields, parts = rest
            return self._typed(TypeName("namedtuple", "", name, tuple(fields)), [TUPLE, parts])
        if kind == RAGGED:
            parts = self._sequence(tuple, list(rest))
            return lambda leaves: Ragged(*parts(leaves))
        if kind == OBJECTS:
            shape, items = rest
            made = self._sequence(list, items)
            return lambda leaves: _objects(made(leaves), shape)
        if kind == SCALAR:
            constant: Any = _scalar(named_dtype(rest[0]), rest[1])
        elif kind == PLAIN:
            constant = int(rest[0]) if len(rest) == 2 else rest[0]
        elif kind == SURROGATES:
            constant = str(rest[0], "utf-8", "surrogatepass")
        else:
            raise CodecError(f"unknown kind of leaf {kind!r}")
        self._places.append((4, len(self._constants)))
        self._constants.append(constant)
        return next


def _maker(how: int, *rest: Any) -> Callable[[Any, Iterator[Any], bool], Any] | None:
    """Return what makes a leaf of a value that stands in the header; None: it is the leaf."""
    if how == AS_TUPLE:
        return lambda value, buffers, stand_ins: tuple(value)
    if how == AS_SCALAR:
        dtype = named_dtype(*rest)
        return lambda value, buffers, stand_ins: _scalar(dtype, value)
    if how == AS_OBJECTS:
        return partial(_make_objects, *rest)
    return None


def _make_objects(shape: list[int], value: list[Any], buffers: Iterator[Any], stand_ins: bool) -> Array:
    if len(value) == 1:
        return _objects(value[0], shape)
    header, count = value
    return _objects(unflatten(header, list(islice(buffers, count)), stand_ins=stand_ins), shape)


def _scalar(dtype: np.dtype[Any], content: bytes) -> Any:
    return np.frombuffer(content, dtype)[0] if dtype.itemsize else dtype.type()


def _objects(items: Sequence[Any], shape: Sequence[int]) -> Array:
    array = np.empty(len(items), object)
    for i, item in enumerate(items):
        array[i] = item
    return array.reshape(shape)


_plans: Plans[_FlattenPlan] = Plans()
_rebuilding: Plans[_UnflattenPlan] = Plans()
watch_table(_plans.forget)
watch_table(_rebuilding.forget)
