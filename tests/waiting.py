"""Waiting for what a test cannot know the time of: for a condition with a deadline, never for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

DEADLINE_S = 45.0
LOOK_S = 0.005

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return what `condition` returns once it is true."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(LOOK_S)
    return value


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(*pids: int) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), f"the end of {', '.join(map(str, pids))}")
