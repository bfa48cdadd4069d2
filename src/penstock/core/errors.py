"""Errors, sorted by who must act on them.

`InvalidPipelineError`, `InvalidArgumentError`: the caller's code must change. `DataError`: the data must be mended or
skipped. `StateMismatchError`: the checkpoint and the pipeline do not belong together. A user function's own exception
is never wrapped: it keeps its type and gains a note (see `runtime.blame`).
"""

from __future__ import annotations

from collections.abc import Iterable


class PenstockError(Exception):
    """Base of every error Penstock raises itself."""


class InvalidArgumentError(PenstockError, ValueError):
    """An argument is outside of what is allowed; the message says what is."""


class InvalidPipelineError(PenstockError, ValueError):
    """Operators that do not fit together."""


class DataError(PenstockError):
    """A source could not be read: the message names the file and the offset."""

    def __init__(self, path: str, what: str, *, offset: int | None = None, remedy: str = "") -> None:
        self.path, self.offset, self.what = path, offset, what
        where = path if offset is None else f"{path} at byte {offset}"
        super().__init__(f"{where}: {what}" + (f"; {remedy}" if remedy else ""))


class NoFilesError(DataError, FileNotFoundError):
    """A path or glob matched nothing."""


class CorruptRecordError(DataError):
    """A record failed its checksum or could not be parsed."""


class TruncatedFileError(CorruptRecordError):
    """A file ended in the middle of a record."""


class StorageUnavailableError(PenstockError, OSError):
    """Storage did not answer, after retries. Not a `DataError`: skipping bad data must not hide an outage."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{path}: {what}")


class ImageDecodeError(PenstockError, ValueError):
    """Bytes that are not a whole image; they carry no path, so the operator's note names the element."""

    def __init__(self, image_format: str, size_bytes: int, reason: str) -> None:
        self.image_format, self.size_bytes, self.reason = image_format, size_bytes, reason
        super().__init__(f"cannot decode {image_format} data of {size_bytes:,} bytes: {reason}")


class MissingExtraError(PenstockError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{package} is not installed; run: pip install 'penstock[{extra}]'")


class CodecError(PenstockError):
    """Bytes that are not a graph (or element) of a version this release reads."""


class FunctionShippingError(PenstockError, TypeError):
    """A user function cannot be shipped; names the variable that stands in the way."""


class StateMismatchError(PenstockError):
    """A state that does not belong to this pipeline."""


class BatchShapeError(PenstockError, ValueError):
    """Elements of one batch whose structure, shapes or types differ."""


class InterruptedReadError(PenstockError):
    """An iterator that was interrupted (Ctrl-C) is read again."""

    def __init__(self) -> None:
        super().__init__(
            "this iterator was interrupted; make a new one, and load the state_dict() of this one to go on where it was"
        )


class ErrorBudgetExceededError(PenstockError):
    """More elements failed than `on_error` allows."""


class ReplayError(PenstockError):
    """A skipped element cannot be run again: its pipeline was not stored, or the data is not what it was."""


def choice(argument: str, value: object, allowed: Iterable[object]) -> InvalidArgumentError:
    """Return the error for a value outside a closed set.

    >>> str(choice("stop", "never!", ["first", "all"]))
    "stop='never!' is not one of 'first', 'all'"
    """
    return InvalidArgumentError(f"{argument}={value!r} is not one of {', '.join(map(repr, allowed))}")
