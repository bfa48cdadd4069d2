"""Graphs as bytes.

    magic (4 bytes) | version 1 (1 byte) | msgpack of (operators, functions, payloads)
    magic (4 bytes) | version 2 (1 byte) | length of the msgpack (8 bytes) | msgpack | zeros | memory of large arrays

The second form is of graphs with large arrays that go to other hosts. Their memory begins at a multiple of 64 bytes, so
that who maps the whole has the arrays.

Operators stand in the order in which they can be built, each stored once however many read it. An operator is its
class's name and all its fields but the `PRIVATE` ones; every class of `graph.ops` and `graph.readers` takes part by
being there. Rules of evolution: a new field needs a default, which an older graph then takes; a field never changes its
type; what this release does not know is refused by name. Decoding checks every field's type and never unpickles:
functions and payloads stay bytes until they are called for.

A value is a msgpack scalar, or a list that begins with its tag.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec
import numpy as np

from penstock.core.errors import CodecError
from penstock.core.host_memory import AttachedMemory, padding_bytes
from penstock.graph import ops, readers, transforms
from penstock.graph.expressions import Expression
from penstock.graph.fields import checked
from penstock.graph.functions import LargeMemory, Payload, Shipped, UserFunction
from penstock.graph.node import Node
from penstock.graph.traverse import walk

MAGIC: Final = b"PSTK"
VERSION: Final = 1
WITH_MEMORY: Final = 2
"""The version of a graph with memory of large arrays behind it."""
_LENGTH: Final = struct.Struct("<Q")
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1  # what msgpack has room for


class _Document(msgspec.Struct, array_like=True):
    operators: list[tuple[str, dict[str, Any]]]
    functions: list[Shipped]
    payloads: list[Shipped]


def _records() -> dict[str, type[Any]]:
    """Return every operator and parameter record by name. A class that others are made of is no operator."""
    found = {
        value
        for module in (ops, readers, transforms)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, (Node, ops.SkipErrors, transforms.FeatureTransform))
    }
    bases = {base for cls in found for base in cls.__mro__[1:]}
    return {cls.__name__: cls for cls in found - bases}


RECORDS: Final = _records()


def encode_graph(node: Node, *, functions: bool = True, memory: LargeMemory | None = None) -> bytes:
    """Return the graph as bytes. Without `functions` it can be read, compared and explained, but not run.

    With `memory` of this host, large arrays lie there and not in the bytes, which are then good on this host. With
    memory that is attached they follow the rest, to be mapped where the bytes lie.

    Raises `FunctionShippingError` for a function that cannot be shipped, naming the variable that stands in the way.
    """
    encoder = _Encoder(functions, memory)
    for operator in walk(node):
        encoder.add(operator)
    document = msgspec.msgpack.encode(encoder.document)
    if not isinstance(memory, AttachedMemory) or not memory.nbytes:
        return MAGIC + bytes((VERSION,)) + document
    head = MAGIC + bytes((WITH_MEMORY,)) + _LENGTH.pack(len(document)) + document
    return b"".join([head, bytes(padding_bytes(len(head))), *memory.pieces()])


def decode_graph(data: bytes | memoryview) -> Node:
    """Return the graph that `encode_graph` wrote; `CodecError` says what is wrong with the bytes.

    Large arrays behind it are not copied: they lie in `data`.
    """
    head, version, body = bytes(data[:4]), data[4:5], data[5:]
    attached: memoryview | None = None
    if head != MAGIC or not version:
        raise CodecError(f"not a graph: it begins with {head!r} and not with {MAGIC!r}")
    if version[0] == WITH_MEMORY:
        body, attached = _parts(data)
    elif version[0] != VERSION:
        raise CodecError(
            f"a graph of version {version[0]}; this release reads version {VERSION}: upgrade the older side"
        )
    try:
        document = _documents.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:  # the last: maps as keys
        raise CodecError(f"a damaged graph: {error}") from error
    try:
        return _Decoder(document, attached).graph()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"a damaged graph: {error}") from error


def _parts(data: bytes | memoryview) -> tuple[memoryview, memoryview]:
    """Return a graph's msgpack, and the memory of large arrays behind it."""
    whole = memoryview(data)
    begin = len(MAGIC) + 1 + _LENGTH.size
    if len(whole) < begin:
        raise CodecError("a damaged graph: it ends before it begins")
    end = begin + int(_LENGTH.unpack(whole[begin - _LENGTH.size : begin])[0])
    if end > len(whole):
        raise CodecError(f"a damaged graph: {end} bytes were written, and there are {len(whole)}")
    return whole[begin:end], whole[end + padding_bytes(end) :]


class _Encoder:
    def __init__(self, with_functions: bool, memory: LargeMemory | None) -> None:
        self.document = _Document([], [], [])
        self._with_functions, self._memory = with_functions, memory
        self._numbers: dict[int, int] = {}

    def add(self, operator: Node) -> int:
        if id(operator) not in self._numbers:
            fields = self._fields(operator, operator.name)
            self._numbers[id(operator)] = len(self.document.operators)
            self.document.operators.append((_record_name(operator), fields))
        return self._numbers[id(operator)]

    def _fields(self, record: Any, where: str) -> dict[str, Any]:
        private = record.PRIVATE if isinstance(record, Node) else ()
        names = [name for name in record.__struct_fields__ if name not in private]
        return {name: self._value(getattr(record, name), f"{where}: {name}") for name in names}

    def _value(self, value: Any, where: str) -> Any:
        match value:
            case np.generic() if value.dtype.kind not in "OV":
                return ["scalar", value.dtype.str, value.tobytes()]
            case np.ndarray() if value.dtype.kind not in "OV":
                return ["array", value.dtype.str, list(value.shape), value.tobytes()]
            case None | bool() | float() | str() | bytes():
                return value
            case int():
                return value if _SMALLEST <= value <= _LARGEST else ["int", hex(value)]
            case tuple():
                return ["tuple", [self._value(part, where) for part in value]]
            case list():
                return ["list", [self._value(part, where) for part in value]]
            case dict():
                return ["dict", [[self._value(key, where), self._value(part, where)] for key, part in value.items()]]
            case Node():
                return ["node", self.add(value)]
            case UserFunction():
                return ["function", self._shipped(value, self.document.functions)]
            case Payload():
                return ["payload", self._shipped(value, self.document.payloads)]
            case Expression():
                return ["expression", value.to_plain()]
            case _ if type(value).__name__ in RECORDS:
                return ["record", _record_name(value), self._fields(value, where)]
        raise CodecError(
            f"{where} holds a {type(value).__qualname__}, which a graph cannot carry; "
            "use numbers, text, bytes, arrays, and tuples, lists or dicts of them"
        )

    def _shipped(self, value: UserFunction | Payload, table: list[Shipped]) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(table)
            table.append(value.ship(self._memory) if self._with_functions else value.outline())
        return self._numbers[id(value)]


def _record_name(record: Any) -> str:
    name = type(record).__name__
    if RECORDS.get(name) is not type(record):
        raise CodecError(f"{name} is not an operator of graph.ops or graph.readers and cannot be encoded")
    return name


class _Decoder:
    def __init__(self, document: _Document, attached: memoryview | None) -> None:
        self._document = document
        self._operators: list[Node] = []
        for shipped in (*document.functions, *document.payloads):
            _check_attached(shipped, 0 if attached is None else len(attached))
        self._functions = [UserFunction.from_shipped(shipped, attached) for shipped in document.functions]
        self._payloads = [Payload.from_shipped(shipped, attached) for shipped in document.payloads]

    def graph(self) -> Node:
        for number, (name, fields) in enumerate(self._document.operators, 1):
            record = self._record(name, fields, f"operator {number}")
            if not isinstance(record, Node):
                raise CodecError(f"operator {number}: {name} is not an operator")
            self._operators.append(record)
        if not self._operators:
            raise CodecError("a graph without operators")
        return self._operators[-1]

    def _record(self, name: str, fields: dict[str, Any], where: str) -> Any:
        cls = RECORDS.get(name)
        if cls is None:
            raise CodecError(f"{where} is a {name!r}, which this release does not know; it was written by a later one")
        where = f"{where} ({name})"
        given = {field: self._value(value, f"{where}, field {field!r}") for field, value in fields.items()}
        checked(cls, given, where)
        try:
            return cls(**given)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise CodecError(f"{where}: {error}") from error

    def _value(self, value: Any, where: str) -> Any:
        match value:
            case None | bool() | int() | float() | str() | bytes():
                return value
            case ["tuple", list(parts)]:
                return tuple(self._value(part, where) for part in parts)
            case ["list", list(parts)]:
                return [self._value(part, where) for part in parts]
            case ["dict", list(pairs)]:
                return self._dict(pairs, where)
            case ["node", int(number)]:
                return _entry(self._operators, number, where)
            case ["function", int(number)]:
                return _entry(self._functions, number, where)
            case ["payload", int(number)]:
                return _entry(self._payloads, number, where)
            case ["record", str(name), dict(fields)]:
                return self._record(name, fields, where)
            case ["int", str(digits)] | ["expression", digits] | ["scalar", *digits] | ["array", *digits]:
                return _plain(value[0], digits, where)
        raise CodecError(f"{where}: {str(value)[:80]} is not a value")

    def _dict(self, pairs: list[Any], where: str) -> dict[Any, Any]:
        try:
            return {self._value(key, where): self._value(part, where) for key, part in pairs}
        except (TypeError, ValueError) as error:
            raise CodecError(f"{where}: {error}") from error


def _check_attached(shipped: Shipped, length: int) -> None:
    for buffer in shipped.attached:
        if buffer.offset < 0 or buffer.nbytes < 0 or buffer.offset + buffer.nbytes > length:
            raise CodecError(f"a damaged graph: an array of {shipped.name} lies beyond the {length} bytes behind it")


def _entry(table: list[Any], number: int, where: str) -> Any:
    if not 0 <= number < len(table):
        raise CodecError(f"{where} refers to entry {number} of {len(table)}")
    return table[number]


def _plain(tag: str, content: Any, where: str) -> Any:
    """Decode a value that is made of nothing but plain data."""
    try:
        match tag, content:
            case "int", _:
                return int(content, 16)
            case "expression", _:
                return Expression.from_plain(content)
            case "scalar", [str(dtype), bytes(raw)]:
                (scalar,) = np.frombuffer(raw, _dtype(dtype))
                return scalar
            case "array", [str(dtype), list(shape), bytes(raw)]:
                return np.frombuffer(raw, _dtype(dtype)).reshape(shape).copy()
    except (TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise CodecError(f"{where}: not a valid {tag}: {error}") from error
    raise CodecError(f"{where}: not a valid {tag}")


def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"dtype {text!r} cannot travel")
    return dtype


_documents = msgspec.msgpack.Decoder(_Document)
