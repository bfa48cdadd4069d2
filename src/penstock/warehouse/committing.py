"""Commits: how files come into a table, and how some take the place of others.

Rules, and docs/design/0019 has why:

- Rows that are new come by deltalake's transaction, which retries beside anybody else's commits.
- What replaces files (reorder, compaction, filling in, reaping) is committed here. Its read version is known; if a
  commit since then has removed one of the same files, it is refused, and made again from what is there now. Files that
  were only added meanwhile are none of its business, and stay.
- A commit is a file that must not exist yet, published by a hard link when it is whole and on disk: of two at once, one
  finds the number taken and looks again. A process that is killed leaves either the commit or none of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from penstock.core.errors import InvalidArgumentError, MissingExtraError, TableConflictError
from penstock.sources.delta_log import (
    LOG,
    PARTITION,
    LoggedFile,
    commit_path,
    newest_version,
    read_commit,
    read_snapshot,
)
from penstock.sources.storage import is_remote

APPEND_TRIES = 20


def deltalake() -> Any:
    """Return the package that appends and makes checkpoints."""
    try:
        import deltalake
        import deltalake.transaction
    except ImportError as error:
        raise MissingExtraError("deltalake", "warehouse") from error
    return deltalake


def local_folder(url: str) -> Path:
    """Return the folder of a table that is written to."""
    if is_remote(url):
        raise InvalidArgumentError(
            f"{url}: tables are written where a file system makes hard links; write to a folder, copy it to the store "
            "with its _delta_log, and read it from there"
        )
    return Path(url)


def commit_append(
    url: str, added: Sequence[tuple[LoggedFile, str]], *, progress: tuple[str, int] | None = None
) -> int | None:
    """Commit new files and return the version; None: `progress` (an application's name and number) was there before.

    One number of an application is committed once, whoever repeats it.
    """
    module = deltalake()
    actions = [
        module.transaction.AddAction(
            quote(file.path, safe="/="), file.size, {PARTITION: file.partition}, int(time.time() * 1e3), True, stats
        )
        for file, stats in added
    ]
    transactions = [module.transaction.Transaction(*progress)] if progress is not None else None
    properties = module.transaction.CommitProperties(app_transactions=transactions)
    for _ in range(APPEND_TRIES):
        if progress is not None and read_snapshot(url).progress.get(progress[0], -1) >= progress[1]:
            return None
        table = module.DeltaTable(url)
        try:
            table.create_write_transaction(actions, "append", table.schema(), [PARTITION], commit_properties=properties)
            return newest_version(url)
        except module.exceptions.CommitFailedError as error:
            failure = error  # somebody changed what the table is: append to what it is now
    raise TableConflictError(url, f"an append did not come through beside other commits: {failure}")


def commit_replacement(
    url: str,
    added: Sequence[tuple[LoggedFile, str]],
    removed: Iterable[LoggedFile],
    *,
    read_version: int,
    operation: str,
    changes_data: bool,
    progress: tuple[str, int] | None = None,
) -> int:
    """Commit that new files stand in the place of old ones, and return the version.

    `TableConflictError`: since `read_version` another commit has removed one of the old ones.
    """
    gone = list(removed)
    content = _lines(added, gone, operation, read_version, changes_data, progress)
    paths = {file.path for file in gone}
    seen = read_version
    while True:
        newest = newest_version(url)
        for version in range(seen + 1, newest + 1):
            _check(url, version, paths)
        seen = newest
        if publish_commit(url, newest + 1, content):
            return newest + 1


def _check(url: str, version: int, paths: set[str]) -> None:
    for action in read_commit(url, version):
        if action.remove is not None and action.remove.path in paths:
            raise TableConflictError(
                url, f"{action.remove.path} was replaced in version {version}, while it was being replaced here"
            )


def publish_commit(url: str, version: int, content: bytes) -> bool:
    """Make a commit the one of that number; False: the number is taken."""
    target = Path(commit_path(url, version))
    draft = target.parent.parent / "_penstock" / f"commit-{uuid4().hex}"
    draft.parent.mkdir(exist_ok=True)
    with open(draft, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, target)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    _sync_folder(target.parent)
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lines(
    added: Sequence[tuple[LoggedFile, str]],
    removed: Sequence[LoggedFile],
    operation: str,
    read_version: int,
    changes_data: bool,
    progress: tuple[str, int] | None,
) -> bytes:
    now = int(time.time() * 1e3)
    told = {"timestamp": now, "operation": operation, "readVersion": read_version, "operationParameters": {}}
    actions: list[Mapping[str, Any]] = [{"commitInfo": told}]
    if progress is not None:
        actions.append({"txn": {"appId": progress[0], "version": progress[1]}})
    actions.extend({"remove": _removal(file, now, changes_data)} for file in removed)
    actions.extend({"add": _addition(file, stats, now, changes_data)} for file, stats in added)
    return b"".join(json.dumps(action, separators=(",", ":")).encode() + b"\n" for action in actions)


def _removal(file: LoggedFile, now: int, changes_data: bool) -> Mapping[str, Any]:
    return {
        "path": quote(file.path, safe="/="),
        "deletionTimestamp": now,
        "dataChange": changes_data,
        "extendedFileMetadata": True,
        "partitionValues": {PARTITION: file.partition},
        "size": file.size,
    }


def _addition(file: LoggedFile, stats: str, now: int, changes_data: bool) -> Mapping[str, Any]:
    return {
        "path": quote(file.path, safe="/="),
        "partitionValues": {PARTITION: file.partition},
        "size": file.size,
        "modificationTime": now,
        "dataChange": changes_data,
        "stats": stats,
    }


def log_exists(url: str) -> bool:
    """Return whether there is a table."""
    return (local_folder(url) / LOG).is_dir()
