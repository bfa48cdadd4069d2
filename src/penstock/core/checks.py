"""Checks of one argument: each passes, or raises `InvalidArgumentError` with its name and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from penstock.core.errors import InvalidArgumentError, choice


def check_choice(argument: str, value: object, allowed: Sequence[object]) -> None:
    """Refuse what is not one of `allowed`."""
    if value not in allowed:
        raise choice(argument, value, allowed)


MOST_COUNTED = 65_536
"""Of what a service makes a record each: ranks, streams, trainers, workers."""


def check_count(argument: str, value: object) -> None:
    """Refuse what is no number of things of which each costs something.

    >>> check_count("streams", 1 << 40)
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: streams=1099511627776 must be at most 65536
    """
    check_whole(argument, value, 1)
    if isinstance(value, int) and value > MOST_COUNTED:
        raise InvalidArgumentError(f"{argument}={value} must be at most {MOST_COUNTED}")


def check_whole(argument: str, value: object, least: int) -> None:
    """Refuse what is not a whole number of at least `least`.

    >>> check_whole("streams", 0, 1)
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: streams=0 must be a whole number of at least 1
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgumentError(f"{argument}={value!r} must be a whole number of at least {least}")


MOST_PROCESSES = 1024
"""Of one host, as its workers: a number that is meant as one of them, and not a mistake that takes all its memory."""


def check_processes(argument: str, value: object, least: int) -> None:
    """Refuse what is no number of worker processes of one host.

    >>> check_processes("workers", 10**9, 0)
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: workers=1000000000 must be at most 1024: each is a process of this host
    """
    check_whole(argument, value, least)
    if isinstance(value, int) and value > MOST_PROCESSES:
        raise InvalidArgumentError(
            f"{argument}={value} must be at most {MOST_PROCESSES}: each is a process of this host"
        )


def check_positive(argument: str, value: object) -> None:
    """Refuse what is not a number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0 or math.isnan(value):
        raise InvalidArgumentError(f"{argument}={value!r} must be a number above 0")


def check_flag(argument: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{argument}={value!r} must be True or False")


def check_names(argument: str, value: object, meant: str) -> tuple[str, ...]:
    """Return the names that were given, one or several; refuse what is none.

    >>> check_names("requires", "gpu", "tags"), check_names("requires", ["gpu", "ssd"], "tags")
    (('gpu',), ('gpu', 'ssd'))
    """
    given = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    names = tuple(name for name in given if isinstance(name, str) and name.strip())
    if len(names) < len(given):
        raise InvalidArgumentError(f"{argument}={value!r} must be {meant}")
    return names
