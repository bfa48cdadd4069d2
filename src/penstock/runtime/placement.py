"""What a run's part of a job means for its stages: nothing, where it runs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
from msgspec.structs import replace

from penstock.core.element import Array
from penstock.core.errors import InvalidArgumentError, InvalidPipelineError
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.regrouping import last_regrouping, makes_rounds
from penstock.graph.traits import GroupedBy
from penstock.graph.traverse import walk
from penstock.runtime.buffers import is_large
from penstock.runtime.collate import Empty
from penstock.runtime.contract import Stage
from penstock.runtime.distributable import check_coordinated
from penstock.runtime.flight import Flight
from penstock.runtime.stats import StageMeter
from penstock.runtime.streaming.leftovers import (
    Advance,
    Leftovers,
    PlainRemainder,
    Remainder,
    RoundsRemainder,
    RowsRemainder,
    WaitingRemainder,
)
from penstock.runtime.streaming.ordinals import AllSplits, FedSplits, Ordinals
from penstock.runtime.streaming.sharding import ShardStage, StreamShare
from penstock.runtime.streaming.units import Sizes, unit_sizes
from penstock.runtime.streams import Allocate, Left, StreamPart, UnitFeed


class StreamPlacement:
    def __init__(self, part: StreamPart | None, root: Node) -> None:
        self.part = part
        self._lefts = [] if part is None else [Left(*left) for left in part.leftovers]
        self.share = StreamShare() if part is None else StreamShare(part.shuffle_parts, part.keep)
        self.last_regrouping = None if part is None else last_regrouping(root)
        if part is not None and part.coordinated:
            check_coordinated(root)
        self.mix_weights = None if part is None or part.weights is None else mix_weights(root, part.weights)
        """What to mix by instead of the operator's own weights."""
        self._splits_read: Counter[int] = Counter()
        self._marked = {below for node in walk(root) if isinstance(node, ops.Shard) for below in walk(node)}

    @property
    def alone(self) -> bool:
        return self.part is None

    @property
    def takes_all(self) -> bool:
        """Whether all elements of a split that is named are this run's; which splits a tail reads is another matter."""
        return self.part is None or (self.part.keep is None and not self.part.leftovers)

    # Sources

    def ordinals(self, number: int, splits: int) -> Callable[[int], Ordinals]:
        """Return the splits of a source that are read in a pass, of `splits` there are."""
        part = self.part
        if part is None:
            every = AllSplits(number, splits)
            return lambda pass_: every
        feed, read = part.feed, self._splits_read
        return lambda pass_: FedSplits(feed, number, pass_, read)

    def splits_read(self, sources: Sequence[int]) -> Callable[[], int]:
        """Return a function that counts the splits of some sources that this stream has begun.

        In a tail, a pass without any counts as one: its feed names no others later.
        """
        assert self.part is not None
        if self.part.leftovers:
            return count().__next__
        read = self._splits_read
        return lambda: sum(read[source] for source in sources)

    @property
    def units(self) -> UnitFeed | None:
        """What names elements by their index, where that is how this stream is fed."""
        feed = None if self.part is None else self.part.feed
        return feed if isinstance(feed, UnitFeed) else None

    @property
    def sizes(self) -> Sizes | None:
        """What says how many rows each batch has, where units do."""
        whole = self.part is not None and self.part.units == "whole"
        return unit_sizes(self.units) if whole and self.units is not None else None

    @property
    def thinned_units(self) -> bool:
        """Whether each batch is what is left of a unit."""
        return self.part is not None and self.part.units == "thinned"

    def dropped(self, number: int) -> frozenset[tuple[int, int]]:
        found = () if self.part is None else self.part.dropped
        return frozenset((split, index) for source, split, index in found if source == number)

    def shards_at(self, node: Node) -> bool:
        """Say whether elements are shared out right after this operator."""
        part = self.part
        if part is None or (part.keep is None and all(left.keep is None for left in self._lefts)):
            return False
        return isinstance(node, ops.Shard) or (not node.inputs and node not in self._marked)

    def sharding(self, meter: StageMeter, upstream: Stage) -> Stage:
        return ShardStage(meter, upstream, self.share)

    # Groups

    def keeps_rest(self, node: Node) -> bool:
        return self.part is not None and self.part.rest == "keep" and node is self.last_regrouping

    def members(self, node: Node) -> int:
        """Return how many outputs of this operator make a round; 0: it does not have to know."""
        if self.part is None or node is not self.last_regrouping or not makes_rounds(node):
            return 0
        return self.part.coordinated

    def left(self, reader: Node | None, upstream: Stage, advance: Advance) -> Stage:
        """Return what an operator that regroups (None: whoever reads the run) gets: in a tail, what is left of streams.

        `advance` makes and discards the outputs that a leftover begins with.
        """
        if self.part is None or not self._lefts or reader is not self.last_regrouping:
            return upstream
        return Leftovers(
            StageMeter("leftovers"),
            upstream,
            self._remainder(reader, upstream),
            leftovers=self._lefts,
            feed=self.part.feed,
            share=self.share,
            advance=advance,
        )

    def _remainder(self, reader: Node | None, upstream: Stage) -> Remainder:
        if reader is not None and self.members(reader):
            return RoundsRemainder(upstream)
        regroups = None if reader is None else reader.traits.regroups
        if regroups is None or regroups.by is GroupedBy.ORDER:
            return PlainRemainder(upstream)
        return WaitingRemainder(upstream) if regroups.by is GroupedBy.KEY else RowsRemainder(upstream)

    # Work and memory

    def flight(self) -> Flight | None:
        part = self.part
        if part is None or (part.recorder is None and not part.suspects):
            return None
        return Flight(part.recorder, {(source, split, index): count for source, split, index, count in part.suspects})

    @property
    def allocate(self) -> Allocate | None:
        return None if self.part is None else self.part.allocate

    @property
    def empty(self) -> Empty:
        """What gives memory for a batch's arrays: large ones of a stream lie where its owner wants them."""
        allocate = self.allocate
        if allocate is None:
            return np.empty
        given = allocate

        def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
            array = given(shape, dtype) if is_large(shape, dtype) else None
            return np.empty(shape, dtype) if array is None else array

        return empty


def mix_weights(root: Node, weights: tuple[float, ...]) -> tuple[float, ...]:
    """Return the weights as the one mix of a graph takes them."""
    return replace(_one_mix(root), weights=weights).weights  # the operator checks them


def check_weights_midway(root: Node, *, hinted: bool = False) -> None:
    """Raise `InvalidArgumentError` where the mix of a graph cannot go by other weights in the middle of an epoch.

    An operator that holds something back reads it again from a state of the mix, which then has to give the same.
    `hinted`: streams are told apart by a `shard()` mark, each reads all of the mix above it, and none stands where
    another does: what one has given by the old weights would not be what another leaves out by the new ones.
    """
    mix = _one_mix(root)
    for node in walk(root):
        after_it = any(above is mix for above in walk(node))
        if hinted and after_it and isinstance(node, ops.Shard):
            raise InvalidArgumentError(
                "set_weights() in the middle of an epoch with shard() after the mix: each stream mixes everything, and "
                "they are not at one place. Set weights between epochs, or put shard() before the mix, on each input"
            )
        if node.traits.holds_back and after_it:
            raise InvalidArgumentError(
                f"set_weights() in the middle of an epoch with {short_label(node)} after the mix: it holds elements of "
                "the old weights. Set weights between epochs, or put the operator before the mix"
            )


def _one_mix(root: Node) -> ops.Mix:
    mixes = [node for node in walk(root) if isinstance(node, ops.Mix)]
    if len(mixes) != 1:
        raise InvalidPipelineError(
            f"weights were given for a pipeline with {len(mixes) or 'no'} mix() operators; it needs exactly one"
        )
    return mixes[0]
