"""Reading an epoch through a service that feeds a pipeline here: operators stand after `distribute`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.api.epochs import Epoch, FromService, Loaded, save, walk_through
from penstock.api.iteration import given_seed
from penstock.api.states import (
    PipelineSignature,
    SavedState,
    kind_of,
    merged,
    parts_in,
    places_of,
    signature_of,
    with_all_parts,
)
from penstock.api.statistics import LoaderStatistics, statistics_here, statistics_of
from penstock.client.session import Beginning
from penstock.client.stage import ServiceStage
from penstock.core.element import Element
from penstock.core.errors import InvalidArgumentError, InvalidPipelineError, JobMismatchError, StateMismatchError
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.passes import canonicalize, optimize
from penstock.runtime.budget import default_budget
from penstock.runtime.iterator import Run
from penstock.runtime.lower import MakeStage
from penstock.runtime.stats import ReaderClock, StageMeter
from penstock.sources.registry import open_source, source_digest
from penstock.stream.checkpoint import Weights
from penstock.submission.options import JobOptions


class PipedPlace(msgspec.Struct, frozen=True):
    """Where a pipeline here stood, and what the services that feed it knew it by."""

    operators: Any
    attempts: list[tuple[int, str] | None]
    """Of the stages in the order they are made; empty: those of another number of ranks, which are over."""


class Piped:
    def __init__(
        self, node: Node, sources: list[FromService], *, threads: int | None, memory_bytes: int | None
    ) -> None:
        self._sources = sources
        self._node = canonicalize(node)
        self._budget = default_budget(threads, memory_bytes)
        self._given_seed = _one_seed(sources)
        self._own: PipelineSignature | None = None
        self._graph: Node | None = None

    @property
    def signature(self) -> PipelineSignature:
        if self._own is None:
            parts = [entry for source in self._sources for entry in source.dataset._plan.signature.entries]
            here = signature_of(self._node, self._digest)
            self._own = PipelineSignature(
                [*parts, *(entry for entry in here.entries if kind_of(entry) != "FromService")]
            )
        return self._own

    def _digest(self, node: SourceNode) -> str:
        return "" if isinstance(node, FromService) else source_digest(open_source(node))

    @property
    def options(self) -> JobOptions:
        return self._sources[0].backend.options

    def seed_of(self, seed: int | None) -> int:
        first = self._sources[0]
        found = (seed, self._given_seed, first.backend.seed, given_seed(walk_through(self._node)))
        return next((each for each in found if each is not None), first.dataset._plan.seed)

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None, weights: Weights | None) -> Epoch:
        if self._graph is None:
            self._graph = optimize(self._node)
        seed, may_rejoin = self.seed_of(seed), loaded is None or not loaded.changed
        beginning = Beginning(epoch=epoch, seed=seed, may_rejoin=may_rejoin, weights=weights)
        place: PipedPlace = PipedPlace(None, []) if loaded is None or loaded.place is None else loaded.place
        opened = self._open(beginning, place)
        try:
            self._check_seeds()
        except BaseException:
            opened.close()
            raise
        job_seed = self._sources[0].backend.seed
        if job_seed in (None, seed) or place.operators is not None:
            return opened
        # Another rank made the job and drew its seed, which functions here go by as well.
        opened.close()
        return self._open(replace(beginning, seed=job_seed, may_rejoin=True), replace(place, attempts=opened.attempts))

    def _check_seeds(self) -> None:
        """Refuse jobs of two seeds: a state has one, by which both would be read on."""
        first, *others = (source.backend for source in self._sources)
        for other in others:
            if None not in (first.seed, other.seed) and other.seed != first.seed:
                raise JobMismatchError(
                    f"job {other.options.job!r} has the seed {other.seed} and job {first.options.job!r} {first.seed}: "
                    "a pipeline has one seed. Give one of the loaders another job= name, or both the same seed="
                )

    def _open(self, beginning: Beginning, place: PipedPlace) -> _PipedEpoch:
        assert self._graph is not None and beginning.seed is not None
        made: list[ServiceStage] = []
        clock = ReaderClock()

        def stage(source: FromService, meter: StageMeter, identities: int | None) -> ServiceStage:
            attempt = place.attempts[len(made)] if len(made) < len(place.attempts) else None
            made.append(
                ServiceStage(meter, source.backend, beginning, seed, clock, attempt, identities, source.group_rows)
            )
            return made[-1]

        def seed() -> int | None:
            """Another rank may have made the job that is opened first: the next one is made with its seed."""
            opened = (each.reader.session.opened.spec.seed for each in made if each.reader is not None)
            return beginning.seed if place.operators is not None else next(opened, beginning.seed)

        stages: dict[SourceNode, MakeStage] = {source: partial(stage, source) for source in self._sources}
        run = Run(
            self._graph,
            seed=beginning.seed,
            epoch=beginning.epoch,
            budget=self._budget,
            source_of=open_source,
            stages=stages,
            clock=clock,
        )
        try:
            run.open(beginning.epoch, place.operators)
        except BaseException:
            run.close()
            raise
        return _PipedEpoch(self, run, made, beginning)

    def place_of(self, saved: Sequence[SavedState], changed: bool) -> PipedPlace:
        if any(one.attempts is None and not parts_in(one.place) for one in saved):
            raise StateMismatchError("the state was saved by a loader without operators after distribute()")
        places, ranks, rank = places_of(saved), self.options.ranks.count, self.options.rank
        if saved[0].consumers != ranks:
            self._check_held(saved[0].consumers, ranks, places)
        own = [n for n, one in enumerate(saved) if one.consumers == ranks and one.consumer in (None, rank)]
        if len(places) == 1:
            operators = places[0]
        elif own:
            operators = with_all_parts(places[own[0]], places)
        else:
            operators = merged(places)
        return PipedPlace(copy.deepcopy(operators), (saved[own[0]].attempts or []) if own else [])

    def _check_held(self, before: int, now: int, places: Sequence[Any]) -> None:
        """Refuse another number of ranks where each of the old ones held a part of what it had received.

        What is dealt anew begins before all that, and what one rank had given of its part another would leave out.
        """
        holding = next((node for node in walk(self._node) if node.traits.holds_back), None)
        if holding is not None and any(place is not None for place in places):
            raise StateMismatchError(
                f"the state was saved by {before} consumers and there are {now} now, and {holding.name}() after "
                "distribute() held a part of what each of them had received, which cannot be dealt anew. Load it with "
                f"{before}, or load one saved at the end of an epoch; before distribute() {holding.name}() does not "
                "stand in the way"
            )

    def leaving_apart(self) -> Node | None:
        """Return an operator here of which each rank may give another number of outputs for as many inputs."""
        for node in walk(self._node):
            alike = node.elements_given([1] * len(node.inputs)) is not None
            if node.inputs and not alike and node.endless([None] * len(node.inputs)) is None:
                return node
        return None


def _one_seed(sources: Sequence[FromService]) -> int | None:
    """Return the seed that some of the loaders were given; None: none was."""
    given = list(dict.fromkeys(s.backend.options.seed for s in sources if s.backend.options.seed is not None))
    if len(given) > 1:
        raise InvalidPipelineError(
            f"loaders with seed={given[0]} and seed={given[1]} in one pipeline: a pipeline has one seed, which is in "
            "its state. Give them the same, or one of them none"
        )
    return next(iter(given), None)


class _PipedEpoch:
    def __init__(self, kind: Piped, run: Run, stages: list[ServiceStage], beginning: Beginning) -> None:
        self._kind, self._run, self._stages = kind, run, stages
        self._epoch, self._seed, self._weights = beginning.epoch, beginning.seed, beginning.weights
        self.elements: Iterator[Element] = run

    @property
    def attempts(self) -> list[tuple[int, str] | None]:
        """What the services that feed it know it by."""
        return [stage.attempt for stage in self._stages]

    def note_state(self) -> Callable[[], dict[str, Any]]:
        ended, note, weights, skipped = self._run.ended, self._run.note(), self._weights, self._run.skipped
        attempts = self.attempts
        opened = [stage.opened for stage in self._stages if stage.opened is not None]

        def made() -> dict[str, Any]:
            return save(
                self._kind,
                epoch=self._epoch,
                seed=self._seed,
                phase="ended" if ended else "reading",
                weights=weights,
                skipped=skipped,
                attempts=None if ended else attempts,
                place=None if ended else _reopened(note(), opened),
            )

        return made

    def set_weights(self, weights: Weights) -> None:
        if not self._run.ended:
            raise InvalidArgumentError(
                "set_weights() in the middle of an epoch with operators after distribute(): they hold elements of the "
                "old weights. Set weights between epochs, or put the operators before distribute()"
            )
        self._weights = weights

    def statistics(self) -> LoaderStatistics:
        here = self._run.statistics()
        readers = [stage.reader for stage in self._stages if stage.reader is not None]
        return statistics_of(readers, here) if readers else statistics_here(here)

    def close(self, why: Exception | None = None) -> None:
        self._run.close(why)


def _reopened(place: Any, opened: Sequence[tuple[Any, Any]]) -> Any:
    """Return the place in the words of the present attempts, where it is one that a stage was opened at."""
    for before, now in opened:
        if place is before:
            return now
    return [_reopened(part, opened) for part in place] if isinstance(place, list) else place
