"""Checking that a record's fields hold what its annotations say: graphs arrive as bytes from other processes."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from penstock.core.errors import CodecError

_known: dict[type[Any], dict[str, Any]] = {}


def checked(cls: type[Any], given: Mapping[str, Any], where: str) -> None:
    """Raise `CodecError` unless the fields are exactly those that the class needs, each of its type."""
    hints = _hints(cls)
    for name, value in given.items():
        if name not in hints or name in getattr(cls, "PRIVATE", ()):
            raise CodecError(f"{where} has a field {name!r} that this release does not know; a later one wrote it")
        if not fits(value, hints[name]):
            raise CodecError(f"{where}: field {name!r} cannot hold a {type(value).__name__}")
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            raise CodecError(f"{where} lacks the field {field.name!r}")


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _known:
        hints = typing.get_type_hints(cls)
        _known[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
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
