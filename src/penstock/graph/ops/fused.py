"""Operators that passes make of several others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError
from penstock.graph.node import Node
from penstock.graph.ops.base import Unary
from penstock.graph.ops.batches import Batches, batches_of
from penstock.graph.ops.passing import Prefetch
from penstock.graph.traits import Length, Traits, varied


class OfSteps(Unary, frozen=True, kw_only=True, eq=False):
    """Base of operators that run others as steps, each of which stands on a `Hole`."""

    steps: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise InvalidArgumentError("a fused operator needs at least one step")


class Fused(OfSteps, frozen=True, kw_only=True, eq=False):
    """Steps that run over a chunk in one go."""

    TRAITS: ClassVar[Traits] = replace(Prefetch.TRAITS, same_columns=False)

    @property
    def traits(self) -> Traits:
        may_skip = any(step.traits.may_skip for step in self.steps)
        return varied(self.TRAITS, may_skip=may_skip, threads=threads_of(self.steps))


class FusedBatch(OfSteps, frozen=True, kw_only=True, eq=False):
    """One-to-one steps whose results are written straight into the batch's buffer."""

    TRAITS: ClassVar[Traits] = replace(Batches.TRAITS, same_columns=False, threads=None)
    size: int
    drop_last: bool = False

    @property
    def traits(self) -> Traits:
        return varied(self.TRAITS, threads=threads_of(self.steps))

    @property
    def drops_rest(self) -> bool:
        return self.drop_last

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        return batches_of(inputs[0], self.size, drop_last=self.drop_last)


def steps_of(node: Node) -> tuple[Node, ...]:
    """Return the steps of a fused operator; any other is its own."""
    return node.steps if isinstance(node, OfSteps) else (node,)


def threads_of(steps: Iterable[Node]) -> int | None:
    """Return how many threads work on some steps together, as `Traits.threads` has it."""
    asked = [step.traits.threads for step in steps]
    given = [threads for threads in asked if threads]
    return max(given) if given else None if None in asked else 0
