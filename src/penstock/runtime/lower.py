"""From a graph to running stages.

What an operator means is decided here and in `ops/`, never by a pass: with or without passes a graph gives the same
elements. A shuffle is where that takes thought. It asks for an order of what is below it, so the shuffles it reaches
through one-to-one operators are one with it (the largest size counts), and where it reaches a source the source reads
in that order itself: any source by permuting its splits, an indexable one by a full permutation, without a buffer.

With a `StreamPart` the same graph becomes a stream of a job: sources read what a feed names, and the operator that
makes the groups keeps its rest, or is fed the rests of other streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from pkgutil import iter_modules
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.codec import encode_graph
from penstock.graph.fingerprint import fingerprint
from penstock.graph.node import Node
from penstock.graph.parameters import short_label as label_of
from penstock.graph.randomized import identified, takes_rng, with_identities
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.runtime import ops as stage_modules
from penstock.runtime.budget import Budget
from penstock.runtime.building import KeptAt, Site, build_stage
from penstock.runtime.cache_points import points_over
from penstock.runtime.calling import Calling
from penstock.runtime.contract import RegroupingStage, Stage, State
from penstock.runtime.empty_passes import EmptyPasses
from penstock.runtime.ops.grouping import ROUNDS
from penstock.runtime.ops.source import IndexedSource, RandomOrder, Reading, SplitSource
from penstock.runtime.ops.transform import transform
from penstock.runtime.ops.windows import Torn, Windows
from penstock.runtime.pass_numbers import PassNumbering
from penstock.runtime.placement import StreamPlacement
from penstock.runtime.pool import ThreadPool
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.resources import Resources
from penstock.runtime.shuffling import order_of, shuffles_reached
from penstock.runtime.stats import CachingStatistics, StageMeter
from penstock.runtime.streaming.rounds import Dealing
from penstock.runtime.streaming.units import UnitSource
from penstock.runtime.streams import Left, StreamPart
from penstock.sources.base import IndexableSource, Source

if TYPE_CHECKING:
    from penstock.caching.elsewhere import OtherHosts
    from penstock.runtime.cache_choice import CacheJudge
    from penstock.runtime.kept_points import CacheTerms, KeptPoints


def _register_stages() -> None:
    for module in iter_modules(stage_modules.__path__, f"{stage_modules.__name__}."):
        import_module(module.name)


_register_stages()

MakeStage: TypeAlias = Callable[[StageMeter, int | None], Stage]
"""(meter, the number that its first source's identities go by; None: there are to be none) → a stage."""


@dataclass(slots=True)
class Lowering:
    """What the lowering of one graph needs, and the meters and quarantines it makes."""

    seed: int
    epoch: int
    budget: Budget
    pool: ThreadPool | None
    source_of: Callable[[SourceNode], Source]
    part: StreamPart | None = None
    stages: Mapping[SourceNode, MakeStage] = field(default_factory=dict)
    """What makes the stages that stand for sources: they are read as they are, whatever a shuffle above asks for."""
    regrouping: RegroupingStage | None = None
    """The stage whose rest is kept."""
    meters: list[StageMeter] = field(default_factory=list)
    quarantines: list[Quarantine] = field(default_factory=list)
    quarantine_kind: type[Quarantine] = Quarantine
    _root: Node | None = None
    reader_times: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    """How long the reader has waited for outputs, and how long it has been busy with them."""
    cache_scope: str = "user"
    """Whose entries autocache() finds and makes."""
    cache_judge: CacheJudge | None = None
    """Who decides what is kept; None: this process does."""
    cache_hosts: OtherHosts | None = None
    """Those that may have what this host does not."""
    _kept: dict[Node, KeptPoints] = field(default_factory=dict)
    _wants_idents: set[Node] = field(default_factory=set)
    _source_numbers: dict[Node, int] = field(default_factory=dict)
    _node_numbers: dict[Node, int] = field(default_factory=dict)
    _identity_numbers: dict[Node, int] = field(default_factory=dict)
    """What identities call the sources: the same numbers wherever a pipeline is cut in two."""
    _numbering: PassNumbering = field(init=False)
    _placement: StreamPlacement = field(init=False)
    _resources: Resources = field(init=False)

    def lower(self, root: Node) -> Stage:
        self._root = root
        nodes = list(walk(root))
        self._node_numbers = {node: number for number, node in enumerate(nodes)}
        self._numbering = PassNumbering(root)
        self._placement = StreamPlacement(self.part, root)
        sources = [node for node in nodes if isinstance(node, SourceNode)]
        self._source_numbers = {node: i for i, node in enumerate(sources)}
        handed_on = identified(root)
        first = 0 if handed_on is None else handed_on.first_source
        self._identity_numbers = dict(zip(sources, accumulate((node.stands_for for node in sources), initial=first)))
        self._resources = Resources(self.budget, self.pool, sum(node.traits.threads != 0 for node in nodes))
        self._wants_idents = set(nodes) if self._placement.thinned_units else with_identities(root)
        return self._placement.left(None, self._build(root, None), self._advance)

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
            elif not node.traits.passes_order:
                order = None
            node = node.upstream
        kept = self._kept_over(chain, node)
        stage = self._build_base(node, order, kept)
        self._kept.update({} if kept is None else dict.fromkeys(kept.nodes(), kept))
        for unary in reversed(chain):
            if unary not in absorbed:
                stage = self._build_unary(unary, stage)
        return stage

    def _kept_over(self, chain: list[ops.Unary], base: Node) -> KeptPoints | None:
        """Return what the caching points above a source keep; None: there are none, or they cannot here."""
        if not any(isinstance(node, ops.Autocache) for node in chain):
            return None
        if base in self.stages:
            raise InvalidPipelineError(
                "autocache() after distribute(): put it before it, where elements are made; here, cache() keeps them"
            )
        from penstock.runtime.kept_points import KeptPoints  # few pipelines keep anything

        by_index = isinstance(base, SourceNode) and self._reads_by_index(base)
        points = points_over(chain, base, by_index=by_index)
        assert isinstance(base, SourceNode)
        number = self._identity_numbers[base]
        return KeptPoints(points, self._cache_terms(base, number), self.meters, self.quarantines)

    def _build_base(self, node: Node, order: RandomOrder | None, kept: KeptPoints | None) -> Stage:
        if isinstance(node, SourceNode):
            return self._build_source(node, order, kept)
        upstreams = [self._build(upstream, None) for upstream in node.inputs]
        return build_stage(node, self._site(node, self._meter(node)), *upstreams)

    def _build_source(self, node: SourceNode, order: RandomOrder | None, kept: KeptPoints | None) -> Stage:
        meter = self._meter(node)
        if node in self.stages:
            return self.stages[node](meter, self._identity_numbers[node] if node in self._wants_idents else None)
        source, number, placement = self.source_of(node), self._source_numbers[node], self._placement
        splits = source.splits()
        by_index = isinstance(source, IndexableSource)
        reading = Reading(
            number=number,
            identity_number=self._identity_numbers[node],
            splits=splits,
            ordinals=placement.ordinals(number, len(splits)),
            with_idents=node in self._wants_idents or kept is not None,
            order=order,
            quarantine=None if node.policy is None else self._quarantine(node, node.policy, meter),
            dropped=placement.dropped(number),
            flight=placement.flight(),
            kept_splits=None if kept is None or by_index else kept.splits(meter),
            kept_elements=None if kept is None or not by_index else kept.elements(meter),
        )
        stage: Stage
        if isinstance(source, IndexableSource):
            units = placement.units
            stage = (
                IndexedSource(meter, source, reading) if units is None else UnitSource(meter, source, reading, units)
            )
        else:
            stage = SplitSource(meter, source, reading)
        if not placement.shards_at(node):
            return stage
        self.meters.append(StageMeter("shard", meter.node))
        return placement.sharding(self.meters[-1], stage)

    def _build_unary(self, node: ops.Unary, upstream: Stage) -> Stage:
        meter = self._meter(node)
        if node.traits.regroups is not None:
            return self._regroup(node, meter, upstream)
        site = self._site(node, meter)
        stage = transform([node], site, upstream) if node.traits.fuses else build_stage(node, site, upstream)
        if stage is upstream:
            self.meters.remove(meter)
        return stage

    def _site(self, node: Node, meter: StageMeter, *, keep_rest: bool = False) -> Site:
        return Site(
            meter=meter,
            seed=self.seed,
            pool=self.pool,
            resources=self._resources,
            placement=self._placement,
            calling=Calling(self.seed, self._quarantine),
            with_idents=node in self._wants_idents,
            keep_rest=keep_rest,
            source_of=self.source_of,
            reads_by_index=self._reads_by_index,
            passes_over=self._numbering.passes,
            empty_passes=self._empty_passes,
            meter_before=lambda label: self._meter_before(meter, label),
            kept_at=self._kept_at,
        )

    def _kept_at(self, node: Node) -> KeptAt | None:
        return self._kept[node].stand(node) if node in self._kept else None

    def _cache_terms(self, source: SourceNode, number: int) -> CacheTerms:
        from penstock.runtime.kept_points import CacheTerms

        placement = self._placement
        return CacheTerms(
            seed=self.seed,
            source=number,
            scope=self.cache_scope,
            pipeline=self._pipeline_key(),
            epoch=self.epoch,
            judge=self.cache_judge,
            hosts=self.cache_hosts,
            cores=max(1, self.budget.threads),
            reader_times=self.reader_times,
            split_local=not placement.shards_at(source) and placement.units is None,
        )

    def _pipeline_key(self) -> tuple[object, ...]:
        """Return what tells this pipeline from others, and this way of running it."""
        assert self._root is not None
        points = tuple((node.location, node.epochs) for node in walk(self._root) if isinstance(node, ops.Autocache))
        return fingerprint(self._root), points, self.cache_scope, self.budget.threads

    def caching(self) -> tuple[CachingStatistics, ...]:
        """Return what is kept of each source that has points above it."""
        return tuple(kept.statistics() for kept in dict.fromkeys(self._kept.values()))

    # Groups

    def _regroup(self, node: ops.Unary, meter: StageMeter, upstream: Stage) -> Stage:
        placement = self._placement
        upstream, keep_rest = placement.left(node, upstream, self._advance), placement.keeps_rest(node)
        members = placement.members(node)
        if members:
            return self._in_rounds(node, members, meter, upstream, keep_rest=keep_rest)
        stage = build_stage(node, self._site(node, meter, keep_rest=keep_rest), upstream)
        if keep_rest:
            assert isinstance(stage, RegroupingStage)
            self.regrouping = stage
        return stage

    def _in_rounds(self, node: Node, members: int, meter: StageMeter, upstream: Stage, *, keep_rest: bool) -> Stage:
        assert self.part is not None
        empty, torn = self._placement.empty, self.part.torn
        rules_of = ROUNDS[type(node)]
        rounds = Windows(
            self._meter_before(meter, f"rounds of {members}"),
            upstream,
            rules_of(node, members, empty, meter),
            keep_rest=keep_rest,
            torn=None if torn is None else Torn(rules_of(node, torn.consumers, empty, meter), torn.given),
        )
        if keep_rest:
            self.regrouping = rounds
        return Dealing(meter, rounds, members=members)

    def _advance(self, pass_: int, left: Left) -> State:
        """Return the state of a leftover's own stream after the outputs to discard."""
        assert self.part is not None and self._root is not None
        parts = left.shuffle_parts or self.part.shuffle_parts
        part = replace(self.part, leftovers=(), rest="keep", shuffle_parts=parts, keep=left.keep, torn=left.torn)
        alone = dataclasses.replace(self, pool=None, part=part, meters=[], quarantines=[], regrouping=None)
        stage = alone.lower(self._root)
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

    # What stages share

    def _empty_passes(self, node: Node) -> EmptyPasses:
        below = [source for source in walk(node) if isinstance(source, SourceNode) and source not in self.stages]
        if self._placement.alone or not any(self.source_of(source).splits() for source in below):
            return EmptyPasses()
        once = not any(each.passes != 1 or takes_rng(each) for each in walk(node))
        whole = sum(len(self.source_of(source).splits()) for source in below) if once else None
        splits_read = self._placement.splits_read([self._source_numbers[source] for source in below])
        return EmptyPasses(splits_read, whole if self._placement.takes_all else None)

    def _reads_by_index(self, source: SourceNode) -> bool:
        return source not in self.stages and isinstance(self.source_of(source), IndexableSource)

    def _meter(self, node: Node) -> StageMeter:
        meter = StageMeter(label_of(node), self._node_numbers[node])
        self.meters.append(meter)
        return meter

    def _meter_before(self, meter: StageMeter, label: str) -> StageMeter:
        made = StageMeter(label, meter.node)
        self.meters.insert(self.meters.index(meter), made)
        return made

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
