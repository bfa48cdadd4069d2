"""holdout: an element's side is a function of the seed and of its place in the source, whatever is read when and where.

What several elements were made of, as of a `flat_map`, they share: children of one record are never on both sides.
"""

from __future__ import annotations

import msgspec

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.parameters import short_label
from penstock.runtime.building import Step, step_of
from penstock.runtime.calling import Calling
from penstock.runtime.contract import Chunk, Selected
from penstock.runtime.ordered import Outcome
from penstock.runtime.randomness import derive_word
from penstock.runtime.stats import StageMeter

_WORD = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64


class HoldoutStep(msgspec.Struct):
    label: str
    key: int
    below: int
    """Elements whose word is below it are held out."""
    held_out: bool

    def run(self, chunk: Chunk) -> Outcome:
        kept: list[int] = []
        for k in range(len(chunk.elements)):
            origin = chunk.marks.origin(k)
            if origin is None:
                error = InvalidPipelineError(
                    f"{self.label} where it is not known any more which records elements were made of; put it before "
                    "what comes in between: cache(), or distribute()"
                )
                return Outcome(self._selected(chunk, kept, k), error)
            word = _mixed(_mixed(_mixed(self.key ^ origin.source) ^ origin.split) ^ origin.index)
            if (word < self.below) is self.held_out:
                kept.append(k)
        return Outcome(self._selected(chunk, kept, len(chunk.elements)))

    def _selected(self, chunk: Chunk, kept: list[int], total: int) -> Chunk:
        idents = None if chunk.idents is None else chunk.idents[kept]
        return Chunk([chunk.elements[k] for k in kept], Selected(chunk.marks, kept, total), idents)


def _mixed(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)


@step_of(ops.Holdout)
def _holdout_step(node: ops.Holdout, calling: Calling, meter: StageMeter) -> Step:
    below = round(node.fraction * (1 << 64))
    return HoldoutStep(short_label(node), derive_word("holdout", node.seed), below, node.part == "held out")
