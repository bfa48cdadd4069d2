"""mix: elements of several inputs in proportion to weights.

No dice: the next element comes from the input that is furthest behind its share, so the proportions hold at every
moment to within one element, also after a resume. The state is, per input, `[pass, state, units given, ended]`.

A stream may be given weights of its own, which then stand at the end of its states. Where a state was made with others,
units are counted anew: shares hold from there on, and nothing is caught up with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from penstock.core.element import Element
from penstock.core.errors import EmptyInputError
from penstock.graph import ops
from penstock.runtime.blame import blame
from penstock.runtime.building import Site, builds
from penstock.runtime.contract import Chunk, Fixed, Idents, Marks, Origin, Stage, State
from penstock.runtime.empty_passes import MOST_EMPTY, EmptyPasses
from penstock.runtime.pass_numbers import PassesOver
from penstock.runtime.stats import StageMeter


class _Input(msgspec.Struct):
    stage: Stage
    weight: float
    passes_over: PassesOver
    empty: EmptyPasses
    pass_: int = 0
    units: float = 0.0
    ended: bool = False
    chunk: Chunk | None = None
    next: int = 0

    @property
    def place(self) -> tuple[Marks, int]:
        assert self.chunk is not None
        return self.chunk.marks, self.next


class _InputAt(msgspec.Struct, frozen=True):
    """Where an input stood at the start of an output chunk."""

    pass_: int
    place: tuple[Marks, int]
    units: float
    ended: bool


class _MixMarks(msgspec.Struct, frozen=True):
    before: Sequence[_InputAt]
    picks: Sequence[tuple[int, float]]
    weights: Sequence[float] | None
    """The weights to keep in the state."""

    def at(self, k: int) -> State:
        taken, units = [0] * len(self.before), [start.units for start in self.before]
        for source, amount in self.picks[:k]:
            taken[source] += 1
            units[source] += amount
        inputs: list[State] = [
            [start.pass_, start.place[0].at(start.place[1] + taken[i]), units[i], int(start.ended)]
            for i, start in enumerate(self.before)
        ]
        return inputs if self.weights is None else [*inputs, list(self.weights)]

    def origin(self, k: int) -> Origin | None:
        source = self.picks[k][0]
        marks, at = self.before[source].place
        return marks.origin(at + sum(1 for pick, _ in self.picks[:k] if pick == source))


class Mixing(Stage):
    def __init__(
        self,
        meter: StageMeter,
        upstreams: Sequence[Stage],
        *,
        label: str,
        weights: Sequence[float],
        unit: Callable[[Element], float] | None,
        stop: ops.MixStop,
        passes_over: Sequence[PassesOver],
        empty: Sequence[EmptyPasses],
        given_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(meter, *upstreams)
        self._label = label
        self._weights = weights
        self._given_weights = given_weights
        self._unit = unit
        self._stop = stop
        self._passes_over = passes_over
        self._empty = empty
        self._stopped = False

    def open(self, pass_: int, state: State) -> None:
        self._outer_pass = pass_
        weights = self._given_weights or self._weights
        self._sources = [_Input(*each) for each in zip(self.inputs, weights, self._passes_over, self._empty)]
        saved_inputs = state or [[0, None, 0.0, 0]] * len(self._sources)
        saved_weights = saved_inputs[len(self._sources)] if len(saved_inputs) > len(self._sources) else self._weights
        for source, saved in zip(self._sources, saved_inputs):
            source.pass_, place, units, ended = saved
            source.units = units if list(saved_weights) == list(weights) else 0.0
            source.ended = bool(ended)
            source.stage.open(self._inner_pass(source), place)
            source.chunk = Chunk((), Fixed(place))
        self._over = False
        self._error: BaseException | None = None

    def _inner_pass(self, source: _Input) -> int:
        return source.passes_over.number(self._outer_pass, source.pass_)

    def _pull(self, want: int) -> Chunk:
        if self._error is not None:
            raise self._error
        out: list[Element] = []
        picks: list[tuple[int, float]] = []
        idents: list[Idents] = []
        before: list[_InputAt] | None = None
        while len(out) < want and not self._over and not self._stopped:
            number = self._furthest_behind()
            if number is None:
                break
            source = self._sources[number]
            assert source.chunk is not None
            if source.next == len(source.chunk.elements):
                if out:
                    break  # asking the input is for the next pull: what is made is given first
                self._ask(source, want)
                continue
            before = before or self._stand()
            element = source.chunk.elements[source.next]
            try:
                amount = 1.0 if self._unit is None else float(self._unit(element))
            except Exception as error:
                self._error = blame(error, self._label, source.chunk.marks.origin(source.next))
                break
            if source.chunk.idents is not None:
                idents.append(source.chunk.idents[source.next : source.next + 1])
            out.append(element)
            picks.append((number, amount))
            source.units += amount
            source.next += 1
        if self._error is not None and not out:
            raise self._error
        if before is None:
            return Chunk((), _MixMarks(self._stand(), (), self._given_weights))
        marks = _MixMarks(before, picks, self._given_weights)
        return Chunk(out, marks, np.concatenate(idents) if idents else None)

    def _stand(self) -> list[_InputAt]:
        return [_InputAt(s.pass_, s.place, s.units, s.ended) for s in self._sources]

    def _furthest_behind(self) -> int | None:
        best, best_share = None, 0.0
        for i, source in enumerate(self._sources):
            if source.weight and not source.ended:
                share = source.units / source.weight
                if best is None or share < best_share:
                    best, best_share = i, share
        return best

    def _ask(self, source: _Input, want: int) -> None:
        chunk = source.stage.pull(want)
        if not chunk.elements:
            if self._stop == "first":
                self._over = True
            elif self._stop == "all":
                source.ended = True
            elif source.passes_over.count != ops.NEVER_ENDS:
                self._give_up(source)  # it never ends by itself, so it has given up
            else:
                chunk = self._next_pass(source, want)
        source.chunk, source.next = chunk, 0

    def _next_pass(self, source: _Input, want: int) -> Chunk:
        """Return the first chunk of the next pass, or of one after it: see `EmptyPasses`."""
        source.empty.gave()
        while True:
            source.pass_ += 1
            source.empty.begin_pass()
            source.stage.open(self._inner_pass(source), None)
            source.chunk, source.next = Chunk((), Fixed(None)), 0
            chunk = source.stage.pull(want)
            if chunk.elements or self._stopped:
                return chunk
            if source.empty.were_enough() or source.empty.certain:
                self._give_up(source)
                return chunk

    def _give_up(self, source: _Input) -> None:
        if self._stopped:
            return
        if not source.empty.certain:
            raise self._nothing_of(source)
        source.ended = True

    def _nothing_of(self, source: _Input) -> EmptyInputError:
        number = next(number for number, one in enumerate(self._sources) if one is source)
        return EmptyInputError(
            f"{self._label}: input {number} gave a stream nothing in {MOST_EMPTY} passes, so that "
            "it would be left out of what this stream gives; give that input more data or a filter that keeps some of "
            "every file, use fewer streams, or leave the input out"
        )

    def stop(self) -> None:
        self._stopped = True
        super().stop()


@builds(ops.Mix)
def _mixing(node: ops.Mix, at: Site, *upstreams: Stage) -> Stage:
    return Mixing(
        at.meter,
        upstreams,
        label=at.meter.label,
        weights=node.weights,
        given_weights=at.placement.mix_weights,
        unit=None if node.unit is None else node.unit.resolve(),
        stop=node.stop,
        passes_over=[at.passes_over(node, upstream) for upstream in node.inputs],
        empty=[at.empty_passes(upstream) for upstream in node.inputs],
    )
