"""What the simulated consumers save, and how the states of all of them become one to resume from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from penstock.core.ids import AttemptId
from penstock.wire.jobs import Cut, Feed, Named, Ranges, Resume, StreamResume


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Where a consumer stands in a stream. `trail` are the splits behind it, in order."""

    number: int
    cut: Cut = Cut()
    round: int = 0
    ended: bool = False
    leftover: bool = False
    feed: Feed | None = None
    trail: tuple[int, ...] = ()

    def after(self, cut: Cut, done: Sequence[int]) -> Mark:
        return msgspec.structs.replace(self, cut=cut, round=self.round + 1, trail=(*self.trail, *done))

    def at_end(self, cut: Cut, *, leftover: bool) -> Mark:
        return msgspec.structs.replace(self, cut=cut, ended=True, leftover=leftover)

    @property
    def opened(self) -> tuple[int, ...]:
        return (*self.trail, *(o for named in self.cut.named for o in named.ordinals))


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer's checkpoint."""

    attempt: AttemptId | None = None
    marks: Mapping[int, Mark] = {}
    done: frozenset[int] = frozenset()
    fed_from: int = 0
    """The step at which the attempt began, of a job that its consumer feeds."""


def resume_from(states: Sequence[Saved], epoch: int, *, owned: bool) -> Resume:
    """Merge: of every stream the lowest place, naming all splits from there to the highest; done: what all are past.

    `owned`: a stream has one reader, whose place it is; done is what anybody is past.
    """
    numbers = sorted({number for state in states for number in state.marks})
    all_marks = [[state.marks.get(number) for state in states] for number in numbers]
    streams = tuple(_owners(marks) if owned else _merge(marks) for marks in all_marks)
    done = (frozenset.union if owned else frozenset.intersection)(*(state.done for state in states))
    ranges = (Ranges(0, 0, tuple((o, o + 1) for o in sorted(done))),) if done else ()
    resume = Resume(epoch=epoch, consumers=len(states), streams=streams, done=ranges)
    text = msgspec.msgpack.encode((states[0].attempt, resume))
    return msgspec.structs.replace(resume, digest=hashlib.blake2b(text, digest_size=8).hexdigest())


def _owners(marks: Sequence[Mark | None]) -> StreamResume:
    (mark,) = (mark for mark in marks if mark is not None)
    return StreamResume(number=mark.number, cut=mark.cut, round=mark.round, marks=(), feed=mark.feed, ended=mark.ended)


def _merge(marks: Sequence[Mark | None]) -> StreamResume:
    known = [mark for mark in marks if mark is not None]
    beginning = Mark(number=known[0].number, feed=known[0].feed)
    all_marks = [beginning if mark is None else mark for mark in marks]
    low = min(all_marks, key=lambda mark: (mark.round, mark.ended))
    high = max(all_marks, key=lambda mark: (mark.round, mark.ended))
    cut = low.cut
    if low.feed is None:
        behind = set(low.trail)
        named = tuple(o for o in high.opened if o not in behind)
        cut = msgspec.structs.replace(cut, named=(Named(0, 0, named),) if named else ())
    return StreamResume(
        number=low.number,
        cut=cut,
        round=low.round,
        marks=tuple(mark.round for mark in all_marks),
        feed=low.feed,
        ended=all(mark.ended for mark in all_marks),
    )
