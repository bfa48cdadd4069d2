"""A consumer says that it has all of a stream."""

from __future__ import annotations

from penstock.control import events as e
from penstock.control.completing import complete
from penstock.control.draft import Draft
from penstock.control.runners import settle
from penstock.wire.messages import Answer, Done, EndStream, NotKnown, Refused


def end_stream(draft: Draft, request: EndStream) -> Answer:
    iteration = draft.state.iteration(request.job, request.attempt)
    if iteration is None:
        return NotKnown(what=f"attempt {request.attempt!r} of job {request.job!r}")
    if not any(slot.consumer == request.consumer for slot in iteration.opened):
        return NotKnown(what=f"consumer {request.consumer} of attempt {request.attempt!r}")
    stream = iteration.streams.get(request.stream)
    if stream is None:
        return NotKnown(what=f"stream {request.stream!r} of attempt {request.attempt!r}")
    if stream.lost:
        return Done()
    readers = range(draft.job(request.job).spec.ranks.count) if stream.owner is None else (stream.owner,)
    if request.consumer not in readers:
        return Refused(reason=f"stream {request.stream!r} is not consumer {request.consumer}'s", kind="not_the_owner")
    for consumer, rounds in stream.ended_by.items():
        if rounds != request.rounds:
            return Refused(
                reason=(
                    f"stream {request.stream!r} ended after {request.rounds} rounds for consumer {request.consumer}, "
                    f"and after {rounds} for consumer {consumer}: the pipeline did not do the same twice. Exactly-once "
                    "needs functions that give the same result for the same input"
                ),
                kind="nondeterministic",
            )
    if request.consumer not in stream.ended_by or stream.reopened:
        draft.emit(
            e.ConsumerEnded(
                request.job, request.attempt, request.stream, request.consumer, request.rounds, request.leftover
            )
        )
        if complete(draft, request.job, request.attempt):
            settle(draft, request.job)
        draft.publish()
    return Done()
