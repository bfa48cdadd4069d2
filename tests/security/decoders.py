"""Everything that makes a message out of bytes of another process, and what it may raise when they are none."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.core.errors import PenstockError
from penstock.dispatcher.asks import decode_ask
from penstock.wire.elements import flatten, unflatten
from penstock.wire.fetching import FromFellow, ToFellow
from penstock.wire.frames import FromRunner, ToRunner
from penstock.wire.framing import Assembly, RequestAssembler, cut_request, decode_message, decode_tell, pack
from penstock.wire.messages import PROTOCOL, Answer, Push, Request
from penstock.wire.runs import decode_run, encode_run
from tests.security.hostile import NUMBERS, Hostile, kinds_of

_to_runner: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRunner)
_from_fellow: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromFellow)
_to_fellow: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFellow)
_from_runner: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromRunner)

RUNS: tuple[list[Any], ...] = (
    [1, 2, 3],
    ["a", "b"],
    [None, 1.5],
    [b"a", b"bcd"],
    [(1, [2, "x"]), (3, [4, "y"])],
    [np.float32(1)] * 3,
    [np.zeros((2, size)) for size in range(1, 4)],
    [{"a": np.arange(4), "b": b"xy"} for _ in range(5)],
    [{"x": i, "y": str(i), "z": None, "w": [i] * i} for i in range(4)],
    [np.array(["a", None], object)],
    [1 << 80],
)


class Target(NamedTuple):
    """A decoder."""

    examples: Callable[[random.Random], bytes]
    """Makes bytes that it takes."""
    decode: Callable[[bytes], object]
    """Raises `PenstockError` for what is no message, and nothing else."""


def _any_of(*unions: Any) -> Callable[[random.Random], bytes]:
    kinds = [kind for union in unions for kind in kinds_of(union).values()]
    return lambda rng: Hostile(rng).message(rng.choice(kinds))


def _in_envelope(make: Callable[[random.Random], bytes]) -> Callable[[random.Random], bytes]:
    return lambda rng: msgspec.msgpack.encode(
        [rng.choice((1, PROTOCOL)), rng.choice(NUMBERS), rng.choice(NUMBERS), msgspec.Raw(make(rng))]
    )


class _Frame(NamedTuple):
    buffer: memoryview


def _assemble(data: bytes) -> None:
    assembly = Assembly()
    whole = assembly.add(_Frame(memoryview(data)))
    for _ in range(3):
        if whole is not None:
            break
        whole = assembly.add(_Frame(memoryview(data)))


def _put_together(data: bytes) -> None:
    assembler = RequestAssembler()
    for start in range(0, len(data), 8_128):
        assembler.add(b"peer", data[start : start + 8_128], principal="a", now=0.0)


def _with_buffers(decode: Callable[[bytes, list[bytes]], object]) -> Callable[[bytes], object]:
    def decode_all(data: bytes) -> None:
        try:
            layout, buffers = msgspec.msgpack.decode(data, type=tuple[bytes, list[bytes]])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # what holds them together is of these tests
        decode(layout, buffers)

    return decode_all


def _encoded(layout: bytes, buffers: list[Any]) -> bytes:
    return msgspec.msgpack.encode([layout, [np.asarray(memoryview(each)).tobytes() for each in buffers]])


_ENCODED_RUNS = [_encoded(*encode_run(run)) for run in RUNS]
_ENCODED_ELEMENTS = [_encoded(*flatten(run[0])) for run in RUNS]

TARGETS: dict[str, Target] = {
    "ask": Target(_in_envelope(_any_of(Request)), decode_ask),
    "tell": Target(_in_envelope(_any_of(Answer, Push)), decode_tell),
    "to_runner": Target(_any_of(ToRunner), lambda data: decode_message(_to_runner, data)),
    "from_fellow": Target(_any_of(FromFellow), lambda data: decode_message(_from_fellow, data)),
    "to_fellow": Target(_any_of(ToFellow), lambda data: decode_message(_to_fellow, data)),
    "from_runner": Target(_any_of(FromRunner), lambda data: decode_message(_from_runner, data)),
    "parcel": Target(
        lambda rng: pack(b"header", [bytes(rng.choice((0, 3, 300))) for _ in range(rng.randrange(4))])[0], _assemble
    ),
    "pieces": Target(lambda rng: b"".join(cut_request(bytes(rng.randrange(9_000, 20_000)))), _put_together),
    "run": Target(lambda rng: rng.choice(_ENCODED_RUNS), _with_buffers(decode_run)),
    "element": Target(lambda rng: rng.choice(_ENCODED_ELEMENTS), _with_buffers(unflatten)),
}


def try_decoding(name: str, data: bytes) -> None:
    """Decode; only what says that these bytes are no message may come out."""
    try:
        TARGETS[name].decode(data)
    except PenstockError:
        pass
