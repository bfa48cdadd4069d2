"""The language of path patterns: braces and globs, as a shell reads them. Pure text, no storage."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import cache

_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([a-zA-Z])\.\.([a-zA-Z])")
_GLOB_MARKS = ("*", "?", "[")


def expand_braces(pattern: str) -> list[str]:
    """Expand `{a,b}`, `{1..9}`, `{001..100}`, `{0..10..5}` and `{a..e}` as a shell does, inner ones too.

    >>> expand_braces("x-{08..10}.tar")
    ['x-08.tar', 'x-09.tar', 'x-10.tar']
    >>> expand_braces("{a,b{1,2}}/{single}")
    ['a/{single}', 'b1/{single}', 'b2/{single}']
    """
    span = _first_braces(pattern)
    if span is None:
        return [pattern]
    start, stop = span
    choices = _choices(pattern[start + 1 : stop])
    tails = expand_braces(pattern[stop + 1 :])
    if choices is None:  # not a list and not a range: these two braces are meant as they stand
        inner = expand_braces(pattern[start + 1 : stop])
        return [f"{pattern[:start]}{{{middle}}}{tail}" for middle in inner for tail in tails]
    return [f"{pattern[:start]}{middle}{tail}" for middle in choices for tail in tails]


def _first_braces(pattern: str) -> tuple[int, int] | None:
    """Return where the first matched pair of braces begins and ends."""
    for start in (i for i, letter in enumerate(pattern) if letter == "{"):
        depth = 0
        for stop in range(start, len(pattern)):
            depth += (pattern[stop] == "{") - (pattern[stop] == "}")
            if depth == 0:
                return start, stop
    return None


def _choices(inside: str) -> list[str] | None:
    if numbers := _NUMBERS.fullmatch(inside):
        return _numbers(*numbers.groups())
    if letters := _LETTERS.fullmatch(inside):
        first, last = map(ord, letters.groups())
        return [chr(code) for code in range(first, last + 1)] or [chr(code) for code in range(first, last - 1, -1)]
    parts, depth, begin = [], 0, 0
    for i, letter in enumerate(inside):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append(inside[begin:i])
            begin = i + 1
    if not parts:
        return None
    return [choice for part in (*parts, inside[begin:]) for choice in expand_braces(part)]


def _numbers(first: str, last: str, step: str | None) -> list[str]:
    padded = any(re.match(r"-?0\d", text) for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    low, high = int(first), int(last)
    stride = abs(int(step or 1)) or 1
    numbers = range(low, high + 1, stride) if low <= high else range(low, high - 1, -stride)
    return [f"{number:0{width}d}" for number in numbers]


def has_magic(path: str) -> bool:
    """Say whether a path is a glob. In `http` URLs only `*` is, and only before the query.

    >>> has_magic("http://host/x?page=1"), has_magic("s3://bucket/x?.tar")
    (False, True)
    """
    if path.startswith(("http://", "https://")):
        return "*" in path.partition("?")[0]
    return has_magic_name(path)


def fixed_part(pattern: str) -> str:
    """Return the folder a glob starts from.

    >>> fixed_part("/data/train/*/x-?.tar"), fixed_part("memory://*.txt")
    ('/data/train', 'memory://')
    """
    scheme, mark, rest = pattern.rpartition("://")
    parts = rest.split("/")
    first = next(i for i, part in enumerate(parts) if has_magic_name(part))
    return scheme + mark + "/".join(parts[:first])


def has_magic_name(part: str) -> bool:
    return any(mark in part for mark in _GLOB_MARKS)


@cache
def name_matcher(part: str) -> Callable[[str], bool]:
    """Return the test for one name of a path. A name that begins with a dot has to be written with its dot."""
    match = re.compile(translate(part)).match
    if part.startswith("."):
        return lambda name: match(name) is not None
    return lambda name: not name.startswith(".") and match(name) is not None


def matches_parts(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Say whether the names of a path match the parts of a glob; `**` stands for any number of folders.

    >>> matches_parts(["a", "b", "x.tar"], ["**", "*.tar"]), matches_parts(["a", "x.tar"], ["*.tar"])
    (True, False)
    """
    if not parts or not names:
        return not parts and not names
    if parts[0] == "**":
        return len(parts) == 1 or any(matches_parts(names[i:], parts[1:]) for i in range(len(names)))
    return name_matcher(parts[0])(names[0]) and matches_parts(names[1:], parts[1:])
