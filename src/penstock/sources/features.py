"""Feature tables. A split is whole files of the table's log, cut without opening any of them.

Splits depend on the table's version and partitions alone, never on features, filters or samples. A row keeps its index
in the split whatever is left out; a batch's hint is the index of the row after it. What a split needs to be read (its
files, where copies of popular columns lie, which files of side tables belong to its days) is in the split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.element import Array, Element
from penstock.core.errors import DataError
from penstock.graph.readers import ReadFeatures
from penstock.sources.background import Background
from penstock.sources.base import FileRange, Reader, Records, Split, SplitPosition
from penstock.sources.coalescing import ReadingMeter, ReadingStatistics
from penstock.sources.cutting import cut_neighbours, split_step
from penstock.sources.delta_log import PARTITION, LoggedFile, appended_files, read_snapshot
from penstock.sources.feature_batches import FeatureBlock, join_batches
from penstock.sources.feature_files import FeatureFile, FooterCache, open_listed
from penstock.sources.hive import partition_texts
from penstock.sources.listing import FileSplits
from penstock.sources.parquet_groups import matching_groups, row_groups
from penstock.sources.predicates import Bounds, may_be_true, row_mask
from penstock.sources.recycled import RecycledMemory
from penstock.sources.side_tables import SideTables
from penstock.sources.sparse_files import SparseMemories
from penstock.sources.storage import is_remote, normal_path
from penstock.sources.table_keys import storage_options
from penstock.sources.tiers import TieredFile, read_tier

STRIPES_AHEAD = 1  # a stripe may be hundreds of megabytes: one is read while one is cut into batches


class SplitNote(msgspec.Struct, array_like=True, frozen=True):
    """What a split says beside its files."""

    root: str
    version: int
    tier: dict[str, TieredFile] = {}
    """Of files that have a copy of popular columns elsewhere, where."""
    side: list[dict[str, list[LoggedFile]]] = []
    """Of each side table, its files by day."""


class FeaturesSource(FileSplits):
    """Made from a `ReadFeatures`."""

    def __init__(self, node: ReadFeatures) -> None:
        self._node = node
        self.remote = any(map(is_remote, node.paths))
        self._footers = FooterCache()
        self._meter = ReadingMeter()
        self._memory, self._memories = RecycledMemory(), SparseMemories()

    def reading(self) -> ReadingStatistics:
        """Return what was asked of the storage so far."""
        return self._meter.snapshot()

    def list_splits(self) -> Sequence[Split]:
        node, options = self._node, storage_options(self._node.storage_options)
        snapshot = read_snapshot(node.paths[0], node.version, options)
        wanted = None if node.partitions is None else set(node.partitions)
        there = appended_files(node.paths[0], node.version, options) if node.appended else snapshot.files
        files = [file for file in there if wanted is None or file.partition in wanted]
        if not files:
            told = "no partition" if wanted is None else f"no partition among {', '.join(sorted(wanted))}"
            raise DataError(
                snapshot.url, f"version {node.version} of the table has {told}", remedy="see Table.snapshot()"
            )
        tier = read_tier(snapshot.url, options) if node.tier else {}
        sides = [_by_day(read_snapshot(url, version, options).files) for url, version, _ in node.injected]
        step = split_step(sum(file.size for file in files), len(files), remote=self.remote, columnar=True)
        cuts = cut_neighbours([file.size for file in files], [file.path for file in files], step)
        return [self._split(files[start:stop], snapshot.url, tier, sides) for start, stop in cuts]

    def _split(
        self,
        files: Sequence[LoggedFile],
        root: str,
        tier: dict[str, TieredFile],
        sides: Sequence[dict[str, list[LoggedFile]]],
    ) -> Split:
        days = {file.partition for file in files}
        note = SplitNote(
            root=root,
            version=self._node.version,
            tier={file.path: tier[file.path] for file in files if file.path in tier},
            side=[{day: side[day] for day in days if day in side} for side in sides],
        )
        ranges = tuple(
            FileRange(f"{root}/{file.path}", file.size, "", 0, file.rows if file.rows >= 0 else self._rows(root, file))
            for file in files
        )
        return Split(files=ranges, note=msgspec.json.encode(note).decode())

    def _rows(self, root: str, file: LoggedFile) -> int:
        """Return how many rows a file has of which another engine's log does not say it."""
        with self._file(f"{root}/{file.path}", file.size, normal_path(self._node.paths[0])) as opened:
            return int(opened.footer.metadata.num_rows)

    def count(self) -> int | None:
        node = self._node
        if node.predicate is not None or node.sample < 1:
            return None
        rows = [sum(piece.stop for piece in split.files) for split in self.splits()]
        return sum(-(-count // node.batch) for count in rows)

    def open(self, split: Split, at: SplitPosition) -> Reader:
        return _FeatureReader(self._node, _SplitStripes(self, self._node, split), at)

    def _file(self, path: str, size: int, told: str, *, tier: bool = False) -> FeatureFile:
        given = (path, size, self._node.storage_options, self._footers, self._meter)
        return open_listed(*given, snapshot=told, tier=tier, memories=self._memories)


def _by_day(files: Sequence[LoggedFile]) -> dict[str, list[LoggedFile]]:
    days: dict[str, list[LoggedFile]] = {}
    for file in files:
        days.setdefault(file.partition, []).append(file)
    return days


class _SplitStripes:
    """Makes the blocks of one split; runs on the reader's thread."""

    def __init__(self, source: FeaturesSource, node: ReadFeatures, split: Split) -> None:
        self._source, self._node, self._split = source, node, split
        self._note = _notes.decode(split.note)
        self._injected = {name for _, _, names in node.injected for name in names}
        self._side = SideTables(node, self._note.side, self._open_side)
        features = (*node.dense, *node.sparse, *node.scored)
        self._stored = tuple(name for name in features if name not in self._injected)
        self._filters = tuple(sorted(node.predicate.columns())) if node.predicate is not None else ()

    def _open_side(self, url: str, file: LoggedFile) -> FeatureFile:
        return self._source._file(f"{url}/{file.path}", file.size, f"version {self._note.version} of {url}")

    def blocks(self, begin: int) -> Iterator[tuple[FeatureBlock, Array]]:
        """Yield blocks from the row `begin` of the split on, each with the indices of its rows in the split."""
        base = 0
        for piece in self._split.files:
            if base + piece.stop > begin and self._may_match(piece):
                yield from self._file_blocks(piece, base, max(0, begin - base))
            base += piece.stop

    def _may_match(self, piece: FileRange) -> bool:
        known = _known_bounds(piece)
        return self._node.predicate is None or may_be_true(
            self._node.predicate, lambda name: known.get(name, Bounds(rows=piece.stop))
        )

    def _told(self, piece: FileRange) -> str:
        day = partition_texts(piece.path).get(PARTITION)
        names = self._stored
        told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"version {self._note.version} of the table, {told or 'its rows'} of {day}"

    def _file_blocks(self, piece: FileRange, base: int, skip: int) -> Iterator[tuple[FeatureBlock, Array]]:
        relative = piece.path[len(self._note.root) + 1 :]
        day = partition_texts(piece.path).get(PARTITION)
        tiered = self._note.tier.get(relative)
        with (
            self._source._file(piece.path, piece.size, self._told(piece)) as file,
            _TierOrNothing(self._source, tiered, self._told(piece)) as tier,
        ):
            columns = dict.fromkeys((*self._stored, *self._node.columns, *(["key"] if self._injected else [])))
            source_of = tier.columns()
            if source_of and source_of.issuperset(columns) and source_of.issuperset(self._filters):
                stripes, missing = tier.stripes(), []  # the file itself need not be opened
            else:
                stripes, missing = file.stripes(), file.has(name for name in columns if name not in source_of)[1]
            self._source._meter.add(missing_columns=len(missing))
            wanted = [name for name in columns if name not in missing]
            for number, first, rows in self._matching(file, stripes, piece):
                if first + rows <= skip:
                    continue
                made = self._block(file, tier, number, first, rows, wanted, relative, day, max(0, skip - first))
                if made is not None:
                    yield made[0], made[1] + base

    def _matching(
        self, file: FeatureFile, stripes: Sequence[tuple[int, int, int]], piece: FileRange
    ) -> Sequence[tuple[int, int, int]]:
        if self._node.predicate is None:
            return stripes
        file.check_keys(self._filters)
        metadata = file.footer.metadata
        groups = row_groups(metadata, 0, piece.stop)
        kept = {group.number for group in matching_groups(metadata, groups, self._node.predicate, _known_bounds(piece))}
        return [stripe for stripe in stripes if stripe[0] in kept]

    def _block(
        self,
        file: FeatureFile,
        tier: _TierOrNothing,
        number: int,
        first: int,
        rows: int,
        wanted: Sequence[str],
        relative: str,
        day: str | None,
        skip: int,
    ) -> tuple[FeatureBlock, Array] | None:
        """Return the rows of a stripe that are wanted, from the row `skip` of it on, with their numbers in the file."""
        found: dict[str, pa.Array] = {}
        mask = sample_mask(self._node.sample, self._node.seed, relative, first, rows)
        if self._node.predicate is not None:
            there = [name for name in self._filters if name != PARTITION]
            found.update(tier.read(file, number, [name for name in there if name in file.footer.leaves]))
            mask &= self._predicate_mask(found, rows, day)
        mask[:skip] = False
        kept = int(np.count_nonzero(mask))
        if not kept:
            return None
        found.update(tier.read(file, number, [name for name in wanted if name not in found]))
        if kept < rows:
            chosen = pa.array(mask)
            found = {name: column.filter(chosen) for name, column in found.items()}
        if self._injected:
            found.update(self._side.columns(day or "", found["key"]))
        return FeatureBlock(self._node, found, kept, self._source._memory), np.flatnonzero(mask) + first

    def _predicate_mask(self, found: dict[str, pa.Array], rows: int, day: str | None) -> Array:
        def column_of(name: str) -> pa.Array:
            if name == PARTITION:
                return pa.array([day] * rows, pa.string())
            return found[name] if name in found else pa.nulls(rows, pa.float32())

        assert self._node.predicate is not None
        answer = row_mask(self._node.predicate, column_of).fill_null(False)
        return np.array(answer.to_numpy(zero_copy_only=False))


def _known_bounds(piece: FileRange) -> dict[str, Bounds]:
    day = partition_texts(piece.path).get(PARTITION)
    return {PARTITION: Bounds(rows=piece.stop, nulls=0, low=day, high=day)}


def sample_mask(share: float, seed: int, path: str, first: int, rows: int) -> Array:
    """Return which rows of a file are in a sample: by (seed, file, row) alone, so that a repeated split has the same.

    >>> sample_mask(0.5, 1, "a", 0, 6).tolist() == sample_mask(0.5, 1, "a", 2, 4).tolist()
    False
    >>> sample_mask(0.5, 1, "a", 0, 6)[2:].tolist() == sample_mask(0.5, 1, "a", 2, 4).tolist()
    True
    """
    if share >= 1:
        return np.ones(rows, np.bool_)
    digest = hashlib.sha256(f"{seed}\0{path}".encode()).digest()
    start = np.uint64(int.from_bytes(digest[:8], "little"))
    with np.errstate(over="ignore"):
        mixed = start + np.arange(first + 1, first + rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed < np.uint64(int(share * 2**64))


class _TierOrNothing:
    """The copy of a file's popular columns, if there is one."""

    def __init__(self, source: FeaturesSource, tiered: TieredFile | None, told: str) -> None:
        self._copy = source._file(tiered.path, tiered.size, told, tier=True) if tiered is not None else None

    def columns(self) -> set[str]:
        return set() if self._copy is None else set(self._copy.footer.leaves)

    def stripes(self) -> list[tuple[int, int, int]]:
        return [] if self._copy is None else self._copy.stripes()

    def read(self, file: FeatureFile, stripe: int, names: Sequence[str]) -> dict[str, pa.Array]:
        """Return columns, those of the copy from there."""
        if self._copy is None:
            return file.read(stripe, names)
        near, far = self._copy.has(names)
        return {**self._copy.read(stripe, near), **file.read(stripe, far)}

    def __enter__(self) -> _TierOrNothing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._copy is not None:
            self._copy.close()


class _FeatureReader:
    """Cuts blocks into batches: full ones, across stripes and files, but for the last of a split."""

    def __init__(self, node: ReadFeatures, stripes: _SplitStripes, at: SplitPosition) -> None:
        self._size = node.batch
        filtered = node.predicate is not None or node.sample < 1
        self._pass_over = at.index if at.offset is None and filtered else 0
        begin = at.offset if at.offset is not None else 0 if filtered else at.index * node.batch
        self._block: tuple[FeatureBlock, Array] | None = None
        self._row = 0
        self._blocks = Background(
            stripes.blocks(begin), depth=STRIPES_AHEAD, abort=lambda: None, name="penstock-features"
        )

    def read(self, want: int) -> Records:
        while self._pass_over and self._next() is not None:
            self._pass_over -= 1
        batches: list[Element] = []
        ends: list[int] = []
        while len(batches) < want and (made := self._next()) is not None:
            batches.append(made[0])
            ends.append(made[1])
            if self._block is None:
                break  # what is there goes out before the next stripe is waited for
        return Records(batches, offsets=ends)

    def _next(self) -> tuple[Element, int] | None:
        """Return the next batch and the index of the row after it."""
        parts: list[dict[str, Any]] = []
        count, end = 0, 0
        while count < self._size:
            if self._block is None:
                self._block, self._row = self._blocks.next(), 0
                if self._block is None:
                    break
            block, indices = self._block
            stop = min(len(block), self._row + self._size - count)
            parts.append(block.batch(self._row, stop))
            count += stop - self._row
            end = int(indices[stop - 1]) + 1
            self._row = stop
            if stop == len(block):
                self._block = None
        return (join_batches(parts), end) if parts else None

    def close(self) -> None:
        self._block = None
        self._blocks.close()


_notes = msgspec.json.Decoder(SplitNote)
