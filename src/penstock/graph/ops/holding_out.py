"""The operator that keeps one of two parts of the data."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError, choice
from penstock.graph.ops.base import Unary, check_at_least
from penstock.graph.ops.functions import Map
from penstock.graph.traits import Traits

Part: TypeAlias = Literal["train", "held out"]


class Holdout(Unary, frozen=True, kw_only=True, eq=False):
    """Keeps the elements that are held out, a `fraction` of all, or the others.

    Which they are follows from `seed` and from where in the source they stand, and so is the same in every epoch.
    """

    TRAITS: ClassVar[Traits] = replace(Map.TRAITS, may_skip=True, same_columns=True, threads=0)
    fraction: float
    seed: int
    part: Part

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)) or not 0 < self.fraction < 1:
            raise InvalidArgumentError(f"holdout({self.fraction!r}): the fraction that is held out is between 0 and 1")
        check_at_least("seed", self.seed, 0)
        if self.part not in ("train", "held out"):
            raise choice("part", self.part, ("train", "held out"))
