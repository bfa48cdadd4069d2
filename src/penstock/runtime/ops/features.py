"""Feature transforms as a step. The kernels are imported when a pipeline has some, and compiled before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.core.element import Ragged
from penstock.core.errors import InvalidPipelineError
from penstock.core.keyed import KeyedDense, KeyedRagged
from penstock.core.leaves import leaf_type
from penstock.graph import ops
from penstock.graph.parameters import short_label
from penstock.runtime.blame import blame
from penstock.runtime.building import Step, step_of
from penstock.runtime.calling import Calling, call_each
from penstock.runtime.contract import Chunk, Selected
from penstock.runtime.ops.columns import unfit_columns
from penstock.runtime.ordered import Outcome
from penstock.runtime.stats import StageMeter

if TYPE_CHECKING:
    from penstock.runtime.feature_batches import FeatureBatches


class FeaturesStep(msgspec.Struct):
    """Makes features of each batch; one of which no row is left is left out."""

    label: str
    needs: tuple[str, ...]
    batches: FeatureBatches

    def run(self, chunk: Chunk) -> Outcome:
        made: list[Any] = []
        error: BaseException | None = None
        try:
            call_each(self._transformed, chunk.elements, made)
        except Exception as raised:
            error = blame(raised, self.label, chunk.marks.origin(len(made)))
        if None not in made and error is None:
            return Outcome(Chunk(made, chunk.marks, chunk.idents))
        kept = [k for k, batch in enumerate(made) if batch is not None]
        idents = None if chunk.idents is None else chunk.idents[kept]
        return Outcome(Chunk([made[k] for k in kept], Selected(chunk.marks, kept, len(made)), idents), error)

    def _transformed(self, element: Any) -> dict[str, Any] | None:
        if not isinstance(element, dict) or any(column not in element for column in self.needs):
            raise unfit_columns(self.label, self.needs, element)
        flags = self.batches.kept(element)
        if flags is not None and not flags.all():
            if not flags.any():
                return None
            element = {name: _taken(self.label, name, column, flags) for name, column in element.items()}
        return {**element, **self.batches.made(element)}


def _taken(label: str, name: str, column: Any, flags: Any) -> Any:
    if isinstance(column, (np.ndarray, Ragged, KeyedDense, KeyedRagged)) and len(column) == len(flags):
        return leaf_type(type(column)).take(column, flags)
    raise InvalidPipelineError(
        f"{label}: column {name!r} is a {type(column).__name__} without a row for each of {len(flags)}; drop() it"
    )


@step_of(ops.TransformFeatures)
def _features_step(node: ops.TransformFeatures, calling: Calling, meter: StageMeter) -> Step:
    from penstock.runtime.feature_batches import FeatureBatches  # with it come numba and the kernels

    return FeaturesStep(short_label(node), node.needs, FeatureBatches(node))
