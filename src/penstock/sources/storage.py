"""Where bytes come from: local files, S3 through obstore, everything else through fsspec.

A `Storage` answers for all paths of one kind. Paths go in and come out as the user would write them (with the scheme,
local ones absolute), so that an error can name them and a split can carry them to another machine.
"""

from __future__ import annotations

import io
import os
import stat as stat_module
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias, cast

from penstock.core.errors import (
    DataError,
    FileChangedError,
    InvalidArgumentError,
    NoFilesError,
    StorageUnavailableError,
)
from penstock.sources import io_threads
from penstock.sources.file_times import FileTimes
from penstock.sources.readahead import WAIT_S, RandomAccessFile, ReadAheadFile

Options: TypeAlias = Mapping[str, Any] | Sequence[tuple[str, Any]]
"""`storage_options`, as a dict or as the pairs a node keeps."""

LOCAL_BUFFER_BYTES = 64 << 10  # serves small records; reads beyond it go straight into the result
_LOCAL_SCHEMES = ("file", "local")
_S3_SCHEMES = ("s3", "s3a")
_times = FileTimes()


class AccessDeniedError(StorageUnavailableError):
    """The credentials do not allow it, or no longer: that is no bad data to be skipped either."""

    def __init__(self, path: str, what: str) -> None:
        remedy = "see storage_options= (for S3: key, secret, token, anon) and the environment's variables"
        super().__init__(path, f"access denied: {what}; {remedy}")


class NoCredentialsError(AccessDeniedError):
    """There are none to ask with."""

    def __init__(self, path: str) -> None:
        StorageUnavailableError.__init__(
            self,
            path,
            "there are no credentials for S3: neither storage_options= (key, secret, token) nor the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) nor a role of this machine gives any; "
            "for a public bucket say storage_options={'anon': True}",
        )


class FoundFile(NamedTuple):
    """A file that exists. `etag` is the store's own mark of the content, where it has one."""

    path: str
    size: int
    etag: str = ""


class Storage(Protocol):
    def stat(self, paths: Sequence[str]) -> list[FoundFile | None]:
        """Return what is known of each path, None where it is no file."""
        ...

    def scan(self, folder: str) -> tuple[list[str], list[FoundFile]]:
        """Return the folders and the files right inside a folder; nothing where there is no such folder."""
        ...

    def walk(self, folder: str) -> Iterator[FoundFile]:
        """Yield the files below a folder."""
        ...

    def open(self, file: FoundFile, start: int, stop: int) -> BinaryIO: ...

    def open_random(self, file: FoundFile) -> BinaryIO: ...


def split_scheme(path: str) -> tuple[str, str]:
    """
    >>> split_scheme("s3://bucket/key"), split_scheme("/data/x")
    (('s3', 'bucket/key'), ('', '/data/x'))
    """
    scheme, mark, rest = path.partition("://")
    return (scheme, rest) if mark else ("", path)


def folder_of(path: str) -> str:
    """
    >>> folder_of("/data/x.tar"), folder_of("memory://x.tar")
    ('/data', 'memory://')
    """
    scheme, rest = split_scheme(path)
    return (f"{scheme}://" if scheme else "") + rest.rpartition("/")[0]


def is_remote(path: str) -> bool:
    return split_scheme(path)[0] not in ("", *_LOCAL_SCHEMES)


def normal_path(path: str) -> str:
    """Return a path as this package writes it: local ones absolute and bare, so that they hold in any process.

    >>> normal_path("file:///data/a.tar"), normal_path("s3://bucket/a.tar")
    ('/data/a.tar', 's3://bucket/a.tar')
    """
    scheme, rest = split_scheme(path)
    if scheme and scheme not in _LOCAL_SCHEMES:
        return path
    return os.path.abspath(os.path.expanduser(rest))


def storage_for(path: str, options: Options = ()) -> Storage:
    scheme, rest = split_scheme(path)
    if not scheme or scheme in _LOCAL_SCHEMES:
        return LocalStorage()
    if "::" in rest:
        raise InvalidArgumentError(f"{path}: a URL inside a URL is not read; unpack the archive or name the inner one")
    if scheme in _S3_SCHEMES:
        from penstock.sources.object_store import S3Storage

        return S3Storage(scheme, rest.partition("/")[0], dict(options))
    return FsspecStorage(scheme, dict(options))


def open_file(
    path: str, size: int, options: Options = (), *, etag: str = "", start: int = 0, stop: int | None = None
) -> BinaryIO:
    """Open a file to be read forward from `start`; of a remote one, nothing from `stop` on is read.

    A remote file has its first requests under way when this returns, and nothing was waited for: `size` and `etag`
    come from the listing. `read` and `readinto` come back short only at the end of the file. Seeking works; a far seek
    in a remote file throws away what was read ahead. A file that is not the one that was listed is a
    `FileChangedError`: a local one here and by `check_unchanged`, a remote one where an answer shows it.
    """
    return storage_for(path, options).open(FoundFile(path, size, etag), start, size if stop is None else stop)


def open_random(path: str, size: int, options: Options = (), *, etag: str = "") -> BinaryIO:
    """Open a file to be read here and there: every remote `read` is one request, nothing is read ahead."""
    return storage_for(path, options).open_random(FoundFile(path, size, etag))


def check_unchanged(file: BinaryIO | str, path: str, listed: int, *, offset: int | None = None) -> None:
    """Raise `FileChangedError` if a local file, open or named, has another size than when it was listed.

    Or another time than when this process has listed or opened it first (see `sources.file_times`). A remote one that
    is open has been compared with every answer.
    """
    try:
        if isinstance(file, str):
            status = os.stat(file)
        elif isinstance(file, io.BufferedReader):
            status = os.fstat(file.fileno())
        else:
            return
    except FileNotFoundError as error:
        raise gone(path) from error
    except OSError as error:
        raise DataError(path, error.strerror or str(error)) from error
    if status.st_size != listed or not _times.is_same(normal_path(path), status):
        raise FileChangedError(path, listed=listed, found=status.st_size, offset=offset)


def gone(path: str) -> NoFilesError:
    return NoFilesError(path, "the file is gone since it was listed")


class LocalStorage:
    def stat(self, paths: Sequence[str]) -> list[FoundFile | None]:
        return [self._stat_one(normal_path(path)) for path in paths]

    def _stat_one(self, path: str) -> FoundFile | None:
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(path, error.strerror or str(error)) from error
        if stat_module.S_ISDIR(status.st_mode):
            return None
        _times.listed(path, status)
        return FoundFile(path, status.st_size)

    def scan(self, folder: str) -> tuple[list[str], list[FoundFile]]:
        folders: list[str] = []
        files: list[FoundFile] = []
        try:
            with os.scandir(normal_path(folder)) as found:
                for item in found:
                    if item.is_dir():
                        folders.append(item.path)
                    elif item.is_file():
                        _times.listed(item.path, status := item.stat())
                        files.append(FoundFile(item.path, status.st_size))
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        except OSError as error:
            raise DataError(folder, error.strerror or str(error)) from error
        return folders, files

    def walk(self, folder: str) -> Iterator[FoundFile]:
        return self._walk(normal_path(folder), frozenset())

    def _walk(self, folder: str, above: frozenset[str]) -> Iterator[FoundFile]:
        real = os.path.realpath(folder)
        if real in above:
            return  # a link to a folder it lies in; other links are followed, datasets are often made of them
        folders, files = self.scan(folder)
        yield from files
        for inner in folders:
            if not is_hidden(inner):
                yield from self._walk(inner, above | {real})

    def open(self, file: FoundFile, start: int, stop: int) -> BinaryIO:
        try:
            opened = open(normal_path(file.path), "rb", buffering=LOCAL_BUFFER_BYTES)  # noqa: SIM115 (the caller closes it)
        except FileNotFoundError as error:
            raise gone(file.path) from error
        except OSError as error:
            raise DataError(file.path, error.strerror or str(error)) from error
        try:
            check_unchanged(opened, file.path, file.size)
        except DataError:
            opened.close()
            raise
        if start:
            opened.seek(start)
        return opened

    def open_random(self, file: FoundFile) -> BinaryIO:
        return self.open(file, 0, file.size)


class FsspecStorage:
    """Any scheme fsspec knows. Its block caches are not used: ranges are asked for directly, several at a time."""

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        import fsspec

        self._scheme = scheme
        try:
            self._fs = fsspec.filesystem(scheme, **options)
        except ImportError as error:
            raise InvalidArgumentError(f"{scheme}:// cannot be read: {error}") from error
        except ValueError as error:
            raise InvalidArgumentError(f"{scheme}:// is not a kind of storage that fsspec knows: {error}") from error

    def _inner(self, path: str) -> str:
        return str(self._fs._strip_protocol(path))

    def _entry(self, found: Mapping[str, Any]) -> FoundFile:
        size = found.get("size")
        path = self._outer(str(found["name"]))
        if size is None:
            raise DataError(path, "the server does not say how long the file is", remedy="copy it to other storage")
        etag = found.get("ETag") or found.get("etag") or ""
        return FoundFile(path, int(size), str(etag).strip('"'))

    def _outer(self, name: str) -> str:
        return name if "://" in name else f"{self._scheme}://{name.lstrip('/')}"

    def stat(self, paths: Sequence[str]) -> list[FoundFile | None]:
        return io_threads.run_all([partial(self._stat_one, path) for path in paths], deadline_s=WAIT_S)

    def _stat_one(self, path: str) -> FoundFile | None:
        try:
            found = self._fs.info(self._inner(path))
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise AccessDeniedError(path, str(error)) from error
        return self._entry(found) if found["type"] == "file" else None

    def scan(self, folder: str) -> tuple[list[str], list[FoundFile]]:
        self._fs.invalidate_cache(self._inner(folder))
        try:
            found = self._fs.ls(self._inner(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        inside = [item for item in found if str(item["name"]).rstrip("/") != self._inner(folder).rstrip("/")]
        folders = [self._outer(str(item["name"])).rstrip("/") for item in inside if item["type"] == "directory"]
        return folders, [self._entry(item) for item in inside if item["type"] == "file"]

    def walk(self, folder: str) -> Iterator[FoundFile]:
        folders, files = self.scan(folder)
        yield from files
        for inner in folders:
            if not is_hidden(inner):
                yield from self.walk(inner)

    def fetch(self, file: FoundFile, start: int, stop: int) -> bytes:
        path = file.path
        to_the_end = stop == file.size
        try:
            # At the end one byte more, to see a file that has grown without asking for its size.
            content = cast(bytes, self._fs.cat_file(self._inner(path), start=start, end=stop + to_the_end))
        except FileNotFoundError as error:
            raise gone(path) from error
        except PermissionError as error:
            raise AccessDeniedError(path, str(error)) from error
        except OSError as error:
            raise StorageUnavailableError(path, f"bytes {start} to {stop} could not be read: {error}") from error
        if to_the_end and start + len(content) > file.size:
            raise FileChangedError(path, listed=file.size, offset=file.size)
        return content

    def open(self, file: FoundFile, start: int, stop: int) -> BinaryIO:
        return cast(BinaryIO, ReadAheadFile(partial(self.fetch, file), file.path, file.size, start, stop))

    def open_random(self, file: FoundFile) -> BinaryIO:
        return cast(BinaryIO, RandomAccessFile(partial(self.fetch, file), file.path, file.size))


def is_hidden(path: str) -> bool:
    return path.rpartition("/")[2].startswith(".")


def drop_folder_marks(entries: Iterable[FoundFile]) -> list[FoundFile]:
    """Leave out the empty objects that some tools store in place of a folder ("a" beside "a/b")."""
    kept = list(entries)
    empty = {entry.path for entry in kept if not entry.size}
    if not empty:
        return kept
    folders = {above for entry in kept for above in _folders_above(entry.path)}
    return [entry for entry in kept if entry.path not in empty or entry.path not in folders]


def _folders_above(path: str) -> Iterator[str]:
    while (path := path.rpartition("/")[0]) and not path.endswith(":/"):
        yield path
