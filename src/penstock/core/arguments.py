"""Checks of arguments that several packages take."""

from __future__ import annotations

from penstock.core.errors import InvalidArgumentError


def check_whole(argument: str, value: object, least: int) -> None:
    """Raise unless it is a whole number of at least so much.

    >>> check_whole("workers", "x", 0)
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: workers='x' must be a whole number of at least 0
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgumentError(f"{argument}={value!r} must be a whole number of at least {least}")
