"""What an event makes of an attempt's streams: a record in, a record out."""

from __future__ import annotations

from typing import TypeAlias, assert_never

from msgspec.structs import replace

from penstock.control import events as e
from penstock.control.records import Bound, Iteration, Stream
from penstock.core.ids import StreamId, stream_id
from penstock.wire.jobs import Cut

StreamsEvent: TypeAlias = (
    e.StreamsCreated | e.StreamsBound | e.StreamsLost | e.StreamsRetired | e.StreamReopened | e.ConsumerEnded
)


def after(iteration: Iteration, event: StreamsEvent, *, consumers: int) -> Iteration:
    """Return the attempt after an event. Raises KeyError or ValueError where the event does not fit."""
    streams = iteration.streams
    match event:
        case e.StreamsCreated():
            made = [_created(iteration, event, new) for new in event.streams]
            tail = next((stream.stream for stream in made if stream.feed.kind == "tail"), iteration.tail)
            return replace(iteration, streams=streams.put({stream.stream: stream for stream in made}), tail=tail)
        case e.StreamsBound():
            changed: dict[StreamId, Stream] = {}
            for new in event.bindings:
                changed[new.stream] = _bound(changed.get(new.stream) or streams[new.stream], new)
        case e.StreamsLost():
            lost = (streams[stream] for stream in event.streams)
            changed = {s.stream: replace(s, binding=s.binding + 1, bound=None, lost=True) for s in lost}
        case e.StreamsRetired():
            changed = {stream: replace(streams[stream], retired=event.passes) for stream in event.streams}
        case e.StreamReopened():
            stream = streams[event.stream]
            if not stream.ended or stream.lost:
                raise ValueError(f"stream {event.stream!r} has not ended")
            changed = {event.stream: replace(stream, reopened=True)}
        case e.ConsumerEnded():
            changed = {event.stream: _ended(streams[event.stream], event, consumers)}
        case _:
            assert_never(event)
    return replace(iteration, streams=streams.put(changed))


def _created(iteration: Iteration, event: e.StreamsCreated, new: e.NewStream) -> Stream:
    stream = stream_id(event.attempt, new.number)
    if stream in iteration.streams:
        raise ValueError(f"stream {stream!r} exists")
    return Stream(
        stream=stream,
        number=new.number,
        feed=new.feed,
        share=new.share,
        owner=new.owner,
        home=new.home,
        start=Cut(share=new.share),
    )


def _bound(stream: Stream, new: e.NewBinding) -> Stream:
    if new.binding <= stream.binding:
        raise ValueError(f"binding {new.binding} of stream {new.stream!r} after {stream.binding}")
    if new.runner is None or new.worker is None:
        return replace(stream, binding=new.binding, bound=None)
    bound = Bound(runner=new.runner, worker=new.worker, address=new.address, verifier=new.verifier)
    return replace(stream, binding=new.binding, bound=bound, last_worker=new.worker)


def _ended(stream: Stream, event: e.ConsumerEnded, consumers: int) -> Stream:
    ended_by = {**stream.ended_by, event.consumer: event.rounds}
    return replace(
        stream,
        ended_by=ended_by,
        leftover=event.leftover if stream.leftover is None else stream.leftover,
        ended=len(ended_by) >= (consumers if stream.owner is None else 1),
        reopened=False,
    )
