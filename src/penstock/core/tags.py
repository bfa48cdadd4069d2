"""Tags: what workers are said to have, and jobs to require."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.errors import InvalidArgumentError


def check_tags(argument: str, value: object, what: str) -> tuple[str, ...]:
    """Return the tags, or say what they must be; a `str` is one.

    >>> check_tags("tags", "gpu", "names"), check_tags("tags", ["gpu", "fast"], "names")
    (('gpu',), ('gpu', 'fast'))
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        tags: tuple[object, ...] = (value,)
    else:
        tags = tuple(value)
    names = tuple(tag for tag in tags if isinstance(tag, str) and tag.strip() and "," not in tag)
    if len(names) < len(tags):
        raise InvalidArgumentError(f"{argument}={value!r} must be {what}")
    return names
