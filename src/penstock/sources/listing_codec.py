"""What was listed, as bytes: a worker opens sources with it and never lists files or reads footers to find splits.

Rules: arrays of fields, not objects for files, because a source may have millions; folders are written once; an
object of a split is made when it is asked for. Nothing of `storage_options` is in it. What lives in the graph itself
(ranges, items, generators, datasets) is known there, and only counted here. The same listing gives the same bytes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, cast, overload, runtime_checkable

import msgspec
import numpy as np

from penstock.core.errors import CodecError, DataError
from penstock.graph.readers import SourceNode
from penstock.sources import registry
from penstock.sources.base import FileRange, Source, Split
from penstock.sources.listing import ArrayHeader, FileListing

Ints = np.ndarray[Any, np.dtype[np.int64]]
VERSION = 1
SEPARATOR = "\0"  # in no file's name


class PackedFiles(msgspec.Struct, frozen=True, array_like=True):
    """Files, field by field."""

    folders: bytes
    folder_numbers: bytes
    names: bytes
    sizes: bytes
    root_lengths: bytes
    etags: list[str] | None

    def __len__(self) -> int:
        return len(self.sizes) // 8

    def paths(self) -> list[str]:
        folders = _split_text(self.folders)
        if not len(self):
            return []
        numbers = np.frombuffer(self.folder_numbers, np.int64).tolist()
        return [folders[number] + name for number, name in zip(numbers, _split_text(self.names))]

    def etag(self, index: int) -> str:
        return "" if self.etags is None else self.etags[index]


class PackedSplits(msgspec.Struct, frozen=True, array_like=True):
    """Splits, field by field; the ranges of all splits' files one after the other."""

    starts: bytes
    stops: bytes
    notes: list[str]
    """One note for all splits, or one for each."""
    file_counts: bytes
    files: PackedFiles
    range_starts: bytes
    range_stops: bytes


class PackedArrays(msgspec.Struct, frozen=True, array_like=True):
    """What the headers of numpy files say."""

    dtype: str
    offsets: bytes
    fortran_order: bytes
    shapes: list[tuple[int, ...]]


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """Of one source. `files` where elements are counted over files, `splits` where splits name them."""

    count: int
    """Of splits."""
    splits: PackedSplits | None = None
    files: PackedFiles | None = None
    arrays: PackedArrays | None = None


@runtime_checkable
class ListsSplits(Protocol):
    """A source whose splits name files."""

    def splits(self) -> Sequence[Split]: ...

    def use_splits(self, splits: Sequence[Split]) -> None: ...


@runtime_checkable
class CountsOverFiles(Protocol):
    """A source whose splits are ranges of indices over files."""

    def file_listing(self) -> FileListing: ...

    def use_file_listing(self, listing: FileListing) -> None: ...


class SplitList(Sequence[Split]):
    """Splits that are made when they are asked for."""

    def __init__(self, packed: PackedSplits) -> None:
        self._packed = packed
        self._starts = np.frombuffer(packed.starts, np.int64)
        self._stops = np.frombuffer(packed.stops, np.int64)
        counts = np.frombuffer(packed.file_counts, np.int64)
        self._first_files = [0, *accumulate(counts.tolist())]

    @cached_property
    def _paths(self) -> list[str]:
        return self._packed.files.paths()

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Split: ...

    @overload
    def __getitem__(self, index: slice) -> list[Split]: ...

    def __getitem__(self, index: int | slice) -> Split | list[Split]:
        if isinstance(index, slice):
            return [self._make(number) for number in range(*index.indices(len(self)))]
        return self._make(range(len(self))[index])

    def _make(self, number: int) -> Split:
        packed, files = self._packed, self._packed.files
        first, last = self._first_files[number], self._first_files[number + 1]
        columns = (
            np.frombuffer(column, np.int64, last - first, 8 * first).tolist()
            for column in (files.sizes, packed.range_starts, packed.range_stops)
        )
        ranges = tuple(
            FileRange(self._paths[first + i], size, files.etag(first + i), start, stop)
            for i, (size, start, stop) in enumerate(zip(*columns))
        )
        note = packed.notes[number if len(packed.notes) > 1 else 0] if packed.notes else ""
        return Split(ranges, int(self._starts[number]), int(self._stops[number]), note)


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    version: int
    listings: list[Listing]


def encode_listings(sources: Sequence[Source]) -> bytes:
    """Return what the sources have listed; those that have not do it now."""
    return msgspec.msgpack.encode(_Encoded(VERSION, [_listing_of(source) for source in sources]))


def decode_listings(data: bytes) -> list[Listing]:
    try:
        encoded = _encoded.decode(data)
    except msgspec.MsgspecError as error:
        raise CodecError(f"not a list of splits: {error}") from None
    if encoded.version != VERSION:
        raise CodecError(f"a list of splits of version {encoded.version}; this release reads version {VERSION}")
    return encoded.listings


def split_counts(sources: Sequence[Source]) -> tuple[int, ...]:
    return tuple(len(source.splits()) for source in sources)


def open_source(node: SourceNode, listing: Listing | None = None) -> Source:
    """Return the source of a node; with a listing it lists nothing by itself."""
    source = registry.open_source(node)
    if listing is None:
        return source
    if listing.splits is not None:
        cast(ListsSplits, source).use_splits(SplitList(listing.splits))
    if listing.files is not None:
        cast(CountsOverFiles, source).use_file_listing(_unpack_listing(listing.files, listing.arrays))
    return source


def _listing_of(source: Source) -> Listing:
    splits = source.splits()
    if isinstance(source, CountsOverFiles):
        listing = source.file_listing()
        files = _pack_files(listing.paths, listing.sizes.tolist(), listing.root_lengths.tolist(), listing.etags)
        return Listing(
            len(splits), files=files, arrays=None if listing.headers is None else _pack_arrays(listing.headers)
        )
    return Listing(len(splits), splits=_pack_splits(splits) if isinstance(source, ListsSplits) else None)


def _pack_splits(splits: Sequence[Split]) -> PackedSplits:
    ranges = [piece for split in splits for piece in split.files]
    notes = [split.note for split in splits]
    return PackedSplits(
        starts=_pack_ints(split.start for split in splits),
        stops=_pack_ints(split.stop for split in splits),
        notes=notes[:1] if len(set(notes)) <= 1 else notes,
        file_counts=_pack_ints(len(split.files) for split in splits),
        files=_pack_files(
            [r.path for r in ranges], [r.size for r in ranges], [0] * len(ranges), [r.etag for r in ranges]
        ),
        range_starts=_pack_ints(piece.start for piece in ranges),
        range_stops=_pack_ints(piece.stop for piece in ranges),
    )


def _unpack_listing(files: PackedFiles, arrays: PackedArrays | None) -> FileListing:
    return FileListing(
        paths=files.paths(),
        sizes=np.frombuffer(files.sizes, np.int64),
        root_lengths=np.frombuffer(files.root_lengths, np.int64),
        etags=files.etags,
        headers=None if arrays is None else _unpack_arrays(arrays),
    )


def _pack_files(
    paths: Sequence[str], sizes: Sequence[int], root_lengths: Sequence[int], etags: list[str] | None
) -> PackedFiles:
    folders: dict[str, int] = {}
    numbers: list[int] = []
    names: list[str] = []
    for path in paths:
        at = path.rfind("/") + 1
        numbers.append(folders.setdefault(path[:at], len(folders)))
        names.append(path[at:])
    return PackedFiles(
        folders=_join_text(list(folders)),
        folder_numbers=_pack_ints(numbers),
        names=_join_text(names),
        sizes=_pack_ints(sizes),
        root_lengths=_pack_ints(root_lengths),
        etags=etags if etags is not None and any(etags) else None,
    )


def _pack_arrays(headers: Sequence[ArrayHeader]) -> PackedArrays:
    dtype = np.lib.format.dtype_to_descr(headers[0].dtype) if headers else "<i8"
    return PackedArrays(
        dtype=repr(dtype),
        offsets=_pack_ints(header.offset for header in headers),
        fortran_order=bytes(header.fortran_order for header in headers),
        shapes=[header.shape for header in headers],
    )


def _unpack_arrays(arrays: PackedArrays) -> list[ArrayHeader]:
    dtype = np.lib.format.descr_to_dtype(ast.literal_eval(arrays.dtype))
    offsets = np.frombuffer(arrays.offsets, np.int64).tolist()
    return [
        ArrayHeader(dtype, offset, shape, bool(fortran_order))
        for offset, shape, fortran_order in zip(offsets, arrays.shapes, arrays.fortran_order)
    ]


def _pack_ints(values: Iterable[int]) -> bytes:
    return np.fromiter(values, np.int64).tobytes()


def _join_text(texts: Sequence[str]) -> bytes:
    joined = SEPARATOR.join(texts)
    if joined.count(SEPARATOR) > max(0, len(texts) - 1):
        wrong = next(text for text in texts if SEPARATOR in text)
        raise DataError(wrong, "a name with a zero byte in it", remedy="rename it")
    return joined.encode("utf-8", "surrogateescape")


def _split_text(packed: bytes) -> list[str]:
    return packed.decode("utf-8", "surrogateescape").split(SEPARATOR)


_encoded = msgspec.msgpack.Decoder(_Encoded)
