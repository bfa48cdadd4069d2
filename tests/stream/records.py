"""The records of the stream protocol, each from one factory with defaults."""

from __future__ import annotations

from typing import Any

from penstock.core.ids import AttemptId, JobName, RunnerId, StreamId, WorkerId
from penstock.stream.position import Standing
from penstock.wire.frames import (
    OpenStream,
    RemoteFailure,
    Rounds,
    StreamEnded,
    StreamFailed,
    StreamRefused,
)
from penstock.wire.jobs import Cut, Delivery, FeedSpec, JobView, Named, Position, StreamView, delivery_of
from tests.job_specs import job_spec

GRANTED = FeedSpec(kind="granted")
TAIL = FeedSpec(kind="tail")
FAILURE = RemoteFailure(module="builtins", qualname="ValueError", args=(), message="bad", traceback="")


def delivery(**job: Any) -> Delivery:
    return delivery_of(job_spec(**job))


def cut_at(round_: int, *named: int, since: int = 0) -> Cut:
    """The cut before a round: the engine's state is the round itself."""
    return Cut(engine=[round_], since=since, named=(Named(0, 0, named),) if named else ())


def done(*ordinals: int, pass_: int = 0) -> tuple[Named, ...]:
    return (Named(0, pass_, ordinals),)


def standing(round_: int = 0, number: int = 0, **more: Any) -> Standing:
    return Standing.at(Position(number, round_, cut_at(round_), **more))


def stream_view(number: int = 0, binding: int = 1, **more: Any) -> StreamView:
    fields: dict[str, Any] = {
        "feed": GRANTED,
        "share": 1,
        "runner": RunnerId(f"r{number}"),
        "worker": WorkerId(f"w{number}"),
        "address": f"tcp://r{number}",
        **more,
    }
    return StreamView(stream=StreamId(f"a.{number}"), number=number, binding=binding, **fields)


def job_view(*streams: StreamView, version: int = 1, attempt: str = "a", **more: Any) -> JobView:
    return JobView(job=JobName("j"), attempt=AttemptId(attempt), epoch=2, version=version, streams=streams, **more)


def rounds(
    seq: int, count: int = 2, *, number: int = 0, binding: int = 1, opening: int = 1, nbytes: int = 300, **more: Any
) -> Rounds:
    fields: dict[str, Any] = {"cut": cut_at(seq + count), "layout": b"", **more}
    stream = StreamId(f"a.{number}")
    return Rounds(stream=stream, binding=binding, opening=opening, seq=seq, count=count, nbytes=nbytes, **fields)


def ended(seq: int, *, number: int = 0, binding: int = 1, opening: int = 1, **more: Any) -> StreamEnded:
    fields: dict[str, Any] = {"cut": cut_at(seq), **more}
    return StreamEnded(stream=StreamId(f"a.{number}"), binding=binding, opening=opening, seq=seq, **fields)


def failed(seq: int, *, number: int = 0, binding: int = 1, opening: int = 1) -> StreamFailed:
    return StreamFailed(stream=StreamId(f"a.{number}"), binding=binding, opening=opening, seq=seq, failure=FAILURE)


def refused(reason: str = "no", *, number: int = 0, opening: int = 1, superseded: bool = False) -> StreamRefused:
    return StreamRefused(stream=StreamId(f"a.{number}"), opening=opening, reason=reason, superseded=superseded)


def opens(round_: int = 0, *, consumer: int = 0, opening: int = 1, binding: int = 1, **more: Any) -> OpenStream:
    """A reader's opening at a round, with the cut of that round: from the beginning where that is the first."""
    fields: dict[str, Any] = {
        "cut": cut_at(round_) if round_ else Cut(),
        "cut_round": round_,
        "feed": GRANTED,
        "share": 1,
        "credit": 1000,
        **more,
    }
    return OpenStream(
        stream=StreamId("a.0"),
        binding=binding,
        opening=opening,
        consumer=consumer,
        round=round_,
        attempt=AttemptId("a"),
        epoch=2,
        runner=RunnerId("r0"),
        **fields,
    )
