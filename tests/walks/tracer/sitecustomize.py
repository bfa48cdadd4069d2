"""Writes down which functions of Penstock are entered, in every process and thread, if $WALK_FOLDER names a folder.

Python imports this by itself at its start, so that Penstock needs no hook for it; a fork inherits it. Each process has
a file, named by its number, of lines `nanoseconds module function`; the clock is that of all processes. A line is
written by opening the file anew: a process may close descriptors that it does not know, and be killed at any time.
"""

from __future__ import annotations

import os
import sys
import threading
from time import monotonic_ns
from types import CodeType, FrameType

FOLDER = os.environ.get("WALK_FOLDER", "")
EVERY_NS = 1_000_000
"""The engine enters functions for every element: it is seen this often."""
ENGINE = tuple(f"penstock.{name}." for name in ("runtime", "sources", "graph", "passes", "policies"))

_names: dict[CodeType, str] = {}
"""What is written for a function; nothing for those that are not Penstock's."""
_engine_seen: dict[int, int] = {}
"""When the engine was last written down, by thread."""


def _name(frame: FrameType) -> str:
    module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_qualname
    # A module is entered when a function of it is called, not when it is imported.
    counts = module.startswith("penstock.") and function != "<module>" and not _is_body(frame.f_code)
    return f"{module} {function.replace(' ', '')}" if counts else ""


def _is_body(code: CodeType) -> bool:
    """Say whether it is a class's body: its first instructions name the module it is in."""
    return "__module__" in code.co_names and "__qualname__" in code.co_names


def _entered(frame: FrameType, event: str, _: object) -> None:
    if event != "call":
        return
    code = frame.f_code
    name = _names.get(code)
    if name is None:
        name = _names[code] = _name(frame)
    if not name:
        return
    now = monotonic_ns()
    if name.startswith(ENGINE):
        thread = threading.get_ident()
        if now - _engine_seen.get(thread, 0) < EVERY_NS:
            return
        _engine_seen[thread] = now
    try:
        file = os.open(os.path.join(FOLDER, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, f"{now} {name}\n".encode())
        os.close(file)
    except OSError:
        pass  # the walk is over, and its folder gone


if FOLDER:
    threading.setprofile(_entered)
    sys.setprofile(_entered)
