"""Operators that give some outputs, its children, for each input."""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from penstock.graph.functions import UserFunction
from penstock.graph.ops.base import Unary, check_at_least
from penstock.graph.traits import Flow, Inputs, OnWorkers, Traits


class FlatMap(Unary, frozen=True, kw_only=True, eq=False):
    """Zero or more outputs, any iterable, for one input."""

    TRAITS: ClassVar[Traits] = Traits(
        flow=Flow.CHILDREN,
        may_skip=False,
        regroups=None,
        only_counts=False,
        holds_back=True,
        order_bound=False,
        on_workers=OnWorkers.RUNS,
        inputs=Inputs.ALL,
        same_columns=False,
        threads=0,
    )
    function: UserFunction
    salt: int = 0


class Interleave(Unary, frozen=True, kw_only=True, eq=False):
    """Iterables made from `cycle` inputs at a time, read in turns of `block` elements."""

    TRAITS: ClassVar[Traits] = replace(FlatMap.TRAITS, order_bound=True)
    function: UserFunction
    cycle: int = 8
    block: int = 1
    salt: int = 0

    def __post_init__(self) -> None:
        check_at_least("cycle", self.cycle, 1)
        check_at_least("block", self.block, 1)


class Unbatch(Unary, frozen=True, kw_only=True, eq=False):
    """The rows of each batch: as many as its shortest column has, so that all columns count."""

    TRAITS: ClassVar[Traits] = FlatMap.TRAITS
