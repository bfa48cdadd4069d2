"""Records that users make, and what a call with an argument that there is none of is answered with.

msgspec says "Unexpected keyword argument" and names neither the record nor what was meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

R = TypeVar("R")

ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "address": ("to",),
    "num_workers": ("to", "workers"),
    "rank": ("ranks",),
    "service": ("to",),
    "size": ("count",),
    "workers": ("to", "max_workers"),
    "world_size": ("ranks", "count"),
}
"""What other libraries, or other records here, call what is meant."""


def unknown_argument(called: str, name: str, known: Sequence[str]) -> TypeError:
    """Return the error of an argument that there is none of, with the one that was meant.

    >>> print(unknown_argument("Limits", "timeout", ("timeout_s", "memory_bytes")))
    Limits() has no argument 'timeout'; did you mean timeout_s=? It takes timeout_s, memory_bytes
    """
    near = [other for other in known if other in ELSEWHERE.get(name, ())] or get_close_matches(name, known, 1, 0.5)
    near = near or [other for other in known if other in name or name in other]
    meant = f"; did you mean {near[0]}=?" if near else "."
    return TypeError(f"{called}() has no argument {name!r}{meant} It takes {', '.join(known)}")


class _Answering(msgspec.StructMeta):
    def __call__(cls: type[R], *args: Any, **kwargs: Any) -> R:
        # Looked at after it was refused: records are also made where it counts.
        try:
            made: R = super().__call__(*args, **kwargs)  # type: ignore[misc]
        except TypeError as error:
            wrong = _wrong_call(cls, args, kwargs)
            if wrong is None:
                raise
            raise wrong from error.__cause__
        return made


class UserRecord(msgspec.Struct, frozen=True, metaclass=_Answering):
    """Base of records whose arguments users write: a wrong name is answered with the right one."""


def _wrong_call(kind: type[Any], args: Sequence[object], kwargs: Mapping[str, object]) -> TypeError | None:
    """Return what is wrong with a call, if its arguments are; None: something else went wrong."""
    known = kind.__struct_fields__
    for name in kwargs:
        if name not in known:
            return unknown_argument(kind.__name__, name, known)
    positional: tuple[str, ...] = kind.__match_args__
    if len(args) > len(positional):
        example = f", such as {known[0]}=..." if known else ""
        return TypeError(
            f"{kind.__name__}() was given {len(args)} arguments without a name, and takes {len(positional)} so; give "
            f"them by name{example}. It takes {', '.join(known)}"
        )
    twice = [name for name in positional[: len(args)] if name in kwargs]
    if twice:
        return TypeError(
            f"{kind.__name__}() was given {twice[0]} twice: by its place, and as {twice[0]}=; leave one out"
        )
    given = {*positional[: len(args)], *kwargs}
    missing = [field.name for field in msgspec.structs.fields(kind) if field.required and field.name not in given]
    if missing:
        return TypeError(f"{kind.__name__}() needs {missing[0]}=. It takes {', '.join(known)}")
    return None
