"""WebDataset shards: tar archives in which the members of one sample stand next to each other.

The key of a member is its path up to the first dot of the last name, the rest is the extension, in lower case. A
split is a shard. A position's offset is that of a sample's first header in the unpacked archive: an uncompressed
shard is opened right there, a compressed one is unpacked up to it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, BinaryIO

from penstock.core.errors import CorruptRecordError, DataError, FileChangedError
from penstock.graph.readers import ReadWebdataset
from penstock.sources.base import FileRange, OnBad, Records, Split, SplitPosition
from penstock.sources.compression import compression_of, open_decompressed
from penstock.sources.listing import FileSplits, list_files
from penstock.sources.storage import check_unchanged, is_remote, open_file
from penstock.sources.tar import TarStream

EXTENSIONS = (".tar", ".tgz", ".tar.gz", ".tar.gzip", ".tar.zst", ".tar.zstd", ".tzst", ".tar.bz2", ".tbz2", ".tbz")
_HIDDEN_FOLDER = re.compile(r"(?:^|/)\.(?!\.?/)")


class WebdatasetSource(FileSplits):
    def __init__(self, node: ReadWebdataset) -> None:
        self.node = node
        self.remote = any(map(is_remote, node.paths))
        self.on_bad: OnBad | None = None

    @cached_property
    def _splits(self) -> tuple[Split, ...]:
        files = list_files(self.node.paths, self.node.storage_options, extensions=EXTENSIONS)
        return tuple(Split(files=(FileRange(file.path, file.size, file.etag),)) for file in files)

    def list_splits(self) -> Sequence[Split]:
        return self._splits

    def locate(self, split: Split, before: int | None, after: int) -> tuple[str, int | None]:
        return split.files[0].path, before

    def open(self, split: Split, at: SplitPosition) -> WebdatasetReader:
        return WebdatasetReader(self.node, split.files[0], at, self.on_bad)


class WebdatasetReader:
    def __init__(self, node: ReadWebdataset, shard: FileRange, at: SplitPosition, on_bad: OnBad | None) -> None:
        self._path, self._size, self._on_bad = shard.path, shard.size, on_bad
        self._begin = at.offset or 0
        # Without an offset the samples before the position are passed over one by one.
        self._first = at.index
        self._index = 0 if at.offset is None else at.index
        self._left_out = False
        self._failure: DataError | None = None
        self._file: BinaryIO | None = None
        try:
            packed = compression_of(shard.path, node.compression) != "none"
            begin = 0 if packed else self._begin
            self._raw = open_file(shard.path, shard.size, node.storage_options, etag=shard.etag, start=begin)
            self._file = open_decompressed(self._raw, shard.path, node.compression)
        except DataError as error:
            self._failure = error  # told when it is read: a reader may be opened ahead and never used
        self._samples = self._read_samples()

    def read(self, want: int) -> Records:
        if self._failure is not None and self._on_bad is None:
            raise self._failure
        elements: list[dict[str, Any]] = []
        offsets: list[int] = []
        indices: list[int] = []
        try:
            for index, sample, offset in islice(self._samples, want):
                indices.append(index)
                elements.append(sample)
                offsets.append(offset)
        except DataError as error:
            self._failure = error
            if not elements:  # what was read before it is good, and comes first
                raise
        return Records(elements, offsets, indices if self._left_out else None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read_samples(self) -> Generator[tuple[int, dict[str, Any], int], None, None]:
        """Yield (index, sample, offset after it). The rest of a shard that cannot be read is one bad record."""
        try:
            if self._file is None:
                raise self._failure or AssertionError("a shard that was not opened has its reason")
            if self._file.tell() < self._begin:
                self._file.seek(self._begin)
            yield from self._grouped(TarStream(self._file, self._path, self._begin))
        except DataError as error:
            self._leave_out(self._cause_of(error))

    def _cause_of(self, error: DataError) -> DataError:
        """Return that the shard was changed, if so: then it is no wonder that it cannot be read."""
        try:
            if self._file is not None:
                check_unchanged(self._raw, self._path, self._size, offset=error.offset)
        except FileChangedError as changed:
            return changed
        return error

    def _grouped(self, tar: TarStream) -> Generator[tuple[int, dict[str, Any], int], None, None]:
        key: str | None = None
        sample: dict[str, Any] = {}
        bad: DataError | None = None
        while (member := tar.next_member()) is not None:
            named = split_name(member.name)
            if named is None:
                continue
            if named[0] != key:
                if key is not None:
                    yield from self._finished(sample, bad, member.offset)
                key, bad = named[0], None
                sample = {"__key__": key}
            extension = named[1]
            if extension in sample:
                what = f"the sample {key!r} has two members with the extension {extension!r}"
                bad = CorruptRecordError(self._path, what, offset=member.offset)
            elif self._index >= self._first:
                sample[extension] = tar.read_data()
        check_unchanged(self._raw, self._path, self._size, offset=tar.offset)  # before a sample that may lack members
        if key is not None:
            yield from self._finished(sample, bad, tar.offset)

    def _finished(
        self, sample: dict[str, Any], bad: DataError | None, offset: int
    ) -> Iterator[tuple[int, dict[str, Any], int]]:
        index = self._index
        if bad is not None:
            self._leave_out(bad)
        elif index >= self._first:
            yield index, sample, offset
        self._index += 1

    def _leave_out(self, error: DataError) -> None:
        if self._on_bad is None:
            raise error
        if self._index >= self._first:
            self._on_bad(error, self._index)
        self._left_out = True


def split_name(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member, None if it belongs to no sample.

    >>> split_name("train/0001.seg.PNG"), split_name("train/.hidden.png"), split_name("__meta__/info.json")
    (('train/0001', 'seg.png'), None, None)
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= base or name.startswith("__") or name.startswith("__", base):
        return None
    if base and "." in name[:base] and _HIDDEN_FOLDER.search(name[:base]):
        return None
    return name[:dot], name[dot + 1 :].lower()
