"""Evaluation: every element once over all ranks, in a fixed order, in batches of one size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import msgspec
import numpy as np
from msgspec.structs import replace

from penstock.api.dataset import Dataset
from penstock.api.epochs import LoadedState
from penstock.api.loader import Loader
from penstock.core.errors import InvalidArgumentError, StateMismatchError
from penstock.graph.node import Node
from penstock.wire.modes import Ranks


def evaluation_loader(
    dataset: Dataset,
    batch_size: int,
    to: Any,
    *,
    ranks: Ranks | None,
    mask: str,
    collate: Callable[..., Any] | None,
    job: str | None,
) -> Loader:
    batches = dataset.batch(batch_size, collate=collate, mask=mask)
    if ranks is None or ranks.count == 1:
        return batches.distribute(to, ranks=ranks, job=job, order="deterministic")
    try:
        total = len(batches)
    except TypeError:
        raise InvalidArgumentError(
            f"evaluation() over {ranks.count} ranks: how many elements there are is not known before they are read, so "
            "that the last step cannot be told from a repeated one; declare it with with_length()"
        ) from None
    loader = batches.distribute(to, ranks=replace(ranks, uneven="pad"), job=job, order="deterministic")
    left = total % ranks.count
    repeated = left > 0 and (ranks.rank or 0) >= left
    masked = loader.enumerate().map(RepeatMasked(total // ranks.count if repeated else -1, mask))
    return EvaluationLoader(masked.node, ranks.count)


class EvaluationLoader(Loader):
    """An evaluation over ranks. Which step repeats another rank's follows from how many of them there are."""

    def __init__(self, node: Node, ranks: int | None = None, **arguments: Any) -> None:
        super().__init__(node, **arguments)
        self._ranks = ranks

    def load_state_dict(self, state: LoadedState | Sequence[LoadedState]) -> None:
        given = [state] if isinstance(state, Mapping) else list(state)
        counts = {part.get("consumers", 1) for each in given for part in each.get("states", [each])}
        if self._ranks is not None and counts - {self._ranks}:
            raise StateMismatchError(
                f"the state is of an evaluation over {max(counts)} ranks, and this one is over {self._ranks}: which "
                "elements are copies follows from their number. Load it on as many ranks, or evaluate anew"
            )
        super().load_state_dict(state)

    def _over(self, node: Node) -> Self:
        made = super()._over(node)
        made._ranks = self._ranks
        return made


class RepeatMasked(msgspec.Struct, frozen=True):
    """Marks the rows of a step that repeats another rank's as copies."""

    step: int
    """Its number; -1: none does."""
    mask: str

    def __call__(self, numbered: tuple[int, dict[str, Any]]) -> dict[str, Any]:
        number, batch = numbered
        return {**batch, self.mask: np.zeros_like(batch[self.mask])} if number == self.step else batch
