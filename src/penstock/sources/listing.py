"""From what the user wrote (paths, folders, globs, braces, URLs) to the list of files.

Rules: the order of the paths is kept, what one of them stands for is sorted, a file named twice is taken once; so the
list depends on the data alone. A file or folder that exists under the very name wins over reading that name as a
pattern. Names that begin with a dot are left out unless written.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.core.errors import NoFilesError
from penstock.sources.base import FileRange, Split
from penstock.sources.cutting import SplitStep, cut_neighbours, split_step
from penstock.sources.patterns import expand_braces, fixed_part, has_magic, has_magic_name, matches_parts, name_matcher
from penstock.sources.storage import (
    AccessDeniedError,
    FoundFile,
    LocalStorage,
    Options,
    Storage,
    folder_of,
    is_hidden,
    normal_path,
    split_scheme,
    storage_for,
)

_MARKER_NAMES = frozenset({"_SUCCESS", "_metadata", "_common_metadata"})  # left beside data by Spark and its kin


class FileInfo(NamedTuple):
    """A file to read. `relative` is its path below the reader's root: with size or etag it is the file's identity."""

    path: str
    size: int
    etag: str
    relative: str


class ArrayHeader(msgspec.Struct, frozen=True):
    """What the header of a numpy file says."""

    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    fortran_order: bool


class FileListing(msgspec.Struct, frozen=True, kw_only=True):
    """Files field by field: millions of them must not be millions of objects."""

    paths: list[str]
    sizes: np.ndarray[Any, np.dtype[np.int64]]
    root_lengths: np.ndarray[Any, np.dtype[np.int64]]
    """How much of each path lies above the reader's root."""
    etags: list[str] | None
    headers: Sequence[ArrayHeader] | None = None
    """The header of each file, where the source has read them to count its elements."""

    @staticmethod
    def of(files: Iterable[FileInfo]) -> FileListing:
        listed = list(files)
        return FileListing(
            paths=[file.path for file in listed],
            sizes=np.array([file.size for file in listed], np.int64),
            root_lengths=np.array([len(file.path) - len(file.relative) for file in listed], np.int64),
            etags=[file.etag for file in listed] if any(file.etag for file in listed) else None,
        )

    def __len__(self) -> int:
        return len(self.paths)

    def relative(self, index: int) -> str:
        return self.paths[index][self.root_lengths[index] :]

    def info(self, index: int) -> FileInfo:
        return FileInfo(self.paths[index], int(self.sizes[index]), self.etag(index), self.relative(index))

    def etag(self, index: int) -> str:
        return self.etags[index] if self.etags is not None else ""


class FileSplits:
    """Base of the sources whose splits name files: say how they are listed, unless that was done elsewhere."""

    _given: Sequence[Split] | None = None

    def list_splits(self) -> Sequence[Split]:
        raise NotImplementedError

    def splits(self) -> Sequence[Split]:
        return self.list_splits() if self._given is None else self._given

    def use_splits(self, splits: Sequence[Split]) -> None:
        self._given = splits


def list_files(
    paths: Sequence[str], storage_options: Options = (), *, extensions: Iterable[str] | None = None
) -> list[FileInfo]:
    """Return every file that `paths` stand for.

    `extensions` (lower case, with the dot) say which files of a folder or glob are meant; a file named in full is
    always taken. The root of the relative paths is the deepest folder above everything the paths name.
    """
    wanted = tuple(extensions) if extensions is not None else None
    found: dict[str, FoundFile] = {}
    roots: list[str] = []
    for path in map(normal_path, paths):
        storage = storage_for(path, storage_options)
        for root, entries in _expand(path, storage, wanted):
            roots.append(root)
            for entry in entries:
                found.setdefault(entry.path, entry)
    root = common_folder(roots)
    return [FileInfo(e.path, e.size, e.etag, relative_path(e.path, root)) for e in found.values()]


def step_for(files: Sequence[FileInfo], *, remote: bool = False) -> SplitStep:
    """Return at which step files are cut."""
    return split_step(sum(file.size for file in files), len(files), remote=remote)


def group_small_files(files: Sequence[FileInfo], step: SplitStep) -> list[Split]:
    """Return splits of whole files: small neighbours share one, a file of a step or more has its own."""
    cuts = cut_neighbours([file.size for file in files], [file.path for file in files], step)
    ranges = [FileRange(file.path, file.size, file.etag) for file in files]
    return [Split(files=tuple(ranges[start:stop])) for start, stop in cuts]


def common_folder(folders: Sequence[str]) -> str:
    """Return the deepest folder above all of them, "" if there is none.

    >>> common_folder(["/data/train", "/data/val/x"]), common_folder(["s3://a/x", "/data"])
    ('/data', '')
    """
    schemes = {split_scheme(folder)[0] for folder in folders}
    if len(schemes) != 1:
        return ""
    parts = [split_scheme(folder)[1].rstrip("/").split("/") for folder in folders]
    shared: list[str] = []
    for level in zip(*parts):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    scheme = schemes.pop()
    return (f"{scheme}://" if scheme else "") + "/".join(shared)


def relative_path(path: str, root: str) -> str:
    """
    >>> relative_path("/data/cat/1.jpg", "/data"), relative_path("s3://bucket/x", "")
    ('cat/1.jpg', 's3://bucket/x')
    """
    if root.endswith("://") and path.startswith(root):
        return path[len(root) :]
    prefix = root.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else path


def _expand(path: str, storage: Storage, wanted: tuple[str, ...] | None) -> Iterator[tuple[str, list[FoundFile]]]:
    """Yield (root, files) for each thing a path stands for."""
    if has_magic(path) or "{" in path:
        literal = _as_written(path, storage)
        if literal is not None:
            yield folder_of(path), [literal]
            return
        if isinstance(storage, LocalStorage) and os.path.isdir(path):
            yield path, _files_below(path, storage, wanted)
            return
    names = expand_braces(path)
    plain = [name for name in names if not has_magic(name)]
    known = dict(zip(plain, storage.stat(plain)))
    for name in names:
        entry = known.get(name)
        if name not in known:
            yield fixed_part(name), _glob(name, storage, wanted)
        elif entry is not None:
            yield folder_of(name), [entry]
        else:
            yield name.rstrip("/"), _files_below(name, storage, wanted)


def _as_written(path: str, storage: Storage) -> FoundFile | None:
    try:
        return storage.stat([path])[0]
    except AccessDeniedError:
        return None  # so S3 answers for a missing object to who may read a bucket and not list it


def _files_below(folder: str, storage: Storage, wanted: tuple[str, ...] | None) -> list[FoundFile]:
    everything = list(storage.walk(folder))
    files = _chosen(everything, wanted)
    if files:
        return files
    if everything:
        raise NoFilesError(folder, f"has {len(everything)} files, but none that is meant ({_told(wanted)})")
    if isinstance(storage, LocalStorage) and os.path.isdir(folder):
        raise NoFilesError(folder, "the folder has no files")
    raise NoFilesError(folder, "no such file or folder")


def _told(wanted: tuple[str, ...] | None) -> str:
    return "hidden files and job markers are not" if wanted is None else ", ".join(wanted)


def _chosen(entries: Iterable[FoundFile], wanted: tuple[str, ...] | None) -> list[FoundFile]:
    return sorted(e for e in entries if not is_hidden(e.path) and _is_meant(posixpath.basename(e.path), wanted))


def _is_meant(name: str, wanted: tuple[str, ...] | None) -> bool:
    return name not in _MARKER_NAMES and (wanted is None or name.lower().endswith(wanted))


def _glob(pattern: str, storage: Storage, wanted: tuple[str, ...] | None) -> list[FoundFile]:
    root = fixed_part(pattern)
    parts = pattern[len(root) :].lstrip("/").split("/")
    files: dict[str, FoundFile] = {}
    folders: set[str] = set()
    _descend(root or "/", parts, storage, files, folders)
    chosen = [entry for entry in files.values() if _is_meant(posixpath.basename(entry.path), wanted)]
    if not files:  # `root/class-*` may name folders: all that is in them
        chosen = [entry for folder in sorted(folders) for entry in _chosen(storage.walk(folder), wanted)]
    if chosen:
        return sorted(chosen)
    if files:
        raise NoFilesError(pattern, f"matches {len(files)} files, but none that is meant ({_told(wanted)})")
    raise NoFilesError(pattern, f"matches no file; searched the folder {root or '/'}, {_contents(root, storage)}")


def _contents(folder: str, storage: Storage) -> str:
    folders, files = storage.scan(folder or "/")
    if not folders and not files:
        return "which is empty or does not exist"
    return f"which has {len(files)} files and {len(folders)} folders"


def _descend(
    folder: str, parts: Sequence[str], storage: Storage, files: dict[str, FoundFile], folders: set[str]
) -> None:
    """Collect in `files` and `folders` what matches the glob `parts` below a folder."""
    part, rest = parts[0], parts[1:]
    if part == "**":  # one walk: an object store lists all that is below a folder in one go
        for entry in storage.walk(folder):
            if matches_parts(relative_path(entry.path, folder).split("/"), parts):
                files[entry.path] = entry
        return
    if not has_magic_name(part):  # a fixed name between two patterns: nothing to list
        inner = f"{folder.rstrip('/')}/{part}"
        if rest:
            _descend(inner, rest, storage, files, folders)
        elif (exact := storage.stat([inner])[0]) is not None:
            files[exact.path] = exact
        else:
            folders.add(inner)
        return
    inner_folders, inner_files = storage.scan(folder)
    matches = name_matcher(part)
    matching = [inner for inner in inner_folders if matches(posixpath.basename(inner))]
    if rest:
        for inner in matching:
            _descend(inner, rest, storage, files, folders)
        return
    folders.update(matching)
    files.update((e.path, e) for e in inner_files if matches(posixpath.basename(e.path)))
