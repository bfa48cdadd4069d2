"""What a consumer saves, and how the states of all of them become one to resume from.

With `uneven="drop"` and `"pad"` all consumers read every stream, so a stream's merged position is the lowest round any
of them stood at, with each consumer's own mark beside it; what is done is what all of them are through with. With
`"allow"` a stream had one owner at a time, so the highest position counts and what anybody is through with is done.

In deterministic order, and with coordinated reads, all consumers stand at the same round after the same number of
steps, so one state stands for all. Else every rank's state is needed, unless the service still knows the attempt: then
each rank goes on from its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.core.conversion import Conversion
from penstock.core.errors import StateMismatchError
from penstock.core.ids import AttemptId
from penstock.core.intervals import Intervals
from penstock.stream.position import (
    DoneSplits,
    Serving,
    Standing,
    done_of,
    joined,
    ranges_of,
    splits_of,
    with_done,
)
from penstock.wire.jobs import Cut, FeedSpec, Leftover, Named, Position, Ranges, Regroup, Resume
from penstock.wire.received import flags_received, regroup_of
from penstock.wire.saved_positions import shorten

Weights: TypeAlias = tuple[float, ...]
Mixes: TypeAlias = tuple[tuple[int, Weights], ...]
"""(round, weights): from that round on these count. In the order of the changes; of two at a round the last counts."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one consumer has received of an epoch."""

    step: int = 0
    streams: tuple[Position, ...] = ()
    done: tuple[Ranges, ...] = ()
    next: int | None = None
    """Which stream the next element came from, where that is known: see `client.stage`."""
    weights: Weights | None = None
    """What a mix goes by from here on, where it was changed; None: the pipeline's own."""
    mixes: tuple[tuple[int, Mixes], ...] = ()
    """By stream: from which round on which weights counted."""


class Place(msgspec.Struct, frozen=True):
    """What a consumer has received, noted down at little cost and made a `Progress` of when somebody asks."""

    step: int
    standings: Mapping[int, Standing]
    """Where the consumer stands in each stream, by the stream's number."""
    done: DoneSplits
    next: int | None
    weights: Weights | None
    mixes: Mapping[int, Mixes]

    @staticmethod
    def at(progress: Progress) -> Place:
        return Place(
            progress.step,
            {each.number: Standing.at(each) for each in progress.streams},
            done_of(progress.done),
            progress.next,
            progress.weights,
            dict(progress.mixes),
        )

    def after(self, serving: Serving, taken: int, *, before: int = 0) -> Place:
        """Return the place after the first `taken` of the elements being served, the first `before` counted in here.

        It says which stream the next of them comes from.
        """
        standings, done = dict(self.standings), self.done
        for number, lane in enumerate(serving.lanes):
            at, header = lane.start + serving.taken_of(number, taken), lane.frame.header
            rounds = at - lane.start - serving.taken_of(number, before)
            if rounds:
                standings[lane.number] = standings[lane.number].taken(header, at, rounds)
                if at == header.count and header.done:
                    done = with_done(done, header.done)
        following = None
        if taken < serving.size:
            lane = serving.lanes[taken % len(serving.lanes)]
            following = lane.number
            standings[following] = standings[following].before(lane.frame.header)
        return replace(self, step=self.step + taken - before, standings=standings, done=done, next=following)

    def progress(self) -> Progress:
        return Progress(
            step=self.step,
            streams=tuple(standing.position for _, standing in sorted(self.standings.items())),
            done=ranges_of(self.done),
            next=self.next,
            weights=self.weights,
            mixes=tuple(sorted(self.mixes.items())),
        )


class ConsumerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One consumer's place in an epoch as it is saved: plain when encoded, a few hundred bytes a stream."""

    attempt: AttemptId
    splits: str
    """The digest of the split list."""
    width: int = 0
    """How many streams the job had, where that was its to say; 0: it was not."""
    order: str = "relaxed"
    uneven: str = "drop"
    coordinated: bool = False
    consumers: int = 1
    consumer: int | None = 0
    """The consumer that saved it; None: it is the same for every consumer."""
    progress: Progress = Progress()
    sampler: Any = None
    """Where the consumer's own sampler stood, of a job that it feeds."""

    @property
    def alike(self) -> bool:
        """Consumers take rounds in turn: after the same number of steps all of them stand at the same place."""
        return self.order == "deterministic" or self.coordinated

    def plain(self) -> dict[str, Any]:
        """Return it as it will be after a way through JSON: lists, no tuples. A sampler's state is its own affair."""
        made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(replace(self, sampler=None)))
        shorten(made.get("progress", {}).get("streams", ()))
        return made if self.sampler is None else {**made, "sampler": self.sampler}

    @staticmethod
    def read(plain: Mapping[str, Any]) -> ConsumerState:
        try:
            return _consumer_state(plain)
        except msgspec.ValidationError as error:
            raise StateMismatchError(
                f"the state is damaged, or was not made by a loader's state_dict(): {error}"
            ) from None


class Checkpoint(msgspec.Struct, frozen=True):
    """All that was loaded, for one consumer."""

    states: tuple[ConsumerState, ...]
    """One that stands for all, or one of each consumer, or only this consumer's own."""
    own: ConsumerState | None
    """The state of this consumer; None: the number of consumers changed."""

    @property
    def first(self) -> ConsumerState:
        return self.states[0]


def read_states(plain: Any, *, consumer: int, consumers: int) -> Checkpoint:
    """Check that saved states, one or the list of all ranks', belong together and to this consumer."""
    states = [ConsumerState.read(one) for one in ([plain] if isinstance(plain, Mapping) else plain)]
    first = states[0]
    for other in states[1:]:
        _check_together(first, other)
    if len(states) == 1:
        if first.consumers == consumers:
            check_whose(first.consumer, consumer)
            return Checkpoint((first,), replace(first, consumer=consumer))
        if first.consumer is not None and first.consumers > 1 and not first.alike:
            raise StateMismatchError(
                f"the state was saved by one of {first.consumers} consumers and there are {consumers} now: "
                f"load the list of the states of all {first.consumers} ranks"
            )
        return Checkpoint((first,), None)
    by_consumer = {one.consumer: one for one in states}
    if None in by_consumer or len(by_consumer) != len(states):
        raise StateMismatchError("the list has two states of one rank; give the state_dict() of each rank once")
    missing = sorted(set(range(first.consumers)) - set(by_consumer))
    if missing:
        raise StateMismatchError(
            f"the states were saved by {first.consumers} consumers; those of {_ranks(missing)} are missing"
        )
    ordered = tuple(by_consumer[c] for c in range(first.consumers))
    return Checkpoint(ordered, by_consumer[consumer] if first.consumers == consumers else None)


def check_whose(saved: int | None, consumer: int) -> None:
    if saved not in (None, consumer):
        raise StateMismatchError(
            f"this is the state of consumer {saved}, and this is consumer {consumer}: load each rank's own state, or "
            "one made with state_dict(all=True)"
        )


def _check_together(one: ConsumerState, other: ConsumerState) -> None:
    pairs: list[tuple[str, object, object]] = [
        ("attempts", one.attempt, other.attempt),
        ("numbers of consumers", one.consumers, other.consumers),
        ("split lists", one.splits, other.splits),
    ]
    if one.uneven != "allow":  # there each has its own streams, and takes steps of its own
        pairs.append(("steps", one.progress.step, other.progress.step))
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise apart(name, mine, theirs)


def apart(name: str, mine: object, theirs: object) -> StateMismatchError:
    return StateMismatchError(
        f"states of different {name} ({mine} and {theirs}) do not belong together; "
        "load the states that were saved at the same step"
    )


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"consumer{'s' if len(numbers) > 1 else ''} {shown}"


class _Rank:
    """One consumer's progress, with its streams and what is done to be looked up."""

    def __init__(self, progress: Progress) -> None:
        self.streams = {each.number: each for each in progress.streams}
        self.done = done_of(progress.done)


def resume_from(checkpoint: Checkpoint, *, epoch: int, consumers: int, feeds: Mapping[int, FeedSpec]) -> Resume:
    """Return the merged checkpoint. `feeds` are those of streams whose splits follow from the job."""
    first = checkpoint.first
    alike = len(checkpoint.states) == 1 and (first.consumers == 1 or first.consumer is None or first.alike)
    if len(checkpoint.states) < first.consumers and not alike:
        raise StateMismatchError(
            f"the service does not know attempt {first.attempt} any more (another service, or a lost journal), so the "
            f"states of all {first.consumers} ranks are needed: load the list of them on every rank"
        )
    ranks = [_Rank(state.progress) for state in checkpoint.states]
    if alike:
        ranks = ranks * first.consumers
    owned = first.uneven == "allow"
    done = _done_by(ranks, anybody=owned)
    streams = []
    for number in sorted({number for rank in ranks for number in rank.streams}):
        held = [rank.streams.get(number) for rank in ranks]
        merged = _highest(held) if owned else _lowest(held, ranks, done)
        merged = replace(merged, feed=merged.feed or feeds.get(number))
        if merged.ended and not merged.leftover:
            merged = _without_rest(merged)
        if first.consumers != consumers and not owned:
            merged = _with_width(merged, first.consumers, consumers, coordinated=first.coordinated)
        streams.append(merged)
    if owned:
        _check_tails(streams)
    width = first.width if first.alike else 0
    resume = Resume(epoch=epoch, consumers=consumers, streams=tuple(streams), done=ranges_of(done), width=width)
    same: Any = resume
    if first.alike:
        # Each rank may load its own state, and which cut stands for a place depends on how rounds came in frames.
        same = (epoch, consumers, first.progress.step, [(s.number, s.marks, s.ended) for s in streams])
    digest = hashlib.blake2b(msgspec.msgpack.encode((first.attempt, same)), digest_size=8).hexdigest()
    return replace(resume, digest=digest)


def _check_tails(streams: Sequence[Position]) -> None:
    """Refuse a stream from before its end where what it had left over then has been read.

    What lay between was granted to it one split after another, and no state names that: it might be granted to others,
    or in another order, and would leave something else over.
    """
    reading = {each.number for each in streams if not each.ended}
    for tail in streams:
        read = tail.round > 0 or tail.ended
        for left in tail.feed.leftovers if tail.feed is not None and read else ():
            if left.number in reading and left.feed.kind == "granted":
                raise StateMismatchError(
                    f"one of the states was saved before stream {left.number} had ended, and another when the epoch's "
                    "last elements were read, after it had; load the states that were saved at the same step"
                )


def begin_at(checkpoint: Checkpoint, *, consumers: int, done: tuple[Ranges, ...]) -> Progress:
    """Return where a consumer begins in an attempt that starts from the checkpoint; `done` is what was done there."""
    own, first = checkpoint.own, checkpoint.first
    if own is not None and (consumers == 1 or not own.alike):
        begins = own.progress
    else:
        # One that was not there before begins where the view says. So do all where one state stands for all: each
        # rank's own describes the same place in its own way (what came in one frame here came in two there).
        begins = Progress(step=first.progress.step, done=done, weights=first.progress.weights)
    return replace(begins, mixes=mixes_from(checkpoint, consumers=consumers))


def mixes_from(checkpoint: Checkpoint, *, consumers: int) -> tuple[tuple[int, Mixes], ...]:
    """Return from which round of each stream on which weights count, in an attempt that starts from the checkpoint."""
    first = checkpoint.first
    if first.consumers == consumers or first.uneven == "allow":
        return first.progress.mixes
    positions = {each.number: each for each in first.progress.streams}
    found: list[tuple[int, Mixes]] = []
    for number, mixes in first.progress.mixes:
        position = positions[number]
        at, weights = mixes[-1]
        if not position.ended and at > position.round - position.cut.since:
            raise StateMismatchError(
                "the state was saved just after the weights had changed; load it with the number of consumers it was "
                f"saved with, {first.consumers}, and save again a little later to change the number"
            )
        found.append((number, ((0, weights),)))  # rounds are counted anew
    return tuple(found)


def _lowest(held: Sequence[Position | None], ranks: Sequence[_Rank], done: DoneSplits) -> Position:
    known = next(position for position in held if position is not None)
    # A consumer whose state does not have it had not seen it when it was saved: it stood at its beginning.
    beginning = Position(known.number, cut=Cut(share=known.cut.share), feed=known.feed)
    positions = [beginning if position is None else position for position in held]
    lowest = min(range(len(positions)), key=lambda c: (positions[c].round, positions[c].ended))
    low = positions[lowest]
    named = low.cut.named if len(positions) == 1 else _named_by_any(positions, ranks[lowest], done)
    return Position(
        low.number,
        low.round,
        replace(low.cut, named=named),
        ended=all(position.ended for position in positions),
        leftover=any(position.leftover for position in positions),
        feed=low.feed,
        marks=tuple(position.round for position in positions),
    )


def _highest(held: Sequence[Position | None]) -> Position:
    high = max((one for one in held if one is not None), key=lambda position: (position.round, position.ended))
    return replace(high, trail=(), trail_lost=False)


def _named_by_any(positions: Iterable[Position], lowest: _Rank, done: DoneSplits) -> tuple[Named, ...]:
    """Return the splits that lie behind some position or are named by it and are not done, in the stream's order.

    They are more than the lowest position needs, where the rank that stands there is through with a split and another
    is not: that rank has seen the end of the stream, or took in one frame what the other has in two. A split that is
    neither done nor named would be granted again.
    """
    lists: dict[tuple[int, int], list[int]] = {}
    ended: set[tuple[int, int]] = set()
    for position in sorted(positions, key=lambda position: position.round):
        trail = list(splits_of(position.trail))
        if position.trail_lost and trail and trail[0][2] not in lowest.done.get(trail[0][:2], ()):
            raise StateMismatchError(
                f"consumers were too far apart in stream {position.number} when the states were saved: which splits "
                "lay between them is not known. Load the states into the service that ran the job"
            )
        behind = (Named(source, pass_, (ordinal,)) for source, pass_, ordinal in trail)
        for named in joined((*behind, *position.cut.named)):
            key = (named.source, named.pass_)
            stretch = [ordinal for ordinal in named.ordinals if ordinal not in done.get(key, ())]
            lists[key] = _woven(lists.get(key, []), stretch)
            if named.ended:
                ended.add(key)
    return tuple(Named(*key, tuple(lists[key]), key in ended) for key in sorted(lists) if lists[key] or key in ended)


def _woven(one: list[int], other: list[int]) -> list[int]:
    """Return two stretches of one list together, in its order; where they have nothing in common `other` comes after.

    >>> _woven([3, 6], [6, 2]), _woven([6, 2], [3, 6]), _woven([3], [6, 2])
    ([3, 6, 2], [3, 6, 2], [3, 6, 2])
    """
    common = next((ordinal for ordinal in other if ordinal in one), None)
    if common is None:
        return one + other
    here, there = one.index(common), other.index(common)
    return one[:here] + other[:there] + one[here:] + [ordinal for ordinal in other[there:] if ordinal not in one]


def _without_rest(stream: Position) -> Position:
    """Let a stream that ended with nothing left over stand at a cut that needs no split: all of its own are done.

    Its last cut may lie before its end, in rounds of an older number of consumers.
    """
    if stream.feed is not None and stream.feed.kind != "granted":
        return stream  # its splits follow from the job, so that from any cut the end is the same
    return replace(stream, cut=Cut(share=stream.cut.share))


def _with_width(stream: Position, old: int, new: int, *, coordinated: bool) -> Position:
    """Turn rounds of the old number of consumers into rounds of the new one."""
    feed = stream.feed
    if feed is not None and feed.leftovers:
        leftovers = tuple(
            Leftover(left.number, _counted_in(left.cut, (left.cut.since,) * old, coordinated=coordinated), left.feed)
            for left in feed.leftovers
        )
        feed = replace(feed, leftovers=leftovers)
    since = stream.cut.since
    given = (since,) * old if stream.ended else tuple(since + mark - stream.round for mark in stream.marks)
    cut = _counted_in(stream.cut, given, coordinated=coordinated)
    return replace(stream, cut=cut, round=0, marks=(0,) * new, feed=feed)


def _counted_in(cut: Cut, given: tuple[int, ...], *, coordinated: bool) -> Cut:
    """Return a cut that says itself what was received after it, for any number of consumers to go on from.

    `given` is how many rounds since the cut each of the old consumers has received.
    """
    if not any(given):
        return replace(cut, since=0)
    width = len(given)
    if cut.regroup is None:
        return replace(cut, since=0, regroup=Regroup(width, given))
    if coordinated:
        raise StateMismatchError(
            f"the state was saved just after the number of consumers had changed to {width}; load it with {width} "
            "consumers and save again a little later to change the number once more"
        )
    flags = flags_received(cut.regroup, width=width, given=given)
    return replace(cut, since=0, regroup=regroup_of(flags))


def _done_by(ranks: Sequence[_Rank], *, anybody: bool) -> DoneSplits:
    """Return what anybody is through with, or everybody."""
    sets = (set(rank.done) for rank in ranks)
    keys, join = (set.union(*sets), Intervals.union) if anybody else (set.intersection(*sets), Intervals.intersection)
    return {key: reduce(join, (rank.done[key] for rank in ranks if key in rank.done)) for key in keys}


_consumer_state = Conversion(ConsumerState)
