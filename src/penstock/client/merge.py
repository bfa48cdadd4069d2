"""From saved states to what a service needs to go on.

With `uneven="drop"` and `"pad"` all consumers read every stream, so a stream's merged place is the lowest round any of
them stood at, with each consumer's own mark beside it; what is done is what all of them are through with. With
`"allow"` a stream had one owner at a time, so the highest mark counts and what anybody is through with is done.

In deterministic order, and with coordinated reads, all consumers stand at the same round after the same number of
steps, so one state stands for all. Else every rank's state is needed, unless the service still knows the attempt: then
each rank goes on from its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.client.ranges import RangeSet
from penstock.client.state import EpochState, Mixes, Progress, StreamMark
from penstock.core.errors import StateMismatchError
from penstock.wire.jobs import Cut, Feed, Leftover, Named, Ranges, Regroup, Resume, StreamResume
from penstock.wire.received import flags_received, regroup_of


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that was loaded, for one consumer."""

    states: tuple[EpochState, ...]
    """One that stands for all, or one of each consumer, or only this consumer's own."""
    own: EpochState | None
    """This consumer's; None: the number of consumers changed."""

    @property
    def first(self) -> EpochState:
        return self.states[0]

    def changed(self, consumers: int) -> bool:
        return self.first.consumers != consumers


def read_states(state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, consumer: int, consumers: int) -> Checkpoint:
    """Check that the states belong together and to this consumer."""
    given = [state] if isinstance(state, Mapping) else list(state)
    if not given:
        raise StateMismatchError("an empty list of states: give the state_dict() of every rank")
    states = [EpochState.read(one) for one in given]
    first = states[0]
    for other in states[1:]:
        _check_together(first, other)
    if len(states) == 1 and first.consumer is None:
        own = None if first.consumers != consumers else replace(first, consumer=consumer)
        return Checkpoint((first,), own)
    by_consumer = {one.consumer: one for one in states}
    if None in by_consumer or len(by_consumer) != len(states):
        raise StateMismatchError("the list has two states of one rank; give the state_dict() of each rank once")
    if len(states) == 1:
        return _one_state(first, consumer, consumers)
    missing = sorted(set(range(first.consumers)) - set(by_consumer))
    if missing:
        raise StateMismatchError(
            f"the states were saved by {first.consumers} consumers; those of {_ranks(missing)} are missing"
        )
    ordered = tuple(by_consumer[c] for c in range(first.consumers))
    return Checkpoint(ordered, by_consumer[consumer] if first.consumers == consumers else None)


def _one_state(state: EpochState, consumer: int, consumers: int) -> Checkpoint:
    if state.consumers == consumers:
        if state.consumer != consumer:
            raise StateMismatchError(
                f"this is the state of consumer {state.consumer}, and this is consumer {consumer}: load each rank's "
                "own state, or one made with state_dict(all=True)"
            )
        return Checkpoint((state,), state)
    if state.consumers > 1 and not state.alike and state.phase == "reading":
        raise StateMismatchError(
            f"the state was saved by one of {state.consumers} consumers and there are {consumers} now: "
            f"load the list of the states of all {state.consumers} ranks"
        )
    return Checkpoint((state,), None)


def _check_together(one: EpochState, other: EpochState) -> None:
    for name, mine, theirs in (
        ("attempts", one.attempt, other.attempt),
        ("epochs", one.epoch, other.epoch),
        ("steps", one.progress.step, other.progress.step),
        ("numbers of consumers", one.consumers, other.consumers),
        ("phases", one.phase, other.phase),
        ("split lists", one.splits, other.splits),
    ):
        if mine != theirs:
            raise StateMismatchError(
                f"states of different {name} ({mine} and {theirs}) do not belong together; "
                "load the states that were saved at the same step"
            )


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"consumer{'s' if len(numbers) > 1 else ''} {shown}"


def resume_from(checkpoint: Checkpoint, *, consumers: int, feeds: Mapping[int, Feed]) -> Resume:
    """Return the merged checkpoint. `feeds` are those of streams whose splits follow from the job."""
    first = checkpoint.first
    alike = len(checkpoint.states) == 1 and (first.consumers == 1 or first.consumer is None or first.alike)
    if len(checkpoint.states) < first.consumers and not alike:
        raise StateMismatchError(
            f"the service does not know attempt {first.attempt} any more (another service, or a lost journal), so the "
            f"states of all {first.consumers} ranks are needed: load the list of them on every rank"
        )
    progresses = [state.progress for state in checkpoint.states]
    if alike:
        progresses = progresses * first.consumers
    numbers = sorted({number for progress in progresses for number in progress.streams})
    merge = _highest if first.uneven == "allow" else _lowest
    streams = []
    for number in numbers:
        marks = [progress.streams.get(number) for progress in progresses]
        resumed = merge(number, marks, progresses)
        resumed = msgspec.structs.replace(resumed, feed=resumed.feed or feeds.get(number))
        if resumed.ended and not any(mark is not None and mark.leftover for mark in marks):
            resumed = _without_rest(resumed)
        if first.consumers != consumers and first.uneven != "allow":
            resumed = _with_width(resumed, first.consumers, consumers, coordinated=first.coordinated)
        streams.append(resumed)
    done = _union(progresses) if first.uneven == "allow" else _intersection(progresses)
    ranges = tuple(Ranges(*key, tuple(found.ranges())) for key, found in sorted(done.items()) if len(found))
    resume = Resume(epoch=first.epoch, consumers=consumers, streams=tuple(streams), done=ranges)
    same: Any = resume
    if first.alike:
        # Each rank may load its own state, and which cut stands for a place depends on how rounds came in frames.
        same = (first.epoch, consumers, first.progress.step, [(s.number, s.marks, s.ended) for s in streams])
    digest = hashlib.blake2b(msgspec.msgpack.encode((first.attempt, same)), digest_size=8).hexdigest()
    return msgspec.structs.replace(resume, digest=digest)


def mixes_from(checkpoint: Checkpoint, *, consumers: int) -> dict[int, Mixes]:
    """Return from which round of each stream on which weights count, in an attempt that starts from the checkpoint."""
    first = checkpoint.first
    if not checkpoint.changed(consumers) or first.uneven == "allow":
        return dict(first.progress.mixes)
    found: dict[int, Mixes] = {}
    for number, mixes in first.progress.mixes.items():
        mark = first.progress.streams[number]
        at, weights = mixes[-1]
        if not mark.ended and at > mark.cut_round - mark.cut.since:
            raise StateMismatchError(
                "the state was saved just after the weights had changed; load it with the number of consumers it was "
                f"saved with, {first.consumers}, and save again a little later to change the number"
            )
        found[number] = ((0, weights),)  # rounds are counted anew
    return found


def _lowest(number: int, marks: Sequence[StreamMark | None], progresses: Sequence[Progress]) -> StreamResume:
    known = [mark for mark in marks if mark is not None]
    # A consumer whose state does not have it had not seen it when it was saved: it stood at its beginning.
    beginning = StreamMark(number, cut=Cut(share=known[0].cut.share), feed=known[0].feed)
    all_marks = [beginning if mark is None else mark for mark in marks]
    lowest = min(range(len(all_marks)), key=lambda c: (all_marks[c].round, all_marks[c].ended))
    low = all_marks[lowest]
    cut = low.cut_here()
    if len(all_marks) > 1:
        named = _named_since(cut, all_marks, progresses[lowest])
        cut = msgspec.structs.replace(cut, named=named)
    return StreamResume(
        number=number,
        cut=cut,
        round=low.round,
        marks=tuple(mark.round for mark in all_marks),
        feed=low.feed,
        ended=all(mark.ended for mark in all_marks),
    )


def _highest(number: int, marks: Sequence[StreamMark | None], progresses: Sequence[Progress]) -> StreamResume:
    high = max((mark for mark in marks if mark is not None), key=lambda mark: (mark.round, mark.ended))
    return StreamResume(
        number=number, cut=high.cut_here(), round=high.round, marks=(), feed=high.feed, ended=high.ended
    )


def _named_since(cut: Cut, marks: Iterable[StreamMark], lowest: Progress) -> tuple[Named, ...]:
    """Return the splits of the stream from the lowest place up to the highest, in the stream's order."""
    lists: dict[tuple[int, int], list[int]] = {(n.source, n.pass_): list(n.ordinals) for n in cut.named}

    def add(source: int, pass_: int, ordinal: int) -> None:
        own = lists.setdefault((source, pass_), [])
        done = lowest.done.get((source, pass_))
        if ordinal not in own and (done is None or ordinal not in done):
            own.append(ordinal)

    for mark in sorted(marks, key=lambda mark: mark.round):
        if mark.trail_lost and mark.trail and not _is_done(lowest, mark.trail[0]):
            raise StateMismatchError(
                f"consumers were too far apart in stream {mark.number} when the states were saved: which splits lay "
                "between them is not known. Load the states into the service that ran the job"
            )
        for place in mark.trail or ():
            add(*place)
        for named in mark.cut_here().named:
            for ordinal in named.ordinals:
                add(named.source, named.pass_, ordinal)
    return tuple(
        Named(source, pass_, tuple(ordinals)) for (source, pass_), ordinals in sorted(lists.items()) if ordinals
    )


def _is_done(progress: Progress, place: tuple[int, int, int]) -> bool:
    source, pass_, ordinal = place
    done = progress.done.get((source, pass_))
    return done is not None and ordinal in done


def _without_rest(stream: StreamResume) -> StreamResume:
    """Let a stream that ended with nothing left over stand at a cut that needs no split: all of its own are done.

    Its last cut may lie before its end, in rounds of an older number of consumers.
    """
    if stream.feed is not None and stream.feed.kind != "granted":
        return stream  # its splits follow from the job, so that from any cut the end is the same
    return msgspec.structs.replace(stream, cut=Cut(share=stream.cut.share))


def _with_width(stream: StreamResume, old: int, new: int, *, coordinated: bool) -> StreamResume:
    """Turn rounds of the old number of consumers into rounds of the new one."""
    feed = stream.feed
    if feed is not None and feed.leftovers:
        leftovers = tuple(
            Leftover(left.number, _counted_in(left.cut, (left.cut.since,) * old, coordinated=coordinated), left.feed)
            for left in feed.leftovers
        )
        feed = msgspec.structs.replace(feed, leftovers=leftovers)
    since = stream.cut.since
    given = (since,) * old if stream.ended else tuple(since + mark - stream.round for mark in stream.marks)
    cut = _counted_in(stream.cut, given, coordinated=coordinated)
    return msgspec.structs.replace(stream, cut=cut, round=0, marks=(0,) * new, feed=feed)


def _counted_in(cut: Cut, given: tuple[int, ...], *, coordinated: bool) -> Cut:
    """Return a cut that says itself what was received after it, for any number of consumers to go on from.

    `given` is how many rounds since the cut each of the old consumers has received.
    """
    if not any(given):
        return msgspec.structs.replace(cut, since=0)
    width = len(given)
    if cut.regroup is None:
        return msgspec.structs.replace(cut, since=0, regroup=Regroup(width, given))
    if coordinated:
        raise StateMismatchError(
            f"the state was saved just after the number of consumers had changed to {width}; load it with {width} "
            "consumers and save again a little later to change the number once more"
        )
    flags = flags_received(cut.regroup, width=width, given=given)
    return msgspec.structs.replace(cut, since=0, regroup=regroup_of(flags))


def _union(progresses: Sequence[Progress]) -> dict[tuple[int, int], RangeSet]:
    found: dict[tuple[int, int], RangeSet] = {}
    for progress in progresses:
        for key, ranges in progress.done.items():
            whole = found.setdefault(key, RangeSet())
            for start, stop in ranges.ranges():
                whole.add_range(start, stop)
    return found


def _intersection(progresses: Sequence[Progress]) -> dict[tuple[int, int], RangeSet]:
    found = dict(progresses[0].done)
    for progress in progresses[1:]:
        found = {key: ranges.intersection(progress.done[key]) for key, ranges in found.items() if key in progress.done}
    return found
