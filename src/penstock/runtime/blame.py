"""A user function's failure keeps its type and traceback; it gains a note and loses our frames."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TypeVar

from penstock.runtime.contract import Origin

_RUNTIME = str(Path(__file__).resolve().parent)
NOTE_PREFIX = "penstock: in "
Raised = TypeVar("Raised", bound=BaseException)


def blame(error: Raised, operator: str, origin: Origin | None) -> Raised:
    """Return `error` with a note that names operator, split and element, and a traceback that begins in user code."""
    if not any(note.startswith(NOTE_PREFIX) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{NOTE_PREFIX}{operator}" + (f", {origin}" if origin else ""))
    return error.with_traceback(users_part(error.__traceback__))


def users_part(traceback: TracebackType | None) -> TracebackType | None:
    """Drop our frames from the front of a traceback."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_RUNTIME):
        traceback = traceback.tb_next
    return traceback
