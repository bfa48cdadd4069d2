"""Errors, sorted by who must act on them.

`InvalidPipelineError`, `InvalidArgumentError`: the caller's code must change. `DataError`: the data must be mended or
skipped. `StateMismatchError`: the checkpoint and the pipeline do not belong together. A user function's own exception
is never wrapped: it keeps its type and gains a note (see `runtime.blame`); `StopIteration` alone is not let through
(see `never_the_end`).
"""

from __future__ import annotations

from collections.abc import Iterable


class PenstockError(Exception):
    """Base of every error Penstock raises itself."""


class InvalidArgumentError(PenstockError, ValueError):
    """An argument is outside of what is allowed; the message says what is."""


class InvalidPipelineError(PenstockError, ValueError):
    """Operators that do not fit together."""


class EmptyInputError(PenstockError, ValueError):
    """An input that should be repeated for ever gives nothing."""


class DataError(PenstockError):
    """A source could not be read: the message names the file and the offset."""

    def __init__(self, path: str, what: str, *, offset: int | None = None, remedy: str = "") -> None:
        self.path, self.offset, self.what = path, offset, what
        where = path if offset is None else f"{path} at byte {offset}"
        super().__init__(f"{where}: {what}" + (f"; {remedy}" if remedy else ""))


def located(error: DataError, path: str, offset: int | None) -> DataError:
    """Return an error that was rebuilt from its message, with the fields that its constructor would have set."""
    error.path, error.offset, error.what = path, offset, str(error)
    return error


class NoFilesError(DataError, FileNotFoundError):
    """A path or glob matched nothing."""


class CorruptRecordError(DataError):
    """A record failed its checksum or could not be parsed."""


class TruncatedFileError(CorruptRecordError):
    """A file ended too early: in the middle of a record, or before the size it was listed with."""


class FileChangedError(TruncatedFileError):
    """A file is not the one that was listed."""

    def __init__(self, path: str, *, listed: int, found: int | None = None, offset: int | None = None) -> None:
        """`listed` and `found` are its sizes then and now; without `found` it has another content of any size.

        Of the same size, it was written again.
        """
        self.listed, self.found = listed, found
        now = "another content" if found is None else f"{found:,} bytes"
        what = f"the file has {now} now and had {listed:,} bytes when it was listed"
        super().__init__(
            path,
            f"{what}: it was written again since it was listed or first read" if found == listed else what,
            offset=offset,
            remedy="make the dataset anew, which lists its files, and move files into place only when they are whole",
        )


class TableConflictError(DataError):
    """A commit to a table would undo what another has done meanwhile: nothing was changed, and it may be repeated."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(path, what, remedy="nothing was changed by this; run it again")


class SnapshotGoneError(DataError):
    """Files of an older version of a table were removed for good: a newer one has to be read."""


class StorageUnavailableError(PenstockError, OSError):
    """Storage did not answer, after retries. Not a `DataError`: skipping bad data must not hide an outage."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{path}: {what}")


class CannotWriteError(PenstockError, OSError):
    """A file of an operator cannot be written: the disk is full, or it is not ours to write to."""

    def __init__(self, operator: str, path: str, error: OSError, remedy: str) -> None:
        self.operator, self.path = operator, path
        super().__init__(f"{operator} cannot write {path}: {error.strerror or error}; {remedy}")
        self.errno = error.errno


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

    def __init__(self, message: str, row: int | None = None) -> None:
        """`row` is the first row that differs, where that is known."""
        self.row = row
        super().__init__(message)


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


class JournalError(PenstockError):
    """The dispatcher's journal cannot be used."""


class JournalCorruptError(JournalError):
    """A journal that was damaged after it was written: nothing is guessed from it."""

    def __init__(self, path: str, position: int | None, what: str, remedy: str = "") -> None:
        self.path, self.position, self.what = path, position, what
        where = path if position is None else f"{path} at position {position}"
        remedy = remedy or "restore it from a copy, or move it away: running jobs then go on from their clients' states"
        super().__init__(f"{where}: {what}; {remedy}")


class JournalLockedError(JournalError):
    """Another dispatcher uses this journal."""

    def __init__(self, path: str, holder: str) -> None:
        self.path, self.holder = path, holder
        super().__init__(f"{path} is in use by {holder}; stop that dispatcher, or give this one its own journal")


class JournalWriteError(JournalError):
    """A write did not reach the disk: nothing that depended on it has been said to anybody."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} cannot be written ({reason}); requests that need it are refused until it can")


class ServiceFileMissingError(InvalidArgumentError, FileNotFoundError):
    """A file that names a service, or holds its keys, is not there (yet)."""

    def __init__(self, path: str, what: str) -> None:
        self.path = path
        super().__init__(f"{path!r} does not exist; it should be {what}")


class CannotListenError(PenstockError, OSError):
    """An address cannot be bound."""

    def __init__(self, address: str, reason: str) -> None:
        self.address, self.reason = address, reason
        super().__init__(f"cannot listen at {address}: {reason}; choose another --port or --bind")


class DispatcherUnavailableError(PenstockError, TimeoutError):
    """The dispatcher did not answer in time."""

    def __init__(self, address: str, what: str, waited_s: float, state: str = "") -> None:
        self.address, self.what, self.waited_s = address, what, waited_s
        super().__init__(
            f"no answer from the dispatcher at {address} to {what} within {waited_s:.1f} s"
            + (f" ({state})" if state else "")
            + "; check that it runs and can be reached from here"
        )


class AuthenticationError(PenstockError, PermissionError):
    """The other side refused our key, or is not who our key is for."""

    def __init__(self, address: str, reason: str) -> None:
        self.address, self.reason = address, reason
        super().__init__(f"{address} refused us: {reason}; use a key that the service knows: its service file has one")


class RefusedError(PenstockError):
    """The dispatcher says no, and asking again will not help."""


class NotPermittedError(RefusedError, PermissionError):
    """The service knows who asks, and that principal may not ask this: it says who may."""


class LimitReachedError(RefusedError):
    """A principal has as much of the service as it may have."""


class ProtocolError(PenstockError):
    """A message that is not one, or of a version this release does not speak."""


class RemoteError(PenstockError):
    """A user function failed in a worker with an exception whose class is not known here."""

    def __init__(self, type_name: str, message: str) -> None:
        self.type_name, self.message = type_name, message
        super().__init__(f"{type_name}: {message}" if message else type_name)


class WaitTimeoutError(PenstockError, TimeoutError):
    """Nothing came within the `timeout` of a loader."""

    def __init__(self, what: str, why: str, waited_s: float) -> None:
        self.what, self.why, self.waited_s = what, why, waited_s
        super().__init__(f"waited {waited_s:.1f} s for {what}: {why}")


class JobFailedError(PenstockError):
    """A job cannot go on."""

    def __init__(self, job: str, reason: str) -> None:
        self.job, self.reason = job, reason
        super().__init__(f"job {job!r} cannot go on: {reason}")


class WorkersLostError(PenstockError):
    """Processes that ran a stream were lost one after the other, before any gave something: see `Limits`."""

    def __init__(self, stream: int, lost: int) -> None:
        self.stream, self.lost = stream, lost
        super().__init__(
            f"{lost} processes in a row that ran stream {stream} were lost before they gave anything: a function ends "
            "its process, crashes in C code, or takes more memory than there is; run the pipeline without distribute() "
            "to see where"
        )


class ForkedLoaderError(PenstockError):
    """A loader is used in a process that was forked after it had connected."""

    def __init__(self) -> None:
        super().__init__(
            "this loader was connected before the process was forked, and its sockets belong to the parent; "
            "call distribute() in the child"
        )


class NurseryGoneError(PenstockError):
    """The process that starts the others of a service has ended."""

    def __init__(self) -> None:
        super().__init__("the process that starts workers has ended, and all of them with it; make a new service")


class ServiceNotReadyError(PenstockError):
    """A service's processes did not start, or not in time."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the service did not start: {reason}; what its processes wrote to stderr says more")


class ServiceClosedError(PenstockError):
    """A service that was closed is used."""

    def __init__(self) -> None:
        super().__init__("this service is closed; make a new one")


class CacheAwayWarning(UserWarning):
    """Storage that autocache() keeps elements in fails or does not answer: they are computed instead."""


class ImpureFunctionWarning(UserWarning):
    """A function whose results autocache() keeps gives another one for the same element."""


class LargeFunctionWarning(UserWarning):
    """A function takes so much data along that sending it, and holding it in every worker, is a burden."""


class JobMismatchError(PenstockError, ValueError):
    """A job of this name exists and is another one; the message names each difference."""


class PipelineMismatchError(PenstockError, ValueError):
    """A pipeline of this id is registered with another structure."""


class SaveMismatchError(PenstockError, ValueError):
    """A folder that something else was saved to, or that workers do not share with the caller."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"cannot save to {path}: {reason}; give an empty folder that all workers share")


class SaveFailedError(PenstockError):
    """What is being read was being saved, and that has failed."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"saving {path} has failed: {reason}; call save() again, which goes on where it was")


class SupersededError(PenstockError):
    """Another reader has taken this one's place: a consumer has one reader, the newest."""


class JobCancelledError(PenstockError):
    """Somebody cancelled the job."""


class DeadlyElementError(PenstockError):
    """An element that a sampler asked for has killed the processes that worked on it."""


def never_the_end(error: Exception, who: str) -> Exception:
    """Return what to raise for an error out of a user's code.

    A `StopIteration` becomes a `RuntimeError`, as PEP 479 has it: the loops it passes on its way up would take it for
    the end of what they read, and all that follows would be missing without a word.

    >>> never_the_end(StopIteration(), "map(f)")
    RuntimeError('map(f) raised StopIteration, which is no end of the data; give next() a default, or catch it')
    >>> never_the_end(KeyError("a"), "map(f)")
    KeyError('a')
    """
    if not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"{who} raised StopIteration, which is no end of the data; give next() a default, or catch it")
    told.__cause__ = error
    return told


def choice(argument: str, value: object, allowed: Iterable[object]) -> InvalidArgumentError:
    """Return the error for a value outside a closed set.

    >>> str(choice("stop", "never!", ["first", "all"]))
    "stop='never!' is not one of 'first', 'all'"
    """
    return InvalidArgumentError(f"{argument}={value!r} is not one of {', '.join(map(repr, allowed))}")
