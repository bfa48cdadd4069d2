"""Who makes what now: of several that need an entry, one does, and the others wait for what it makes.

A claim is a file with a lock, which ends with its process. Its modification time says until when its holder will have
made some more of the entry, by how long elements take him: one whose trainer lets him wait, or whose storage hangs, is
waited for no longer than that. So a wait is worth its while or ends, and two do not wait for each other. Nobody waits
for his own process: a loop inside a loop over the same data would wait for itself.

Single elements are not claimed: under a permutation two jobs seldom need the same one at once. But jobs that use the
same prefix at the same time know of each other (`PrefixUse`), and publish what they make sooner.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from time import time

from penstock.caching.files import HOST

FIRST_S = 10.0  # in which a holder has made something: functions are imported, files opened
OVERDUE = 3.0  # so many times what a part takes
SPARE_S = 5.0  # others use the machine, too
TELL_EVERY_S = 0.5  # that a holder gets on
VAIN_SHARE, VAIN_S = 0.1, 20.0  # of the time, and at first: what may be lost by waiting for what does not come


class Claim:
    """Of one entry, until it is released or its process ends. Any thread may use it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._file = os.fdopen(descriptor, "rb")  # closed, and so unlocked, when nobody has it any more
        self._promise(FIRST_S)

    @property
    def is_due(self) -> bool:
        """Whether it is time to tell that some more was made."""
        return time() >= self._due_s

    def made_some(self, next_s: float) -> None:
        """A part of the entry is made; making another takes so long."""
        self._promise(SPARE_S + OVERDUE * next_s)

    def _promise(self, within_s: float) -> None:
        now = time()
        until, self._due_s = now + within_s, now + TELL_EVERY_S
        with suppress(OSError, ValueError):  # ValueError: it was released meanwhile
            os.utime(self._file.fileno(), (until, until))

    def release(self) -> None:
        if not self._file.closed:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._file.close()


class Claims:
    """Of one scope at one location."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._since_s = time()
        self._vain_s = 0.0

    def take(self, name: str) -> Claim | None:
        """Claim an entry; None: another has it."""
        path = self._path(name)
        while True:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file(path, descriptor):
                    os.pwrite(descriptor, _this_process(), 0)
                    return Claim(path, descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the last holder has just removed it: the lock is on nothing

    def use(self, prefix: str, job: str) -> PrefixUse:
        """Let other jobs know that this one uses a prefix."""
        return PrefixUse(self._folder / prefix / "users", job)

    def is_being_made(self, name: str, *, also_here: bool = False) -> bool:
        """Say whether an entry is worth waiting for: another process, or this one too, makes it and gets on with it."""
        try:
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if os.fstat(descriptor).st_mtime < time():
                return False
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return also_here or os.pread(descriptor, 200, 0) != _this_process()
        except OSError:  # a file system without locks
            return False
        finally:
            os.close(descriptor)
        return False

    @property
    def may_wait(self) -> bool:
        """Whether waiting for others has been worth while so far."""
        return self._vain_s <= VAIN_S + VAIN_SHARE * (time() - self._since_s)

    def waited_in_vain(self, seconds: float) -> None:
        """Who made an entry was held up, by a trainer or by storage."""
        self._vain_s += seconds

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.claim"


class PrefixUse:
    """That a job uses a prefix, as long as this is open. Another job's use is another file, locked as well."""

    def __init__(self, folder: Path, job: str) -> None:
        self._own = folder / blake2b(job.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            descriptor = os.open(self._own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "rb")  # closed, and so unlocked, when nobody has it any more
            with suppress(OSError):  # a file system without locks, or another that looks just now
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_file(self._own, descriptor):
                break

    def has_others(self) -> bool:
        """Say whether another job uses it now; what one has left behind is removed."""
        for path in self._own.parent.iterdir():
            if path == self._own:
                continue
            with suppress(OSError), open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
                path.unlink(missing_ok=True)
        return False

    def close(self) -> None:
        self._file.close()


def _this_process() -> bytes:
    return f"{HOST} {os.getpid()}".encode()


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
