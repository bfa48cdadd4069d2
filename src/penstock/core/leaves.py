"""The table of leaf types: what can be done with the values of a class, wherever an element goes.

Numpy arrays, numbers, text, bytes and None are what everything consists of in the end. Any other class stands in the
table with what its values are made of, which is an element again (`flatten`), and how they are made of it
(`unflatten`). All else follows from that, or stands beside it: length, slices, rows, joining, bytes.

- A *container* is batched, cut and joined part by part: a dataclass, a type registered with `batch="parts"`.
- A leaf *with rows* is a column of a batch by itself: an array, a `Ragged`, a tensor.
- Any other leaf is one object: a batch of them is an array of objects.

Two rules keep this safe. Looking a class up imports nothing: tensors are known once somebody else has imported torch.
And bytes only ever name a class. A name is looked for among what was registered and what is imported already, and no
code of the class runs but what was registered for it.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from penstock.core.errors import CodecError, InvalidArgumentError, choice

Style: TypeAlias = Literal["objects", "parts", "dataclass", "namedtuple", "enum"]
"""What a class is to a process that does not have it: how its values are batched, and what makes up another one."""
BatchForm: TypeAlias = Literal["objects", "parts"]
JoinArrays: TypeAlias = Callable[[Sequence[np.ndarray[Any, Any]]], np.ndarray[Any, Any]]


class UnsendableError(ValueError):
    """A leaf that cannot leave the process; the message is the remedy. What sends it adds where it stands."""


class TypeName(NamedTuple):
    """A class, as bytes name it."""

    style: Style
    module: str
    qualname: str
    fields: tuple[str, ...] = ()
    """The fields' names, if it is a dataclass or a named tuple: a class with other fields is another class."""

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafType:
    """What can be done with the values of a class."""

    name: TypeName
    flatten: Callable[[Any], Any] | None = None
    """What a value is made of; None: it is not sent by parts."""
    unflatten: Callable[[Any], Any] = lambda content: content
    container: bool = False
    has_rows: bool = False
    length: Callable[[Any], int] = len
    slice: Callable[[Any, int, int], Any] = lambda leaf, start, stop: leaf[start:stop]
    take: Callable[[Any, np.ndarray[Any, Any]], Any] = lambda leaf, rows: leaf[rows]
    """Some rows of a leaf that has rows, by number or by a flag for each."""
    rows: Callable[[Any], list[Any]] = list
    rows_are_batches: bool = False
    """Whether a row is a value of the class again, of length 1: then `batch` joins them."""
    join: Callable[[Sequence[Any], JoinArrays], Any] = lambda leaves, join_arrays: join_arrays(leaves)
    """One column of the rows of several; arrays are joined by `join_arrays`, which gives their memory."""
    nbytes: Callable[[Any], int] = sys.getsizeof
    stands_in: bool = False
    """Whether values are stand-ins, because the class itself is not known here."""


def name_of(kind: type[Any], style: Style = "objects", fields: tuple[str, ...] = ()) -> TypeName:
    return TypeName(style, kind.__module__, kind.__qualname__, fields)


_MADE_OTHERWISE = (dict, list, tuple, str, bytes, int, float, BaseException)
"""Subclasses of these are not made field by field."""
ARRAY = LeafType(name=name_of(np.ndarray), has_rows=True, nbytes=lambda array: int(array.nbytes))

_table: dict[type[Any], LeafType] = {np.ndarray: ARRAY}
_by_name: dict[tuple[str, str], LeafType] = {}
_late: dict[tuple[str, str], Callable[[ModuleType], LeafType]] = {}
_derived: dict[type[Any], LeafType] = {}
_watchers: list[Callable[[], None]] = []
REGISTERED: dict[tuple[str, str], tuple[Any, ...]] = {}
"""What was registered in this process, by the name of the class: the arguments of each call."""


def add_type(kind: type[Any], entry: LeafType) -> None:
    """Give a class its entry."""
    _table[kind] = _by_name[entry.name.module, entry.name.qualname] = entry
    for watcher in _watchers:
        watcher()


def watch_table(watcher: Callable[[], None]) -> None:
    """Have something called whenever an entry changes: what was looked up before may be another now."""
    _watchers.append(watcher)


def add_late_type(module: str, qualname: str, make: Callable[[ModuleType], LeafType]) -> None:
    """Say what makes the entry of a class, should somebody import its module."""
    _late[module, qualname] = make


def leaf_type(kind: type[Any]) -> LeafType:
    """Return the entry of a class that is no dict, list or tuple."""
    found = _table.get(kind) or _derived.get(kind)
    if found is None:
        found = _derived[kind] = _entry_of(kind)
    return found


def _entry_of(kind: type[Any]) -> LeafType:
    if issubclass(kind, np.ndarray):
        return ARRAY
    make = _late.get((kind.__module__, kind.__qualname__))
    if make is not None and (module := sys.modules.get(kind.__module__)) is not None:
        return make(module)
    if is_namedtuple_type(kind):
        return _named_tuples(kind)
    if dataclasses.is_dataclass(kind) and not issubclass(kind, _MADE_OTHERWISE):
        return _dataclass(kind)
    if issubclass(kind, enum.Enum) and not issubclass(kind, (int, str, float, bytes)):
        return LeafType(name=name_of(kind, "enum"), flatten=lambda member: member.value, unflatten=kind)
    return LeafType(name=name_of(kind))


def is_namedtuple_type(kind: type[Any]) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _named_tuples(kind: type[Any]) -> LeafType:
    # Past `__new__`, which a subclass may have changed: these are the parts of one that was made before.
    return LeafType(
        name=name_of(kind, "namedtuple", tuple(kind._fields)),
        flatten=tuple,
        unflatten=lambda parts: tuple.__new__(kind, parts),
        container=True,
    )


def _dataclass(kind: type[Any]) -> LeafType:
    names = tuple(field.name for field in dataclasses.fields(kind))

    def flatten(value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) for name in names if hasattr(value, name)}  # some are set later, or never

    def unflatten(content: dict[str, Any]) -> Any:
        # Past `__init__` and `__post_init__`: columns of a batch are not the values that those expect.
        value = object.__new__(kind)
        for name in names:
            if name in content:
                object.__setattr__(value, name, content[name])
        return value

    return LeafType(name=name_of(kind, "dataclass", names), flatten=flatten, unflatten=unflatten, container=True)


def register_type(
    cls: type[Any],
    flatten: Callable[[Any], Any] | None = None,
    unflatten: Callable[[Any], Any] | None = None,
    *,
    batch: BatchForm = "objects",
) -> None:
    """Let values of a class of yours be leaves of elements: sent to and by workers, saved, cached.

    `flatten(value)` says what a value is made of, as an element: arrays, numbers, text, and dicts, lists and tuples of
    them. `unflatten(element)` makes the value again. Workers get both with the pipeline's functions. A program that
    reads what others send or have saved registers the class too, before it reads.

    A batch of such values is an array of objects. With `batch="parts"` it is one value of the class, made of the batch
    of all parts, as with dataclasses; `unbatch`, `rebatch` and slices undo that.

    Dataclasses and named tuples need no functions, nor this call, as long as they stand in a module by their name.

    >>> class Box:
    ...     def __init__(self, corner, size):
    ...         self.corner, self.size = corner, size
    >>> register_type(Box, lambda box: (box.corner, box.size), lambda parts: Box(*parts))
    """
    if not isinstance(cls, type):
        raise InvalidArgumentError(f"register_type takes a class, not {cls!r}")
    if batch not in get_args(BatchForm):
        raise choice("batch", batch, list(get_args(BatchForm)))
    if cls in (np.ndarray, dict, list, tuple, str, bytes, int, float, bool, type(None)):
        raise InvalidArgumentError(f"{cls.__qualname__} is what elements are made of; register a class of your own")
    if (flatten is None) != (unflatten is None):
        raise InvalidArgumentError("register_type takes both flatten and unflatten, or neither")
    if flatten is None or unflatten is None:
        own = _entry_of(cls)
        if not own.container:
            raise InvalidArgumentError(
                f"{cls.__qualname__} is neither a dataclass nor a named tuple: give register_type flatten and unflatten"
            )
        entry = own
    else:
        entry = LeafType(name=name_of(cls, batch), flatten=flatten, unflatten=unflatten, container=batch == "parts")
    add_type(cls, entry)
    REGISTERED[cls.__module__, cls.__qualname__] = (cls, flatten, unflatten, batch)


def register_shipped(types: Sequence[tuple[Any, ...]]) -> None:
    """Register what was registered elsewhere. What this process has itself registered stays."""
    for cls, flatten, unflatten, batch in types:
        if (cls.__module__, cls.__qualname__) not in REGISTERED:
            register_type(cls, flatten, unflatten, batch=batch)


# Classes that bytes name


def find_type(name: TypeName) -> LeafType | None:
    """Return the entry of a class that bytes name; None: it is not known here, or has other fields here."""
    found = _by_name.get((name.module, name.qualname))
    kind = None if found else _imported(name.module, name.qualname)
    if kind is not None:
        found = leaf_type(kind)
    if found is not None and found.flatten is not None and found.name == name:
        return found
    # A named tuple is all said by its name and fields. Any other class has code, and is not made up.
    return _made_up(name) if name.style == "namedtuple" else None


def _imported(module: str, qualname: str) -> type[Any] | None:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # Through `__dict__`: a module's `__getattr__` may import what it is asked for.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


_stand_ins: dict[TypeName, LeafType] = {}


def _made_up(name: TypeName) -> LeafType:
    """Return the entry of a named tuple class of our own: the same one for the same name and fields."""
    if name not in _stand_ins:
        kind: Any = namedtuple(name.qualname.rpartition(".")[2], name.fields, module=name.module)  # type: ignore[misc]
        kind.__qualname__ = name.qualname
        _stand_ins[name] = _table[kind] = dataclasses.replace(_named_tuples(kind), stands_in=True)
    return _stand_ins[name]


class StandIn:
    """A value whose class is not known in this process, on its way to one where it is.

    A worker may read saved values without any of the code that made them. It can pass them on, and batch them.
    """

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"{attribute!r} of a value of {unknown_type(leaf_type(type(self)).name)}")

    def __repr__(self) -> str:
        return f"<a {leaf_type(type(self)).name}, which this process has not imported>"


class _ArrayStandIn(StandIn):
    """One of a class of arrays: a batch of these is an array, as a batch of those is."""

    __slots__ = ()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.content, dtype)


def _stand_in(name: TypeName) -> LeafType:
    """Return the entry of a class that stands for one that is not known here. Its values are sent on as the other's."""
    if name not in _stand_ins:
        base = _ArrayStandIn if (name.module, name.qualname) in _late else StandIn
        kind = type(name.qualname, (base,), {"__slots__": (), "__module__": name.module})
        container = name.style in ("parts", "dataclass")
        entry = LeafType(
            name=name, flatten=lambda value: value.content, unflatten=kind, container=container, stands_in=True
        )
        _stand_ins[name] = _table[kind] = entry
    return _stand_ins[name]


def unknown_type(name: TypeName) -> str:
    """Return what to say of a class that is not known here."""
    fields = f" with the fields {', '.join(name.fields)}" if name.fields else ""
    short = name.qualname.rpartition(".")[2]
    functions = ", flatten, unflatten" if name.style in ("objects", "parts") else ""
    return (
        f"the class {name}{fields}, which this process does not know: before reading, import it here from the same "
        f"code, or call ps.register_type({short}{functions})"
    )


def type_or_stand_in(name: TypeName, *, stand_ins: bool) -> LeafType:
    """Return the entry of a class that bytes name; `CodecError` says what is missing, unless stand-ins will do."""
    found = find_type(name)
    if found is None and not stand_ins:
        raise CodecError(f"an element holds a value of {unknown_type(name)}")
    return found or _stand_in(name)
