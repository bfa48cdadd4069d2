"""From a checkpoint to an iteration: streams at their cuts, and a ledger that grants only what is left.

All splits of a pass = done + named by a cut + left. Done and named ones are never granted again; a stream's list begins
with the ones its cut names.

What is left may include splits that were granted and that no cut names, because their stream had not opened them.
Another stream was told that there is no more of that pass, and went on to the next one, or to another source. It may be
made again from inside the older pass, since a rank lags behind or a frame was only half taken, and ranks have received
what it made after that pass. One more split there would move all of it: elements would be lost, and others given twice.
So a stream is granted nothing more of a pass that its cut says has ended for it, nor of one before the latest that the
cut names. Other streams read what is left.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.control.ledger import Cursor, Ledger
from penstock.control.records import Iteration, Stream, Streams
from penstock.core.checks import check_count
from penstock.core.errors import InvalidArgumentError
from penstock.core.ids import AttemptId, StreamId, stream_id
from penstock.wire.jobs import Cut, FeedSpec, JobSpec, Position, Resume, delivery_of

GRANTED = FeedSpec(kind="granted")


def new_iteration(spec: JobSpec, attempt: AttemptId, epoch: int, resume: Resume | None) -> Iteration:
    if resume is None:
        return Iteration(attempt=attempt, epoch=epoch, ledger=Ledger(counts=spec.split_counts, lists={}, cursors={}))
    kept = _without_idle_tails(resume.streams)
    streams = {s.stream: s for s in (_stream(spec, attempt, held, resume) for held in kept)}
    tail = next((s for s in streams.values() if s.feed.kind == "tail"), None)
    return Iteration(
        attempt=attempt,
        epoch=epoch,
        digest=resume.digest,
        done_before=resume.done,
        width=resume.width,
        streams=Streams(streams),
        first_number=1 + max((held.number for held in resume.streams), default=-1),
        ledger=_ledger(spec, attempt, resume, kept),
        tail=None if tail is None else tail.stream,
        # A tail may have ended before a stream whose reader came back from before the stream's end.
        finished=tail is not None and all(stream.ended for stream in streams.values()),
    )


def resume_misfit(spec: JobSpec, resume: Resume) -> str:
    """Return why a job cannot go on from a checkpoint, in words; empty: it can."""
    sources = {done.source for done in resume.done}
    sources |= {named.source for held in resume.streams for cut in _cuts(held) for named in cut.named}
    if not sources <= set(range(len(spec.split_counts))):
        return f"the checkpoint speaks of source {max(sources)}, and the job has {len(spec.split_counts)}"
    if any(held.number < 0 or held.round < 0 for held in resume.streams):
        return "the checkpoint has streams or rounds below 0"
    if resume.width:
        try:
            check_count("streams", resume.width)
            if not spec.feeds:
                spec.with_streams(resume.width)
        except InvalidArgumentError as error:
            return f"the checkpoint's streams do not fit: {error}"
    return ""


def _without_idle_tails(streams: tuple[Position, ...]) -> tuple[Position, ...]:
    """Leave out a tail of which nothing was given.

    Its leftovers are those of the old lists of splits, and streams that had not ended for all consumers get new ones.
    When all have ended, it is made again. When one was made of which something was given, all others had ended: what
    they had left over is in it, and one that is read again from before its end leaves nothing else.
    """
    return tuple(held for held in streams if held.feed is None or held.feed.kind != "tail" or _is_under_way(held))


def _is_under_way(held: Position) -> bool:
    cut = held.cut
    return held.ended or held.round > 0 or cut.engine is not None or cut.since > 0 or cut.regroup is not None


def _stream(spec: JobSpec, attempt: AttemptId, held: Position, resume: Resume) -> Stream:
    same = resume.consumers == spec.ranks.count
    feed = GRANTED if held.feed is None else held.feed
    owner = delivery_of(spec).owner_of(held.number, feed)
    readers = range(spec.ranks.count) if owner is None else (owner,)
    return Stream(
        stream=stream_id(attempt, held.number),
        number=held.number,
        feed=feed,
        share=held.cut.share,
        start=held.cut,
        first_round=held.round if same else 0,
        marks=held.marks if same else (),
        owner=owner,
        ended=held.ended,
        ended_by=dict.fromkeys(readers, held.round) if held.ended else {},
        leftover=held.cut if held.ended else None,
    )


def _ledger(spec: JobSpec, attempt: AttemptId, resume: Resume, kept: tuple[Position, ...]) -> Ledger:
    taken: dict[tuple[int, int], set[int]] = {}
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    lists: dict[tuple[StreamId, int, int], list[int]] = {}
    reached: dict[tuple[StreamId, int], int] = {}
    for done in resume.done:
        ranges.setdefault((done.source, done.pass_), []).extend(done.ranges)
    for held in kept:
        for cut in _cuts(held):
            for named in cut.named:
                taken.setdefault((named.source, named.pass_), set()).update(named.ordinals)
        if held.feed is None or held.feed.kind == "granted":
            stream = stream_id(attempt, held.number)
            for named in held.cut.named:
                lists.setdefault((stream, named.source, named.pass_), []).extend(named.ordinals)
                first_left = named.pass_ + named.ended
                reached[stream, named.source] = max(first_left, reached.get((stream, named.source), 0))
    cursors: dict[tuple[int, int], Cursor] = {}
    for key in sorted({*taken, *ranges}):
        singles = ((o, o + 1) for o in taken.get(key, ()))
        merged = merge_ranges([*ranges.get(key, ()), *singles])
        count = spec.split_counts[key[0]]
        cursors[key] = Cursor(count=count, left=count - sum(stop - start for start, stop in merged), taken=merged)
    return Ledger(counts=spec.split_counts, lists=lists, cursors=cursors, reached=reached)


def _cuts(held: Position) -> Iterable[Cut]:
    yield held.cut
    if held.feed is not None:
        for leftover in held.feed.leftovers:
            yield leftover.cut


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """
    >>> merge_ranges([(4, 6), (0, 2), (2, 3), (5, 9), (7, 7)])
    [(0, 3), (4, 9)]
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
