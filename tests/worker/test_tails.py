"""After a change of the number of consumers, streams that end inside their old rounds: nothing lost, nothing twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

import penstock as ps
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.passes import optimize
from penstock.runtime.budget import default_budget
from penstock.runtime.iterator import PipelineArguments, Run
from penstock.runtime.streams import Left, StreamPart
from penstock.sources.registry import open_source
from penstock.stream.rounds import RoundMaker
from penstock.wire.jobs import Cut, FeedSpec, Leftover, Regroup
from penstock.wire.received import received
from penstock.worker.feeds import TailFeed, fixed_feed
from penstock.worker.tail_run import TailRun

ROWS, STREAMS, BATCH = 60, 3, 2
PIPELINES = {
    "batches": lambda: ps.from_items(range(ROWS)).batch(BATCH),
    "single elements": lambda: ps.from_items(range(ROWS)).map(lambda x: x),
    "shuffled batches": lambda: ps.from_items(range(ROWS)).flat_map(lambda x: [x]).shuffle(9, seed=1).batch(BATCH),
    "buckets": lambda: ps.from_items(range(ROWS)).bucket_by_length(lambda x: x % 5, boundaries=[2], batch_size=BATCH),
}


class Streams:
    """A job's streams, each over the splits it is dealt."""

    def __init__(self, dataset: ps.Dataset) -> None:
        graph = optimize(dataset.node)
        sources = {node: open_source(node) for node in walk(graph) if isinstance(node, SourceNode)}
        self.pipeline = PipelineArguments(
            graph=graph, seed=1, epoch=0, source_of=sources.__getitem__, cache_scope="user"
        )
        self.counts = [len(source.splits()) for source in sources.values()]
        self.feeds = [FeedSpec(kind="dealt", number=number, of=STREAMS) for number in range(STREAMS)]

    def run(self, number: int) -> Run:
        part = StreamPart(feed=fixed_feed(self.feeds[number], self.counts), rest="keep")
        return Run(**self.pipeline, budget=default_budget(1), part=part)

    def tail(self, leftovers: Sequence[Leftover], width: int) -> Run:
        part = StreamPart(
            feed=TailFeed(leftovers, self.counts),
            leftovers=tuple(
                Left(left.cut.engine, len(received(left.cut, width)), left.cut.share) for left in leftovers
            ),
        )
        return TailRun(
            self.pipeline,
            budget=default_budget(1),
            part=part,
            leftovers=leftovers,
            width=width,
            split_counts=self.counts,
        )


def rounds_of(run: Run, cut: Cut, width: int, *, most: int = 1000) -> tuple[list[Any], Cut, bool]:
    """Return the outputs of whole rounds from a cut on, the cut after them, and whether something is left over."""
    maker = RoundMaker(width=width, cut=cut, next_round=0)
    run.open(0, json.loads(json.dumps(cut.engine)))
    given: list[Any] = []
    while chunk := run.pull(3):
        maker.add(chunk)
        while maker.next_round < most and (taken := maker.take(1)):
            given.extend(taken.outputs)
    left = maker.incomplete > 0 or run.has_rest
    run.close()
    standing = maker.standing
    return given, Cut(standing.engine, standing.since, regroup=standing.regroup), left


def rows(outputs: Iterable[Any]) -> list[int]:
    return [int(row) for output in outputs for row in (output if hasattr(output, "__len__") else [output])]


@pytest.mark.parametrize("given", [(4, 1), (1, 4), (2, 0, 3), (0, 0, 5)], ids=str)
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("name", PIPELINES)
def test_streams_that_end_inside_their_old_rounds_lose_nothing(name: str, width: int, given: tuple[int, ...]) -> None:
    streams = Streams(PIPELINES[name]())
    had: list[Any] = []
    leftovers = []
    largest = 0
    for number in range(STREAMS):
        whole, _, _ = rounds_of(streams.run(number), Cut(), 1)
        largest = max(largest, *(len(rows([output])) for output in whole))
        old = Regroup(len(given), given)
        had += [o for n, o in enumerate(whole) if n // old.width < old.given[n % old.width]]
        outputs, cut, left = rounds_of(streams.run(number), Cut(regroup=old), width)
        had += outputs
        if left:
            leftovers.append(Leftover(number, cut, streams.feeds[number]))
    last, _, _ = rounds_of(streams.tail(leftovers, width), Cut(), width)
    found = sorted(rows([*had, *last]))
    assert len(set(found)) == len(found)
    assert ROWS - len(found) <= (width - 1) * largest  # what does not fill the last round, and nothing else


def test_a_tail_goes_on_exactly_from_inside_its_gaps() -> None:
    streams = Streams(PIPELINES["batches"]())
    cut = Cut(regroup=Regroup(2, (4, 1)))
    leftovers = [Leftover(number, cut, streams.feeds[number]) for number in range(STREAMS)]
    whole, _, _ = rounds_of(streams.tail(leftovers, 1), Cut(), 1)
    assert len(whole) == 15
    for most in range(len(whole)):
        before, cut, _ = rounds_of(streams.tail(leftovers, 1), Cut(), 1, most=most)
        after, _, _ = rounds_of(streams.tail(leftovers, 1), cut, 1)
        assert rows([*before, *after]) == rows(whole)
