"""User functions and objects inside a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A user's object (items, a dataset) that travels with the graph."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class UserFunction:
    """A user's callable. A class is constructed once per process, at its first call."""

    fn: Callable[..., Any]
    takes_rng: bool
    name: str

    @staticmethod
    def of(fn: Callable[..., Any]) -> UserFunction:
        try:
            takes_rng = "rng" in inspect.signature(fn).parameters
        except (TypeError, ValueError):
            takes_rng = False
        return UserFunction(fn, takes_rng, getattr(fn, "__qualname__", type(fn).__qualname__))

    def resolve(self) -> Callable[..., Any]:
        """Return what to call: the function, or the one instance of a class."""
        return self.fn
