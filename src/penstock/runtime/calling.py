"""How the functions that a graph names are called: for each element of a chunk, or for the children of an element.

What was made before a call failed is kept, so the hot path needs no try per element and still knows which element it
was. The loops are plain ones: `list.extend(map(...))` takes a `StopIteration` of the function for the end of the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import msgspec

from penstock.core.element import Element
from penstock.graph import ops
from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.parameters import short_label as label_of
from penstock.runtime.blame import blame
from penstock.runtime.contract import Chunk, Idents
from penstock.runtime.quarantine import Quarantine
from penstock.runtime.randomness import ElementGenerators, derive_key
from penstock.runtime.stats import StageMeter

MakeQuarantine: TypeAlias = Callable[[Node, ops.SkipErrors, StageMeter], Quarantine]
MakeChildren: TypeAlias = Callable[[Any, Idents | None], Iterable[Any]]


def call_each(function: Callable[[Any], Any], elements: Sequence[Any], out: list[Any]) -> None:
    """Append a result for each element; where a call raises, `out` has the results before it."""
    for element in elements:
        out.append(function(element))  # noqa: PERF401 - extend() would end at a StopIteration


class Calls:
    """Calls a user function on each element of a chunk."""

    def __init__(
        self,
        label: str,
        resolve: Callable[[], Callable[..., Any]],
        generators: ElementGenerators | None,
        quarantine: Quarantine | None,
    ) -> None:
        self.label = label
        self.resolve = resolve
        self.generators = generators
        self.quarantine = quarantine

    @cached_property
    def function(self) -> Callable[..., Any]:
        """What to call; a user's class is constructed at its first use, not when the pipeline is built.

        Of an object it is its `__call__` itself: a plain loop calls that in half the time.
        """
        resolved = self.resolve()
        call = type(resolved).__call__
        return MethodType(call, resolved) if isinstance(call, FunctionType) else resolved

    def results(self, chunk: Chunk) -> tuple[list[Any], Sequence[int] | None, BaseException | None]:
        """Return the results, which elements they belong to (None: all from the first on), and what stopped it."""
        if self.quarantine is not None:
            return self._results_or_skip(chunk, self.quarantine)
        function = self.function
        out: list[Any] = []
        try:
            if self.generators is None:
                call_each(function, chunk.elements, out)
            else:
                assert chunk.idents is not None
                at = self.generators.at
                for element, ident in zip(chunk.elements, chunk.idents):
                    out.append(function(element, rng=at(ident)))
        except Exception as error:
            return out, None, blame(error, self.label, chunk.marks.origin(len(out)))
        return out, None, None

    def _results_or_skip(
        self, chunk: Chunk, quarantine: Quarantine
    ) -> tuple[list[Any], Sequence[int], BaseException | None]:
        function = self.function
        out: list[Any] = []
        kept: list[int] = []
        quarantine.entered(len(chunk.elements))
        for k, element in enumerate(chunk.elements):
            try:
                if self.generators is None:
                    result = function(element)
                else:
                    assert chunk.idents is not None
                    result = function(element, rng=self.generators.at(chunk.idents[k]))
            except Exception as error:
                blamed = blame(error, self.label, chunk.marks.origin(k))
                over_budget = quarantine.admit(blamed, chunk.marks, k)
                if over_budget is not None:
                    return out, kept, over_budget
            else:
                out.append(result)
                kept.append(k)
        return out, kept, None


class Calling(msgspec.Struct, frozen=True):
    """Makes what calls the functions of a run."""

    seed: int
    quarantine: MakeQuarantine

    def calls(self, node: ops.Unary, function: UserFunction, salt: int, meter: StageMeter) -> Calls:
        quarantine = None if node.policy is None else self.quarantine(node, node.policy, meter)
        return Calls(label_of(node), function.resolve, self._generators(function, salt), quarantine)

    def children(self, function: UserFunction, salt: int) -> MakeChildren:
        return _children_of(function.resolve, self._generators(function, salt))

    def _generators(self, function: UserFunction, salt: int) -> ElementGenerators | None:
        return ElementGenerators(derive_key("rng", self.seed, salt)) if function.takes_rng else None


def _children_of(resolve: Callable[[], Callable[..., Any]], generators: ElementGenerators | None) -> MakeChildren:
    def children(element: Element, ident: Idents | None) -> Iterable[Element]:
        if generators is None:
            return resolve()(element)  # type: ignore[no-any-return]
        assert ident is not None
        return resolve()(element, rng=generators.fresh(ident))  # type: ignore[no-any-return]

    return children
