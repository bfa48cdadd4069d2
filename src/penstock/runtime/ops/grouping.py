"""How windows put elements together: bucket_by_length, group_by_window, and padded_batch in rounds.

With coordinated reads the m consumers of a job get, in every step, batches of one bucket and one padded length: a
window gathers m batches, and what is made of it is a round, the list of them. `@rounds_of(ops.X)` stands before the
function that returns the rules of such windows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, TypeVar

from penstock.core.element import Element, map_leaves
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.runtime.building import Site, builds
from penstock.runtime.collate import Empty, Padder, collate
from penstock.runtime.contract import Stage
from penstock.runtime.ops.batch import batching
from penstock.runtime.ops.windows import WindowRules, Windows, part_sizes
from penstock.runtime.stats import StageMeter

MakeRules: TypeAlias = Callable[..., WindowRules]
"""(operator, members, what gives memory, meter) → rules for windows of so many batches each."""
AnyMakeRules = TypeVar("AnyMakeRules", bound=MakeRules)

ROUNDS: dict[type[Node], MakeRules] = {}


def rounds_of(operator: type[Node]) -> Callable[[AnyMakeRules], AnyMakeRules]:
    """Register how an operator makes rounds."""

    def register(make: AnyMakeRules) -> AnyMakeRules:
        ROUNDS[operator] = make
        return make

    return register


# padded_batch


@builds(ops.PaddedBatch)
def _padding(node: ops.PaddedBatch, at: Site, upstream: Stage) -> Stage:
    empty, meter = at.placement.empty, at.meter

    def join(rows: Sequence[Element]) -> Element:
        return _padded(rows, _padder_of(node, empty), meter, None)

    return batching(node.size, node.drop_last, join, at, upstream)


@rounds_of(ops.PaddedBatch)
def _padded_rounds(node: ops.PaddedBatch, members: int, empty: Empty, meter: StageMeter) -> WindowRules:
    def pad_all(_: int, rows: Sequence[Element]) -> list[Element]:
        cuts = list(accumulate(part_sizes(len(rows), members)))
        return _padded_round(rows, _padder_of(node, empty, cuts), meter, None, len(cuts))

    rules = WindowRules(
        label=short_label(node), key=lambda _: 0, size=lambda _: node.size, finish=pad_all, drop_last=node.drop_last
    )
    return rules.of_rounds(members, moves_up=True)


# group_by_window


@builds(ops.GroupByWindow)
def _windows_of_keys(node: ops.GroupByWindow, at: Site, upstream: Stage) -> Stage:
    return Windows(at.meter, upstream, _grouping(node, _reducer(node)), keep_rest=at.keep_rest)


@rounds_of(ops.GroupByWindow)
def _reduced_rounds(node: ops.GroupByWindow, members: int, empty: Empty, meter: StageMeter) -> WindowRules:
    reduce = _reducer(node)

    def reduce_each(key: Any, rows: Sequence[Element]) -> list[Element]:
        ends = [0, *accumulate(part_sizes(len(rows), members))]
        return [reduce(key, rows[start:stop]) for start, stop in pairwise(ends)]

    return _grouping(node, reduce_each).of_rounds(members, moves_up=False)


def _grouping(node: ops.GroupByWindow, finish: Callable[[Any, Sequence[Element]], Element]) -> WindowRules:
    return WindowRules(
        label=short_label(node),
        key=node.key.resolve(),
        size=lambda _: node.size,
        drop_last=node.drop_last,
        max_pending=node.max_pending,
        finish=finish,
    )


def _reducer(node: ops.GroupByWindow) -> Callable[[Any, Sequence[Element]], Element]:
    reduce = None if node.reduce is None else node.reduce.resolve()
    return lambda _, rows: list(rows) if reduce is None else reduce(list(rows))


# bucket_by_length


@builds(ops.BucketByLength)
def _windows_of_buckets(node: ops.BucketByLength, at: Site, upstream: Stage) -> Stage:
    pad_length, empty, meter = _pad_lengths(node), at.placement.empty, at.meter

    def finish(bucket: int, rows: Sequence[Element]) -> Element:
        return _padded(rows, Padder(node.value, pad_length(bucket), None, empty), meter, _boundary(node, bucket))

    return Windows(meter, upstream, _bucketing(node, finish), keep_rest=at.keep_rest)


@rounds_of(ops.BucketByLength)
def _bucket_rounds(node: ops.BucketByLength, members: int, empty: Empty, meter: StageMeter) -> WindowRules:
    pad_length = _pad_lengths(node)

    def pad_alike(bucket: int, rows: Sequence[Element]) -> list[Element]:
        cuts = list(accumulate(part_sizes(len(rows), members)))
        padder = Padder(node.value, pad_length(bucket), None, empty, cuts)
        return _padded_round(rows, padder, meter, _boundary(node, bucket), len(cuts))

    return _bucketing(node, pad_alike).of_rounds(members, moves_up=True)


def _bucketing(node: ops.BucketByLength, finish: Callable[[Any, Sequence[Element]], Element]) -> WindowRules:
    length = node.length.resolve()
    return WindowRules(
        label=short_label(node),
        key=lambda element: bisect_left(node.boundaries, length(element)),
        size=lambda bucket: node.batch_sizes[bucket],
        finish=finish,
        drop_last=node.drop_last,
    )


def _boundary(node: ops.BucketByLength, bucket: int) -> int | None:
    return node.boundaries[bucket] if bucket < len(node.boundaries) else None


def _pad_lengths(node: ops.BucketByLength) -> Callable[[int], int | None]:
    return lambda bucket: _boundary(node, bucket) if node.pad_to_boundary else None


# Padding


def _padder_of(node: ops.PaddedBatch, empty: Empty, cuts: Sequence[int] | None = None) -> Padder:
    return Padder(node.value, node.length, node.multiple_of, empty, cuts)


def _padded(rows: Sequence[Element], padder: Padder, meter: StageMeter, up_to: int | None, batches: int = 1) -> Element:
    batch = collate(rows, "", padder)
    meter.count_padding(up_to, batches=batches, rows=len(rows), values=padder.values, padding=padder.padding)
    return batch


def _padded_round(
    rows: Sequence[Element], padder: Padder, meter: StageMeter, up_to: int | None, batches: int
) -> list[Element]:
    joined = _padded(rows, padder, meter, up_to, batches)
    return [_member(joined, number) for number in range(batches)]


def _member(joined: Element, number: int) -> Element:
    return map_leaves(lambda members: members.parts[number], joined)
