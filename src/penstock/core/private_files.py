"""Files that only their owner reads, whatever the directory's mode and the process's umask are.

A directory that was made by somebody else, or a umask of 0, would otherwise show what a service keeps: pipelines with
what their functions hold, elements of data, positions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

PRIVATE = 0o600


def open_private(path: str | os.PathLike[str], mode: str) -> IO[Any]:
    """Open a file to write; made or found, it is its owner's alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, open_private(folder + "/file", "wb") as file:
    ...     oct(os.fstat(file.fileno()).st_mode & 0o777)
    '0o600'
    """
    file = open(path, mode, opener=lambda name, flags: os.open(name, flags, PRIVATE))  # noqa: SIM115 (the caller's)
    try:
        _tighten(file.fileno())
    except BaseException:
        file.close()
        raise
    return file


def make_private(path: str | os.PathLike[str]) -> None:
    """Take away what others may do with a file that is there; a file of another user stays as its owner wants it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # it is not there, is a link, or is not ours to read: whoever opens it next says so
    try:
        _tighten(descriptor)
    except OSError:
        pass  # mounted read-only, as secrets are on clusters
    finally:
        os.close(descriptor)


def create_private(path: Path) -> None:
    """Make an empty file that must not be there yet."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
    make_private(path)


def _tighten(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if found.st_mode & 0o777 != PRIVATE and found.st_uid == os.geteuid():
        os.fchmod(descriptor, PRIVATE)
