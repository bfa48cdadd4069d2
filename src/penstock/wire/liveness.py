"""Names of processes that can be asked for later: is the one that had this name still there?

A lease of shared memory may be taken back only from a process that is known to be gone. A lost connection does not
prove that: the process may just have made another. Its end does.
"""

from __future__ import annotations

import functools
import os


def process_name() -> str:
    """Return a name of this process which no other has: where its number counts, the number, and when it started.

    >>> is_gone(process_name())
    False
    """
    return _named(os.getpid())


def is_gone(name: str) -> bool:
    """Say whether the process of that name is known to have ended. One of another container is never known to.

    >>> is_gone(""), is_gone("elsewhere:1:1")
    (False, False)
    """
    space, _, rest = name.partition(":")
    number, _, started = rest.partition(":")
    if not started or space != _number_space():
        return False
    found = _started(int(number)) if number.isdigit() else None
    return found != started


@functools.lru_cache(maxsize=2)
def _named(pid: int) -> str:
    return f"{_number_space()}:{pid}:{_started(pid) or ''}"


@functools.cache
def _number_space() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot[:8]}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return when a process started, in ticks since boot; None if it is gone (a zombie is: its memory is)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]
