"""Digests of code and of constants: the same in every process, whatever the hash seed.

Code is hashed by what its instructions do, each with the constant, name or jump target it stands for. The raw bytes
were rejected: adding a docstring renumbers the constants, and where a `pass` stands changes with the lines. Left out
are line numbers, the file, the name of the function, docstrings and annotations (those of functions defined *inside*
a function are part of its instructions and do count).
"""

from __future__ import annotations

import dis
import struct
from bisect import bisect_left
from collections.abc import Iterable
from hashlib import blake2b
from types import CodeType
from typing import Any

DIGEST_BYTES = 16
_INLINE_BYTES = 64  # a longer text or byte string stands in its container as a digest

_SKIPPED = frozenset({"NOP", "CACHE", "EXTENDED_ARG", "RESUME"})
_CLASS_NOTES = frozenset({"__doc__", "__qualname__", "__module__", "__firstlineno__", "__static_attributes__"})
_NAMED = frozenset(dis.hasname) | frozenset(dis.haslocal) | frozenset(dis.hasfree) | frozenset(dis.hascompare)
_CONSTANT = frozenset(dis.hasconst)
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_BEHAVIOUR_FLAGS = 0x4 | 0x8 | 0x20 | 0x80 | 0x100 | 0x200  # *args, **kwargs, generator, coroutine and their kinds


def digest(tag: str, parts: Iterable[bytes]) -> bytes:
    """Return the hash of a sequence of byte strings; where one ends and the next begins counts."""
    state = blake2b(tag.encode(), digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def encode_text(tag: bytes, content: bytes) -> bytes:
    """Return an encoding that begins with its own length or is a digest, so that encodings can be joined."""
    if len(content) > _INLINE_BYTES:
        return b"#" + tag + blake2b(content, digest_size=DIGEST_BYTES).digest()
    return tag + len(content).to_bytes(1, "little") + content


def encode_scalar(value: object) -> bytes | None:
    """Return the encoding of an immutable scalar by type and exact value; None if it is not one."""
    kind = type(value)
    if kind is str:
        return encode_text(b"s", value.encode("utf-8", "surrogatepass"))  # type: ignore[attr-defined]
    if kind is int:
        return encode_text(b"i", _int_bytes(value))  # type: ignore[arg-type]
    if kind is float:
        return b"f" + struct.pack("<d", value)
    if kind is bool:
        return b"T" if value else b"F"
    if value is None:
        return b"N"
    if kind is bytes:
        return encode_text(b"b", value)  # type: ignore[arg-type]
    if kind is complex:
        return b"c" + struct.pack("<dd", value.real, value.imag)  # type: ignore[attr-defined]
    if value is Ellipsis:
        return b"E"
    if value is NotImplemented:
        return b"I"
    return None


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def encode_constant(value: Any) -> bytes:
    """Return the encoding of a constant of some code."""
    scalar = encode_scalar(value)
    if scalar is not None:
        return scalar
    if isinstance(value, CodeType):
        return b"#C" + digest_code(value)
    if isinstance(value, tuple):
        return b"#t" + digest("tuple", map(encode_constant, value))
    if isinstance(value, frozenset):
        return b"#z" + digest("frozenset", sorted(map(encode_constant, value)))
    return b"#s" + digest("slice", map(encode_constant, (value.start, value.stop, value.step)))


def digest_code(code: CodeType) -> bytes:
    """Return the hash of what the code does."""
    kept = _instructions(code)
    offsets = [one.offset for one in kept]
    arguments = code.co_varnames[: _arguments(code)]
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _BEHAVIOUR_FLAGS)
    parts = [repr((shape, arguments, code.co_freevars)).encode()]
    for one in kept:
        if one.opcode in _CONSTANT:
            parts.append(one.opname.encode() + b" " + encode_constant(code.co_consts[one.arg or 0]))
        elif one.opcode in _JUMPS:
            parts.append(f"{one.opname} to {bisect_left(offsets, one.argval)}".encode())
        else:
            parts.append(f"{one.opname} {one.argval if one.opcode in _NAMED else one.arg}".encode())
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        start, stop, target = (bisect_left(offsets, offset) for offset in (entry.start, entry.end, entry.target))
        if start != stop:
            parts.append(f"try {start} {stop} except {target} {entry.depth} {entry.lasti}".encode())
    return digest("code", parts)


def _arguments(code: CodeType) -> int:
    stars = bool(code.co_flags & 0x4) + bool(code.co_flags & 0x8)
    return code.co_argcount + code.co_kwonlyargcount + stars


def _instructions(code: CodeType) -> list[dis.Instruction]:
    kept: list[dis.Instruction] = []
    for one in dis.get_instructions(code):
        if one.opname in _SKIPPED:
            continue
        if one.opname == "STORE_NAME" and one.argval in _CLASS_NOTES and kept:
            kept.pop()  # a class body sets these from a constant or a name just before
            continue
        kept.append(one)
    return kept
