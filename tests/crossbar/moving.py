"""A loader that goes from cut to cut of its pipeline, every few outputs and with every epoch."""

from __future__ import annotations

from typing import Any

from penstock.api.cut_ways import CutWay, CutWays
from penstock.api.epochs import WayOfReading
from penstock.api.loader import Loader, make_loader
from penstock.api.measuring_pace import Pace, PaceWindow
from penstock.api.offloaded import OffloadCourse, Offloaded
from penstock.graph.cutting import Cuts, cuts_of
from penstock.passes.shuffles import merge_shuffles, move_shuffles
from penstock.policies.offloading import HeldUp, OffloadLimits, OffloadProfile
from penstock.submission.options import check_options

EVERY = 4


class NoMemory:
    def recall(self) -> OffloadProfile | None:
        return None

    def learn(self, profile: OffloadProfile) -> None:
        pass


class CountingWindow(PaceWindow):
    def __init__(self) -> None:
        super().__init__(1.0)
        self._left = EVERY

    def took(self, **seen: float) -> bool:
        self._left -= 1
        return self._left == 0


class RotatingCourse(OffloadCourse):
    def __init__(self, cuts: Cuts) -> None:
        super().__init__(
            cuts, cores=1, limits=OffloadLimits(), window_s=1.0, memory=NoMemory(), resize=lambda count: None
        )
        self._turn = -1

    def begin(self) -> None:
        self._turn += 1
        self.way = CutWay(cut=self._cuts.legal[self._turn % len(self._cuts.legal)], place="both")
        self.window = CountingWindow()

    def saw(self, pace: Pace, workers: int, held: HeldUp) -> None:
        self.begin()

    def failed(self, error: Exception) -> bool:
        return False


class MovingLoader(Loader):
    def __init__(self, dataset: Any, to: Any, options: Any) -> None:
        cuts = cuts_of(move_shuffles(merge_shuffles(dataset._plan.node)))
        self._ways = CutWays(dataset, options, lambda made, own: make_loader(made, to, own)._sources[0], "")
        course = RotatingCourse(cuts)
        self._offloaded = Offloaded(dataset._plan, options, self._ways, course)
        super().__init__(self._ways.source(course.way), memory_bytes=options.limits.memory_bytes, seed=options.seed)

    def _choose_kind(self) -> WayOfReading:
        return self._offloaded

    def close(self) -> None:
        super().close()
        self._ways.close()


def moving_loader(dataset: Any, to: Any, **asked: Any) -> MovingLoader:
    return MovingLoader(dataset, to, check_options(**asked))
