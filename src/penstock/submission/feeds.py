"""What streams read, where that is said up front: splits, one feed a worker; or units that the reader's sampler gives.

`file`: worker w of W reads files w, w + W, ... of every source. `data`: everybody reads all splits and keeps elements
w, w + W, ...; `hint` does so at the marker the user put. `file_or_data` takes files where there are enough. A function
of the user's gets the splits and the number of workers and returns, for each, the numbers of its splits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from penstock.core.errors import InvalidArgumentError
from penstock.graph.node import Node
from penstock.runtime.stream_limits import stream_limit
from penstock.sources.base import Split
from penstock.submission.options import ShardingFunction
from penstock.wire.jobs import FeedSpec
from penstock.wire.modes import Policy

FEWEST_STREAMS = 2
STREAMS_A_WORKER = 2  # so that some can move to workers that join


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


def fed_streams(count: int) -> tuple[FeedSpec, ...]:
    return tuple(FeedSpec(kind="fed", number=number, of=count) for number in range(count))


def how_many_streams(asked: int, workers: int, ahead: int) -> int:
    return min(asked or max(FEWEST_STREAMS, STREAMS_A_WORKER * workers), ahead)
