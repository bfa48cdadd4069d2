"""The folder of a service on this host: its Unix sockets, its service file, and a journal of the moment.

Only its user can enter it (mode 0700), which is what makes a socket there the service's own. It lies with those of the
user's other services, `penstock-UID` in the folder for temporary files. Each is locked by who made it for as long as
that process lives; what a killed one has left is swept when the next is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from penstock.core.errors import CannotListenError
from penstock.wire.addresses import Listening

LONGEST_PARENT = 48  # of the 107 characters that a Unix socket's path may have
LOCK = "lock"


class ServiceFolder:
    """See the module. `close` removes it, with all that is there."""

    def __init__(self, named_after: str | os.PathLike[str] | None = None) -> None:
        """`named_after`: a path that only one service uses, so that another start of it is found at the same place."""
        name = secrets.token_hex(4)
        if named_after is not None:
            name = hashlib.sha256(os.fsencode(os.path.abspath(named_after))).hexdigest()[:12]
        parent = _parent()
        self.holds_sockets = parent is not None
        """False: there is no place for sockets on this host, and TCP is what is left."""
        self._lock = -1
        if parent is None:
            self.path = Path(tempfile.mkdtemp(prefix="penstock-"))
            return
        self.path = Path(parent, name)
        with _locked(parent):
            _sweep(parent)
            if self.path.exists():
                raise CannotListenError(f"ipc://{self.path}", f"a service with {str(named_after)!r} runs already")
            self.path.mkdir(0o700)
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def listening(self) -> Listening:
        """Return where processes of this service listen."""
        return Listening(folder=str(self.path)) if self.holds_sockets else Listening()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Let go of it; in a fork of who made it nothing else happens."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _parent() -> str | None:
    """Return the folder of all services of this user, if there is one that no other user can enter."""
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        parent = os.path.join(base, f"penstock-{os.geteuid()}")
        if len(parent) > LONGEST_PARENT or " " in parent:
            continue
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, 0o700)
            found = os.lstat(parent)
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return parent
    return None


@contextlib.contextmanager
def _locked(parent: str) -> Iterator[None]:
    """Keep others from making or sweeping folders meanwhile."""
    lock = os.open(os.path.join(parent, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _sweep(parent: str) -> None:
    """Remove the folders whose services have ended without doing so."""
    for entry in os.scandir(parent):
        if entry.is_dir(follow_symlinks=False) and not _is_held(os.path.join(entry.path, LOCK)):
            shutil.rmtree(entry.path, ignore_errors=True)


def _is_held(lock: str) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
