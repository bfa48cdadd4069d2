"""What is done with the next split: the live decision of one run."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.graph import ops
from penstock.runtime.keeping import CachePoint
from penstock.runtime.stats import StageMeter


class LiveChoice:
    def __init__(self, nodes: Sequence[ops.Autocache], points: Sequence[CachePoint], meters: list[StageMeter]) -> None:
        asked = [number for number, node in enumerate(nodes, 1) if node.always]
        self._fixed = asked[-1] if asked else 0

    def point(self) -> int:
        return self._fixed
