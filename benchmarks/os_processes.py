"""Processes of a benchmark: whose they are, what they hold, and how they are ended.

Everything a benchmark starts inherits a mark in its environment; so what is left of it can be found wherever it went.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from harness import BenchError

MARK = "PENSTOCK_BENCH_MARK"


def new_mark() -> str:
    """Mark this process and all that it will start; return the mark."""
    os.environ[MARK] = secrets.token_hex(8)
    return os.environ[MARK]


def marked(mark: str) -> dict[int, str]:
    """Return the command lines of the living processes with a mark, by pid; without this one."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0") and not is_dead(int(entry.name)):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is somebody else's
    return found


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill(pid: int) -> bool:
    """SIGKILL; return whether there was somebody to receive it."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = 30.0, pause_s: float = 0.02) -> float:
    """Wait for a condition and return how long it took."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > patience_s:
            raise BenchError(f"waited {patience_s:g} s for {what}")
        time.sleep(pause_s)
    return time.monotonic() - begin


def resident_bytes(pid: int) -> dict[str, int]:
    """Return what a process holds.

    `anon` by itself, `shared` as far as touched, `pss` with shared pages divided, `rss` with all of them.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()

    def kb(name: str, text: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0

    return {
        "anon": kb("RssAnon", status),
        "shared": kb("RssShmem", status),
        "pss": kb("Pss", rollup),
        "rss": kb("Rss", rollup),
    }


def slab_bytes(pid: int) -> int:
    """Return how much memory the slabs of a worker take."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:penstock" in os.readlink(entry):
                return os.stat(entry).st_blocks * 512
        except FileNotFoundError:
            continue  # closed meanwhile
    return 0
