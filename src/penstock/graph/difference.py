"""What differs between two pipelines, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from typing import Any

from penstock.graph.fingerprint import OperatorSummary, ParameterSummary, summary
from penstock.graph.function_parts import ARROW
from penstock.graph.node import Node
from penstock.graph.parameters import INTERNAL

_KEYS: tuple[Callable[[OperatorSummary], Any], ...] = (
    lambda operator: operator.digest,
    lambda operator: operator.label,
    lambda operator: operator.kind,
)


def difference(before: Node | list[OperatorSummary], after: Node | list[OperatorSummary]) -> list[str]:
    """Return one sentence for each difference, from the sources up; nothing if both describe the same.

    Either side may be a summary kept from earlier (`fingerprint.summary`), which also tells changed files apart.
    """
    old = summary(before) if isinstance(before, Node) else before
    new = summary(after) if isinstance(after, Node) else after
    pairs = list(_align(old, new, _KEYS))
    found: list[str] = []
    for one, other in pairs:
        if one is None and other is not None:
            found.append(f"{other.label} was added [operator {other.number}]")
        elif other is None and one is not None:
            found.append(f"{one.label} was removed")
        elif one is not None and other is not None and one.digest != other.digest:
            found.extend(f"{_where(other)}: {words}" for words in _changes(one, other))
    return found or list(_position_changes(pairs))


def _align(
    old: list[OperatorSummary],
    new: list[OperatorSummary],
    keys: tuple[Callable[[OperatorSummary], Any], ...],
) -> Iterator[tuple[OperatorSummary | None, OperatorSummary | None]]:
    """Pair operators that are the same; between those, by name and function; between those, by name."""
    if not keys or not old or not new:
        yield from ((one, None) for one in old)
        yield from ((None, other) for other in new)
        return
    ours, theirs = [keys[0](one) for one in old], [keys[0](other) for other in new]
    # The ends first: among equal neighbours the longest run is found anywhere, and an edit looks like two.
    head = _common(ours, theirs)
    tail = _common(ours[head:][::-1], theirs[head:][::-1])
    yield from zip(old[:head], new[:head])
    matcher = SequenceMatcher(None, ours[head : len(ours) - tail], theirs[head : len(theirs) - tail], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        one, other = old[head + i : head + i_end], new[head + j : head + j_end]
        yield from zip(one, other) if tag == "equal" else _align(one, other, keys[1:])
    yield from zip(old[len(old) - tail :], new[len(new) - tail :])


def _common(ours: list[Any], theirs: list[Any]) -> int:
    """Return how many entries both begin with."""
    return next((i for i, (one, other) in enumerate(zip(ours, theirs)) if one != other), min(len(ours), len(theirs)))


def _where(operator: OperatorSummary) -> str:
    return f"{'' if operator.inputs else 'source '}{operator.label} [operator {operator.number}]"


def _changes(one: OperatorSummary, other: OperatorSummary) -> Iterator[str]:
    for name in dict.fromkeys((*one.parameters, *other.parameters)):
        old, new = one.parameters.get(name), other.parameters.get(name)
        if name in INTERNAL or (old is not None and new is not None and old.digest == new.digest):
            continue
        if old is not None and new is not None and old.parts and new.parts:
            yield from _part_changes(name, old, new)
        elif name in ("files", "content"):
            yield f"{name} changed"
        else:
            was, is_now = old.text if old is not None else "default", new.text if new is not None else "default"
            yield f"{name} {was} → {is_now}" if was != is_now else f"{name} changed"


def _part_changes(parameter: str, old: ParameterSummary, new: ParameterSummary) -> Iterator[str]:
    renamed = old.text != new.text
    if renamed:
        yield f"{parameter} {old.text} → {new.text}"
    for name in dict.fromkeys((*old.parts, *new.parts)):
        if old.parts.get(name) == new.parts.get(name):
            continue
        if name.startswith("package ") and name in old.parts and name in new.parts:
            yield f"{name} {old.parts[name]} → {new.parts[name]}"
        elif not renamed or name == "code":
            verb = (
                "changed" if name in old.parts and name in new.parts else "is new" if name in new.parts else "is gone"
            )
            yield f"{part_words(name)} {verb}"


def part_words(name: str) -> str:
    """Return the name of a part as a message gives it.

    >>> part_words("closure scale"), part_words("global helper → global TABLE")
    ("captured variable 'scale'", "global 'TABLE' in helper")
    """
    *way, last = name.split(ARROW)
    kind, _, rest = last.partition(" ")
    words = {
        "closure": f"captured variable {rest!r}",
        "default": f"default of {rest!r}",
        "global": f"global {rest!r}",
        "import": f"imported module {rest!r}",
        "attribute": f"attribute {rest!r}",
        "argument": f"argument {rest}",
    }.get(kind, last)
    return f"{words} in {'.'.join(step.rpartition(' ')[2] for step in way)}" if way else words


def _position_changes(pairs: list[tuple[OperatorSummary | None, OperatorSummary | None]]) -> Iterator[str]:
    """Name what is left when no operator differs by itself."""
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    if any(one.digest != other.digest for one, other in both):
        yield "operators draw other random numbers: their positions in the pipeline changed"
    numbers = {one.number: other.number for one, other in both}
    for one, other in both:
        if tuple(numbers[upstream] for upstream in one.inputs) != other.inputs:
            yield f"{_where(other)}: reads its inputs from other operators"
