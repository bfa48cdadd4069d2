"""Bytes that are no message are refused as that, whoever decodes them; `make fuzz` tries millions."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ProtocolError
from penstock.core.ids import AttemptId, RunnerId, StreamId
from penstock.wire.fetching import FromFellow, ToFellow
from penstock.wire.frames import FromRunner, OpenStream, ToRunner
from penstock.wire.jobs import Cut, FeedSpec
from penstock.wire.messages import Answer, Push, Request
from tests.dispatcher.serving import opening, spec
from tests.security.decoders import TARGETS, try_decoding
from tests.security.hostile import Hostile, kinds_of, mutated


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None, database=None)
@given(seed=st.integers(0, 1 << 32), raw=st.binary(max_size=200))
def test_nothing_but_a_refusal_comes_of_bytes_that_are_no_message(name: str, seed: int, raw: bytes) -> None:
    rng = random.Random(seed)
    message = TARGETS[name].examples(rng)
    for data in (message, mutated(rng, message), message[: len(message) // 2] + raw, raw):
        try_decoding(name, data)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "data", [b"", b"\xa1\xff", b"\x91" * 8_000, b"\xdd\xff\xff\xff\xff", b"\xc1" * 20, b"\x81\xa4type"]
)
def test_known_nuisances_are_refused(name: str, data: bytes) -> None:
    try_decoding(name, data)


def test_a_map_with_a_map_as_a_key_is_refused_like_any_other_garbage() -> None:
    """In a field that holds anything; msgspec before 0.19 raises Python's own error for it."""
    message = msgspec.msgpack.encode(hostile_opening()).replace(b"\xa6ENGINE", b"\x81\x80\x01")
    assert b"\x81\x80\x01" in message
    with pytest.raises(ProtocolError):
        TARGETS["to_runner"].decode(message)


def hostile_opening() -> OpenStream:
    return OpenStream(
        stream=StreamId("a.1"),
        binding=1,
        opening=1,
        consumer=0,
        round=0,
        cut=Cut(engine="ENGINE"),
        cut_round=0,
        feed=FeedSpec("granted"),
        share=1,
        attempt=AttemptId("a"),
        epoch=0,
        runner=RunnerId("r"),
        credit=0,
    )


@pytest.mark.parametrize("union", [Request, Answer, Push, ToRunner, FromRunner, FromFellow, ToFellow])
def test_hostile_messages_of_every_type_get_past_the_decoder(union: object) -> None:
    """What is refused by its form only would test nothing behind it."""
    decoder = msgspec.msgpack.Decoder(union)
    hostile = Hostile(random.Random(1), honest=(spec(), opening()))  # modes check themselves: most are refused
    for name, kind in kinds_of(union).items():
        for _ in range(3_000):
            try:
                decoder.decode(hostile.message(kind))
                break
            except msgspec.DecodeError:
                continue
        else:
            raise AssertionError(f"no {name} was a message")
