"""Which stream a consumer in relaxed order takes from."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from penstock.client.fetch import EpochReader
from penstock.client.reading import StreamReading
from penstock.client.state import Progress, StreamMark
from penstock.core.ids import StreamId
from penstock.wire.jobs import Feed, StreamView


def reading(number: int, kind: Any = "granted") -> StreamReading:
    view = StreamView(stream=StreamId(f"a.{number}"), number=number, binding=1, feed=Feed(kind=kind), share=1)
    return StreamReading(view, StreamMark(number))


def reader_of(*readings: StreamReading) -> Any:
    """Return as much of a reader as choosing looks at."""
    found = {each.stream: each for each in readings}
    return SimpleNamespace(_in_turn=False, progress=Progress(), _arrived=deque(), _readings=found)


def test_what_arrived_first_is_taken_first() -> None:
    one, other = reading(0), reading(1)
    reader = reader_of(one, other)
    reader._arrived.extend([other, one, other])
    assert [EpochReader._choose(reader) for _ in range(4)] == [other, one, other, None]


def test_the_tail_waits_until_this_consumer_has_the_ends_of_all_other_streams() -> None:
    """A consumer that rejoins with older marks has rounds to read of streams that have long ended for the others."""
    one, other, tail = reading(0), reading(1), reading(2, "tail")
    reader = reader_of(one, other, tail)
    reader._arrived.extend([tail, other, tail, one])
    one.mark.ended = True
    assert EpochReader._choose(reader) is other
    assert EpochReader._choose(reader) is one
    assert EpochReader._choose(reader) is None
    assert list(reader._arrived) == [tail, tail]
    other.mark.ended = True
    assert [EpochReader._choose(reader) for _ in range(3)] == [tail, tail, None]


def test_a_stream_that_was_given_up_holds_nothing_back() -> None:
    lost, tail = reading(0), reading(1, "tail")
    lost.view = StreamView(stream=lost.stream, number=0, binding=1, feed=Feed(kind="granted"), share=1, lost=True)
    reader = reader_of(lost, tail)
    reader._arrived.append(tail)
    assert EpochReader._choose(reader) is tail
