"""Client-fed jobs: the consumer's own sampler says which elements make which output, and in which order.

Unit u of an attempt (the elements of one output) is number u // S of stream u mod S, and the S streams are read in
turn: so outputs arrive in the sampler's order. Up to `ahead` units that the trainer has not received are drawn and
sent ahead, while it is in `next()`; they are kept until it has their outputs, so that a stream which is opened
elsewhere gets the same ones again.

Every operator gives one output a unit. So all there is to a checkpoint is where the sampler stood before the first unit
not received, and a loaded one starts a new attempt there: on any service, with any number of workers. Consumers do not
depend on each other; each is a job of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from itertools import islice

from penstock.client.sampling import Drawing, Grouping, SamplerPlace, Unit
from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.readers import SourceNode
from penstock.graph.traits import OnWorkers
from penstock.graph.traverse import rewrite, walk
from penstock.passes import canonicalize
from penstock.stream.reading import StreamReader
from penstock.wire.frames import Units
from penstock.wire.jobs import FeedSpec

FEWEST_STREAMS = 2
STREAMS_A_WORKER = 2  # so that some can move to workers that join
REFILL_AT = 0.75  # units are sent several at a time, when so many of those allowed are left
NOMINAL_BATCH = 256  # rows; of the operator put where each list is a batch: how long lists are is not known beforehand
INDEXABLE = "range, from_items, from_torch, from_huggingface, read_images, read_files or read_numpy"


def check_fed(root: Node) -> SourceNode:
    """Return the one source of a pipeline that gives one output a unit; refuse every other pipeline."""
    node = canonicalize(root)
    batch: Node | None = None
    while not isinstance(node, SourceNode):
        if isinstance(node, ops.Batches):
            if batch is not None:
                raise InvalidPipelineError(
                    f"{short_label(node)} and {short_label(batch)} with feed=: a unit of the sampler becomes one "
                    "batch, once; leave one of them out, or put the second one after distribute()"
                )
            batch = node
        elif isinstance(node, ops.Shuffle):
            raise InvalidPipelineError(f"{short_label(node)} with feed=: the sampler says the order; leave it out")
        elif not _gives_one_output(node):
            raise InvalidPipelineError(
                f"{short_label(node)} with feed=: every unit of the sampler must give one output, so that outputs come "
                "in the sampler's order; put it after distribute(), or leave feed= out"
            )
        _check_errors(node)
        (node,) = node.inputs
    _check_errors(node)
    return node


def _gives_one_output(node: Node) -> bool:
    """Return whether each element gives one output, unless `on_error` leaves it out; or workers do not run it."""
    if node.traits.on_workers in (OnWorkers.LEFT_TO_READER, OnWorkers.LEFT_OUT):
        return True
    return ops.passes_states(node) and (node.policy is not None or not node.traits.may_skip)


def _check_errors(node: Node) -> None:
    if isinstance(node, (ops.Unary, SourceNode)) and node.policy is not None:
        raise InvalidPipelineError(
            f"{short_label(node)} with feed= and on_error='skip': every unit of the sampler must give its output "
            "whole; leave on_error out, and bad elements out of the sampler"
        )


def not_indexable(source: SourceNode) -> InvalidPipelineError:
    return InvalidPipelineError(
        f"feed= reads elements by their index, and those of {short_label(source)} can only be read in order: use "
        f"{INDEXABLE}, or leave feed= out and shuffle() the dataset"
    )


def grouping_of(root: Node) -> Grouping | None:
    """Return what the batch operator says, if there is one."""
    for node in walk(root):
        if isinstance(node, ops.Batches):
            return Grouping(size=node.size, drop_last=node.drop_last)
    return None


def with_batches(root: Node) -> Node:
    """Return the graph in which a list becomes one batch, however short; at the end, unless it says where."""
    if grouping_of(root) is None:
        return ops.Batch(upstream=root, size=NOMINAL_BATCH)
    return rewrite(root, lambda node: replace(node, drop_last=False) if isinstance(node, ops.Batches) else node)


def fed_streams(count: int) -> tuple[FeedSpec, ...]:
    return tuple(FeedSpec(kind="fed", number=number, of=count) for number in range(count))


def how_many_streams(asked: int, workers: int, ahead: int) -> int:
    return min(asked or max(FEWEST_STREAMS, STREAMS_A_WORKER * workers), ahead)


class Feeder:
    """What has been drawn for one attempt and not received yet. Belongs to the thread that reads.

    The trainer's steps are counted over the whole epoch, from `begins_at` on in this attempt.
    """

    def __init__(self, drawing: Drawing, *, ahead: int, consumer: int, consumers: int) -> None:
        self.consumer, self.consumers = consumer, consumers
        """Which consumer of how many the loader is; the job itself has but one."""
        self._drawing, self._ahead = drawing, ahead
        self.begins_at = drawing.place().units
        self._kept: deque[tuple[Unit, SamplerPlace]] = deque()
        self._kept_from = self.begins_at
        """The step of the first unit that is kept."""
        self._ended = False
        self._end_told = False
        self._end_place: SamplerPlace | None = None
        self._streams = 1

    def deal_to(self, streams: int) -> None:
        """Deal units to so many streams, in turn."""
        self._streams = streams

    def places(self, step: int, count: int) -> list[SamplerPlace]:
        """Return where the sampler stood before each of the units from `step` on, and after the last of `count`."""
        return [self.place(step + k) for k in range(count + 1)]

    @property
    def _drawn(self) -> int:
        return self._kept_from + len(self._kept)

    def place(self, step: int) -> SamplerPlace:
        """Return where the sampler stood before a unit that was not received before the last `refill`."""
        offset = step - self._kept_from
        if offset < len(self._kept):
            return self._kept[offset][1]
        return self._end_place or self._drawing.place()

    def refill(self, step: int, readers: Collection[StreamReader]) -> list[Units]:
        """Forget what was received, draw more if there is room; return what is to be sent to streams that are open."""
        # Inside a frame a stream stands at the cut before it, and opened there it needs the units from there on.
        cuts = [self._step(r.number, r.standing.cut_round) for r in readers if not r.standing.ended]
        while self._kept_from < min(step, *cuts, self._drawn):
            self._kept.popleft()
            self._kept_from += 1
        before = self._drawn
        if not self._ended and before - step <= REFILL_AT * self._ahead:
            while not self._ended and self._drawn - step < self._ahead:
                place = self._drawing.place()
                unit = self._drawing.draw()
                if unit is None:
                    self._ended, self._end_place = True, place
                else:
                    self._kept.append((unit, place))
        if self._drawn == before and (not self._ended or self._end_told):
            return []
        self._end_told = self._ended
        return [self._units(reader, self._ordinal(reader.number, before)) for reader in readers if reader.is_open]

    def opened(self, reader: StreamReader) -> Units:
        """Return all that a stream which was just opened needs from there on."""
        return self._units(reader, reader.head.cut_round)

    def _step(self, stream: int, ordinal: int) -> int:
        return self.begins_at + ordinal * self._streams + stream

    def _ordinal(self, stream: int, step: int) -> int:
        """Return the number, in a stream, of its first unit at or after a step."""
        return max(0, -(-(step - self.begins_at - stream) // self._streams))

    def _units(self, reader: StreamReader, first: int) -> Units:
        offset = self._step(reader.number, first) - self._kept_from
        return Units(
            stream=reader.stream,
            opening=reader.opening,
            first=first,
            units=tuple(unit for unit, _ in islice(self._kept, offset, None, self._streams)),
            ended=self._ended,
            taken=reader.standing.cut_round,
            start=self.begins_at,
        )
