"""The base of every operator: a frozen record whose fields are its parameters and its inputs.

Rules: a node is checked in its constructor and never changed; a field that holds a `Node` or a tuple of them is an
input, every other field is a parameter; fields listed in `PRIVATE` (credentials) never reach fingerprint, codec or
explain. What others must know of an operator it says itself: its traits, and the methods below that its class overrides
where their answers are not right for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import msgspec

from penstock.graph.traits import Columns, Length, Traits


class Node(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One operator. Compared by identity: two equal descriptions are compared by fingerprint."""

    PRIVATE: ClassVar[frozenset[str]] = frozenset()
    """Names of the parameters that never leave this process."""
    TRAITS: ClassVar[Traits]
    """What passes, the runtime and the service must know of it."""

    @property
    def traits(self) -> Traits:
        """Return the traits with these parameters."""
        return self.TRAITS

    @property
    def name(self) -> str:
        return _snake_case(type(self).__name__)

    @property
    def inputs(self) -> tuple[Node, ...]:
        found: list[Node] = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, Node):
                found.append(value)
            elif _is_nodes(value) and name == "upstreams":
                found.extend(value)
        return tuple(found)

    def with_inputs(self, *inputs: Node) -> Self:
        """Return this operator over other inputs."""
        given = iter(inputs)
        changes: dict[str, Any] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, Node):
                changes[name] = next(given)
            elif _is_nodes(value) and name == "upstreams":
                changes[name] = tuple(next(given) for _ in value)
        return msgspec.structs.replace(self, **changes)

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the public parameters, in the order they are declared."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, Node) and name != "upstreams" and name not in self.PRIVATE:
                yield name, value

    def __repr__(self) -> str:
        public = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in self.PRIVATE)
        return f"{type(self).__name__}({', '.join(public)})"

    # What it says of itself beyond its traits

    def canonical(self) -> Node:
        """Return what it is by definition: its input where it says nothing, one operator where two say the same."""
        return self

    @property
    def passes(self) -> int:
        """Return how often it goes over its inputs in one pass of its own; -1: for ever."""
        return 1

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        """Return how many elements a pass has, given how many its inputs have."""
        return inputs[0] if inputs and self.traits.keeps_order and not self.traits.may_skip else None

    def endless(self, inputs: Sequence[Node | None]) -> Node | None:
        """Return what makes it go on for ever, given what makes its inputs; None: nothing."""
        return next((found for found in inputs if found is not None), None)

    def columns_given(self, inputs: Sequence[Columns]) -> Columns:
        """Return the keys of its elements, given those of its inputs."""
        same = inputs[0] if inputs and all(columns == inputs[0] for columns in inputs) else None
        return same if self.traits.same_columns else None

    def columns_needed(self, asked: Columns, below: Columns) -> Columns:
        """Return which keys it needs of an input that has those `below`, where `asked` are needed of it."""
        return asked if self.traits.same_columns else None

    def narrowed(self, asked: Sequence[str]) -> Node:
        """Return what gives the columns that are `asked` of it and may leave out others; itself, if that is no less."""
        return self

    def names_below(self, columns: Iterable[str], below: Columns) -> dict[str, str] | None:
        """Return what columns with the same values are called in its input, which has those `below`.

        None if one of them is not there, or that cannot be told.
        """
        return {column: column for column in columns} if self.traits.same_columns else None


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
