"""The base of every operator: a frozen record whose fields are its parameters and its inputs.

Rules: a node is checked in its constructor and never changed; a field that holds a `Node` or a tuple of them is an
input, every other field is a parameter; fields listed in `PRIVATE` (credentials) never reach fingerprint, codec or
explain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One operator. Compared by identity: two equal descriptions are compared by fingerprint."""

    PRIVATE: ClassVar[frozenset[str]] = frozenset()
    """Parameters that stay in this process."""
    ONE_TO_ONE: ClassVar[bool] = False
    """Each output depends on exactly one input and stands at its place: a shuffle may move above it."""
    HOLDS_BACK: ClassVar[bool] = False
    """After an output it may hold elements, or a part of one: its state says from where to read the same again."""

    @property
    def holds_back(self) -> bool:
        return self.HOLDS_BACK

    @property
    def name(self) -> str:
        return _snake_case(type(self).__name__)

    @property
    def inputs(self) -> tuple[Node, ...]:
        found: list[Node] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Node):
                found.append(value)
            elif _is_nodes(value) and field.name == "upstreams":
                found.extend(value)
        return tuple(found)

    def with_inputs(self, *inputs: Node) -> Self:
        """Return this operator over other inputs."""
        given = iter(inputs)
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Node):
                changes[field.name] = next(given)
            elif _is_nodes(value) and field.name == "upstreams":
                changes[field.name] = tuple(next(given) for _ in value)
        return dataclasses.replace(self, **changes)

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the public parameters, in the order they are declared."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Node) and field.name != "upstreams" and field.name not in self.PRIVATE:
                yield field.name, value


def _is_nodes(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(part, Node) for part in value)


def _snake_case(name: str) -> str:
    """
    >>> _snake_case("BucketByLength"), _snake_case("ReadTFRecord")
    ('bucket_by_length', 'read_tfrecord')
    """
    out = ""
    for i, letter in enumerate(name):
        if letter.isupper() and i and not name[i - 1].isupper():
            out += "_"
        out += letter.lower()
    return out
