"""What the trainer has received: for each stream its next round and the cut there, and which splits are done.

Rules: only what `next()` returned counts; a frame's cut is taken when its last round is, and inside a frame the state
is the cut before it and the number of rounds since. Everything written is plain (ints, strings, lists), a few hundred
bytes a stream, and made only when asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.client.ranges import RangeSet
from penstock.client.sampling import Place
from penstock.core.errors import StateMismatchError
from penstock.core.ids import AttemptId
from penstock.wire.jobs import Cut, Feed, Named

Phase: TypeAlias = Literal["start", "reading", "ended"]
"""start: nothing was read of the epoch. ended: the loop has ended, and the next epoch is due."""

Weights: TypeAlias = tuple[float, ...]
Mixes: TypeAlias = tuple[tuple[int, Weights], ...]
"""(round, weights): from that round on these count. In the order of the changes; of two at a round the last counts."""

TRAIL = 64
"""How many finished splits of a stream are remembered by name, where several consumers read it in relaxed order: one
that lags behind needs them named. Consumers are at most a window and a runner's buffer apart: a few splits."""

_OPEN, _ENDED, _ENDED_WITH_REST = 0, 1, 2


@dataclass(slots=True)
class StreamMark:
    """Where the trainer stands in one stream. `cut` is the state before `cut_round`, which is not after `round`."""

    number: int
    round: int = 0
    cut: Cut = field(default_factory=Cut)
    cut_round: int = 0
    ended: bool = False
    leftover: bool = False
    """The stream ended with more after `cut` than whole rounds could take."""
    feed: Feed | None = None
    """Kept for the tail only: other feeds follow from the job."""
    trail: deque[tuple[int, int, int]] | None = None
    """(source, pass, ordinal) of the last splits done in this stream, oldest first."""
    trail_lost: bool = False
    opened: tuple[Named, ...] = ()
    """Splits that the rounds after `cut` are made of, where the trainer stands in the middle of a frame: the cut before
    it does not name them, and a state names all it needs."""

    def cut_here(self) -> Cut:
        ahead = self.round - self.cut_round
        if not ahead:
            return self.cut
        named = _joined(self.cut.named, self.opened) if self.opened else self.cut.named
        return msgspec.structs.replace(self.cut, since=self.cut.since + ahead, named=named)

    def reach(self, cut: Cut) -> None:
        """Take over the cut that stands just here."""
        self.cut, self.cut_round, self.opened = cut, self.round, ()

    def copy(self) -> StreamMark:
        trail = None if self.trail is None else deque(self.trail, TRAIL)
        return StreamMark(
            self.number,
            self.round,
            self.cut,
            self.cut_round,
            self.ended,
            self.leftover,
            self.feed,
            trail,
            self.trail_lost,
            self.opened,
        )


@dataclass(slots=True)
class Progress:
    """One consumer's reading of one epoch."""

    streams: dict[int, StreamMark] = field(default_factory=dict)
    done: dict[tuple[int, int], RangeSet] = field(default_factory=dict)
    step: int = 0
    next_stream: int | None = None
    """Which stream the next element came from, where that is known: see `client.stage`."""
    fed: Place | None = None
    """Where the consumer's own sampler stood, where that is written down already."""
    weights: Weights | None = None
    """What a mix goes by from here on, where it was changed; None: the pipeline's own."""
    mixes: dict[int, Mixes] = field(default_factory=dict)
    """By stream: from which round on which weights counted."""

    def add_done(self, mark: StreamMark, named: Iterable[Named]) -> None:
        for each in named:
            ranges = self.done.get((each.source, each.pass_))
            if ranges is None:
                ranges = self.done[each.source, each.pass_] = RangeSet()
            for ordinal in each.ordinals:
                ranges.add(ordinal)
                if mark.trail is not None:
                    mark.trail_lost |= len(mark.trail) == TRAIL
                    mark.trail.append((each.source, each.pass_, ordinal))

    def copy(self) -> Progress:
        return Progress(
            {number: mark.copy() for number, mark in self.streams.items()},
            {key: ranges.copy() for key, ranges in self.done.items()},
            self.step,
            self.next_stream,
            self.fed,
            self.weights,
            dict(self.mixes),
        )

    def set_weights(self, weights: Weights, *, keep_all: bool) -> None:
        """Let others count from here on. `keep_all`: changes before what a stream's cut needs are kept too."""
        self.weights = weights
        for number, mark in self.streams.items():
            if mark.ended:
                continue
            made_until = mark.cut_round - mark.cut.since
            changes = (*self.mixes.get(number, ()), (mark.round, weights))
            needed = max((k for k, change in enumerate(changes) if change[0] <= made_until), default=0)
            self.mixes[number] = changes if keep_all else changes[needed:]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return {
            "step": self.step,
            **({} if self.next_stream is None else {"next": self.next_stream}),
            "streams": [_plain_mark(mark) for mark in self.streams.values()],
            "done": [[*key, [list(r) for r in ranges.ranges()]] for key, ranges in self.done.items() if len(ranges)],
            **({} if self.weights is None else {"weights": list(self.weights), "mixes": self._plain_mixes()}),
        }

    def _plain_mixes(self) -> list[list[Any]]:
        return [[number, [[at, list(weights)] for at, weights in mixes]] for number, mixes in self.mixes.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """A state as it was saved: whose it is, and the progress."""

    epoch: int
    seed: int
    attempt: AttemptId
    consumers: int
    consumer: int | None
    """None: the same for every consumer."""
    phase: Phase
    splits: str
    """Of the split list."""
    streams: int
    """How many the job had, where that was its to say."""
    order: str
    uneven: str
    pipeline: list[list[str]]
    progress: Progress
    coordinated: bool = False
    fed: Place | None = None
    """Where the consumer's own sampler stood, of a job that it feeds."""

    @property
    def alike(self) -> bool:
        """Consumers take rounds in turn: after the same number of steps all of them stand at the same place."""
        return self.order == "deterministic" or self.coordinated

    def plain(self) -> dict[str, Any]:
        return {
            "version": 1,
            "epoch": self.epoch,
            "seed": self.seed,
            "attempt": self.attempt,
            "consumers": self.consumers,
            "consumer": self.consumer,
            "phase": self.phase,
            "splits": self.splits,
            "width": self.streams,
            "order": self.order,
            "uneven": self.uneven,
            **({"coordinated": True} if self.coordinated else {}),
            **({"fed": self.fed.plain()} if self.fed is not None else {}),
            "pipeline": self.pipeline,
            **self.progress.plain(),
        }

    @staticmethod
    def read(state: Mapping[str, Any]) -> EpochState:
        try:
            return EpochState(
                epoch=state["epoch"],
                seed=state["seed"],
                attempt=AttemptId(state["attempt"]),
                consumers=state["consumers"],
                consumer=state["consumer"],
                phase=state["phase"],
                splits=state["splits"],
                streams=state["width"],
                order=state["order"],
                uneven=state["uneven"],
                coordinated=bool(state.get("coordinated", False)),
                fed=Place.read(state["fed"]) if "fed" in state else None,
                pipeline=state["pipeline"],
                progress=_read_progress(state),
            )
        except KeyError as missing:
            raise StateMismatchError(
                f"the state has no {missing.args[0]!r}: it was not made by a loader's state_dict()"
            ) from None
        except (TypeError, ValueError, IndexError, msgspec.ValidationError) as error:
            raise StateMismatchError(f"the state is damaged: {error}") from None


def _joined(named: tuple[Named, ...], more: tuple[Named, ...]) -> tuple[Named, ...]:
    """Return the splits of both, each once, in the order of the stream."""
    lists: dict[tuple[int, int], dict[int, None]] = {}
    for each in (*named, *more):
        lists.setdefault((each.source, each.pass_), {}).update(dict.fromkeys(each.ordinals))
    return tuple(Named(source, pass_, tuple(ordinals)) for (source, pass_), ordinals in lists.items())


def _plain_mark(mark: StreamMark) -> list[Any]:
    flag = _OPEN if not mark.ended else _ENDED_WITH_REST if mark.leftover else _ENDED
    plain: list[Any] = [mark.number, mark.round, flag, _plain_cut(mark.cut_here())]
    if mark.feed is not None or mark.trail:
        plain.append(None if mark.feed is None else _as_json(mark.feed))
    if mark.trail:
        plain.append([int(mark.trail_lost), *_plain_trail(mark.trail)])
    return plain


def _plain_cut(cut: Cut) -> list[Any]:
    """
    >>> _plain_cut(Cut()), _plain_cut(Cut(engine=[3]))
    ([], [[3]])
    """
    values: list[Any] = _as_json(cut)
    defaults: list[Any] = [None, 0, [], 1, None]
    while values and values[-1] == defaults[len(values) - 1]:
        values.pop()
    return values


def _as_json(record: msgspec.Struct) -> Any:
    """Return it as it will be after a way through JSON: lists, no tuples."""
    return msgspec.json.decode(msgspec.json.encode(record))


def _plain_trail(trail: Iterable[tuple[int, int, int]]) -> list[list[Any]]:
    """Return runs of [source, pass, [first, count, step, ...]]: ordinals that follow each other at one distance.

    >>> _plain_trail([(0, 0, 2), (0, 0, 6), (0, 0, 10), (0, 0, 11), (0, 1, 4)])
    [[0, 0, [2, 3, 4, 11, 1, 1]], [0, 1, [4, 1, 1]]]
    """
    runs: list[list[Any]] = []
    for source, pass_, ordinal in trail:
        if not runs or runs[-1][:2] != [source, pass_]:
            runs.append([source, pass_, []])
        places = runs[-1][2]
        if places:
            first, count, step = places[-3:]
            if count == 1 and ordinal > first:
                places[-2:] = [2, ordinal - first]
                continue
            if ordinal == first + count * step:
                places[-2] += 1
                continue
        places += [ordinal, 1, 1]
    return runs


def _trail_of(runs: Iterable[list[Any]]) -> Iterator[tuple[int, int, int]]:
    for source, pass_, places in runs:
        for first, count, step in zip(places[::3], places[1::3], places[2::3]):
            yield from ((source, pass_, first + k * step) for k in range(count))


def _read_progress(state: Mapping[str, Any]) -> Progress:
    marks = (_read_mark(plain) for plain in state["streams"])
    return Progress(
        streams={mark.number: mark for mark in marks},
        done={(source, pass_): RangeSet((a, b) for a, b in ranges) for source, pass_, ranges in state["done"]},
        step=int(state["step"]),
        next_stream=state.get("next"),
        weights=tuple(map(float, state["weights"])) if "weights" in state else None,
        mixes={
            int(number): tuple((int(at), tuple(map(float, weights))) for at, weights in mixes)
            for number, mixes in state.get("mixes", ())
        },
    )


def _read_mark(plain: list[Any]) -> StreamMark:
    number, round_, flag, cut, *rest = plain
    feed = msgspec.convert(rest[0], Feed) if rest and rest[0] is not None else None
    mark = StreamMark(int(number), int(round_), msgspec.convert(cut, Cut), int(round_), flag != _OPEN, False, feed)
    mark.leftover = flag == _ENDED_WITH_REST
    if len(rest) > 1:
        lost, *runs = rest[1]
        mark.trail_lost = bool(lost)
        mark.trail = deque(_trail_of(runs), TRAIL)
    return mark
