"""Ways in which a loader reads an epoch: threads here, or a service directly. `api.piped` has the third.

Each opens epochs at a place, and knows the pipeline's signature. States have one shape (`api.states`); what differs is
what stands in a state's place: operators' states, what a service had delivered, or the first with the second in them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from penstock.api.dataset import Dataset
from penstock.api.iteration import DatasetIterator, Plan, given_seed
from penstock.api.states import (
    STATE_VERSION,
    Phase,
    PipelineSignature,
    SavedState,
    kind_of,
    parts_in,
    with_parts,
)
from penstock.api.statistics import LoaderStatistics, statistics_here, statistics_of
from penstock.client.backend import ServiceBackend
from penstock.client.reader import EpochReader
from penstock.client.session import Beginning
from penstock.core.element import Element
from penstock.core.errors import InvalidArgumentError, StateMismatchError
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.stream.checkpoint import Checkpoint, Weights, apart, check_whose, read_states
from penstock.submission.options import JobOptions

LoadedState = Mapping[str, Any]


class FromService(SourceNode, frozen=True, kw_only=True, eq=False):
    """What a job delivers. It lives in this process only, and never travels."""

    PRIVATE: ClassVar[frozenset[str]] = frozenset({"backend", "dataset"})
    backend: ServiceBackend
    dataset: Dataset
    group_rows: int = 0
    """Its outputs are the elements of batches that are made here, of so many each; 0: they are what is read."""

    @property
    def stands_for(self) -> int:
        return sum(isinstance(node, SourceNode) for node in walk(self.dataset.node))


def walk_through(node: Node) -> Iterator[Node]:
    """Yield every operator of a pipeline as if it were not cut: those before `distribute` stand where its job does."""
    done: set[Node] = set()
    for operator in walk(node):
        for each in walk(operator.dataset.node) if isinstance(operator, FromService) else (operator,):
            if each not in done:
                done.add(each)
                yield each


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What `load_state_dict` was given, checked."""

    epoch: int
    seed: int
    state: dict[str, Any]
    """As it was given, for who saves again before reading on."""
    place: Any
    """Where to begin in that epoch, as the kind of loader has it; None: at its beginning."""
    weights: Weights | None = None
    changed: bool = False
    """Operators that do not decide which elements come are others now."""


class Epoch(Protocol):
    """An iteration under way, or ended."""

    elements: Iterator[Element]

    def note_state(self) -> Callable[[], dict[str, Any]]:
        """Note down where the reader stands, for less than a state costs; the function that is returned makes it."""

    def statistics(self) -> LoaderStatistics: ...

    def set_weights(self, weights: Weights) -> None: ...

    def close(self, why: Exception | None = None) -> None:
        """Let go of everything. `why` is raised to whoever reads on before the end; None: it is the end."""


class WayOfReading(Protocol):
    """One of the five ways to read."""

    @property
    def signature(self) -> PipelineSignature: ...

    @property
    def options(self) -> JobOptions | None:
        """Of the job that is read; None: there is none."""

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None, weights: Weights | None) -> Epoch:
        """Begin an epoch; `weights` are what a mix goes by, None: the pipeline's own."""

    def seed_of(self, seed: int | None) -> int: ...

    def place_of(self, saved: Sequence[SavedState], changed: bool) -> Any:
        """Return where to begin, of states saved while reading; refuse what this kind cannot read on from."""


def load(kind: WayOfReading, states: Sequence[LoadedState]) -> Loaded:
    """Check states, one or those of all ranks, and return where they say to begin."""
    for state in states:
        kind.signature.check(state)
    saved = [SavedState.read(state) for state in states]
    first = saved[0]
    for other in saved[1:]:
        for name, mine, theirs in (("epochs", first.epoch, other.epoch), ("phases", first.phase, other.phase)):
            if mine != theirs:
                raise apart(name, mine, theirs)
    options = kind.options
    consumers, consumer = (1, 0) if options is None else (options.ranks.count, options.rank)
    if len(saved) == 1 and first.consumers == consumers:
        check_whose(first.consumer, consumer)
    changed = any(one.pipeline != kind.signature.entries for one in saved)
    place = kind.place_of(saved, changed) if first.phase == "reading" else None
    if first.consumers != consumers:
        warnings.warn(
            f"the state was saved by {first.consumers} consumers and there are {consumers} now; what is left is dealt "
            "anew",
            stacklevel=3,
        )
    kept = dict(states[0]) if len(states) == 1 else {"version": STATE_VERSION, "states": list(states)}
    return Loaded(
        epoch=first.epoch + (first.phase == "ended"),
        seed=first.seed,
        state=copy.deepcopy(kept),
        place=place,
        weights=first.weights,
        changed=changed,
    )


def save(
    kind: WayOfReading,
    *,
    epoch: int,
    seed: int | None,
    phase: Phase,
    weights: Weights | None,
    place: Any = None,
    skipped: int = 0,
    attempts: list[tuple[int, str] | None] | None = None,
    cut: str = "",
) -> dict[str, Any]:
    options = kind.options
    saved = SavedState(
        version=STATE_VERSION,
        pipeline=kind.signature.entries,
        epoch=epoch,
        seed=kind.seed_of(seed),
        phase=phase,
        consumers=1 if options is None else options.ranks.count,
        consumer=0 if options is None else options.rank,
        weights=weights,
        skipped=skipped,
        attempts=attempts,
        cut=cut,
        place=place,
    )
    return saved.plain()


# Threads in this process


class Here:
    options = None

    def __init__(self, plan: Plan, *, threads: int | None, memory_bytes: int | None, drawn: int | None) -> None:
        self._plan = plan
        self._threads, self._memory_bytes, self._drawn = threads, memory_bytes, drawn

    @property
    def signature(self) -> PipelineSignature:
        return self._plan.signature

    def seed_of(self, seed: int | None) -> int:
        found = (seed, given_seed(walk(self._plan.node)), self._drawn)
        return next((each for each in found if each is not None), self._plan.seed)

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None, weights: Weights | None) -> Epoch:
        iterator = DatasetIterator(
            self._plan, epoch=epoch, seed=self.seed_of(seed), threads=self._threads, memory_bytes=self._memory_bytes
        )
        if loaded is not None:
            iterator.load_state_dict(loaded.state)
        return _HereEpoch(iterator)

    def place_of(self, saved: Sequence[SavedState], changed: bool) -> Any:
        if len(saved) > 1:
            raise StateMismatchError(
                f"{len(saved)} states for a loader that reads in this process: it has one consumer and takes one"
            )
        if saved[0].attempts is not None or parts_in(saved[0].place):
            raise StateMismatchError(
                "the state was saved by a loader over a service, whose streams threads here do not have; load it there"
            )
        return saved[0].place


class _HereEpoch:
    def __init__(self, iterator: DatasetIterator) -> None:
        self._iterator = iterator
        self.elements: Iterator[Element] = iterator

    def note_state(self) -> Callable[[], dict[str, Any]]:
        return self._iterator.note_state()

    def set_weights(self, weights: Weights) -> None:
        raise InvalidArgumentError("set_weights() needs a service; read through one with distribute(to=...)")

    def statistics(self) -> LoaderStatistics:
        return statistics_here(self._iterator.statistics())

    def close(self, why: Exception | None = None) -> None:
        self._iterator.close(why)


# A service, read directly


class Direct:
    def __init__(self, source: FromService) -> None:
        self._backend, self._plan = source.backend, source.dataset._plan

    @property
    def signature(self) -> PipelineSignature:
        return self._plan.signature

    @property
    def options(self) -> JobOptions:
        return self._backend.options

    def seed_of(self, seed: int | None) -> int:
        return next(each for each in (seed, self._backend.seed, self._plan.seed) if each is not None)

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None, weights: Weights | None) -> Epoch:
        checkpoint = None if loaded is None else loaded.place
        may_rejoin = loaded is None or not loaded.changed
        reader = self._backend.open(
            Beginning(epoch=epoch, seed=seed, checkpoint=checkpoint, may_rejoin=may_rejoin, weights=weights)
        )
        return _DirectEpoch(self, reader)

    def check_weights_midway(self) -> None:
        self._backend.check_weights_midway()

    def place_of(self, saved: Sequence[SavedState], changed: bool) -> Checkpoint:
        places = [with_parts(one.place, {"consumer": one.consumer}) for one in saved]
        if any(parts_in(place) != [place] for place in places):
            raise StateMismatchError("the state was saved by a loader with operators after distribute(), or by none")
        checkpoint = read_states(places, consumer=self.options.rank, consumers=self.options.ranks.count)
        self._backend.check(checkpoint)
        if changed:
            _check_batches(checkpoint, saved[0].pipeline, self.signature.entries)
        return checkpoint


class _DirectEpoch:
    def __init__(self, kind: Direct, reader: EpochReader) -> None:
        self._kind, self._reader = kind, reader
        self.elements: Iterator[Element] = reader

    def note_state(self) -> Callable[[], dict[str, Any]]:
        note, ended = self._reader.note(), self._reader.finished

        def made() -> dict[str, Any]:
            state = note()
            return save(
                self._kind,
                epoch=self._reader.epoch,
                seed=self._reader.session.opened.spec.seed,
                phase="ended" if ended else "reading",
                weights=state.progress.weights,
                place=None if ended else state.plain(),
            )

        return made

    def set_weights(self, weights: Weights) -> None:
        if not self._reader.finished:
            self._kind.check_weights_midway()
        self._reader.set_weights(weights)

    def statistics(self) -> LoaderStatistics:
        return statistics_of([self._reader])

    def close(self, why: Exception | None = None) -> None:
        self._reader.close(why)


def _check_batches(checkpoint: Checkpoint, saved: list[str], own: list[str]) -> None:
    """Refuse other batches where the state counts batches: it can be re-made only with those it was saved with."""
    if _batches(saved) == _batches(own):
        return
    positions = [position for state in checkpoint.states for position in state.progress.streams]
    counts = any(each.cut.since or each.cut.regroup is not None for each in positions if not each.ended)
    if counts or (checkpoint.first.consumers > 1 and not checkpoint.first.alike):
        raise StateMismatchError(
            "the batches changed, and the state lies in the middle of some that were sent together; load it into the "
            "pipeline with the batches it was saved with, or load one saved at the end of an epoch"
        )


def _batches(entries: list[str]) -> list[str]:
    return [entry for entry in entries if "Batch" in kind_of(entry)]
