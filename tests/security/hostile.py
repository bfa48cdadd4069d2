"""Messages of every type as nobody honest would send them: made from the types themselves, so that none is left out.

What is made has the right shape and hostile values: numbers at the edges of their kinds, names that do not exist or
are somebody else's, lists that are empty or long. `mutated` then breaks the shape as well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from msgspec import inspect

NUMBERS = (0, 1, 2, 3, 7, -1, -2, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 53) + 1, (1 << 60) - 1, 1 << 60)
EXTREMES = ((1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS = (0.0, -1.0, 0.5, 1e308, -1e308, math.inf, -math.inf, math.nan)
TEXTS = ("", "x", "a/b", "../../etc/passwd", "\0", "\x1b[2J", "é" * 40, "y" * 300, "0" * 40, "tcp://127.0.0.1:1", "a.0")


def kinds_of(union: Any) -> dict[str, Any]:
    """Return the types of a union by name."""
    return {kind.__name__: kind for kind in get_args(union)}


class Hostile:
    """Makes messages. `names`: ids that exist, which get some of them past the first check."""

    def __init__(self, rng: random.Random, names: Sequence[str] = (), honest: Sequence[msgspec.Struct] = ()) -> None:
        """`honest`: records that some messages hold as they are, or with one field changed."""
        self._rng, self._names = rng, tuple(names)
        self._honest = {type(record): record for record in honest}

    def message(self, kind: Any) -> bytes:
        """Return a message of a type, encoded, with hostile values in it."""
        return msgspec.msgpack.encode(self.value(kind))

    def value(self, kind: Any) -> Any:
        """Return a hostile value of a type as what msgpack can carry."""
        return self._made(_info(kind), 0)

    def _made(self, info: Any, depth: int) -> Any:
        rng = self._rng
        match info:
            case inspect.StructType():
                return self._struct(info, depth)
            case inspect.UnionType():
                choices = [kind for kind in info.types if depth < 6 or isinstance(kind, inspect.NoneType)]
                return self._made(rng.choice(choices or list(info.types)), depth + 1)
            case inspect.IntType():
                return rng.choice(EXTREMES) if rng.random() < 0.1 else rng.choice(NUMBERS)
            case inspect.FloatType():
                return rng.choice(FLOATS)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.StrType():
                return rng.choice(self._names) if self._names and rng.random() < 0.6 else rng.choice(TEXTS)
            case inspect.BytesType() | inspect.ByteArrayType():
                return rng.randbytes(rng.choice((0, 1, 10, 200)))
            case inspect.LiteralType():
                return rng.choice(info.values)
            case inspect.NoneType():
                return None
            case inspect.TupleType():
                return [self._made(item, depth + 1) for item in info.item_types]
            case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
                return [self._made(info.item_type, depth + 1) for _ in range(self._length(depth))]
            case inspect.DictType():
                return {
                    self._key(info.key_type, depth): self._made(info.value_type, depth + 1)
                    for _ in range(self._length(depth))
                }
            case inspect.CustomType() | inspect.AnyType() | inspect.RawType():
                return rng.choice((None, 1, "x", [], {}, [1, [2]], b"bytes", -1, 1.5, {"a": {"b": 1}}))
        return None

    def _key(self, info: Any, depth: int) -> Any:
        made = self._made(info, depth + 1)
        return tuple(made) if isinstance(made, list) else made

    def _length(self, depth: int) -> int:
        most = 4 if depth < 3 else 2
        return self._rng.choice((0, 1, 1, 2, most)) if depth < 8 else 0

    def _struct(self, info: Any, depth: int) -> Any:
        config = info.cls.__struct_config__
        honest = self._honest.get(info.cls)
        if honest is not None and self._rng.random() < 0.8:
            spoiled = self._rng.choice([*info.fields, None])
            values = [
                (
                    field.encode_name,
                    self._made(field.type, depth + 1)
                    if field is spoiled
                    else msgspec.to_builtins(getattr(honest, field.name), builtin_types=(bytes,)),
                )
                for field in info.fields
            ]
        else:
            values = [(field.encode_name, self._made(field.type, depth + 1)) for field in info.fields]
        if config.array_like:
            tagged = [] if info.tag is None else [info.tag]
            return [*tagged, *(value for _, value in values)]
        tagged_fields = {} if info.tag is None else {info.tag_field: info.tag}
        return tagged_fields | dict(values)


_known: dict[Any, Any] = {}


def _info(kind: Any) -> Any:
    if kind not in _known:
        _known[kind] = inspect.type_info(kind)
    return _known[kind]


class Pool:
    """Messages of some types without an end, at some microseconds each: made ones as they are, with a value changed, or
    with their bytes broken. What is drawn from is renewed little by little."""

    def __init__(self, rng: random.Random, hostile: Hostile, kinds: Sequence[Any], size: int = 2_000) -> None:
        self._rng, self._hostile, self._kinds = rng, hostile, kinds
        self._made = [self._make() for _ in range(size)]

    def _make(self) -> bytes:
        return self._hostile.message(self._rng.choice(self._kinds))

    def renew(self, count: int) -> None:
        """Put newly made messages into the place of so many."""
        for _ in range(count):
            self._made[self._rng.randrange(len(self._made))] = self._make()

    def draw(self) -> bytes:
        rng = self._rng
        message = self._made[int(rng.random() * len(self._made))]
        how = rng.random()
        return message if how < 0.2 else altered(rng, message) if how < 0.6 else mutated(rng, message)


_VALUES: tuple[Any, ...] = (*NUMBERS, *EXTREMES, *FLOATS, *TEXTS, None, True, b"", b"\xff" * 40, [], {}, [1, [2]])


def altered(rng: random.Random, message: bytes) -> bytes:
    """Return a message with another value somewhere in it: its shape is right, mostly."""
    whole = value = msgspec.msgpack.decode(message, strict=False)
    while isinstance(value, list | dict) and value:
        place = rng.choice(list(value)) if isinstance(value, dict) else int(rng.random() * len(value))
        inner = value[place]
        if not isinstance(inner, list | dict) or not inner or rng.random() < 0.1:
            value[place] = rng.choice(_VALUES)
            break
        value = inner
    return msgspec.msgpack.encode(whole)


def mutated(rng: random.Random, message: bytes) -> bytes:
    """Return a message with something wrong with it."""
    changed = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(changed) + 1)
        how = rng.randrange(6)
        if how == 0 and changed:
            changed[place % len(changed)] ^= 1 << rng.randrange(8)
        elif how == 1 and changed:
            changed[place % len(changed)] = rng.choice((0, 0x7F, 0x80, 0xC0, 0xC1, 0xCF, 0xD9, 0xDD, 0xDF, 0xFF))
        elif how == 2:
            changed[place:place] = rng.randbytes(rng.choice((1, 4, 9)))
        elif how == 3:
            del changed[place : place + rng.choice((1, 3, 20))]
        elif how == 4:
            del changed[place:]
        else:
            start = rng.randrange(len(changed) + 1)
            changed[place:place] = changed[start : start + rng.randrange(1, 40)]
    return bytes(changed)
