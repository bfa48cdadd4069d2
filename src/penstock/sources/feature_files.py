"""One file of a feature table: columns of a stripe, read with few reads and decoded by Arrow."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Self

import msgspec
import pyarrow as pa

from penstock.core.errors import CorruptRecordError, NoFilesError, SnapshotGoneError
from penstock.sources.coalescing import ReadingMeter, coalesced, gap_bytes
from penstock.sources.parquet_groups import byte_ranges, row_groups
from penstock.sources.sparse_files import SparseFile, SparseMemories
from penstock.sources.storage import Options
from penstock.sources.table_keys import COLUMN_KEYS, KEYED, ColumnKeys, decryption, storage_options

FOOTERS_KEPT = 16
FOOTER_BYTES = 64 << 10
_TAIL_BYTES = 8  # of a Parquet file: the footer's length and the magic
_ENCRYPTED = b"PARE"  # the magic of a file whose footer is encrypted


class Footer(msgspec.Struct, frozen=True):
    """What the end of a file says."""

    metadata: Any
    leaves: dict[str, range]
    """Of each column, the numbers of its leaves."""


class FooterCache:
    """The last footers of a source, parsed: a wide table's takes long, and stripes of a file come after each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, str], Footer] = OrderedDict()
        self.opened = 0

    def get(self, key: tuple[str, int, str]) -> Footer | None:
        with self._lock:
            return self._kept.get(key)

    def keep(self, key: tuple[str, int, str], reader: Any) -> Footer:
        metadata = reader.metadata
        with self._lock:
            last = next(reversed(self._kept.values()), None)
        # Naming 14,000 columns takes longer than comparing two schemas.
        same = last is not None and last.metadata.schema.equals(metadata.schema)
        footer = Footer(metadata, last.leaves if last is not None and same else _leaves(metadata))
        with self._lock:
            self.opened += 1
            self._kept[key] = footer
            while len(self._kept) > FOOTERS_KEPT:
                self._kept.popitem(last=False)
        return footer


def _leaves(metadata: Any) -> dict[str, range]:
    """Return the leaves of each column, which follow each other.

    All paths at once would be as many lists, and make the interpreter look through all objects that there are.
    """
    schema, count = metadata.schema, metadata.num_columns
    names = [schema.column(leaf).path.partition(".")[0] for leaf in range(count)]
    firsts = [leaf for leaf in range(count) if not leaf or names[leaf] != names[leaf - 1]]
    return {names[first]: range(first, last) for first, last in pairwise([*firsts, count])}


class FeatureFile:
    """Opens at the first stripe that is asked for. Not safe for several threads."""

    def __init__(
        self,
        path: str,
        size: int,
        options: Options,
        footers: FooterCache,
        meter: ReadingMeter,
        *,
        etag: str = "",
        coalesce: bool = True,
        tier: bool = False,
        memories: SparseMemories | None = None,
    ) -> None:
        self.path = path
        self._key = (path, size, etag)
        self._decryption = decryption(options, path)
        self._options = options
        self._keyed = self._decryption is not None and path.endswith(KEYED)
        self._keys: ColumnKeys | None = None
        self._footers, self._meter, self._coalesce, self._tier = footers, meter, coalesce, tier
        self._sparse = SparseFile(path, size, storage_options(options), etag=etag, memories=memories)
        self._reader: Any = None
        self._footer: Footer | None = None

    @property
    def footer(self) -> Footer:
        if self._footer is None:
            # Of columns with keys of their own the footer is only read with the file that it was opened with.
            kept = None if self._keyed else self._footers.get(self._key)
            self._footer = kept or self._footers.keep(self._key, self._with_footer())
        return self._footer

    def _with_footer(self) -> Any:
        """Return a reader that has parsed the footer."""
        size = self._key[1]
        first = max(0, size - FOOTER_BYTES)
        self._sparse.fill([(first, size)])
        source = self._sparse.source()
        source.seek(max(0, size - _TAIL_BYTES))
        tail = source.read(_TAIL_BYTES)
        length = int.from_bytes(tail[:4], "little") + _TAIL_BYTES
        if length <= size and size - length < first:
            self._sparse.fill([(size - length, first)])
        # Each page of an encrypted file is signed with its key: a checksum says nothing that this does not.
        checksums = not tail.endswith(_ENCRYPTED)
        try:
            reader = _arrow_reader(self._sparse.source(), checksums, decryption_properties=self._decryption)
        except (pa.ArrowException, OSError, ValueError) as error:
            what = f"the footer cannot be read: {error}"
            raise CorruptRecordError(self.path, what + self._key_hint(), offset=size) from error
        self._reader = reader
        if self._keyed:
            note = (reader.metadata.metadata or {}).get(COLUMN_KEYS)
            self._keys = ColumnKeys(self._options, self.path, note)
        return reader

    def _key_hint(self) -> str:
        if self._decryption is None:
            return " (if the table is encrypted, name its key: ps.Table(url, key='file:PATH'))"
        return " (or the key is not the one it was written with)"

    def check_keys(self, columns: Iterable[str]) -> None:
        """Raise, with the column, if one of them cannot be decrypted."""
        if self._keyed:
            self.footer  # noqa: B018 (it says which column has which key)
            assert self._keys is not None
            self._keys.check(columns)

    def stripes(self) -> list[tuple[int, int, int]]:
        """Return the number, the first row and the rows of each stripe."""
        metadata = self.footer.metadata
        return [(group.number, group.first_row, group.rows) for group in row_groups(metadata, 0, metadata.num_rows)]

    def has(self, columns: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return which columns are there, and which are not."""
        there: list[str] = []
        missing: list[str] = []
        for column in columns:
            (there if column in self.footer.leaves else missing).append(column)
        return there, missing

    def read(self, stripe: int, columns: Sequence[str]) -> dict[str, pa.Array]:
        """Return columns of a stripe, all of which are there."""
        if not columns:
            return {}
        footer = self.footer
        self.check_keys(columns)
        leaves = sorted(leaf for column in columns for leaf in footer.leaves[column])
        group = row_groups(footer.metadata, 0, footer.metadata.num_rows)[stripe]
        wanted = byte_ranges(footer.metadata, [group], leaves)
        gap = gap_bytes(footer.metadata.row_group(stripe).total_byte_size) if self._coalesce else 0
        reads = coalesced(wanted, gap) if self._coalesce else sorted(wanted)
        self._sparse.fill(reads)
        total = sum(stop - start for start, stop in reads)
        self._meter.add(
            reads=len(reads),
            column_chunks=len(wanted),
            read_bytes=total,
            bytes_in_vain=total - sum(stop - start for start, stop in wanted),
            tier_bytes=total if self._tier else 0,
        )
        try:
            table = self._decoded(stripe, leaves)
        except (pa.ArrowException, OSError) as error:
            raise self._named(stripe, columns, error) from error
        finally:
            self._sparse.drop(reads)
        return {name: _one_chunk(table.column(number)) for number, name in enumerate(table.column_names)}

    def _decoded(self, stripe: int, leaves: Sequence[int]) -> Any:
        if self._reader is None:
            if self._decryption is not None:
                self._with_footer()  # it holds what decrypts the file, and does not serve another opening of it
            else:
                self._reader = _arrow_reader(self._sparse.source(), metadata=self.footer.metadata)
        reader: Any = self._reader
        return reader.read_row_group(stripe, column_indices=list(leaves), use_threads=True)

    def _named(self, stripe: int, columns: Sequence[str], error: Exception) -> CorruptRecordError:
        """Return the error of a stripe, with the first column that cannot be decoded."""
        bad = next((column for column in columns if not self._decodes(stripe, column)), None)
        which = f"column {bad!r} of stripe {stripe}" if bad is not None else f"stripe {stripe}"
        return CorruptRecordError(self.path, f"{which} cannot be read: {error}" + self._key_hint())

    def _decodes(self, stripe: int, column: str) -> bool:
        leaves = self.footer.leaves[column]
        group = row_groups(self.footer.metadata, 0, self.footer.metadata.num_rows)[stripe]
        self._sparse.fill(byte_ranges(self.footer.metadata, [group], leaves))
        try:
            self._decoded(stripe, leaves)
        except (pa.ArrowException, OSError):
            return False
        return True

    def close(self) -> None:
        self._reader = None
        self._sparse.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_listed(*arguments: Any, snapshot: str, **options: Any) -> FeatureFile:
    """Open a file that a snapshot lists; one that is gone since then says so."""
    try:
        return FeatureFile(*arguments, **options)
    except NoFilesError as error:
        raise SnapshotGoneError(
            arguments[0], f"{snapshot}: the file was removed for good", remedy="read the table's newest version"
        ) from error


def _arrow_reader(source: Any, checksums: bool = True, **options: Any) -> Any:
    """Open a file with Arrow's reader itself: `ParquetFile`, which is around it, first names every column of the file
    in Python, and that takes a third of the time that a tenth of the columns of a wide file take to read.

    Memory comes from the system's allocator, which has what the stripe before gave back. Arrow's own returns it, and
    clearing new pages takes a quarter of the time that a stripe takes. All that is read lies in memory: to fetch it
    ahead would only mean to open what the footer says of each column once more.
    """
    from pyarrow.parquet.core import ParquetReader

    reader = ParquetReader(memory_pool=pa.system_memory_pool())
    reader.open(source, page_checksum_verification=checksums, pre_buffer=False, **options)
    return reader


def _one_chunk(column: Any) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
