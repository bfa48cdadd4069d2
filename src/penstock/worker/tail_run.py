"""The run of a tail: it begins with what lies in gaps, and only then takes what is left of its leftovers.

Where the number of consumers changed, the last outputs of a stream may have been received in part: outputs that nobody
has stand before ones that somebody has. If the stream ends there, its leftover has these gaps. What is in them are
whole outputs, so they are made as their own stream made them and given as they are; regrouping is for what comes after
the last received one. The state there is `["gaps", outputs of gaps given]`: they are fewer than a round a leftover, so
opened in their middle they are made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec.structs import replace

from penstock.core.element import Element
from penstock.runtime.budget import Budget
from penstock.runtime.contract import Chunk, Computed, State
from penstock.runtime.iterator import PipelineArguments, Run
from penstock.runtime.streams import StreamPart, StreamStopped
from penstock.wire.jobs import Leftover
from penstock.wire.received import gaps_in, received
from penstock.worker.feeds import leftover_feed

GAPS = "gaps"


class TailRun(Run):
    """See the module. `width` is how many consumers the rounds of `leftovers` were for."""

    def __init__(
        self,
        pipeline: PipelineArguments,
        *,
        budget: Budget,
        part: StreamPart,
        leftovers: Sequence[Leftover],
        width: int,
        split_counts: Sequence[int],
    ) -> None:
        super().__init__(**pipeline, budget=budget, part=part)

        def run_of(leftover: Leftover) -> Run:
            own = replace(
                part,
                feed=leftover_feed(leftover, split_counts),
                rest="keep",
                shuffle_parts=leftover.cut.share,
                keep=leftover.feed.keep,
                leftovers=(),
            )
            return Run(**pipeline, budget=replace(budget, threads=1), part=own)

        self._run_of = run_of
        found = [(leftover, gaps_in(received(leftover.cut, width))) for leftover in leftovers]
        self._gaps = [(leftover, gaps) for leftover, gaps in found if gaps]
        self._in_gaps = sum(stop - start for _, gaps in self._gaps for start, stop in gaps)
        self._given = self._in_gaps
        self._outputs: Iterator[Element] = iter(())

    def open(self, pass_: int, state: State) -> None:
        self._given = self._in_gaps
        if state is None or state[0] == GAPS:
            self._given = 0 if state is None else state[1]
            self._outputs = islice(self._make_gaps(pass_), self._given, None)
            state = None
        super().open(pass_, state)

    def close(self, why: Exception | None = None) -> None:
        super().close(why)
        self._outputs = iter(())  # what makes them refers back to this

    def pull(self, want: int) -> Chunk:
        if self._given < self._in_gaps:
            elements = list(islice(self._outputs, want))
            if elements:
                given = self._given
                self._given += len(elements)
                return Chunk(elements, Computed(lambda k: [GAPS, given + k]))
            self._given = self._in_gaps
        return super().pull(want)

    def _make_gaps(self, pass_: int) -> Iterator[Element]:
        for leftover, gaps in self._gaps:
            run = self._run_of(leftover)
            try:
                run.open(pass_, leftover.cut.engine)
                made = 0
                for start, stop in gaps:
                    # What comes before was received: it is made and let go of.
                    while made < stop and (elements := self._pull_from(run, (start if made < start else stop) - made)):
                        made += len(elements)
                        if made > start:
                            yield from elements
            finally:
                run.close()

    def _pull_from(self, run: Run, want: int) -> Sequence[Element]:
        if self.closed:
            raise StreamStopped
        return run.pull(want).elements
