"""What a record's class says of its fields, and whether they hold it: graphs arrive as bytes from other processes.

Records are msgspec's structs: a dataclass takes 0.8 ms to be made and a struct 0.03, and a process of a service imports
hundreds of them.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.core.errors import CodecError

_known: dict[type[Any], dict[str, Any]] = {}


def defaults_of(record: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the default of each field that has one; of one that is made anew each time, what makes it.

    >>> class Point(msgspec.Struct):
    ...     x: int
    ...     y: int = 2
    >>> defaults_of(Point)
    {'y': 2}
    """
    defaults = record.__struct_defaults__
    named = zip(record.__struct_fields__[len(record.__struct_fields__) - len(defaults) :], defaults)
    return {name: default for name, default in named if default is not msgspec.NODEFAULT}


def checked(cls: type[Any], given: Mapping[str, Any], where: str) -> None:
    """Raise `CodecError` unless the fields are exactly those that the class needs, each of its type."""
    hints = _hints(cls)
    for name, value in given.items():
        if name not in hints or name in getattr(cls, "PRIVATE", ()):
            raise CodecError(f"{where} has a field {name!r} that this release does not know; a later one wrote it")
        if not fits(value, hints[name]):
            raise CodecError(f"{where}: field {name!r} cannot hold a {type(value).__name__}")
    for name in cls.__struct_fields__:
        if name not in given and name not in defaults_of(cls):
            raise CodecError(f"{where} lacks the field {name!r}")


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _known:
        hints = typing.get_type_hints(cls)
        _known[cls] = {name: hints[name] for name in cls.__struct_fields__}
    return _known[cls]


def fits(value: object, hint: Any) -> bool:
    """
    >>> fits((1, 2), tuple[int, ...]), fits(True, int), fits(1, float), fits(None, str | None)
    (True, False, True, True)
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return any(type(value) is type(allowed) and value == allowed for allowed in arguments)
    if origin is typing.Union or origin is types.UnionType:
        return any(fits(value, option) for option in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(fits(part, arguments[0]) for part in value)
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
