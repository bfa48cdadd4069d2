"""Ways of reading one pipeline through one service, each with its cut and its workers, made when they are needed.

Each is a job of its own. Its streams, splits, rounds and states are those of all others, so that a state of one is
where another may begin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec
from msgspec.structs import replace
from msgspec.structs import replace as with_fields

from penstock.api.dataset import Dataset
from penstock.api.epochs import Direct, FromService
from penstock.api.piped import Piped
from penstock.core.errors import PenstockError
from penstock.graph.cutting import PipelineCut
from penstock.policies.offloading import ReadingPlace
from penstock.submission.options import JobOptions
from penstock.wire.figures import JobFigures
from penstock.wire.modes import Placement, Target

FIGURES_S = 1.0  # so long a service is waited for that is asked in the middle of an epoch
TARGETS: dict[ReadingPlace, Target] = {"here": "local", "there": "remote", "both": "any"}

MakeSource: TypeAlias = Callable[[Dataset, JobOptions], FromService]


class CutWay(msgspec.Struct, frozen=True, kw_only=True):
    """What is read: at which cut, by whom, by how many of them at most (None: all)."""

    cut: PipelineCut
    place: ReadingPlace
    max_workers: int | None = None
    guest_pace: float = 1.0
    """How fast a guest works, beside a worker elsewhere."""


class CutWays:
    def __init__(self, dataset: Dataset, options: JobOptions, make_source: MakeSource, guests: str) -> None:
        """`guests`: the name of this trainer's guest workers; empty: it has none."""
        self._dataset, self._options, self._make_source, self._guests = dataset, options, make_source, guests
        self._made: dict[tuple[CutWay, float | None], Direct | Piped] = {}
        self._sources: dict[tuple[CutWay, float | None], FromService] = {}

    def source(self, way: CutWay, timeout_s: float | None = None) -> FromService:
        """Return the job of that way."""
        if (way, timeout_s) in self._sources:
            return self._sources[way, timeout_s]
        dataset = Dataset(way.cut.there)
        dataset._plan.share_sources(self._dataset._plan)
        options, suffix = self._options, f"cut-{way.cut.name}-{way.place}-{way.max_workers or 'all'}-{way.guest_pace:g}"
        limits = options.limits if timeout_s is None else replace(options.limits, timeout_s=timeout_s)
        source = self._make_source(
            dataset,
            replace(
                options,
                job=None if options.job is None else f"{options.job} ({suffix})",
                placement=self._placement(way),
                limits=limits,
            ),
        )
        self._sources[way, timeout_s] = source
        return source

    def _placement(self, way: CutWay) -> Placement:
        target = TARGETS[way.place] if self._guests else self._options.placement.target
        return with_fields(
            self._options.placement,
            target=target,
            guests=self._guests,
            max_workers=way.max_workers,
            guest_pace=way.guest_pace,
            read_by="trainer" if way.cut.form == "read here" else self._options.placement.read_by,
        )

    def way(self, way: CutWay, timeout_s: float | None = None) -> Direct | Piped:
        key = (way, timeout_s)
        if key not in self._made:
            source = replace(self.source(way, timeout_s), group_rows=way.cut.group_rows)
            limits = self._options.limits
            self._made[key] = (
                Piped(way.cut.over(source), [source], threads=None, memory_bytes=limits.memory_bytes)
                if way.cut.here
                else Direct(source)
            )
        return self._made[key]

    def figures(self, way: CutWay, timeout_s: float | None = None) -> JobFigures | None:
        """Return what the service knows in numbers of a way's job; None: it cannot be asked now."""
        try:
            return self.source(way, timeout_s).backend.figures(FIGURES_S)
        except PenstockError:
            return None

    def close(self) -> None:
        for source in self._sources.values():
            source.backend.close()
