"""S3 and what speaks its protocol, through obstore."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, BinaryIO, TypeVar, cast

from penstock.core.errors import (
    DataError,
    FileChangedError,
    InvalidArgumentError,
    MissingExtraError,
    NoFilesError,
    StorageUnavailableError,
)
from penstock.sources import io_threads
from penstock.sources.readahead import WAIT_S, RandomAccessFile, ReadAheadFile
from penstock.sources.storage import AccessDeniedError, FoundFile, NoCredentialsError, drop_folder_marks

T = TypeVar("T")

REQUEST_TIMEOUT = timedelta(seconds=60)  # for one answer with its body: a block at 140 KB/s
SILENCE_TIMEOUT = timedelta(seconds=10)  # without a byte: a lost connection is noticed, a slow one is let be
RETRY_TIMEOUT = timedelta(seconds=90)  # obstore begins no retry after this; with the last request still below WAIT_S
RETRIES = 6
TRIES = 3  # by us: obstore's older releases leave an answer that breaks off in the middle to their caller
TRY_AGAIN_WITHIN_S = 20.0  # what took longer went through obstore's own retries; with one more call below WAIT_S
WEAK = "W/"  # begins the etag of a content that may differ in its bytes
ASK_EACH = 64  # above this many named files in one folder, listing the folder is cheaper than asking for each

# What s3fs and boto3 call it -> what obstore calls it.
_CONFIG_NAMES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "anon": "skip_signature",
    "requester_pays": "request_payer",
}
# Without keys the machine's role is asked for; the address of that service tells nobody what is wrong.
_ASKED_FOR_A_ROLE = re.compile(r"/latest/(api/token|meta-data)")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class _OtherContentError(Exception):
    """The object has another etag, or ends before the range that was asked for."""


class S3Storage:
    def __init__(self, scheme: str, bucket: str, options: Mapping[str, Any]) -> None:
        try:
            import obstore
        except ImportError as error:
            raise MissingExtraError("obstore", "s3") from error
        if not bucket:
            raise InvalidArgumentError(f"{scheme}://: the name of a bucket is missing")
        self._obstore = obstore
        self._root = f"{scheme}://{bucket}"
        environment = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_")))
        self._store = _connect(bucket, _Frozen(options), environment)

    def _key(self, path: str) -> str:
        return path[len(self._root) :].strip("/")

    def _entry(self, found: Mapping[str, Any]) -> FoundFile:
        return FoundFile(f"{self._root}/{found['path']}", int(found["size"]), (found["e_tag"] or "").strip('"'))

    def stat(self, paths: Sequence[str]) -> list[FoundFile | None]:
        by_folder: dict[str, list[str]] = {}
        for path in paths:
            by_folder.setdefault(path.rpartition("/")[0], []).append(path)
        known: dict[str, FoundFile] = {}
        asked: list[str] = []
        for folder, inside in by_folder.items():
            listed = self._list_between(folder, min(inside), max(inside)) if len(inside) > ASK_EACH else None
            if listed is None:
                asked.extend(inside)
            else:
                known.update((entry.path, entry) for entry in listed)
        found = io_threads.run_all([partial(self._stat_one, path) for path in asked], deadline_s=WAIT_S)
        known.update((entry.path, entry) for entry in found if entry is not None)
        return [known.get(path) for path in paths]

    def _stat_one(self, path: str) -> FoundFile | None:
        try:
            ask = partial(self._obstore.head, self._store, self._key(path))
            return self._entry(self._call(path, "cannot be looked up", ask))
        except NoFilesError:
            return None

    def _list_between(self, folder: str, first: str, last: str) -> list[FoundFile] | None:
        """Return what a folder holds from one name to another; None if it may be read and not listed."""
        before = self._key(first)[:-1]  # `offset` itself is left out of the answer

        def list_pages() -> list[FoundFile]:
            entries: list[FoundFile] = []
            for page in self._obstore.list(self._store, self._key(folder) or None, offset=before, chunk_size=1000):
                entries.extend(map(self._entry, page))
                if entries[-1].path > last:
                    break
            return entries

        try:
            return self._call(folder, "cannot be listed", list_pages)
        except AccessDeniedError:
            return None

    def scan(self, folder: str) -> tuple[list[str], list[FoundFile]]:
        list_one = partial(self._obstore.list_with_delimiter, self._store, self._key(folder) or None)
        found: Any = self._call(folder, "cannot be listed", list_one)
        folders = [f"{self._root}/{prefix}" for prefix in found["common_prefixes"]]
        marks = {folder.rstrip("/"), *folders}
        entries = [self._entry(item) for item in found["objects"]]
        return folders, [entry for entry in entries if entry.size or entry.path not in marks]

    def walk(self, folder: str) -> Iterator[FoundFile]:
        prefix = self._key(folder) or None
        found = self._call(folder, "cannot be listed", lambda: self._obstore.list(self._store, prefix).collect())
        inside = f"{folder.rstrip('/')}/"
        for entry in drop_folder_marks(map(self._entry, found)):
            if entry.path.startswith(inside) and "/." not in entry.path[len(inside) :]:
                yield entry

    def fetch(self, file: FoundFile, start: int, stop: int) -> Any:
        what = f"bytes {start} to {stop} could not be read"
        try:
            return self._call(file.path, what, partial(self._get, file, start, stop))
        except _OtherContentError as error:
            raise FileChangedError(file.path, listed=file.size, offset=start) from error

    def _get(self, file: FoundFile, start: int, stop: int) -> Any:
        key = self._key(file.path)
        if not file.etag or file.etag.startswith(WEAK):
            return self._obstore.get_range(self._store, key, start=start, end=stop)
        # The same request with a condition: an object that was written anew is refused.
        options: Any = {"range": (start, stop), "if_match": f'"{file.etag}"'}
        return self._obstore.get(self._store, key, options=options).bytes()

    def open(self, file: FoundFile, start: int, stop: int) -> BinaryIO:
        return cast(BinaryIO, ReadAheadFile(partial(self.fetch, file), file.path, file.size, start, stop))

    def open_random(self, file: FoundFile) -> BinaryIO:
        return cast(BinaryIO, RandomAccessFile(partial(self.fetch, file), file.path, file.size))

    def _call(self, path: str, what: str, call: Callable[[], T]) -> T:
        """Call obstore, with its errors told as ours. `call` begins anew each time: it may be called again."""
        errors = self._obstore.exceptions
        began = time.monotonic()
        for attempt in range(1, TRIES + 1):
            try:
                return call()
            except FileNotFoundError as error:
                raise NoFilesError(path, "no such object") from error
            except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
                raise AccessDeniedError(path, f"{what}: {_first_line(error)}") from error
            except (errors.BaseError, OSError) as error:
                told = _first_line(error)
                status = _status(told)
                if "NoSuchBucket" in told:
                    raise NoFilesError(path, "no such bucket") from error
                last = attempt == TRIES or time.monotonic() - began > TRY_AGAIN_WITHIN_S
                if _ASKED_FOR_A_ROLE.search(told) and (last or 400 <= status < 500):
                    raise NoCredentialsError(path) from error
                if status in (401, 403):  # so listing says it
                    raise AccessDeniedError(path, f"{what}: {told}") from error
                if status in (412, 416) or isinstance(error, errors.PreconditionError):
                    raise _OtherContentError from error
                if 400 <= status < 500 and status not in (408, 429):  # those two mean: later
                    raise DataError(path, f"{what}: {told}") from error
                if last:
                    tries = f"{what} in {attempt} tries: {told}"
                    raise StorageUnavailableError(path, tries) from error
                time.sleep(0.1 * 2**attempt)
        raise AssertionError("the loop returns or raises")


def _first_line(error: BaseException) -> str:
    """Return what an error of obstore's says, without the dump of its Rust value that follows."""
    return str(error).partition("\n\nDebug source")[0].replace("\n", " ").strip()


def _status(told: str) -> int:
    """
    >>> _status("Server returned non-2xx status code: 404 Not Found: "), _status("HTTP error: error sending request")
    (404, 0)
    """
    found = re.search(r"status code: (\d{3})", told)
    return int(found[1]) if found else 0


class _Frozen:
    """Options as a cache key: they may hold dicts. Compared by what they say, never printed."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self._key = repr(sorted((key, repr(value)) for key, value in self.options.items()))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self._key == other._key


@cache
def _connect(bucket: str, frozen: _Frozen, environment: tuple[tuple[str, str], ...]) -> Any:
    """Return the one store of a bucket: it has the connections. `environment` is there to tell two apart."""
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    config, settings = s3_config(frozen.options, dict(environment))
    try:
        return S3Store(bucket, config=cast(Any, config), **settings)
    except (BaseError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"storage_options of s3://{bucket}: {_first_line(error)}") from error


def s3_config(options: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return obstore's configuration and its other settings, from names of s3fs, boto3 or obstore.

    >>> s3_config({"key": "k", "client_kwargs": {"endpoint_url": "http://localhost:9000"}}, {})[0]
    {'endpoint': 'http://localhost:9000', 'access_key_id': 'k'}
    """
    flat = {**options.get("config", {}), **options.get("client_kwargs", {}), **options}
    given = {"client_options": flat.get("client_options", {}), "retry_config": flat.get("retry_config", {})}
    outside = ("config", "client_kwargs", "client_options", "retry_config", "credential_provider", "use_ssl", "verify")
    config = {_CONFIG_NAMES.get(name, name): v for name, v in flat.items() if name not in outside and v is not None}

    settings: dict[str, Any] = {
        "client_options": {"timeout": REQUEST_TIMEOUT, "read_timeout": SILENCE_TIMEOUT},
        "retry_config": {"max_retries": RETRIES, "retry_timeout": RETRY_TIMEOUT},
    }
    if "credential_provider" in flat:
        settings["credential_provider"] = flat["credential_provider"]
    endpoint = config.get("endpoint") or next((environment[v] for v in _ENDPOINT_VARIABLES if environment.get(v)), "")
    if endpoint.startswith("http://") or flat.get("use_ssl") is False:
        settings["client_options"]["allow_http"] = True
    if flat.get("verify") is False:
        settings["client_options"]["allow_invalid_certificates"] = True
    for name, values in given.items():
        settings[name].update(values)
    return config, settings
