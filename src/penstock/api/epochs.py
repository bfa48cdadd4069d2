"""The three ways a loader reads an epoch: threads here, a service directly, a service that feeds a pipeline here.

Each opens epochs, makes and checks states in its own form, and knows the pipeline's signature. A state says which way
it was made by what it holds: `finished` (threads here), `streams` (a service), `local` (a pipeline over a service).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from penstock.api.checkpoint import STATE_VERSION, PipelineSignature, signature_of
from penstock.api.dataset import Dataset
from penstock.api.iteration import DatasetIterator, Plan
from penstock.client.backend import Beginning, ServiceBackend
from penstock.client.fetch import EpochReader
from penstock.client.merge import Checkpoint, read_states
from penstock.client.stage import ServiceStage
from penstock.client.state import EpochState, Progress, Weights
from penstock.client.statistics import LoaderStatistics, statistics_here, statistics_of
from penstock.core.element import Element
from penstock.core.errors import InvalidArgumentError, StateMismatchError
from penstock.core.ids import AttemptId
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.passes import canonicalize, optimize
from penstock.runtime.budget import default_budget
from penstock.runtime.contract import Stage
from penstock.runtime.iterator import Run
from penstock.runtime.stats import StageMeter
from penstock.sources.registry import open_source, source_digest

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FromService(SourceNode):
    """What a job delivers. It lives in this process only, and never travels."""

    PRIVATE: ClassVar[frozenset[str]] = frozenset({"backend", "dataset"})
    backend: ServiceBackend = field(repr=False)
    dataset: Dataset = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What `load_state_dict` was given, checked."""

    epoch: int
    seed: int
    state: dict[str, Any]
    place: Any
    """Where to begin in that epoch, as the kind of loader has it; None: at its beginning."""
    changed: bool = False


class Epoch(Protocol):
    """An iteration under way, or ended."""

    elements: Iterator[Element]

    def state_dict(self) -> dict[str, Any]: ...

    def statistics(self) -> LoaderStatistics: ...

    def set_weights(self, weights: Weights) -> None: ...

    def close(self) -> None: ...


class Kind(Protocol):
    """One of the three ways to read."""

    weights: Weights | None
    """What a mix goes by in epochs that begin; None: the pipeline's own."""

    @property
    def signature(self) -> PipelineSignature: ...

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None) -> Epoch: ...

    def load(self, states: list[State], changed: bool) -> Loaded: ...

    def fresh(self, epoch: int, seed: int | None) -> dict[str, Any]: ...


# Threads in this process


class Here:
    def __init__(self, plan: Plan, *, threads: int | None, memory_bytes: int | None) -> None:
        self._plan = plan
        self._threads, self._memory_bytes = threads, memory_bytes
        self.weights: Weights | None = None

    @property
    def signature(self) -> PipelineSignature:
        return self._plan.signature

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None) -> Epoch:
        iterator = self._iterator(epoch, seed)
        if loaded is not None and loaded.place is not None:
            iterator.load_state_dict(loaded.place)
        return _HereEpoch(iterator)

    def load(self, states: list[State], changed: bool) -> Loaded:
        if len(states) > 1:
            raise StateMismatchError(
                f"{len(states)} states for a loader that reads in this process: it has one consumer and takes one"
            )
        state = dict(states[0])
        if "finished" not in state:
            raise StateMismatchError(
                "the state was saved by a loader over a service, whose streams threads here do not have; load it there"
            )
        ended = state["finished"]
        return Loaded(epoch=state["epoch"] + bool(ended), seed=state["seed"], state=state, place=state)

    def fresh(self, epoch: int, seed: int | None) -> dict[str, Any]:
        with self._iterator(epoch, seed) as iterator:
            return iterator.state_dict()

    def _iterator(self, epoch: int, seed: int | None) -> DatasetIterator:
        return DatasetIterator(
            self._plan, epoch=epoch, seed=seed, threads=self._threads, memory_bytes=self._memory_bytes
        )


class _HereEpoch:
    def __init__(self, iterator: DatasetIterator) -> None:
        self._iterator = iterator
        self.elements: Iterator[Element] = iterator

    def state_dict(self) -> dict[str, Any]:
        return self._iterator.state_dict()

    def set_weights(self, weights: Weights) -> None:
        raise InvalidArgumentError("set_weights() needs a service; read through one with distribute(to=...)")

    def statistics(self) -> LoaderStatistics:
        return statistics_here(self._iterator.statistics())

    def close(self) -> None:
        self._iterator.close()


# A service, read directly


class Direct:
    def __init__(self, source: FromService) -> None:
        self._backend, self._plan = source.backend, source.dataset._plan
        self.weights: Weights | None = None

    @property
    def signature(self) -> PipelineSignature:
        return self._plan.signature

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None) -> Epoch:
        place = None if loaded is None else loaded.place
        changed = loaded is not None and loaded.changed
        reader = self._backend.open(
            Beginning(epoch=epoch, seed=seed, checkpoint=place, may_rejoin=not changed, weights=self.weights)
        )
        return _DirectEpoch(reader, self.signature.entries)

    def load(self, states: list[State], changed: bool) -> Loaded:
        for state in states:
            if "local" in state or "streams" not in state:
                raise StateMismatchError(
                    "the state was saved by a loader with operators after distribute(), or by none"
                )
        options = self._backend.options
        checkpoint = read_states(states, consumer=options.consumer, consumers=options.consumers)
        self._backend.check(checkpoint)
        if changed:
            _check_batches(checkpoint, self.signature.entries)
        _warn_of_consumers(checkpoint.first.consumers, options.consumers)
        state = (
            states[0]
            if len(states) == 1
            else {"version": STATE_VERSION, "pipeline": states[0]["pipeline"], "states": states}
        )
        self.weights = checkpoint.first.progress.weights
        return _loaded_from(checkpoint, dict(state), checkpoint, changed)

    def fresh(self, epoch: int, seed: int | None) -> dict[str, Any]:
        seed = self._plan.seed if seed is None else seed
        return _fresh(self._backend, epoch, seed, self.signature, self.weights).plain()


class _DirectEpoch:
    def __init__(self, reader: EpochReader, pipeline: list[list[str]]) -> None:
        self._reader, self._pipeline = reader, pipeline
        self.elements: Iterator[Element] = reader

    def state_dict(self) -> dict[str, Any]:
        reader = self._reader
        progress = reader.state()
        return reader.session.state(progress, pipeline=self._pipeline, finished=reader.finished).plain()

    def set_weights(self, weights: Weights) -> None:
        self._reader.set_weights(weights)

    def statistics(self) -> LoaderStatistics:
        return statistics_of(self._reader)

    def close(self) -> None:
        self._reader.close()


def _fresh(
    backend: ServiceBackend, epoch: int, seed: int, signature: PipelineSignature, weights: Weights | None
) -> EpochState:
    options = backend.options
    return EpochState(
        epoch=epoch,
        seed=seed,
        attempt=AttemptId(""),
        consumers=options.consumers,
        consumer=options.consumer,
        phase="start",
        splits="",
        streams=0,
        order=options.order,
        uneven=options.uneven,
        coordinated=options.coordinated,
        pipeline=signature.entries,
        progress=Progress(weights=weights),
    )


def _loaded_from(checkpoint: Checkpoint, state: dict[str, Any], place: Any, changed: bool) -> Loaded:
    first = checkpoint.first
    return Loaded(
        epoch=first.epoch + (first.phase == "ended"),
        seed=first.seed,
        state=copy.deepcopy(state),
        place=place if first.phase == "reading" else None,
        changed=changed,
    )


def _check_batches(checkpoint: Checkpoint, own: list[list[str]]) -> None:
    """Refuse other batches where the state counts batches: it can be re-made only with those it was saved with."""
    saved = checkpoint.first
    if saved.phase != "reading" or _batches(saved.pipeline) == _batches(own):
        return
    marks = [mark for state in checkpoint.states for mark in state.progress.streams.values()]
    counts = any(mark.cut.since or mark.cut.regroup is not None for mark in marks if not mark.ended)
    if counts or (saved.consumers > 1 and not saved.alike):
        raise StateMismatchError(
            "the batches changed, and the state lies in the middle of some that were sent together; load it into the "
            "pipeline with the batches it was saved with, or load one saved at the end of an epoch"
        )


def _batches(entries: list[list[str]]) -> list[list[str]]:
    return [entry for entry in entries if "Batch" in entry[2]]


def _warn_of_consumers(saved: int, now: int) -> None:
    if saved != now:
        warnings.warn(
            f"the state was saved by {saved} consumers and there are {now} now; what is left is dealt anew",
            stacklevel=4,
        )


# A service that feeds a pipeline here


class Piped:
    def __init__(
        self, node: Node, sources: list[FromService], *, threads: int | None, memory_bytes: int | None
    ) -> None:
        self._sources = sources
        self.weights: Weights | None = None
        self._node = canonicalize(node)
        self._budget = default_budget(threads, memory_bytes)
        self._own: PipelineSignature | None = None
        self._graph: Node | None = None

    @property
    def signature(self) -> PipelineSignature:
        if self._own is None:
            parts = [entry for source in self._sources for entry in source.dataset._plan.signature.entries]
            here = signature_of(self._node, self._digest)
            self._own = PipelineSignature([*parts, *(entry for entry in here.entries if entry[2] != "FromService")])
        return self._own

    def _digest(self, node: SourceNode) -> str:
        return "" if isinstance(node, FromService) else source_digest(open_source(node))

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None) -> Epoch:
        if self._graph is None:
            self._graph = optimize(self._node)
        changed = loaded is not None and loaded.changed
        seed = self._sources[0].dataset._plan.seed if seed is None else seed
        made: list[ServiceStage] = []

        def stage(source: FromService, meter: StageMeter) -> ServiceStage:
            options = source.backend.options
            made.append(
                ServiceStage(
                    meter,
                    lambda beginning: source.backend.open(replace(beginning, weights=self.weights)),
                    seed=seed,
                    may_rejoin=not changed,
                    consumer=options.consumer,
                    consumers=options.consumers,
                )
            )
            return made[-1]

        stages: dict[SourceNode, Callable[[StageMeter], Stage]] = {
            source: partial(stage, source) for source in self._sources
        }
        run = Run(self._graph, seed=seed, epoch=epoch, budget=self._budget, source_of=open_source, stages=stages)
        try:
            run.open(epoch, None if loaded is None else loaded.place)
        except BaseException:
            run.close()
            raise
        return _PipedEpoch(run, made, self._head(epoch, seed))

    def _head(self, epoch: int, seed: int) -> dict[str, Any]:
        options = self._sources[0].backend.options
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "seed": seed,
            "consumers": options.consumers,
            "consumer": options.consumer,
            "order": options.order,
            **({"coordinated": True} if options.coordinated else {}),
            **({} if self.weights is None else {"weights": list(self.weights)}),
            "pipeline": self.signature.entries,
        }

    def load(self, states: list[State], changed: bool) -> Loaded:
        for state in states:
            if "local" not in state:
                raise StateMismatchError("the state was saved by a loader without operators after distribute()")
        options = self._sources[0].backend.options
        first = states[0]
        kept: dict[str, Any] = dict(first)
        if len(states) > 1:
            place = _merged([state["local"] for state in states])
            kept = {"version": STATE_VERSION, "pipeline": first["pipeline"], "states": states}
        else:
            if first["consumer"] not in (None, options.consumer) and first["consumers"] == options.consumers:
                raise StateMismatchError(
                    f"this is the state of consumer {first['consumer']}, and this is consumer {options.consumer}: load "
                    "each rank's own state, or one made with state_dict(all=True)"
                )
            place = _without_consumer(first["local"]) if first["consumer"] is None else first["local"]
        reading = first["phase"] == "reading"
        self.weights = tuple(map(float, first["weights"])) if "weights" in first else None
        _warn_of_consumers(first["consumers"], options.consumers)
        return Loaded(
            epoch=first["epoch"] + (first["phase"] == "ended"),
            seed=first["seed"],
            state=copy.deepcopy(kept),
            place=copy.deepcopy(place) if reading else None,
            changed=changed,
        )

    def fresh(self, epoch: int, seed: int | None) -> dict[str, Any]:
        seed = self._sources[0].dataset._plan.seed if seed is None else seed
        return {**self._head(epoch, seed), "phase": "start", "local": None}


class _PipedEpoch:
    def __init__(self, run: Run, stages: list[ServiceStage], head: dict[str, Any]) -> None:
        self._run, self._stages, self._head = run, stages, head
        self.elements: Iterator[Element] = run

    def state_dict(self) -> dict[str, Any]:
        ended = self._run.ended
        local = None if ended else copy.deepcopy(self._run.state())
        return {**self._head, "phase": "ended" if ended else "reading", "local": local}

    def set_weights(self, weights: Weights) -> None:
        if not self._run.ended:
            raise InvalidArgumentError(
                "set_weights() in the middle of an epoch with operators after distribute(): they hold elements of the "
                "old weights. Set weights between epochs, or put the operators before distribute()"
            )

    def statistics(self) -> LoaderStatistics:
        here = self._run.statistics()
        reader = self._stages[0].reader if self._stages else None
        return statistics_here(here) if reader is None else statistics_of(reader, here.stages)

    def close(self) -> None:
        self._run.close()


def _merged(places: list[Any]) -> Any:
    """Return one state of which each service part is the list of all ranks' parts; the rest must be equal."""
    if all(isinstance(place, dict) and "streams" in place for place in places):
        return places
    if all(isinstance(place, list) for place in places) and len({len(place) for place in places}) == 1:
        return [_merged(list(parts)) for parts in zip(*places)]
    if all(place == places[0] for place in places):
        return places[0]
    raise StateMismatchError(
        "the ranks' operators after distribute() stand at different places, so their states cannot be merged; "
        "load them with the number of consumers they were saved with"
    )


def _without_consumer(place: Any) -> Any:
    if isinstance(place, dict) and "streams" in place:
        return {**place, "consumer": None}
    return [_without_consumer(part) for part in place] if isinstance(place, list) else place
