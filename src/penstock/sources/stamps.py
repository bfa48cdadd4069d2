"""What tells that a source gives the same again: its files as they are now.

A stamp of a file has its size, its modification and change times in nanoseconds, or, of an object store, its etag. The
change time is set by the system alone: a file that was edited in place, and whose modification time was set back, has
another one. Whoever asks for a stamp opens the file for it, or asks the store for its head: who may not read a file
gets no stamp, and so no elements that were made of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from penstock.core.errors import DataError, StorageUnavailableError
from penstock.sources.base import IndexableSource, Source, Split
from penstock.sources.storage import Options, is_remote, storage_for


@runtime_checkable
class StampsElements(Protocol):
    """An indexable source over files: what its element at an index is made of."""

    def stamps(self, indices: Sequence[int]) -> list[str | None]:
        """Return a stamp for each element; None: it cannot be told whether it is the same later."""


@runtime_checkable
class StampsSplits(Protocol):
    """A source that knows itself what its splits are read from."""

    def split_stamp(self, split: Split) -> str | None: ...


def file_stamp(path: str, options: Options = ()) -> str | None:
    """Return what tells this file from what it was or will be; None: nothing does, or it cannot be read."""
    if not is_remote(path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
    try:
        (entry,) = storage_for(path, options).stat([path])
    except (DataError, StorageUnavailableError, OSError):
        return None
    return f"{entry.size} {entry.etag}" if entry is not None and entry.etag else None


def options_of(source: Any) -> Options:
    """Return what a source opens its files with."""
    node = getattr(source, "node", None) or getattr(source, "_node", None)
    return getattr(node, "storage_options", ())


def split_stamp(source: Source, split: Split) -> str | None:
    """Return a text that stands for all that a split is read from, as it is now; None: it cannot be told."""
    if isinstance(source, StampsSplits):
        return source.split_stamp(split)
    options = options_of(source)
    parts = [f"{split.start} {split.stop} {split.note!r}"]
    for file in split.files:
        stamp = file_stamp(file.path, options)
        if stamp is None:
            return None
        parts.append(f"{file.path!r} {file.start} {file.stop} {stamp}")
    return "\n".join(parts)


def element_stamps(source: IndexableSource, indices: Sequence[int]) -> list[str | None]:
    """Return a stamp for each element. One that is not of a file is known by its index."""
    if isinstance(source, StampsElements):
        return source.stamps(indices)
    return [str(int(index)) for index in indices]
