"""Runs a pipeline as streams of a job, with a feed that deals splits and remembers nothing a state does not name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.api.dataset import Dataset
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.passes import canonicalize, optimize
from penstock.runtime.budget import default_budget
from penstock.runtime.distributable import for_workers
from penstock.runtime.iterator import Run
from penstock.runtime.streams import Left, StreamPart, still_needed
from penstock.sources.base import Source
from penstock.sources.registry import open_source
from penstock.testing.conformance import compare_all

SEED = 1234
Lists = dict[tuple[int, int], list[int]]


def dealt(counts: Sequence[int], number: int, of: int) -> Callable[[int, int], list[int]]:
    """Return a stream's list for (source, pass): every split goes to one stream, in no simple pattern."""

    def list_of(source: int, pass_: int) -> list[int]:
        return [o for o in range(counts[source]) if (o * 5 + o // 3 + source + pass_) % of == number]

    return list_of


@dataclass
class FakeFeed:
    """Answers for one stream. From a state on it knows only what that state still needs, and what was never begun."""

    list_of: Callable[[int, int], list[int]]
    state: Any = None
    asked: Lists = field(default_factory=dict)

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        ordinals = list(still_needed(self.state, source, pass_, self.list_of(source, pass_)))
        assert after is None or after in ordinals, f"{after} of source {source}, pass {pass_} is not in {self.state}"
        following = ordinals[0 if after is None else ordinals.index(after) + 1 :]
        self.asked.setdefault((source, pass_), []).extend(following[:1])
        return following[0] if following else None

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        return self.next_split(source, pass_, after)

    def prefer(self, source: int, pass_: int, ordinals: Sequence[int]) -> None:
        pass

    def select(self, leftover: int) -> None:
        raise AssertionError("not a tail")


@dataclass
class TailFeed:
    feeds: Sequence[FakeFeed]
    present: int = -1

    def next_split(self, source: int, pass_: int, after: int | None) -> int | None:
        return self.feeds[self.present].next_split(source, pass_, after)

    def known_split(self, source: int, pass_: int, after: int) -> int | None:
        return self.next_split(source, pass_, after)

    def prefer(self, source: int, pass_: int, ordinals: Sequence[int]) -> None:
        pass

    def select(self, leftover: int) -> None:
        self.present = leftover


@dataclass
class Read:
    """What a run gave: `states[k]` is the state after k outputs, the last one that of the end."""

    elements: list[Any]
    states: list[Any]
    has_rest: bool
    asked: Lists


class Job:
    def __init__(
        self, dataset: Dataset, *, sharding: str = "dynamic", optimized: bool = True, threads: int = 1
    ) -> None:
        node = for_workers(dataset.node, sharding)
        self.alone = Dataset(node)
        """The same in one process."""
        self.graph: Node = optimize(node) if optimized else canonicalize(node)
        self._threads = threads
        self._sources: dict[SourceNode, Source] = {}
        nodes = [n for n in walk(self.graph) if isinstance(n, SourceNode)]
        self.counts = [len(self.source_of(n).splits()) for n in nodes]

    def source_of(self, node: SourceNode) -> Source:
        if node not in self._sources:
            self._sources[node] = open_source(node)
        return self._sources[node]

    def run(self, part: StreamPart, *, state: Any = None, epoch: int = 0, most: int = 1000, want: int = 1) -> Read:
        state = json.loads(json.dumps(state))
        run = Run(
            self.graph,
            seed=SEED,
            epoch=epoch,
            budget=default_budget(self._threads),
            source_of=self.source_of,
            part=part,
        )
        try:
            run.open(epoch, state)
            read = Read([], [state], False, getattr(part.feed, "asked", {}))
            while len(read.elements) < most:
                chunk = run.pull(want)
                if not chunk.elements:
                    read.states.append(chunk.marks.at(0))
                    assert run.pull(want).marks.at(0) == chunk.marks.at(0)
                    break
                read.elements.extend(chunk.elements)
                read.states.extend(chunk.marks.at(k + 1) for k in range(len(chunk.elements)))
            read.has_rest = run.has_rest
            return read
        finally:
            run.close()

    def stream(self, number: int, of: int, *, every: int = 1, most: int = 1000, **part: Any) -> Read:
        """Read a stream, and restore it at every `every`-th position with nothing but what its state names."""
        list_of = dealt(self.counts, number, of)

        def read(state: Any) -> Read:
            feed = FakeFeed(list_of, state)
            return self.run(StreamPart(feed=feed, rest="keep", shuffle_parts=of, **part), state=state, most=most)

        whole = read(None)
        check_restores(whole, read, every)
        return whole

    def tail(
        self,
        leftovers: Sequence[Left],
        list_ofs: Sequence[Callable[[int, int], list[int]]],
        *,
        every: int = 1,
        **part: Any,
    ) -> Read:
        def read(state: Any) -> Read:
            feeds = [FakeFeed(list_of, left.state) for left, list_of in zip(leftovers, list_ofs)]
            return self.run(StreamPart(feed=TailFeed(feeds), leftovers=tuple(leftovers), **part), state=state)

        whole = read(None)
        check_restores(whole, read, every)
        return whole

    def epoch(self, of: int, *, every: int = 1, **part: Any) -> list[Any]:
        """Return all outputs of `of` streams and their tail."""
        return [element for read in self.reads(of, every=every, **part) for element in read.elements]

    def reads(self, of: int, *, every: int = 1, **part: Any) -> list[Read]:
        """Read `of` streams and their tail, if there is one."""
        streams = [self.stream(number, of, every=every, **part) for number in range(of)]
        left = [(Left(s.states[-1], 0, of), dealt(self.counts, i, of)) for i, s in enumerate(streams) if s.has_rest]
        if not left:
            return streams
        return [*streams, self.tail([a for a, _ in left], [b for _, b in left], every=every, **part)]


def check_restores(whole: Read, read: Callable[[Any], Read], every: int) -> None:
    for position in range(1, len(whole.states), every):
        again = read(whole.states[position])
        expected = whole.elements[position:]
        different = compare_all(expected, again.elements[: len(expected)])
        assert different is None, f"restored after {position} at {whole.states[position]}: {different}"
        if position < len(whole.elements) or not whole.has_rest:
            assert len(again.elements) == len(expected)
            assert again.has_rest == whole.has_rest
