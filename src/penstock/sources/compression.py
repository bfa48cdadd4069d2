"""gzip, zstd and bz2 as streams that are read forward.

One loop for the three: they differ only in the decompressor. Files of several members (or frames) put one after the
other are read as one. Offsets in errors are those of the compressed file: it is the one that has to be mended.
"""

from __future__ import annotations

import bz2
import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol, cast

from penstock.core.errors import CorruptRecordError, MissingExtraError, TruncatedFileError
from penstock.graph.readers import FileCompression

_BY_ENDING: dict[str, FileCompression] = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".tgz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".tzst": "zstd",
    ".bz2": "bz2",
    ".tbz2": "bz2",
    ".tbz": "bz2",
}
IN_BYTES = 128 << 10  # compressed bytes a step; what they unpack to is held until it is read


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def compression_of(path: str, compression: FileCompression) -> FileCompression:
    """Return how a file is compressed: as forced, or with "auto" as its name says.

    >>> compression_of("a/x.TAR.GZ", "auto"), compression_of("x.tar", "auto"), compression_of("x.gz", "none")
    ('gzip', 'none', 'none')
    """
    if compression != "auto":
        return compression
    name = path.rpartition("/")[2].lower()
    return next((kind for ending, kind in _BY_ENDING.items() if name.endswith(ending)), "none")


def open_decompressed(raw: BinaryIO, path: str, compression: FileCompression) -> BinaryIO:
    """Return a stream of the unpacked bytes of `raw`, which it owns: closing one closes the other.

    Without compression that is `raw` itself. Else the stream seeks forward only, by unpacking what lies between.
    """
    kind = compression_of(path, compression)
    if kind == "none":
        return raw
    make: Callable[[], Any]
    errors: tuple[type[Exception], ...]
    match kind:
        case "gzip":
            make, errors = lambda: zlib.decompressobj(wbits=31), (zlib.error,)
        case "bz2":
            make, errors = bz2.BZ2Decompressor, (OSError, ValueError)
        case _:
            zstandard = _import_zstandard()
            make, errors = zstandard.ZstdDecompressor().decompressobj, (zstandard.ZstdError,)
    return cast(BinaryIO, _DecompressedFile(raw, path, kind, make, errors))


def _import_zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("zstandard", "zstd") from error
    return zstandard


class _DecompressedFile(io.BufferedIOBase):
    def __init__(
        self,
        raw: BinaryIO,
        path: str,
        kind: str,
        make: Callable[[], _Decompressor],
        errors: tuple[type[Exception], ...],
    ) -> None:
        self._raw, self._path, self._kind, self._make, self._errors = raw, path, kind, make, errors
        self._member: _Decompressor | None = None  # None between two members, and at the start
        self._given = 0  # compressed bytes handed to decompressors
        self._rest = b""  # compressed bytes that lie behind the end of a member
        self._block = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def _here(self) -> memoryview:
        """Return unpacked bytes at hand, unpacking more if there are none; empty at the end."""
        while not self._block:
            packed = self._rest or self._raw.read(IN_BYTES)
            self._rest = b""
            if not packed:
                if self._member is not None:
                    raise TruncatedFileError(self._path, f"the {self._kind} data ends too early", offset=self._given)
                break
            self._unpack(packed)
        return self._block

    def _unpack(self, packed: bytes) -> None:
        if self._member is None:
            if self._given:  # some writers pad the file with zeros behind the last member
                padding = len(packed) - len(packed.lstrip(b"\0"))
                self._given += padding
                packed = packed[padding:]
                if not packed:
                    return
            self._member = self._make()
        try:
            self._block = memoryview(self._member.decompress(packed))
        except self._errors as error:
            what = f"corrupt {self._kind} data (offset in the compressed file): {error}"
            raise CorruptRecordError(self._path, what, offset=self._given) from error
        if self._member.eof:
            self._rest = self._member.unused_data
            self._member = None
        self._given += len(packed) - len(self._rest)

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        done = 0
        while done < len(target) and (part := self._here()[: len(target) - done]):
            target[done : done + len(part)] = part
            done += len(part)
            self._pass(len(part))
        return done

    def read(self, size: int | None = -1) -> bytes:
        wanted = -1 if size is None else size
        parts: list[memoryview] = []
        while wanted and (part := self._here()[: wanted if wanted > 0 else None]):
            parts.append(part)
            wanted -= len(part) if wanted > 0 else 0
            self._pass(len(part))
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def read1(self, size: int = -1) -> bytes:
        part = self._here()[: size if size >= 0 else None]
        self._pass(len(part))
        return bytes(part)

    def _pass(self, size: int) -> None:
        self._block = self._block[size:]
        self._at += size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset + (self._at if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END or target < self._at:
            raise io.UnsupportedOperation(f"{self._path}: {self._kind} data can only be read forward")
        while self._at < target and (part := self._here()[: target - self._at]):
            self._pass(len(part))
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
