"""A user function's failure keeps its type and traceback; it gains a note and loses our frames.

`StopIteration` alone changes its type: see `never_the_end`. What no operator blames passes `Stage.pull`, which does the
same.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import NoReturn

from penstock.core.errors import BatchShapeError, never_the_end
from penstock.runtime.contract import Marks, Origin

_RUNTIME = str(Path(__file__).resolve().parent)
NOTE_PREFIX = "penstock: in "


def blame(error: Exception, operator: str, origin: Origin | None) -> Exception:
    """Return `error` with a note that names operator, split and element, and a traceback that begins in user code."""
    traceback = error.__traceback__
    error = never_the_end(error, operator)
    if not any(note.startswith(NOTE_PREFIX) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{NOTE_PREFIX}{operator}" + (f", {origin}" if origin else ""))
    return error.with_traceback(users_part(traceback))


def raise_blamed(error: Exception, operator: str, origin: Origin | None) -> NoReturn:
    """Raise what `blame` returns; whatever caused it stays its cause."""
    raise blame(error, operator, origin)


class RowOrigins:
    """Where the rows of a batch came from, so that an error about one of them names it."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Marks, int]] = []

    def add(self, first: int, marks: Marks, at: int) -> None:
        """Note that the rows from `first` on are the elements of a chunk from `at` on."""
        self._parts.append((first, marks, at))

    def clear(self) -> None:
        self._parts.clear()

    def blame(self, error: Exception, operator: str) -> Exception:
        """Return the error with a note about the row it names; about the first, if it names none."""
        row = wrong_row(error)
        first, marks, at = next(part for part in reversed(self._parts) if part[0] <= row)
        return blame(error, operator, marks.origin(at + row - first))


def wrong_row(error: Exception) -> int:
    """Return which row of a batch an error is about."""
    return error.row or 0 if isinstance(error, BatchShapeError) else 0


def users_part(traceback: TracebackType | None) -> TracebackType | None:
    """Drop our frames from the front of a traceback."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_RUNTIME):
        traceback = traceback.tb_next
    return traceback
