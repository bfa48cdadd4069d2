"""How fast a trainer goes while it reads in one way, and what holds up those who work for it.

A pace is that of a window of real batches, the first of which are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.policies.offloading import HeldUp
from penstock.wire.figures import JobFigures, StageFigures

WARM_OUTPUTS = 3  # what was made ahead while the way was opened is not its pace
LEAST_OUTPUTS = 6  # more of slow ones would cost more than what they are asked for brings
PATIENCE = 10.0  # windows: a pace so slow that it does not fill one is known well enough


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What a window saw, an output."""

    outputs: int
    wait_s: float
    run_s: float
    cpu_s: float
    output_bytes: float

    @property
    def per_s(self) -> float:
        return self.outputs / max(self.wait_s + self.run_s, 1e-9)

    @property
    def step_per_s(self) -> float:
        """The pace if it never waited."""
        return self.outputs / max(self.run_s, 1e-9)

    @property
    def waited(self) -> float:
        """The share of the time that the trainer waited."""
        return self.wait_s / max(self.wait_s + self.run_s, 1e-9)


class PaceWindow:
    """Told of every output; it knows no clock. Times are seconds of one clock, `cpu_s` and `read_bytes` sums so far."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._seen = 0
        self._began: float | None = None
        self._cpu_s = self._bytes = 0.0
        self.outputs = 0
        self._wait_s = self._run_s = 0.0

    def took(self, *, asked_at: float, got_at: float, ran_s: float, cpu_s: float, read_bytes: float) -> bool:
        """Count an output: the trainer was busy for `ran_s`, asked, and got it. Return whether the window is full.

        >>> window = PaceWindow(least_s=1.0)
        >>> at = [dict(asked_at=n + 0.8, got_at=n + 1.0, ran_s=0.8, cpu_s=n, read_bytes=9 * n) for n in range(10)]
        >>> full = [window.took(**output) for output in at]
        >>> full.index(True), window.pace(cpu_s=9, read_bytes=81).output_bytes, round(window.pace(9, 81).per_s, 3)
        (8, 9.0, 1.0)
        """
        self._seen += 1
        if self._began is None:
            if self._seen >= WARM_OUTPUTS:
                self._began, self._cpu_s, self._bytes = got_at, cpu_s, read_bytes
            return False
        self.outputs += 1
        self._wait_s += got_at - asked_at
        self._run_s += ran_s
        lasted = got_at - self._began
        return lasted >= self._least_s and (self.outputs >= LEAST_OUTPUTS or lasted >= PATIENCE * self._least_s)

    def pace(self, cpu_s: float, read_bytes: float) -> Pace:
        """Return what was seen; of a window with no output counted, nothing."""
        count = max(1, self.outputs)
        return Pace(
            outputs=self.outputs,
            wait_s=self._wait_s,
            run_s=self._run_s,
            cpu_s=max(0.0, cpu_s - self._cpu_s) / count,
            output_bytes=max(0.0, read_bytes - self._bytes) / count,
        )


def held_up(figures: JobFigures | None, *, ahead: float = 0.0) -> HeldUp:
    """Return what most workers of a job wait for while its trainer waits: the link, if they have sent all they may; the
    disk, if their sources do.

    `ahead` is how many outputs of a stream have arrived here and were not taken: with more than one it is the trainer,
    at what stands after the cut, that is waited for.

    >>> from penstock.wire.figures import WorkerFigures
    >>> names = [name for name in WorkerFigures.__struct_fields__ if name != "stages"]
    >>> worker = lambda **what: WorkerFigures(**{**dict.fromkeys(names, 0), **what})
    >>> held_up(JobFigures(job="a", workers=(worker(waits_for="credit"),))).by
    'link'
    >>> held_up(JobFigures(job="a", workers=(worker(waits_for="credit"),)), ahead=9.0).by
    ''
    >>> read = StageFigures(0, "read_jsonl(...)", elements=80, nbytes=8_000, busy_s=9.0, cpu_s=1.0)
    >>> work = StageFigures(1, "map(decode)", busy_s=2.0, cpu_s=2.0)
    >>> waits = worker(waits_for="input", stages=(read, work))
    >>> held_up(JobFigures(job="a", workers=(waits,), stages=(read, work), outputs=8))
    HeldUp(by='disk', read_bytes=1000.0)
    """
    workers = () if figures is None else figures.workers
    if figures is None or not workers or ahead > 1.0:
        return HeldUp()
    most = len(workers) / 2
    if sum(worker.waits_for == "credit" for worker in workers) > most:
        return HeldUp(by="link")
    if sum(worker.waits_for == "input" and _waits_to_read(worker.stages) for worker in workers) > most:
        read = sum(stage.nbytes for stage in figures.stages if _reads(stage))
        return HeldUp(by="disk", read_bytes=read / max(1, figures.outputs))
    return HeldUp()


def _reads(stage: StageFigures) -> bool:
    return stage.name.startswith("read_")


def _waits_to_read(stages: Sequence[StageFigures]) -> bool:
    """Say whether a source is where most time passes without a processor."""
    waited = {stage: stage.busy_s - stage.cpu_s for stage in stages}
    return bool(waited) and _reads(max(waited, key=lambda stage: waited[stage]))
