"""Saved datasets: the parts in the order of the manifest.

Of one that is still being written, what is there so far makes splits as ever, and what will come is one more split: its
reader looks for more until the manifest is complete, or the writer says that it has failed. Parts are only ever added,
so a position in it stays true. Of one that is not begun yet, the first sign is waited for when the splits are listed.
`FileRange.stop` is a part's number of elements; in the split of what will come, `start` is the first part's number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from time import monotonic, sleep

from penstock.core.element import Element
from penstock.core.errors import CorruptRecordError, NoFilesError, SaveFailedError, WaitTimeoutError
from penstock.graph.readers import ReadSaved
from penstock.sources.base import FileRange, Records, Split, SplitPosition
from penstock.sources.cutting import split_step
from penstock.sources.listing import FileSplits
from penstock.sources.projection import group_ranges
from penstock.sources.saved_files import PROGRESS, Manifest, SavedPart, decode, load_failure, load_manifest, read_part
from penstock.sources.storage import Options, folder_of, is_remote, normal_path
from penstock.wire.neighbours import is_gone

LOOK_S = 0.1  # between two looks for more


class SavedSource(FileSplits):
    def __init__(self, node: ReadSaved) -> None:
        self._node = node
        self._folders = [normal_path(path).rstrip("/") for path in node.paths]
        self.remote = any(map(is_remote, node.paths))

    def count(self) -> int | None:
        """Return how many elements were saved; None: more is being written."""
        splits = self.splits()
        return None if any(split.note for split in splits) else sum(f.stop for split in splits for f in split.files)

    def list_splits(self) -> Sequence[Split]:
        return self._splits

    @cached_property
    def _splits(self) -> list[Split]:
        """Listed once: a second look would find more."""
        return [split for folder in self._folders for split in self._list(folder)]

    def _list(self, folder: str) -> list[Split]:
        manifest = self._begun(folder)
        ranges = [(_range(folder, part), float(part.nbytes)) for part in manifest.parts]
        splits = group_ranges(ranges, split_step(sum(size for _, size in ranges), len(ranges), remote=self.remote))
        if not manifest.complete:
            rest = FileRange(f"{folder}/{PROGRESS}", 0, start=len(manifest.parts))
            splits.append(Split(files=(rest,), note=repr(self._node.wait_s)))
        return splits

    def _begun(self, folder: str) -> Manifest:
        """Return what there is so far, waiting for the writer to begin; a failure of an earlier one is not awaited."""
        began = monotonic()
        while (manifest := _look(folder, self._node.storage_options)) is None:
            waited_s = monotonic() - began
            if waited_s >= self._node.wait_s:
                raise NoFilesError(
                    folder,
                    f"holds no saved dataset, and none was begun there in {waited_s:.1f} s",
                    remedy="see the path, or give a longer wait=",
                )
            sleep(min(LOOK_S, self._node.wait_s - waited_s))
        return manifest

    def open(self, split: Split, at: SplitPosition) -> SavedReader:
        return SavedReader(split, at, self._node.storage_options)


class SavedReader:
    def __init__(self, split: Split, at: SplitPosition, options: Options) -> None:
        self._split, self._options = split, options
        self._skip = at.index
        self._closed = threading.Event()
        self._runs = self._read()
        self._elements: Sequence[Element] = ()

    def read(self, want: int) -> Records:
        if not self._elements:
            self._elements = next(self._runs, ())
        taken, self._elements = self._elements[:want], self._elements[want:]
        return Records(taken)

    def close(self) -> None:
        """Stop; a thread that waits for more is woken."""
        self._closed.set()

    def _read(self) -> Iterator[Sequence[Element]]:
        for piece in self._ranges():
            if self._skip >= piece.stop:
                self._skip -= piece.stop
                continue
            yield from self._part(piece)

    def _part(self, piece: FileRange) -> Iterator[Sequence[Element]]:
        try:
            for count, batch in read_part(piece.path, piece.size, piece.etag, self._options):
                if self._skip >= count:
                    self._skip -= count
                    continue
                elements = decode(batch)[self._skip :]
                self._skip = 0
                yield elements
        except (ValueError, TypeError) as error:
            raise CorruptRecordError(piece.path, str(error), remedy="save the dataset anew") from error

    def _ranges(self) -> Iterator[FileRange]:
        if not self._split.note:
            yield from self._split.files
            return
        rest = self._split.files[0]
        yield from self._coming(folder_of(rest.path), rest.start, float(self._split.note))

    def _coming(self, folder: str, known: int, wait_s: float) -> Iterator[FileRange]:
        """Yield parts as they come. The deadline is for each next one: a dataset may take days to write."""
        since = monotonic()
        while True:
            manifest = _look(folder, self._options)
            if manifest is None:
                raise NoFilesError(folder, "holds no saved dataset any more")
            for part in manifest.parts[known:]:
                yield _range(folder, part)
            if manifest.complete:
                return
            if len(manifest.parts) > known:
                known, since = len(manifest.parts), monotonic()
            waited_s = monotonic() - since
            if waited_s >= wait_s:
                why = f"{_why_nothing_comes(manifest)}; go on with save() if it was killed, or give a longer wait="
                raise WaitTimeoutError(f"more of {folder} than {known} parts", why, waited_s)
            if self._closed.wait(min(LOOK_S, wait_s - waited_s)):
                raise ValueError(f"{folder}: the reader was closed")


def _look(folder: str, options: Options) -> Manifest | None:
    """Return what is saved so far; `SaveFailedError` if no more will come."""
    failure = load_failure(folder, options)  # before the manifest: a writer that goes on removes it first
    manifest = load_manifest(folder, options)
    if failure is not None and (manifest is None or not manifest.complete):
        raise SaveFailedError(folder, failure)
    return manifest


def _why_nothing_comes(manifest: Manifest) -> str:
    gone = bool(manifest.writer) and is_gone(manifest.writer)
    return "nothing was added" + (", and the process that saved it has died" if gone else "")


def _range(folder: str, part: SavedPart) -> FileRange:
    return FileRange(f"{folder}/{part.file}", part.nbytes, part.checksum, 0, part.elements)
