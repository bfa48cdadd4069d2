"""From a graph to running stages.

What an operator means is decided here and in `ops/`, never by a pass: with or without passes a graph gives the same
elements. A shuffle is where that takes thought. It asks for an order of what is below it, so the shuffles it reaches
through one-to-one operators are one with it (the largest size counts), and where it reaches a source the source reads
in that order itself: any source by permuting its splits, an indexable one by a full permutation, without a buffer.

With a `StreamPart` the same graph becomes a stream of a job: sources read what a feed names, and the operator that
makes the groups keeps its rest, or is fed the rests of other streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.codec import encode_graph
from penstock.graph.fingerprint import fingerprint
from penstock.graph.node import Node
from penstock.graph.parameters import short_label as label_of
from penstock.graph.randomized import draws, takes_rng
from penstock.graph.readers import SourceNode
from penstock.graph.regrouping import Regrouping
from penstock.graph.traverse import walk
from penstock.runtime.budget import Budget
from penstock.runtime.buffers import BufferPool
from penstock.runtime.calling import Calling, threads_of
from penstock.runtime.contract import Stage, State
from penstock.runtime.groups import InRounds, batch_collator, round_rules, window_rules
from penstock.runtime.ops.batch import Batching
from penstock.runtime.ops.cache import Caching, Store, memory_store
from penstock.runtime.ops.cache_files import FileStore
from penstock.runtime.ops.children import FlatMapping
from penstock.runtime.ops.combine import Concatenating, Zipping
from penstock.runtime.ops.fused_batch import FusedBatching
from penstock.runtime.ops.interleave import Interleaving
from penstock.runtime.ops.mix import Mixing
from penstock.runtime.ops.pack import Packing
from penstock.runtime.ops.rebatch import Rebatching
from penstock.runtime.ops.repeat import EmptyPasses, Epochs, Repeating
from penstock.runtime.ops.rounds import Dealing
from penstock.runtime.ops.shuffle import BlockShuffle
from penstock.runtime.ops.slicing import Enumerating, LengthDeclared, Skipping, Taking
from penstock.runtime.ops.source import IndexedSource, RandomOrder, Reading, SplitSource
from penstock.runtime.ops.transform import GroupedMap, Transform
from penstock.runtime.ops.units import UnitSource, unit_sizes
from penstock.runtime.ops.windows import Torn, Windows
from penstock.runtime.ordered import Prefetching
from penstock.runtime.pass_numbers import PassNumbering
from penstock.runtime.placement import Placement
from penstock.runtime.pool import ThreadPool
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.resources import Resources
from penstock.runtime.shuffling import ORDER_PASSING, block_size, order_of, shuffles_reached, source_reached
from penstock.runtime.stats import StageMeter
from penstock.runtime.streams import Left, StreamPart
from penstock.runtime.tuning import FixedTuner
from penstock.sources.base import IndexableSource, Source
from penstock.sources.registry import source_digest

THREADED = (ops.Map, ops.Filter, ops.Fused, ops.FusedBatch, ops.Prefetch)


@dataclass(slots=True)
class Lowering:
    """What the lowering of one graph needs, and the meters and quarantines it makes."""

    seed: int
    epoch: int
    budget: Budget
    pool: ThreadPool | None
    source_of: Callable[[SourceNode], Source]
    part: StreamPart | None = None
    stages: Mapping[SourceNode, Callable[[StageMeter], Stage]] = field(default_factory=dict)
    """Stages that stand for sources: they are read as they are, whatever a shuffle above asks for."""
    regrouping: Batching | FusedBatching | Rebatching | Windows | None = None
    """The stage whose rest is kept."""
    meters: list[StageMeter] = field(default_factory=list)
    quarantines: list[Quarantine] = field(default_factory=list)
    quarantine_kind: type[Quarantine] = Quarantine
    _root: Node | None = None
    _wants_idents: set[Node] = field(default_factory=set)
    _source_numbers: dict[Node, int] = field(default_factory=dict)
    _numbering: PassNumbering = field(init=False)
    _placement: Placement = field(init=False)
    _resources: Resources = field(init=False)

    def lower(self, root: Node) -> Stage:
        self._root = root
        nodes = list(walk(root))
        self._numbering = PassNumbering(root)
        self._placement = Placement(self.part, root)
        self._source_numbers = {node: i for i, node in enumerate(n for n in nodes if isinstance(n, SourceNode))}
        self._resources = Resources(self.budget, self.pool, sum(isinstance(node, THREADED) for node in nodes))
        self._wants_idents = {below for node in nodes if takes_rng(node) for below in walk(node)}
        return self._placement.left(None, self._build(root, None), self._advance)

    @property
    def _calling(self) -> Calling:
        # Kept here it would refer back to this, and what a run holds would wait for the garbage collector.
        return Calling(self.seed, self._quarantine)

    def _build(self, node: Node, order: RandomOrder | None) -> Stage:
        """Build a chain of one-input operators from the bottom up, without recursion: chains can be long."""
        chain: list[ops.Unary] = []
        absorbed: set[Node] = set()
        while isinstance(node, ops.Unary):
            chain.append(node)
            if isinstance(node, ops.Shuffle):
                if order is None or node not in absorbed:
                    order = order_of(node, self.seed)
                    absorbed |= set(shuffles_reached(node))
            elif not isinstance(node, ORDER_PASSING):
                order = None
            node = node.upstream
        stage = self._build_base(node, order)
        for unary in reversed(chain):
            if unary not in absorbed:
                stage = self._build_unary(unary, stage)
        return stage

    def _build_base(self, node: Node, order: RandomOrder | None) -> Stage:
        if isinstance(node, SourceNode):
            return self._build_source(node, order)
        upstreams = [self._build(upstream, None) for upstream in node.inputs]
        meter = self._meter(node)
        match node:
            case ops.Zip():
                return Zipping(meter, upstreams)
            case ops.Concatenate():
                return Concatenating(meter, upstreams, keep_ends=not self._placement.alone)
            case ops.Mix():
                unit = None if node.unit is None else node.unit.resolve()
                return Mixing(
                    meter,
                    upstreams,
                    label=meter.label,
                    weights=node.weights,
                    given_weights=self._placement.mix_weights,
                    unit=unit,
                    stop=node.stop,
                    passes_over=[self._numbering.passes(node, upstream) for upstream in node.inputs],
                    empty=[self._empty_passes(upstream) for upstream in node.inputs],
                )
        raise InvalidPipelineError(f"{node.name}: there is no way to run it")

    def _build_source(self, node: SourceNode, order: RandomOrder | None) -> Stage:
        meter = self._meter(node)
        if node in self.stages:
            return self.stages[node](meter)
        source, number, placement = self.source_of(node), self._source_numbers[node], self._placement
        splits = source.splits()
        policy = getattr(node, "on_error", None)
        reading = Reading(
            number=number,
            splits=splits,
            ordinals=placement.ordinals(number, len(splits)),
            with_idents=node in self._wants_idents,
            order=order,
            quarantine=self._quarantine(node, policy, meter) if policy is not None else None,
            dropped=placement.dropped(number),
            flight=placement.flight(),
        )
        stage: Stage
        if isinstance(source, IndexableSource):
            units = placement.units
            stage = (
                IndexedSource(meter, source, reading) if units is None else UnitSource(meter, source, reading, units)
            )
        else:
            stage = SplitSource(meter, source, reading)
        return self._sharded(node, stage)

    def _build_unary(self, node: ops.Unary, upstream: Stage) -> Stage:
        meter = self._meter(node)
        match node:
            case ops.Map(batch_size=int(size)):
                tuner, room = self._resources.tuner(node.threads, meter), self._resources.room()
                return GroupedMap(
                    meter,
                    upstream,
                    self.pool,
                    tuner,
                    room,
                    size=size,
                    calls=self._calling.calls(node, node.function, meter),
                    flight=self._placement.flight(),
                )
            case ops.Map() | ops.Filter() | ops.Select() | ops.Drop() | ops.Rename():
                return self._transform(meter, upstream, [node])
            case ops.Fused():
                return self._transform(meter, upstream, node.steps)
            case ops.FlatMap() | ops.Unbatch() | ops.Interleave():
                return self._children(node, meter, upstream)
            case ops.Shuffle():
                return self._shuffle(node, meter, upstream)
            case ops.Batch() | ops.PaddedBatch() | ops.RaggedBatch() | ops.Rebatch() | ops.FusedBatch():
                return self._regroup(node, meter, upstream)
            case ops.Repeat():
                return self._repeating(node, meter, upstream)
            case ops.Take():
                return Taking(meter, upstream, node.count)
            case ops.Skip():
                return Skipping(meter, upstream, node.count)
            case ops.Enumerate():
                return Enumerating(meter, upstream, node.start)
            case ops.BucketByLength() | ops.GroupByWindow():
                return self._regroup(node, meter, upstream)
            case ops.Pack():
                return Packing(
                    meter,
                    upstream,
                    label=meter.label,
                    length=node.length,
                    key=node.key,
                    long=node.long,
                    lookahead=node.lookahead,
                    value=node.value,
                )
            case ops.Cache():
                return Caching(meter, upstream, self._store(node), with_idents=node in self._wants_idents)
            case ops.Prefetch():
                prefetch_tuner = self._resources.prefetch_tuner(node, meter)
                return Prefetching(meter, upstream, self.pool, prefetch_tuner, self._resources.room(node.size))
            case ops.WithLength():
                return LengthDeclared(meter, upstream, node.count)
            case ops.WithEpoch():
                return Epochs(meter, self._repeating(node, StageMeter("repeat"), upstream), node.count, node.slot)
            case ops.Shard():
                self.meters.remove(meter)
                return self._sharded(node, upstream)
        raise InvalidPipelineError(f"{node.name}: there is no way to run it")

    # Transforms

    def _transform(self, meter: StageMeter, upstream: Stage, nodes: Sequence[Node]) -> Stage:
        own = all(isinstance(node, (ops.Select, ops.Drop, ops.Rename)) for node in nodes)
        tuner = FixedTuner(meter, 0) if own else self._resources.tuner(threads_of(nodes), meter)
        one_to_one = all(node.ONE_TO_ONE and getattr(node, "on_error", None) is None for node in nodes)
        return Transform(
            meter,
            upstream,
            self.pool,
            tuner,
            self._resources.room(),
            steps=[self._calling.step(node, meter) for node in nodes],
            one_to_one=one_to_one,
            flight=None if own else self._placement.flight(),
        )

    def _children(self, node: ops.FlatMap | ops.Unbatch | ops.Interleave, meter: StageMeter, upstream: Stage) -> Stage:
        with_idents = node in self._wants_idents
        children = self._calling.children(node)
        if not isinstance(node, ops.Interleave):
            return FlatMapping(
                meter,
                upstream,
                label=meter.label,
                children=children,
                with_idents=with_idents,
                flight=None if isinstance(node, ops.Unbatch) else self._placement.flight(),
            )
        return Interleaving(
            meter,
            upstream,
            label=meter.label,
            children=children,
            cycle=node.cycle,
            block=node.block,
            with_idents=with_idents,
        )

    # Groups

    def _regroup(self, node: Regrouping, meter: StageMeter, upstream: Stage) -> Stage:
        placement = self._placement
        upstream, keep_rest = placement.left(node, upstream, self._advance), placement.keeps_rest(node)
        members = placement.members(node)
        units = None if placement.units is None else unit_sizes(placement.units)
        if members:
            assert isinstance(node, InRounds)
            return self._in_rounds(node, members, meter, upstream, keep_rest=keep_rest)
        stage: Batching | FusedBatching | Rebatching | Windows
        match node:
            case ops.FusedBatch():
                meter.label = f"batch({node.size})"
                rows_meter = self._rows_meter(node, meter)
                buffers = BufferPool(placement.allocate)
                stage = FusedBatching(
                    meter,
                    upstream,
                    self.pool,
                    self._resources.tuner(threads_of(node.steps), rows_meter),
                    self._resources.room(),
                    steps=[self._calling.step(step, rows_meter) for step in node.steps],
                    size=node.size,
                    drop_last=node.drop_last,
                    rows_meter=rows_meter,
                    collate=batch_collator(node, buffers.empty, meter),
                    buffers=buffers,
                    keep_rest=keep_rest,
                    flight=placement.flight(),
                    sizes=units,
                )
            case ops.Rebatch(size=size, drop_last=drop_last):
                stage = Rebatching(
                    meter, upstream, size=size, drop_last=drop_last, keep_rest=keep_rest, empty=placement.empty
                )
            case ops.BucketByLength() | ops.GroupByWindow():
                stage = Windows(meter, upstream, window_rules(node, placement.empty, meter), keep_rest=keep_rest)
            case ops.Batch() | ops.PaddedBatch() | ops.RaggedBatch():
                join = batch_collator(node, placement.empty, meter)
                stage = Batching(
                    meter,
                    upstream,
                    size=node.size,
                    drop_last=node.drop_last,
                    collate=join,
                    keep_rest=keep_rest,
                    sizes=units,
                )
        if keep_rest:
            self.regrouping = stage
        return stage

    def _in_rounds(self, node: InRounds, members: int, meter: StageMeter, upstream: Stage, *, keep_rest: bool) -> Stage:
        assert self.part is not None
        empty, torn = self._placement.empty, self.part.torn
        made = StageMeter(f"rounds of {members}")
        self.meters.insert(self.meters.index(meter), made)
        rounds = Windows(
            made,
            upstream,
            round_rules(node, members, empty, meter),
            keep_rest=keep_rest,
            torn=None if torn is None else Torn(round_rules(node, torn.consumers, empty, meter), torn.given),
        )
        if keep_rest:
            self.regrouping = rounds
        return Dealing(meter, rounds, members=members)

    def _advance(self, pass_: int, left: Left) -> State:
        """Return the state of a leftover's own stream after the outputs to discard."""
        assert self.part is not None and self._root is not None
        parts = left.shuffle_parts or self.part.shuffle_parts
        part = replace(self.part, leftovers=(), rest="keep", shuffle_parts=parts, keep=left.keep, torn=left.torn)
        stage = replace(self, pool=None, part=part, meters=[], quarantines=[], regrouping=None).lower(self._root)
        state, due = left.state, left.outputs
        try:
            stage.open(pass_, state)
            if left.torn is not None and not due:
                return stage.pull(1).marks.at(0)
            while due and (chunk := stage.pull(due)).elements:
                due -= len(chunk.elements)
                state = chunk.marks.at(len(chunk.elements))
        finally:
            stage.stop()
            stage.close()
        return state

    def _sharded(self, node: Node, upstream: Stage) -> Stage:
        if not self._placement.shards_at(node):
            return upstream
        self.meters.append(StageMeter("shard"))
        return self._placement.sharding(self.meters[-1], upstream)

    def _repeating(self, node: ops.Repeat | ops.WithEpoch, meter: StageMeter, upstream: Stage) -> Repeating:
        passes_over = self._numbering.passes(node, node.upstream)
        return Repeating(meter, upstream, passes_over, empty=self._empty_passes(node))

    def _empty_passes(self, node: Node) -> EmptyPasses:
        below = [source for source in walk(node) if isinstance(source, SourceNode) and source not in self.stages]
        if self._placement.alone or not any(self.source_of(source).splits() for source in below):
            return EmptyPasses()
        return EmptyPasses(self._placement.splits_read([self._source_numbers[source] for source in below]))

    def _shuffle(self, node: ops.Shuffle, meter: StageMeter, upstream: Stage) -> Stage:
        source = source_reached(node)
        if source is not None and source not in self.stages and isinstance(self.source_of(source), IndexableSource):
            self.meters.remove(meter)
            return upstream
        order, share = order_of(node, self.seed), self._placement.share
        return BlockShuffle(meter, upstream, size=block_size(node), order=order, share=share)

    # What stages share

    def _meter(self, node: Node) -> StageMeter:
        meter = StageMeter(label_of(node))
        self.meters.append(meter)
        return meter

    def _rows_meter(self, node: ops.FusedBatch, batch_meter: StageMeter) -> StageMeter:
        """Count the rows' making as a stage of its own, before the batch's."""
        meter = StageMeter(" + ".join(map(label_of, node.steps)))
        self.meters.insert(self.meters.index(batch_meter), meter)
        return meter

    def _store(self, node: ops.Cache) -> Store:
        if node.path is None:
            return memory_store(node.slot, node.max_bytes)
        # A cached pass is drawn with the seed: another seed is other content. The files above are part of the key too.
        content = fingerprint(node.upstream, source_digest=lambda source: source_digest(self.source_of(source)))
        return FileStore(node.path, f"{content[:24]}-{self.seed:x}" if _draws_below(node) else content[:24])

    def _quarantine(self, node: Node, policy: ops.SkipErrors, meter: StageMeter) -> Quarantine:
        root = self._root
        assert root is not None
        quarantine = self.quarantine_kind(
            policy,
            label_of(node),
            meter,
            number=len(self.quarantines),
            epoch=self.epoch,
            seed=self.seed,
            graph=lambda: encode_graph(root),
        )
        self.quarantines.append(quarantine)
        return quarantine


def _draws_below(node: Node) -> bool:
    return any(map(draws, walk(node)))
