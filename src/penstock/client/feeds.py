"""What streams read, where that is said up front: splits, one feed a worker; or units that the reader's sampler gives.

`file`: worker w of W reads files w, w + W, ... of every source. `data`: everybody reads all splits and keeps elements
w, w + W, ...; `hint` does so at the marker the user put. `file_or_data` takes files where there are enough. A function
of the user's gets the splits and the number of workers and returns, for each, the numbers of its splits. A pipeline
that a sampler feeds (`client.sampling`) gives one output a unit, or is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from penstock.client.options import ShardingFunction
from penstock.client.sampling import Grouping
from penstock.core.errors import InvalidArgumentError, InvalidPipelineError
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.readers import SourceNode
from penstock.graph.traits import OnWorkers
from penstock.graph.traverse import rewrite, walk
from penstock.passes import canonicalize
from penstock.runtime.stream_limits import stream_limit
from penstock.sources.base import Split
from penstock.wire.jobs import FeedSpec
from penstock.wire.modes import Policy

FEWEST_STREAMS = 2
STREAMS_A_WORKER = 2  # so that some can move to workers that join
NOMINAL_BATCH = 256  # rows; of the operator put where each list is a batch: how long lists are is not known beforehand
INDEXABLE = "range, from_items, from_torch, from_huggingface, read_images, read_files or read_numpy"


class NamedSplits(NamedTuple):
    """A source's splits, with the name messages give it."""

    name: str
    splits: Sequence[Split]
    element_files: int = 0
    """How many files there are, where each file is one element and a split is a range of files; 0: it is otherwise."""
    elements: int | None = None
    """How many elements there are, where that is known without reading."""


def feeds_for(
    sharding: Policy, sources: Sequence[NamedSplits], workers: int, shard: ShardingFunction | None = None
) -> tuple[FeedSpec, ...]:
    """Return the feed of each worker; `InvalidArgumentError` says why the splits cannot be dealt so."""
    if workers < 1:
        raise InvalidArgumentError(f"sharding={sharding!r} assigns splits to workers up front, and there is none yet")
    if sharding == "custom":
        assert shard is not None
        return _listed_feeds(_deal_as_told(shard, source, workers) for source in sources)
    by_file = sharding == "file" or (sharding == "file_or_data" and _enough_files(sources, workers))
    if by_file and not all(source.element_files for source in sources):
        return _listed_feeds(_deal_files(source, workers) for source in sources)
    if by_file:  # file number i is element number i
        for source in sources:
            _check_count(source, source.element_files, workers)
    return tuple(FeedSpec(kind="dealt", number=0, of=1, keep=(w, workers)) for w in range(workers))


def dealt_feeds(streams: int, owners: int) -> tuple[FeedSpec, ...]:
    """Return the feeds of streams that splits are dealt to in turn; each of `owners` consumers reads its own."""
    if streams < owners:
        raise InvalidArgumentError(
            f"uneven='allow' gives each of {owners} consumers streams of its own, and this pipeline can be cut into "
            f"{streams}, because a mix needs something of all its inputs in every stream; use uneven='drop' or 'pad', "
            "or write the inputs into more files"
        )
    return tuple(FeedSpec(kind="dealt", number=number, of=streams) for number in range(streams))


def check_needs(root: Node, sources: Sequence[NamedSplits], feeds: Sequence[FeedSpec]) -> None:
    """Refuse feeds of which one lacks an input that the pipeline cannot do without."""
    for worker, feed in enumerate(feeds):
        limit = stream_limit(root, [_of_source(feed, number, source) for number, source in enumerate(sources)])
        if limit is not None and not limit.most:
            raise InvalidArgumentError(
                f"worker {worker} of {len(feeds)} would get nothing of {limit.source}, which {limit.operator} needs in "
                "every stream; give each worker some of it, use fewer workers, or sharding='dynamic'"
            )


def _of_source(feed: FeedSpec, number: int, source: NamedSplits) -> int | None:
    """Return how many splits, or elements, of a source a feed has; None: nobody has any, or it is not known."""
    if feed.kind == "listed":
        return len(feed.listed[number]) if source.splits else None
    if feed.keep is None or not source.elements:
        return None
    return len(range(feed.keep[0], source.elements, feed.keep[1]))


def one_file_a_split(splits: Sequence[Split]) -> list[Split]:
    """Cut splits of several (small) files into splits of one: files are what is dealt."""
    cut: list[Split] = []
    for split in splits:
        if len(split.files) <= 1:
            cut.append(split)
        else:
            cut += [Split(files=(file,), start=split.start, stop=split.stop, note=split.note) for file in split.files]
    return cut


def _enough_files(sources: Sequence[NamedSplits], workers: int) -> bool:
    return all((source.element_files or len(_files(source))) >= workers for source in sources)


def _check_count(source: NamedSplits, count: int, workers: int) -> None:
    if count < workers:
        raise InvalidArgumentError(
            f"sharding='file': {source.name} has {count} files for {workers} workers, so some would have "
            "nothing to read; use fewer workers, more files, or sharding='file_or_data'"
        )


def _files(source: NamedSplits) -> dict[str, int]:
    """Return the number of each file; a file cut into several splits is one."""
    numbers: dict[str, int] = {}
    for split in source.splits:
        for file in split.files:
            numbers.setdefault(file.path, len(numbers))
    return numbers


def _listed_feeds(dealt: Iterable[Sequence[Sequence[int]]]) -> tuple[FeedSpec, ...]:
    """Return the feed of each worker, of what each source deals to it."""
    return tuple(FeedSpec(kind="listed", listed=tuple(map(tuple, own))) for own in zip(*dealt))


def _deal_files(source: NamedSplits, workers: int) -> list[list[int]]:
    """Return the numbers of each worker's splits: those of its files."""
    numbers = _files(source)
    if not numbers:
        raise InvalidArgumentError(f"sharding='file': {source.name} has no files to deal; use 'data' or 'file_or_data'")
    _check_count(source, len(numbers), workers)
    dealt: list[list[int]] = [[] for _ in range(workers)]
    for index, split in enumerate(source.splits):
        if not split.files:
            raise InvalidArgumentError(f"sharding='file': split {index} of {source.name} has no file")
        dealt[numbers[split.files[0].path] % workers].append(index)
    return dealt


def _deal_as_told(shard: ShardingFunction, source: NamedSplits, workers: int) -> list[list[int]]:
    dealt = [list(map(int, own)) for own in shard(list(source.splits), workers)]
    if len(dealt) != workers:
        raise InvalidArgumentError(
            f"the sharding function returned {len(dealt)} lists for {workers} workers; it must return one for each"
        )
    for number, times in Counter(chain.from_iterable(dealt)).items():
        if not 0 <= number < len(source.splits):
            raise InvalidArgumentError(
                f"the sharding function returned split {number} of {source.name}, which has {len(source.splits)}"
            )
        if times > 1:
            raise InvalidArgumentError(f"the sharding function gave split {number} of {source.name} twice")
    return dealt


# Fed by the reader's own sampler


def check_fed(root: Node) -> SourceNode:
    """Return the one source of a pipeline that gives one output a unit; refuse every other pipeline."""
    node = _check_chain(root, _gives_one_output, _ONE_OUTPUT)
    for each in walk(canonicalize(root)):
        _check_errors(each)
    return node


def check_fed_here(root: Node) -> tuple[SourceNode, bool]:
    """Return the one source of a pipeline that a sampler feeds here, and whether elements may be left out."""
    node = _check_chain(root, ops.passes_states, _ONE_BY_ONE)
    return node, any(
        each.traits.may_skip or (isinstance(each, (ops.Unary, SourceNode)) and each.policy is not None)
        for each in walk(canonicalize(root))
    )


_ONE_OUTPUT = (
    "every unit of the sampler must give one output, so that outputs come in the sampler's order; put it after "
    "distribute(), or leave feed= out"
)
_ONE_BY_ONE = (
    "without workers, what stands over the sampler's order takes elements one by one (map, filter, select, batch); "
    "give distribute() a number of worker processes and put it after that, or leave feed= out"
)


def _check_chain(root: Node, fits: Callable[[Node], bool], otherwise: str) -> SourceNode:
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
        elif not fits(node):
            raise InvalidPipelineError(f"{short_label(node)} with feed=: {otherwise}")
        (node,) = node.inputs
    return node


def _gives_one_output(node: Node) -> bool:
    """Return whether each element gives one output, unless `on_error` leaves it out; or workers do not run it."""
    if node.traits.on_workers is OnWorkers.LEFT_TO_READER or isinstance(node, ops.Autocache):
        return True
    return ops.passes_states(node) and (node.policy is not None or not node.traits.may_skip)


def _check_errors(node: Node) -> None:
    if isinstance(node, (ops.Unary, SourceNode)) and node.policy is not None:
        raise InvalidPipelineError(
            f"{short_label(node)} with feed= and on_error='skip': every unit of the sampler must give its output "
            "whole; leave on_error out, and bad elements out of the sampler, or read without workers"
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
