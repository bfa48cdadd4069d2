"""A user function's exception, from a worker to the trainer: as plain text and values, never pickled.

It is rebuilt as its own class where that class is known here already: a builtin, or one of a module that has been
imported. Nothing is imported for it. What comes out must print the same as what went in; else it is a `RemoteError`.
Its cause and the exceptions of a group come with it. `SystemExit` and its like arrive as what they are, as in process.
"""

from __future__ import annotations

import builtins
import os
import sys
import traceback
from typing import Any

from penstock.core.errors import RemoteError
from penstock.wire.frames import RemoteFailure

_MAX_TEXT = 100_000
_DEEPEST = 8  # causes of causes, and groups in groups
_MOST_PARTS = 100
_OUR_FRAMES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INT64 = range(-(1 << 63), 1 << 64)


def describe_failure(error: BaseException) -> RemoteFailure:
    return _described(error, _traceback(error), _DEEPEST)


def _described(error: BaseException, story: str, deeper: int) -> RemoteFailure:
    """`story` is told of the first alone: it has those of its cause and of its group in it."""
    cause = error.__cause__ if deeper else None
    parts = error.exceptions[:_MOST_PARTS] if isinstance(error, BaseExceptionGroup) and deeper else ()
    return RemoteFailure(
        module=type(error).__module__,
        qualname=type(error).__qualname__,
        args=_plain_arguments(error),
        message=_short(_text(error)),
        traceback=_short(story),
        notes=tuple(_short(str(note)) for note in getattr(error, "__notes__", ())),
        cause=None if cause is None else _described(cause, "", deeper - 1),
        exceptions=tuple(_described(part, "", deeper - 1) for part in parts),
    )


def rebuild_failure(failure: RemoteFailure) -> BaseException:
    """Return the exception, with its notes, and the worker's traceback as one more."""
    error = _rebuilt(failure) or RemoteError(_name(failure), failure.message)
    if failure.cause is not None:
        error.__cause__ = rebuild_failure(failure.cause)
    for note in failure.notes:
        error.add_note(note)
    if failure.traceback:
        error.add_note("In the worker:\n" + failure.traceback.rstrip())
    return error


def _rebuilt(failure: RemoteFailure) -> BaseException | None:
    kind = _known_class(failure.module, failure.qualname)
    if kind is None:
        return None
    said = _Said(failure.message)
    attempts: list[tuple[Any, ...]] = [failure.args, tuple(map(_as_tuples, failure.args)), (said,)]
    if failure.exceptions:
        attempts = [(*failure.args, [rebuild_failure(part) for part in failure.exceptions])]
    for arguments in attempts:
        try:
            error = kind(*arguments)
            if type(error) is kind and _text(error) == failure.message:
                return error
        except Exception:
            continue  # it wants other arguments than it keeps
    try:
        # Its type is what an `except` looks for; only the fields its constructor would have set are missing.
        bare = kind.__new__(kind)
        bare.args = (said,)
        return bare if type(bare) is kind and _text(bare) == failure.message else None
    except Exception:
        return None


class _Said(str):
    """A message that prints as it is also where an exception prints the `repr` of its argument, as KeyError does."""

    __repr__ = str.__str__


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _known_class(module: str, qualname: str) -> type[BaseException] | None:
    found: Any = builtins if module == "builtins" else sys.modules.get(module)
    for part in qualname.split("."):
        # Through `__dict__`: a module's `__getattr__` may import what it is asked for.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _name(failure: RemoteFailure) -> str:
    return failure.qualname if failure.module in ("builtins", "__main__") else f"{failure.module}.{failure.qualname}"


def _plain_arguments(error: BaseException) -> tuple[Any, ...]:
    arguments = error.args
    if isinstance(error, OSError) and error.filename is not None:
        arguments = (error.errno, error.strerror, error.filename)
    if isinstance(error, BaseExceptionGroup):
        arguments = (error.message,)  # its exceptions travel by themselves
    return tuple(arguments) if all(_is_plain(value, 4) for value in arguments) else ()


def _is_plain(value: Any, depth: int) -> bool:
    if value is None or type(value) in (bool, float):
        return True
    if type(value) is int:
        return value in _INT64
    if type(value) is str:
        return len(value) <= _MAX_TEXT and _encodes(value)
    if type(value) is bytes:
        return len(value) <= _MAX_TEXT
    if type(value) in (list, tuple):
        return depth > 0 and len(value) <= 1000 and all(_is_plain(part, depth - 1) for part in value)
    return False


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:
        return f"<its message cannot be printed: {type(other).__name__}>"


def _traceback(error: BaseException) -> str:
    try:
        story = traceback.TracebackException.from_exception(error)
        _hide_our_frames(story, set())
        story.__notes__ = None  # they travel by themselves
        return "".join(story.format())
    except Exception:  # a source file that cannot be read, a `__str__` that raises
        return f"{type(error).__qualname__} (its traceback cannot be printed)"


def _hide_our_frames(story: traceback.TracebackException, seen: set[int]) -> None:
    if id(story) in seen:
        return
    seen.add(id(story))
    theirs = [frame for frame in story.stack if not frame.filename.startswith(_OUR_FRAMES)]
    if theirs:
        story.stack = traceback.StackSummary.from_list(theirs)
    for linked in (story.__cause__, story.__context__, *(story.exceptions or ())):
        if linked is not None:
            _hide_our_frames(linked, seen)


def _short(text: str) -> str:
    cleaned = text.encode("utf-8", "backslashreplace").decode()
    return cleaned if len(cleaned) <= _MAX_TEXT else cleaned[:_MAX_TEXT] + f"... ({len(cleaned):,} characters)"
