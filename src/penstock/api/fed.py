"""Reading an epoch in this process in the order of a sampler: the fourth way to read.

A run here may leave elements out, unlike one on workers: with `filter` or `on_error` a list of the sampler's becomes a
batch of what is left of it, and single indices are batched as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from penstock.api.epochs import Epoch, Loaded, save
from penstock.api.iteration import Plan, given_seed
from penstock.api.states import PipelineSignature, SavedState
from penstock.api.statistics import LoaderStatistics, statistics_here
from penstock.core.element import Element
from penstock.core.errors import InvalidArgumentError, StateMismatchError
from penstock.graph.traverse import walk
from penstock.passes import optimize
from penstock.runtime.budget import default_budget
from penstock.runtime.iterator import Run
from penstock.runtime.streams import StreamPart, UnitRows, places
from penstock.samplers.drawing import Drawing, Feed, SamplerPlace
from penstock.samplers.local_units import LocalUnits
from penstock.samplers.pipelines import check_fed_here, grouping_of, not_indexable, with_batches
from penstock.sources.base import IndexableSource
from penstock.stream.checkpoint import Weights
from penstock.submission.options import JobOptions


class FedHere:
    """A dataset and the sampler that says what is read of it."""

    def __init__(
        self,
        plan: Plan,
        options: JobOptions,
        *,
        threads: int | None,
        memory_bytes: int | None,
        drawn: int | None,
    ) -> None:
        assert options.feed is not None
        self.options = options
        self._plan, self._feed, self._drawn = plan, options.feed, drawn
        self._source, self._skips = check_fed_here(plan.node)
        self._budget = default_budget(threads, memory_bytes)
        self._lists: bool | None = None

    @property
    def signature(self) -> PipelineSignature:
        return self._plan.signature

    @property
    def feed(self) -> Feed:
        return self._feed

    def length(self) -> int | None:
        """Return how many outputs an epoch has, where the sampler says and nothing is left out."""
        return None if self._skips else self._feed.length(grouping_of(self._plan.node), self._lists)

    def seed_of(self, seed: int | None) -> int:
        found = (seed, given_seed(walk(self._plan.node)), self._drawn)
        return next((each for each in found if each is not None), self._plan.seed)

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None, weights: Weights | None) -> Epoch:
        source = self._plan.source_of(self._source)
        if not isinstance(source, IndexableSource):
            raise not_indexable(self._source)
        place = {"operators": None, "fed": None} if loaded is None or loaded.place is None else loaded.place
        drawing = Drawing(
            self._feed,
            epoch=epoch,
            grouping=grouping_of(self._plan.node),
            count=len(source),
            at=None if place["fed"] is None else SamplerPlace.read(place["fed"]),
        )
        self._lists = drawing.lists if self._lists is None else self._lists
        units: UnitRows = "whole" if not self._skips else "thinned" if self._lists else "loose"
        graph = with_batches(self._plan.node) if self._lists else self._plan.node
        feed = LocalUnits(drawing, self._feed.ahead)
        run = Run(
            # Fused with a batch, operators could not leave rows of a list out.
            graph if units == "thinned" else optimize(graph),
            seed=self.seed_of(seed),
            epoch=epoch,
            budget=self._budget,
            source_of=self._plan.source_of,
            part=StreamPart(feed=feed, units=units),
        )
        try:
            run.open(epoch, place["operators"])
        except BaseException:
            feed.stop()
            run.close()
            raise
        return _FedEpoch(self, run, feed, epoch, self.seed_of(seed))

    def place_of(self, saved: Sequence[SavedState], changed: bool) -> Any:
        if len(saved) > 1:
            raise StateMismatchError(
                f"{len(saved)} states for a loader with feed=: where other samplers stood says nothing about this one; "
                "give it its own"
            )
        place = saved[0].place
        if not isinstance(place, dict) or "fed" not in place:
            raise StateMismatchError(
                "the state was saved by a loader without feed=, or by one over a service; load it there"
            )
        return place


class _FedEpoch:
    def __init__(self, kind: FedHere, run: Run, feed: LocalUnits, epoch: int, seed: int) -> None:
        self._kind, self._run, self._feed = kind, run, feed
        self._epoch, self._seed = epoch, seed
        self.elements: Iterator[Element] = _Reader(run, feed)

    def note_state(self) -> Callable[[], dict[str, Any]]:
        ended = self._run.ended
        operators = self._run.state()
        fed = self._feed.place(_ordinal(operators))
        return partial(
            save,
            self._kind,
            epoch=self._epoch,
            seed=self._seed,
            phase="ended" if ended else "reading",
            weights=None,
            skipped=self._run.skipped,
            place=None if ended else {"operators": operators, "fed": fed.plain()},
        )

    def set_weights(self, weights: Weights) -> None:
        raise InvalidArgumentError("set_weights() with feed=: what a sampler names is not mixed")

    def statistics(self) -> LoaderStatistics:
        return statistics_here(self._run.statistics())

    def close(self, why: Exception | None = None) -> None:
        self._feed.stop()
        self._run.close(why)


class _Reader:
    """Reads the run, and lets the sampler be drawn from meanwhile."""

    def __init__(self, run: Run, feed: LocalUnits) -> None:
        self._run, self._feed = run, feed
        weakref.finalize(self, feed.stop)  # threads that wait for more must not outlive their reader

    def __iter__(self) -> Iterator[Element]:
        return self

    def __next__(self) -> Element:
        at = _ordinal(self._run.state())
        self._feed.reader_came(0 if at is None else at)
        try:
            return self._run.__next__()
        finally:
            self._feed.reader_left()


def _ordinal(state: Any) -> int | None:
    """Return the first unit that a state needs; None: it is the end. Before anything was read it is the first."""
    if state is None:
        return 0
    found = [place.ordinal for place in places(state)]
    return None if -1 in found else min(found, default=0)
