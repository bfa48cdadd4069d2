"""Operators that call a function, or evaluate a condition, for each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError
from penstock.graph.expressions import Expression
from penstock.graph.functions import UserFunction
from penstock.graph.ops.base import SkipErrors, Unary, check_at_least
from penstock.graph.traits import Columns, Flow, Inputs, OnWorkers, Traits, either, varied


class Map(Unary, frozen=True, kw_only=True, eq=False):
    """One output for one input. With `batch_size`, the function is called with a list of up to that many elements."""

    TRAITS: ClassVar[Traits] = Traits(
        flow=Flow.STEP,
        may_skip=False,
        regroups=None,
        only_counts=False,
        holds_back=False,
        order_bound=False,
        on_workers=OnWorkers.RUNS,
        inputs=Inputs.ALL,
        same_columns=False,
        threads=None,
    )
    function: UserFunction
    batch_size: int | None = None
    threads: int | None = None
    on_error: SkipErrors | None = None
    salt: int = 0

    def __post_init__(self) -> None:
        check_at_least("batch_size", self.batch_size, 1)
        check_at_least("threads", self.threads, 1)
        if self.batch_size is not None and self.on_error is not None:
            raise InvalidArgumentError("on_error='skip' needs one call per element; it cannot be used with batch_size")

    @property
    def policy(self) -> SkipErrors | None:
        return self.on_error

    @property
    def traits(self) -> Traits:
        grouped = self.batch_size is not None  # an element's neighbours go along
        return varied(
            self.TRAITS,
            flow=Flow.IN_PLACE if grouped else Flow.STEP,
            may_skip=self.on_error is not None,
            holds_back=grouped,
            order_bound=grouped,
            threads=self.threads,
        )


class Filter(Unary, frozen=True, kw_only=True, eq=False):
    """Keeps the elements for which the function, or the expression on columns, is true."""

    TRAITS: ClassVar[Traits] = replace(Map.TRAITS, may_skip=True)
    predicate: UserFunction | Expression
    threads: int | None = None
    on_error: SkipErrors | None = None
    salt: int = 0

    def __post_init__(self) -> None:
        check_at_least("threads", self.threads, 1)

    @property
    def policy(self) -> SkipErrors | None:
        return self.on_error

    @property
    def traits(self) -> Traits:
        return varied(self.TRAITS, threads=self.threads)

    def columns_given(self, inputs: Sequence[Columns]) -> Columns:
        return inputs[0] if isinstance(self.predicate, Expression) else None

    def columns_needed(self, asked: Columns, below: Columns) -> Columns:
        # A function may look at any column, and add or remove some in place.
        return either(asked, sorted(self.predicate.columns())) if isinstance(self.predicate, Expression) else None
