"""From a pipeline to a job: the graph and the split list as blobs, and the record all consumers must agree on.

Everything that could be refused is refused here, before a byte is sent: operators without a global meaning, functions
that cannot be shipped, splits that cannot be dealt.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import msgspec
import numpy as np
from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError, InvalidPipelineError
from penstock.core.host_memory import AttachedMemory, HostMemory
from penstock.core.ids import BlobHash, Fingerprint
from penstock.graph import ops
from penstock.graph.codec import encode_graph
from penstock.graph.function_parts import ARROW
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.installed import distributions_of
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.readers import FileSource, ReadFiles, ReadImages, SourceNode
from penstock.graph.traverse import walk
from penstock.passes import canonicalize
from penstock.runtime.distributable import check_coordinated, for_workers
from penstock.runtime.stream_limits import ends_with_an_input, stream_limit
from penstock.samplers.pipelines import check_fed, not_indexable, with_batches
from penstock.sources import registry
from penstock.sources.base import IndexableSource, Source
from penstock.sources.listing_codec import ListsSplits, encode_listings, split_counts
from penstock.submission.feeds import (
    NamedSplits,
    check_needs,
    dealt_feeds,
    fed_streams,
    feeds_for,
    how_many_streams,
    one_file_a_split,
)
from penstock.submission.options import JobOptions
from penstock.wire.addresses import host_id
from penstock.wire.blobs import blob_hash
from penstock.wire.frames import NO_STORAGE_OPTIONS, SourceStorageOptions
from penstock.wire.jobs import FeedSpec, JobSpec

_PACKAGE = "package "


class Pipeline(Protocol):
    """What is known about a dataset without running it."""

    @property
    def node(self) -> Node: ...

    @property
    def seed(self) -> int: ...

    def source_of(self, node: SourceNode) -> Source: ...

    def fingerprint(self) -> str: ...


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A job ready to be sent."""

    spec: JobSpec
    blobs: dict[BlobHash, bytes]
    splits_digest: str
    storage: SourceStorageOptions = NO_STORAGE_OPTIONS
    """The processes that read open their storage with it; it is no part of the job."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline that can be shipped; how its splits are dealt may still depend on the number of workers."""

    root: Node
    """The graph that workers run."""
    graph: bytes
    """The same, encoded."""
    sources: tuple[NamedSplits, ...]
    listings: bytes
    counts: tuple[int, ...]
    fingerprint: Fingerprint
    versions: tuple[tuple[str, str], ...]
    splits_digest: str
    """It stands for how the data is cut into splits; what there is to read is in the pipeline's signature."""
    storage: SourceStorageOptions = NO_STORAGE_OPTIONS


def prepare(
    pipeline: Pipeline, options: JobOptions, *, fed_lists: bool = False, memory: HostMemory | None = None
) -> Prepared:
    """Check and encode a pipeline. Touches the data's listing, and no service.

    `fed_lists`: the consumer's sampler gives lists, each of which is to become a batch. `memory`: where large arrays of
    it lie, if all workers are on this host; else they follow the graph, and each host maps them.
    """
    if options.feed is not None:
        check_fed(pipeline.node)
    graph = canonicalize(for_workers(pipeline.node, options.sharding.policy))
    if fed_lists:
        graph = with_batches(graph)
    if options.ranks.coordinated:
        check_coordinated(graph)
    if options.sharding.policy == "hint":
        _check_marks(graph)
    encoded = encode_graph(graph, memory=AttachedMemory() if memory is None else memory)
    nodes = [node for node in walk(graph) if isinstance(node, SourceNode)]
    by_file = options.sharding.policy in ("file", "file_or_data")
    sources = tuple(_one_file_source(node, pipeline) if by_file else pipeline.source_of(node) for node in nodes)
    if by_file:
        _check_held_out(graph, nodes, sources, pipeline)
    counts = split_counts(sources)
    return Prepared(
        root=graph,
        graph=encoded,
        sources=tuple(map(_named, nodes, sources)),
        listings=encode_listings(sources),
        counts=counts,
        fingerprint=_fingerprint(pipeline, options, fed_lists=fed_lists),
        versions=tuple(_versions(graph)),
        splits_digest=hashlib.blake2b(f"{counts} {by_file}".encode(), digest_size=6).hexdigest(),
        storage=_storage(nodes),
    )


def identified(prepared: Prepared, first_source: int, memory: HostMemory | None = None) -> Prepared:
    """Return the pipeline whose outputs carry identities, for a function that draws from them where they are read.

    It is another job than the same pipeline without them: whoever reads it must take its outputs apart.
    """
    root = ops.Identified(upstream=prepared.root, first_source=first_source)
    own = f"{prepared.fingerprint} identified {first_source}"
    fingerprint = Fingerprint(hashlib.blake2b(own.encode(), digest_size=16).hexdigest())
    graph = encode_graph(root, memory=AttachedMemory() if memory is None else memory)
    return msgspec.structs.replace(prepared, root=root, graph=graph, fingerprint=fingerprint)


def _check_marks(graph: Node) -> None:
    marks = [node for node in walk(graph) if isinstance(node, ops.Shard)]
    if not marks:
        raise InvalidArgumentError(
            "sharding='hint' takes each worker's part where shard() stands, and this pipeline has none; "
            "put .shard() where it should be, or use sharding='data'"
        )
    for mark in marks:
        if any(isinstance(above, ops.Shard) for above in walk(mark.upstream)):
            raise InvalidArgumentError(
                "sharding='hint' takes each worker's part where shard() stands, and here one shard() follows another: "
                "a worker would get its part of a part, and the rest nobody; leave one of them out"
            )


def _storage(nodes: list[SourceNode]) -> SourceStorageOptions:
    """Return what the sources open their storage with; nothing, if none was given anything."""
    given = tuple(dict(node.storage_options) if isinstance(node, FileSource) else {} for node in nodes)
    for node, options in zip(nodes, given):
        for name, value in options.items():
            try:
                msgspec.msgpack.encode(value)
            except TypeError:
                raise InvalidArgumentError(
                    f"storage_options[{name!r}] of {node.name} is a {type(value).__name__}, which workers cannot be "
                    "sent; give numbers, texts, and lists and dicts of them"
                ) from None
    return SourceStorageOptions(given) if any(given) else NO_STORAGE_OPTIONS


def _fingerprint(pipeline: Pipeline, options: JobOptions, *, fed_lists: bool) -> Fingerprint:
    own = pipeline.fingerprint()
    if options.feed is None:
        return Fingerprint(own)
    # Another job than the same pipeline without a sampler: who feeds a stream is part of what it gives.
    return Fingerprint(hashlib.blake2b(f"{own} fed {fed_lists}".encode(), digest_size=16).hexdigest())


def fed_source(pipeline: Pipeline) -> IndexableSource:
    """Return the one source of a pipeline that a sampler can feed; refuse every other pipeline."""
    node = check_fed(pipeline.node)
    source = pipeline.source_of(node)
    if not isinstance(source, IndexableSource):
        raise not_indexable(node)
    return source


def submission(
    prepared: Prepared, options: JobOptions, *, seed: int, workers: Callable[[], int], streams: int | None = None
) -> Submission:
    """Return the job. `workers` is asked only where splits are assigned up front; `streams` overrides it there.

    A state that is loaded says how many streams were assigned splits: they are what it knows.
    """
    feeds: tuple[FeedSpec, ...] = ()
    sharding = options.sharding
    if sharding.static:
        feeds = feeds_for(sharding.policy, prepared.sources, streams or workers(), options.shard)
        if sharding.policy != "hint":  # how many elements there are at a mark is not known
            check_needs(prepared.root, prepared.sources, feeds)
    elif options.feed is not None:
        most = min(workers(), options.placement.max_workers or sys.maxsize)
        feeds = fed_streams(how_many_streams(sharding.streams or 0, most, options.feed.ahead))
    elif options.order == "relaxed" and sharding.policy == "dynamic" and ends_with_an_input(prepared.root):
        feeds = dealt_feeds(streams or _at_most(options.dealt_streams, prepared), _owners(options))
    if feeds:
        sharding = replace(sharding, streams=None)
    elif sharding.streams:
        sharding = replace(sharding, streams=max(1, _at_most(sharding.streams, prepared)))
    graph, splits = blob_hash(prepared.graph), blob_hash(prepared.listings)
    spec = JobSpec(
        fingerprint=prepared.fingerprint,
        graph=graph,
        splits=splits,
        split_counts=prepared.counts,
        seed=seed,
        ranks=options.ranks,
        sharding=sharding,
        order=options.order,
        sharing=options.sharing,
        placement=options.placement,
        transport=options.transport,
        feeds=feeds,
        host=host_id(),
        share_with=options.access.share_with,
        collect_after_s=options.limits.collect_after_s,
        versions=prepared.versions,
    )
    blobs = {graph: prepared.graph, splits: prepared.listings}
    return Submission(spec=spec, blobs=blobs, splits_digest=prepared.splits_digest, storage=prepared.storage)


def _at_most(streams: int, prepared: Prepared) -> int:
    """Return so many streams, or fewer, so that each has something of every input that the pipeline needs.

    It depends on nothing but the pipeline and its data: what a job gives stays a function of those and its options.
    """
    limit = stream_limit(prepared.root, [count or None for count in prepared.counts])
    return streams if limit is None else min(streams, limit.most)


def _owners(options: JobOptions) -> int:
    """Return how many consumers need a stream of their own."""
    return options.ranks.count if options.ranks.uneven == "allow" else 1


def _named(node: SourceNode, source: Source) -> NamedSplits:
    files = 0
    if isinstance(node, (ReadFiles, ReadImages)) and isinstance(source, IndexableSource):
        files = len(source)
    elements = len(source) if isinstance(source, IndexableSource) else None
    return NamedSplits(short_label(node), source.splits(), files, elements)


def _check_held_out(graph: Node, nodes: list[SourceNode], sources: tuple[Source, ...], pipeline: Pipeline) -> None:
    """Refuse a holdout over splits that are not those of other readers: both parts would be others there."""
    held_out = next((node for node in walk(graph) if isinstance(node, ops.Holdout)), None)
    cut = next((node for node, source in zip(nodes, sources) if source is not pipeline.source_of(node)), None)
    if held_out is not None and cut is not None:
        raise InvalidPipelineError(
            f"{short_label(held_out)} with sharding by file: which elements are held out follows from the splits of "
            f"{short_label(cut)}, where small files share one, and by file each is its own, so that the parts would "
            "be others than those that are read elsewhere; use sharding='dynamic' or 'data'"
        )


def _one_file_source(node: SourceNode, pipeline: Pipeline) -> Source:
    listed = pipeline.source_of(node)
    splits = listed.splits()
    if not isinstance(listed, ListsSplits) or all(len(split.files) <= 1 for split in splits):
        return listed
    source = registry.open_source(node)
    cast(ListsSplits, source).use_splits(one_file_a_split(splits))
    return source


def _versions(graph: Node) -> Iterator[tuple[str, str]]:
    yield "python", f"{sys.version_info.major}.{sys.version_info.minor}"
    yield "numpy", np.__version__
    found: dict[str, str] = {}
    for node in walk(graph):
        for _, value in node.parameters():
            for used in _functions(value):
                for name, version in used.parts().items():
                    last = name.rpartition(ARROW)[2]
                    if last.startswith(_PACKAGE):
                        found[last.removeprefix(_PACKAGE)] = version
    versions: dict[str, str] = {}
    for package in found.keys() - {"numpy", "penstock"}:
        if found[package]:
            versions |= distributions_of(package)
    yield from sorted(versions.items())


def _functions(value: object) -> Iterator[UserFunction | Payload]:
    if isinstance(value, (UserFunction, Payload)):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _functions(part)
