"""Operators with several inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError, choice
from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.ops.base import NEVER_ENDS
from penstock.graph.traits import Columns, Flow, Inputs, Length, OnWorkers, Traits


class Zip(Node, frozen=True, kw_only=True, eq=False):
    """Tuples of one element of each input; ends with the shortest."""

    TRAITS: ClassVar[Traits] = Traits(
        flow=Flow.OWN,
        may_skip=False,
        regroups=None,
        only_counts=False,
        holds_back=False,
        order_bound=False,
        on_workers=OnWorkers.REFUSED,
        inputs=Inputs.ALL,
        same_columns=False,
        threads=0,
    )
    upstreams: tuple[Node, ...]

    def __post_init__(self) -> None:
        check_some("zip", self.upstreams)

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        known = [length for length in inputs if length is not None]
        return min(known) if len(known) == len(inputs) else None

    def endless(self, inputs: Sequence[Node | None]) -> Node | None:
        return None if None in inputs else inputs[0]


class Concatenate(Node, frozen=True, kw_only=True, eq=False):
    """All elements of the first input, then those of the second, and so on."""

    TRAITS: ClassVar[Traits] = replace(Zip.TRAITS, on_workers=OnWorkers.RUNS, inputs=Inputs.ANY, same_columns=True)
    upstreams: tuple[Node, ...]

    def __post_init__(self) -> None:
        check_some("concatenate", self.upstreams)

    def elements_given(self, inputs: Sequence[Length]) -> Length:
        known = [length for length in inputs if length is not None]
        return sum(known) if len(known) == len(inputs) else None


MixStop: TypeAlias = Literal["first", "all", "never"]
MIX_STOPS = ("first", "all", "never")


class Mix(Node, frozen=True, kw_only=True, eq=False):
    """Elements of the inputs in proportion to the weights; `unit` measures an element (None counts elements)."""

    TRAITS: ClassVar[Traits] = replace(
        Zip.TRAITS, order_bound=True, on_workers=OnWorkers.RUNS, inputs=Inputs.ALL_OR_WRONG
    )
    upstreams: tuple[Node, ...]
    weights: tuple[float, ...]
    unit: UserFunction | None = None
    stop: MixStop = "first"

    def __post_init__(self) -> None:
        check_some("mix", self.upstreams)
        if len(self.weights) != len(self.upstreams):
            raise InvalidArgumentError(f"mix has {len(self.upstreams)} sources and {len(self.weights)} weights")
        if any(not weight >= 0 for weight in self.weights) or sum(self.weights) <= 0:
            raise InvalidArgumentError(f"weights={self.weights} must not be negative, nor all zero")
        if self.stop not in MIX_STOPS:
            raise choice("stop", self.stop, MIX_STOPS)

    @property
    def passes(self) -> int:
        return NEVER_ENDS if self.stop == "never" else 1

    def endless(self, inputs: Sequence[Node | None]) -> Node | None:
        if self.stop == "never":
            return self
        if self.stop == "first" and None in inputs:
            return None
        return next((found for found in inputs if found is not None), None)

    def columns_needed(self, asked: Columns, below: Columns) -> Columns:
        return asked if self.unit is None else None  # a function may look at any column


def check_some(operator: str, upstreams: tuple[Node, ...]) -> None:
    if not upstreams:
        raise InvalidArgumentError(f"{operator} needs at least one dataset")
