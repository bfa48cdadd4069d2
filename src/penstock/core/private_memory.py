"""Whether other processes of the same user may look into this one's memory, and whether it leaves a core dump."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4


def keep_memory_private() -> None:
    """Nobody but root attaches to this process, or reads its memory. It is inherited by what is forked."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def let_memory_be_read() -> None:
    """As for any process: its user may debug and profile it."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
