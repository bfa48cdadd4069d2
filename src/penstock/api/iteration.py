"""One epoch of a dataset in this process: the iterator users hold, and the plan its epochs share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import msgspec

from penstock.api.states import STATE_VERSION, PipelineSignature, SavedState, parts_in, signature_of
from penstock.core.checks import check_whole
from penstock.core.element import Element
from penstock.core.errors import StateMismatchError
from penstock.graph import ops
from penstock.graph.explain import explain_mermaid, explain_text
from penstock.graph.fingerprint import fingerprint
from penstock.graph.node import Node
from penstock.graph.readers import ColumnarSource, ReadImages, SourceNode
from penstock.graph.traverse import walk
from penstock.passes import canonicalize, optimize
from penstock.passes.columns import known_types
from penstock.runtime.budget import default_budget
from penstock.runtime.contract import State
from penstock.runtime.iterator import Run
from penstock.runtime.stats import Statistics
from penstock.runtime.verdict import analyze_table, verdict
from penstock.sources.base import CountedSource, IndexableSource, Source
from penstock.sources.registry import open_source, source_digest


class Plan:
    """What every iteration of one dataset shares: the optimized graph, the sources' listings, seed and epoch."""

    def __init__(self, node: Node) -> None:
        self.written = node
        self.next_epoch = 0
        self._optimized: Node | None = None
        self._sources: dict[SourceNode, Source] = {}
        self._lengths: dict[SourceNode, int | None] = {}
        self._seed: int | None = None

    @cached_property
    def node(self) -> Node:
        """What is run without passes, and what a state belongs to."""
        return canonicalize(self.written)

    @property
    def optimized(self) -> Node:
        if self._optimized is None:
            self._optimized = optimize(self.node)
        return self._optimized

    @property
    def seed(self) -> int:
        """The first seed the user gave, else one drawn once for this dataset."""
        if self._seed is None:
            given = given_seed(walk(self.node))
            self._seed = secrets.randbits(48) if given is None else given
        return self._seed

    def source_of(self, node: SourceNode) -> Source:
        source = self._sources.get(node)
        if source is None:
            source = self._sources[node] = open_source(node)
        return source

    def share_sources(self, other: Plan) -> None:
        """Read the sources as another plan has listed them."""
        self._sources = other._sources

    def source_length(self, node: SourceNode) -> int | None:
        """Return how many elements a source has, where that is known; looked for once."""
        if node not in self._lengths:
            source = self.source_of(node)
            if isinstance(source, IndexableSource):
                self._lengths[node] = len(source)
            else:
                self._lengths[node] = source.count() if isinstance(source, CountedSource) else None
        return self._lengths[node]

    @cached_property
    def schema(self) -> dict[str, str] | None:
        def of_source(node: ColumnarSource) -> dict[str, str]:
            source: Any = self.source_of(node)
            types: dict[str, str] = source.schema()
            return types

        return known_types(self.node, of_source)

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        found = [node for node in walk(self.node) if isinstance(node, ReadImages)]
        if len(found) != 1:
            return None
        source: Any = self.source_of(found[0])
        names: tuple[str, ...] = source.class_names
        return names

    @property
    def labels(self) -> Any:
        """The labels of all images of the one `read_images`; None where there is none."""
        found = [node for node in walk(self.node) if isinstance(node, ReadImages)]
        if len(found) != 1:
            return None
        source: Any = self.source_of(found[0])
        return source.labels

    @cached_property
    def signature(self) -> PipelineSignature:
        return signature_of(self.node, lambda node: source_digest(self.source_of(node)))

    def fingerprint(self) -> str:
        return fingerprint(self.node, source_digest=lambda node: source_digest(self.source_of(node)))

    def explain(self, *, analyze: bool, mermaid: bool, duration_s: float) -> str:
        if mermaid:
            return explain_mermaid(self.optimized)
        text = f"as written\n{_indent(explain_text(self.written))}\n\nas run\n{_indent(explain_text(self.optimized))}"
        if not analyze:
            return text
        with DatasetIterator(self, epoch=0) as iterator:
            iterator.run_for(duration_s)
            statistics = iterator.statistics()
        sampled = (
            f"sampled in this process, not on workers: {statistics.elements:,} outputs of epoch 0 in "
            f"{statistics.read_s + statistics.idle_s:.1f} s, on up to {statistics.threads} threads"
        )
        return f"{text}\n\n{sampled}\n{analyze_table(statistics)}\n\n{verdict(statistics)}"


def given_seed(operators: Iterable[Node]) -> int | None:
    """Return the first seed that the user gave to one of some operators."""
    return next((node.seed for node in operators if isinstance(node, ops.Shuffle) and node.seed is not None), None)


class DatasetIterator:
    """Reads one epoch. `next`, `state_dict`, `load_state_dict`, `statistics`, `close`; a context manager."""

    def __init__(
        self,
        plan: Plan,
        *,
        epoch: int | None = None,
        seed: int | None = None,
        threads: int | None = None,
        memory_bytes: int | None = None,
        optimize: bool = True,
    ) -> None:
        if epoch is not None:
            check_whole("epoch", epoch, 0)
        if seed is not None:
            check_whole("seed", seed, 0)
        self._plan = plan
        self._graph = plan.optimized if optimize else plan.node
        self._budget = default_budget(threads, memory_bytes)
        self._seed = plan.seed if seed is None else seed
        self.epoch = plan.next_epoch if epoch is None else epoch
        plan.next_epoch = self.epoch + 1
        self._run = self._start(None)
        self._finished = False

    def _start(self, state: Any) -> Run:
        run = Run(self._graph, seed=self._seed, epoch=self.epoch, budget=self._budget, source_of=self._plan.source_of)
        run.open(self.epoch, state)
        return run

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Element:
        try:
            return self._run.__next__()  # next() would leave a gap between the element and us, for an interrupt
        except StopIteration:
            self._finished = self._finished or self._run.ended
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return where the reader stands: small, JSON-able, self-contained."""
        return self._saved(self.epoch, self._seed, self._finished, self._run.skipped, self._run.state())

    def note_state(self) -> Callable[[], dict[str, Any]]:
        """Note down where the reader stands, for less than making the state: the function returned makes it later."""
        epoch, seed, finished, skipped = self.epoch, self._seed, self._finished, self._run.skipped
        place = self._run.note()
        return lambda: self._saved(epoch, seed, finished, skipped, place())

    def _saved(self, epoch: int, seed: int, finished: bool, skipped: int, place: State) -> dict[str, Any]:
        # A `SavedState` as its `plain` makes it, which costs six times as much: this may be saved with every step.
        state = {
            "version": STATE_VERSION,
            "pipeline": self._plan.signature.entries.copy(),
            "epoch": epoch,
            "seed": seed,
            "phase": "ended" if finished else "reading",
            "place": msgspec.to_builtins(place),
        }
        if skipped:
            state["skipped"] = skipped
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Taken after the loop had ended, it begins the next epoch."""
        self._plan.signature.check(state)
        saved = SavedState.read(state)
        if parts_in(saved.place):
            raise StateMismatchError(
                "the state was saved by a loader over a service, whose streams threads here do not have; load it there"
            )
        self._run.close()
        self.epoch, self._seed, self._finished = saved.epoch, saved.seed, False
        self._run = self._start(saved.place)
        if saved.phase == "ended":
            next(self._run, None)  # operators that go on from epoch to epoch learn where this one ended
            self._run.close()
            self.epoch += 1
            self._run = self._start(None)
        self._plan.next_epoch = self.epoch + 1

    def statistics(self) -> Statistics:
        """Return the figures of this epoch so far, by stage."""
        return self._run.statistics()

    def run_for(self, duration_s: float) -> None:
        """Read and drop elements for a while, to measure."""
        from time import monotonic

        deadline = monotonic() + duration_s
        for _ in self:
            if monotonic() > deadline:
                return

    def close(self, why: Exception | None = None) -> None:
        """Stop at once; threads in the middle of a user function end with it. `why` is raised to whoever reads on."""
        self._run.close(why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
