"""From Arrow columns to elements: dicts of whole columns (`batch`) or one dict a row (`rows`).

| Arrow type                       | in a batch                      | in a row                                   |
|----------------------------------|---------------------------------|--------------------------------------------|
| bool, ints, floats               | array of that dtype             | Python bool, int, float                    |
| decimal                          | float64                         | float                                      |
| timestamp (UTC), date            | datetime64 of the column's unit | `np.datetime64`                            |
| time of day, duration            | timedelta64                     | `np.timedelta64`                           |
| string, binary, fixed binary     | object array                    | `str`, `bytes`                             |
| list of the above                | `Ragged`                        | array                                      |
| fixed-size list of the above     | array with one more axis        | array                                      |
| list of fixed-size lists         | `Ragged` of such rows           | array with one more axis                   |
| fixed-shape tensor               | array of that shape             | array                                      |
| struct                           | dict of the above               | dict                                       |
| dictionary, run-end encoded      | as their values                 | as their values                            |

Lists of lists, lists of structs, maps and unions have no such form and are refused by name.

Nulls, by `nulls=`: "error" raises; "mask" puts in zero (or empty, or False) and adds a column `<name>__mask` beside
every one, true where there *is* a value, so that it can be multiplied with; None leaves None (in a batch only where a
column holds objects); anything else is put in itself. A null list is an empty one, except under "error" and, in rows,
None. A struct's nulls are those of its fields, and its masks stand beside them.

Arrays of a batch are writable. They lie in the memory that was decoded into where Arrow lets them, so one batch that is
kept keeps its neighbours' memory too (at most a chunk of the reader's); rows are copied out in small blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from penstock.core.element import Array, Ragged
from penstock.core.errors import InvalidArgumentError
from penstock.sources.rows import CutRows, cells_of, cut_of, rows_of

Leaf: TypeAlias = Any  # an array, a Ragged or a dict of them

MASK_SUFFIX = "__mask"

_NUMBERS = (
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
)
# Not `to_pandas_dtype`: before pyarrow 20 it imports pandas, which need not be there.
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
_DTYPES: dict[int, np.dtype[Any]] = {arrow.id: np.dtype(_FLOATS.get(str(arrow), str(arrow))) for arrow in _NUMBERS}
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_TEXT_IDS = frozenset(arrow.id for arrow in _TEXTS)
_KINDS: dict[int, str] = {  # by type id: hashing a type spells it out first
    arrow.id: kind
    for kind, arrows in {
        "number": _NUMBERS,
        "bool": (pa.bool_(),),
        "object": (*_TEXTS, pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1)),
        "time": (*(pa.timestamp("s"), pa.date32(), pa.date64()), pa.time32("s"), pa.time64("us"), pa.duration("s")),
        "decimal": (pa.decimal32(1), pa.decimal64(1), pa.decimal128(1), pa.decimal256(1)),
        "list": (
            *(pa.list_(pa.int8()), pa.large_list(pa.int8())),
            pa.list_view(pa.int8()),
            pa.large_list_view(pa.int8()),
        ),
        "fixed_list": (pa.list_(pa.int8(), 1),),
        "struct": (pa.struct([]),),
        "null": (pa.null(),),
    }.items()
    for arrow in arrows
}


class NullFoundError(Exception):
    """A null where none may be. The reader knows in which file that row lies."""

    def __init__(self, column: str, row: int, inside: str = "") -> None:
        self.column, self.row, self.inside = column, row, inside
        super().__init__(f"column {column!r} is null{inside} in row {row}")


def check_column(name: str, arrow: Any) -> None:
    """Refuse a type that has no form as a leaf."""
    kind, inner = leaf_kind(arrow), arrow
    if kind == "struct":
        for field in arrow:
            check_column(f"{name}.{field.name}", field.type)
        return
    if kind == "list":
        kind, inner = leaf_kind(arrow.value_type), arrow.value_type
    while kind == "fixed_list":
        kind, inner = leaf_kind(_storage(inner).value_type), _storage(inner).value_type
    if kind in ("list", "struct", "unknown"):
        raise InvalidArgumentError(
            f"column {name!r} is of type {arrow}, which has no form as arrays (one level of lists, over numbers, text "
            "or fixed-size lists, has); leave it out with columns="
        )


class Converter:
    """Turns record batches of one schema into elements: one dict of columns, or with `rows` a dict for each row."""

    def __init__(self, schema: pa.Schema, nulls: Any, *, rows: bool) -> None:
        self._fields = list(schema)
        self._rows = rows
        self._nulls = nulls
        self._refuse = isinstance(nulls, str) and nulls == "error"
        self._masks = isinstance(nulls, str) and nulls == "mask"
        names = {field.name for field in self._fields}
        for field in self._fields:
            check_column(field.name, field.type)
            if self._masks and field.name + MASK_SUFFIX in names:
                raise InvalidArgumentError(
                    f"nulls='mask' would add a column {field.name + MASK_SUFFIX!r}, but there is one of that name"
                )

    def batch(self, record_batch: pa.RecordBatch) -> dict[str, Leaf]:
        """Return the columns; raises `NullFoundError`."""
        return self._columns(record_batch.columns, self._fields, "")

    def rows(self, record_batch: pa.RecordBatch) -> CutRows:
        """Return a function that makes the rows start to stop into dicts; it raises `NullFoundError`."""
        return rows_of(self._columns(record_batch.columns, self._fields, ""))

    def _columns(self, arrays: Sequence[pa.Array], fields: Sequence[pa.Field], prefix: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for given, field in zip(arrays, fields):
            name = prefix + field.name
            array = plain_array(given)
            if pt.is_struct(array.type):
                out[field.name] = self._columns(array.flatten(), list(array.type), f"{name}.")
                continue
            out[field.name] = self._cut(array, name) if self._rows else self._leaf(array, name)
            if self._masks:
                valid = _valid(array)
                out[field.name + MASK_SUFFIX] = cut_of(valid) if self._rows else valid
        return out

    def _cut(self, array: pa.Array, name: str) -> CutRows:
        """Return a function from start and stop to a column's values as they stand in rows."""
        kind = leaf_kind(array.type)
        at_once = kind in ("number", "bool", "time", "decimal") or pt.is_dictionary(array.type)
        if at_once and not array.null_count:
            return cut_of(_flat(array, kind))
        return partial(self._cells, array, name)  # objects are made when they are wanted

    def _cells(self, array: pa.Array, name: str, start: int, stop: int) -> list[Any]:
        part = array.slice(start, stop - start)
        try:
            cells = cells_of(self._leaf(part, name))
        except NullFoundError as error:
            raise NullFoundError(name, start + error.row, error.inside) from None
        if part.null_count and self._nulls is None:
            for row in np.flatnonzero(~_valid(part)).tolist():
                cells[row] = None
        return cells

    def _leaf(self, array: pa.Array, name: str) -> Leaf:
        if array.null_count and self._refuse:
            raise NullFoundError(name, int(np.argmin(_valid(array))))
        kind = leaf_kind(array.type)
        if kind == "list":
            return self._ragged(array, name)
        if kind == "fixed_list":
            return self._fixed_lists(array, name)
        values = _flat(array, kind)
        if array.null_count:
            values[~_valid(array)] = self._stand_in(name, array.type, values.dtype)
        return values

    def _ragged(self, array: pa.Array, name: str) -> Ragged:
        in_order = not pt.is_list_view(array.type) and not pt.is_large_list_view(array.type)
        if array.null_count or not in_order:
            lengths = np.diff(array.offsets.to_numpy()) if in_order else array.sizes.to_numpy()
            offsets = np.zeros(len(array) + 1, np.int64)
            np.cumsum(np.where(_valid(array), lengths, 0), out=offsets[1:])
            inner = array.flatten()  # in order, and without what may lie below null lists
        else:
            offsets = np.array(array.offsets.to_numpy(), dtype=np.int64)
            inner = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
            offsets -= offsets[0]
        return Ragged(self._inner(inner, name, lambda at: int(np.searchsorted(offsets, at, side="right")) - 1), offsets)

    def _fixed_lists(self, array: pa.Array, name: str) -> Array:
        size = array.type.list_size
        if not array.null_count:
            inner = array.values.slice(array.offset * size, len(array) * size)
            values = self._inner(inner, name, lambda at: at // size)
            return values.reshape(len(array), size, *values.shape[1:])
        present = np.flatnonzero(_valid(array))
        given = self._inner(array.flatten(), name, lambda at: int(present[at // size]))
        values = np.empty((len(array), size, *given.shape[1:]), given.dtype)
        values[...] = self._stand_in(name, _innermost(array.type), given.dtype)
        values[present] = given.reshape(len(present), size, *given.shape[1:])
        return values

    def _inner(self, array: pa.Array, name: str, row_of: Callable[[int], int]) -> Array:
        """Return what lies inside lists. Nulls in there have no mask and no None: only a value can stand in."""
        values = plain_array(array)
        if values.null_count and (self._nulls is None or self._masks):
            raise NullFoundError(
                name, row_of(int(np.argmin(_valid(values)))), " inside a list (only a value can go there)"
            )
        try:
            leaf: Array = self._leaf(values, name)
        except NullFoundError as error:
            raise NullFoundError(name, row_of(error.row), error.inside or " inside a list") from None
        return leaf

    def _stand_in(self, name: str, arrow: Any, dtype: np.dtype[Any]) -> Any:
        """Return what is put in the place of a null."""
        if self._nulls is None and (self._rows or dtype.kind == "O"):
            return None if dtype.kind == "O" else np.zeros((), dtype)[()]  # a row's cell becomes None afterwards
        if self._masks:
            text = "" if is_text(arrow) else b""
            return text if dtype.kind == "O" else np.zeros((), dtype)[()]
        value = self._nulls
        if not _fits(value, arrow, dtype):
            raise InvalidArgumentError(
                f"nulls={value!r} cannot stand in column {name!r} of type {arrow}; give a value that can, "
                "nulls='mask', or leave the column out with columns="
            )
        return value if dtype.kind == "O" else np.asarray(value).astype(dtype)[()]


def _fits(value: Any, arrow: Any, dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "O":
        return isinstance(value, str if is_text(arrow) else bytes)
    if dtype.kind in "mM":
        return isinstance(value, np.datetime64 if dtype.kind == "M" else np.timedelta64)
    if dtype.kind == "b" or isinstance(value, (bool, np.bool_)):
        return dtype.kind == "b" and isinstance(value, (bool, np.bool_))
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    if dtype.kind == "f":
        return True
    limits = np.iinfo(dtype)
    return bool(limits.min <= value <= limits.max and value == int(value))


def _storage(arrow: Any) -> Any:
    return arrow.storage_type if isinstance(arrow, pa.BaseExtensionType) else arrow


def _innermost(arrow: Any) -> Any:
    arrow = _storage(arrow)
    return _innermost(arrow.value_type) if pt.is_fixed_size_list(arrow) else arrow


def is_text(arrow: Any) -> bool:
    return arrow.id in _TEXT_IDS


def leaf_kind(arrow: Any) -> str:
    """Return what a column of this type becomes: "number", "bool", "object", "time", ... or "unknown"."""
    arrow = _storage(arrow)
    if pt.is_dictionary(arrow) or pt.is_run_end_encoded(arrow):
        return leaf_kind(arrow.value_type)
    return _KINDS.get(arrow.id, "unknown")


def plain_array(array: pa.Array) -> pa.Array:
    """Return an array without an encoding around its values; a dictionary stays, `_flat` uses it."""
    if isinstance(array, pa.ExtensionArray):
        return _shaped(array)
    if pt.is_run_end_encoded(array.type):
        import pyarrow.compute as pc

        return plain_array(pc.run_end_decode(array))
    if pt.is_dictionary(array.type):
        nested = leaf_kind(array.type.value_type) in ("list", "fixed_list", "struct")
        nulls = array.null_count + array.dictionary.null_count
        return plain_array(array.dictionary_decode()) if nested or nulls else array
    return array


def _shaped(array: pa.ExtensionArray) -> pa.Array:
    """Return an extension array's storage; a tensor's as fixed-size lists in fixed-size lists, one for each axis."""
    storage = array.storage
    if not isinstance(array.type, pa.FixedShapeTensorType):
        return plain_array(storage)
    if array.type.permutation is not None and list(array.type.permutation) != sorted(array.type.permutation):
        raise InvalidArgumentError(f"a tensor column with the axes permuted ({array.type}) is not read")
    arrow = array.type.value_type
    for size in reversed(array.type.shape):
        arrow = pa.list_(arrow, size)
    return storage if arrow == storage.type else _nest(storage, array.type.shape)


def _nest(storage: pa.Array, shape: Sequence[int]) -> pa.Array:
    inner = storage.values.slice(storage.offset * storage.type.list_size, len(storage) * storage.type.list_size)
    for size in reversed(shape[1:]):
        inner = pa.FixedSizeListArray.from_arrays(inner, size)
    mask = storage.is_null() if storage.null_count else None
    return pa.FixedSizeListArray.from_arrays(inner, shape[0], mask=mask)


def _flat(array: pa.Array, kind: str) -> Array:
    """Return one value a row, in memory that may be written to; below a null, anything."""
    if pt.is_dictionary(array.type):
        taken: Array = _flat(plain_array(array.dictionary), kind).take(array.indices.to_numpy())
        return taken
    if kind == "number":
        return _view(array, _DTYPES[array.type.id])
    if kind == "time":
        return _times(array)
    if kind == "decimal":
        return _view(array.cast(pa.float64()), np.dtype(np.float64))
    if kind == "null":
        return np.zeros(len(array))
    if kind == "bool" and array.null_count:
        array = array.fill_null(False)
    values: Array = array.to_numpy(zero_copy_only=False)
    return values if values.flags.writeable else values.copy()


def _view(array: pa.Array, dtype: np.dtype[Any]) -> Array:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(len(array), dtype)
    values = np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)
    return values if values.flags.writeable else _copied(values)  # memory-mapped, or somebody else's


def _copied(values: Array) -> Array:
    """Copy into memory of Arrow's pool: it is used again and again, where numpy's would be fresh pages each time."""
    copy = np.frombuffer(pa.allocate_buffer(values.nbytes), values.dtype)
    np.copyto(copy, values)
    return copy


def _times(array: pa.Array) -> Array:
    arrow = array.type
    if pt.is_date(arrow):
        unit = "M8[D]" if pt.is_date32(arrow) else "M8[ms]"
    else:
        unit = f"M8[{arrow.unit}]" if pt.is_timestamp(arrow) else f"m8[{arrow.unit}]"
    narrow = arrow.bit_width == 32
    values = _view(array, np.dtype(np.int32)).astype(np.int64) if narrow else _view(array, np.dtype(np.int64))
    return values.view(unit)


def _valid(array: pa.Array) -> Array:
    """Return a bool array of its own, true where there is a value."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    valid: Array = array.is_valid().to_numpy(zero_copy_only=False)
    return valid
