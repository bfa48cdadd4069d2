"""How the operators that regroup put elements together.

With coordinated reads the m consumers of a job get, in every step, batches of one bucket and one padded length: a
window gathers m batches, and what is made of it is a round, the list of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from penstock.core.element import Element, map_leaves
from penstock.graph import ops
from penstock.graph.parameters import short_label
from penstock.runtime.collate import Empty, Padder, collate, ragged_leaves, stack_leaves
from penstock.runtime.ops.batch import Collate
from penstock.runtime.ops.windows import WindowRules, part_sizes
from penstock.runtime.stats import StageMeter

InRounds: TypeAlias = ops.BucketByLength | ops.GroupByWindow | ops.PaddedBatch
IN_ROUNDS = (ops.BucketByLength, ops.GroupByWindow, ops.PaddedBatch)
"""What has to know of rounds. Outputs of the others are alike, whichever of them make a round."""


def batch_collator(
    node: ops.Batch | ops.PaddedBatch | ops.RaggedBatch | ops.FusedBatch, empty: Empty, meter: StageMeter
) -> Collate:
    match node:
        case ops.PaddedBatch():
            return lambda rows: _padded(rows, _padder_of(node, empty), meter, None)
        case ops.RaggedBatch():
            return lambda rows: collate(rows, "", ragged_leaves)
        case ops.Batch() | ops.FusedBatch():
            leaf = partial(stack_leaves, empty=empty)
            return lambda rows: collate(rows, "", leaf)


def window_rules(node: ops.BucketByLength | ops.GroupByWindow, empty: Empty, meter: StageMeter) -> WindowRules:
    if isinstance(node, ops.GroupByWindow):
        return _grouping(node, _reducer(node))
    pad_length = _pad_lengths(node)

    def finish(bucket: int, rows: Sequence[Element]) -> Element:
        return _padded(rows, Padder(node.value, pad_length(bucket), None, empty), meter, _boundary(node, bucket))

    return _bucketing(node, finish)


def round_rules(node: InRounds, members: int, empty: Empty, meter: StageMeter) -> WindowRules:
    """Return rules for windows of `members` batches each."""
    rules: WindowRules
    match node:
        case ops.GroupByWindow():
            reduce = _reducer(node)

            def reduce_each(key: Any, rows: Sequence[Element]) -> list[Element]:
                ends = [0, *accumulate(part_sizes(len(rows), members))]
                return [reduce(key, rows[start:stop]) for start, stop in pairwise(ends)]

            rules = _grouping(node, reduce_each)
        case ops.BucketByLength():
            pad_length = _pad_lengths(node)

            def pad_alike(bucket: int, rows: Sequence[Element]) -> list[Element]:
                cuts = list(accumulate(part_sizes(len(rows), members)))
                padder = Padder(node.value, pad_length(bucket), None, empty, cuts)
                return _padded_round(rows, padder, meter, _boundary(node, bucket), len(cuts))

            rules = _bucketing(node, pad_alike)
        case ops.PaddedBatch():

            def pad_all(_: int, rows: Sequence[Element]) -> list[Element]:
                cuts = list(accumulate(part_sizes(len(rows), members)))
                return _padded_round(rows, _padder_of(node, empty, cuts), meter, None, len(cuts))

            rules = WindowRules(
                label=short_label(node),
                key=lambda _: 0,
                size=lambda _: node.size,
                finish=pad_all,
                drop_last=node.drop_last,
            )
    return rules.of_rounds(members, moves_up=not isinstance(node, ops.GroupByWindow))


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
