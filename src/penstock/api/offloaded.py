"""Reading an epoch wherever it goes fastest: the fifth way to read.

An epoch is read in one way at a time (a cut, and who works on what stands before it), and goes over to another between
two outputs: the state of the one is where the other begins. Nothing is read twice, left out or read in another order,
and whoever saves a state saves the same as anybody else who reads the pipeline through a service.

What is tried next, and what is chosen, is said by `policies.offloading`. Trials are windows of real batches. One that
fails costs its window: the epoch goes on here, where it stood.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, process_time
from typing import Any, Protocol

from msgspec.structs import replace

from penstock.api.cut_ways import CutWay, CutWays
from penstock.api.epochs import Epoch, Loaded, save
from penstock.api.iteration import Plan
from penstock.api.measuring_pace import Pace, PaceWindow, held_up
from penstock.api.states import Phase, PipelineSignature, SavedState, parts_in
from penstock.api.statistics import LoaderStatistics
from penstock.core.element import Element
from penstock.core.errors import DataError, StateMismatchError, StorageUnavailableError
from penstock.graph.cutting import ALL_THERE, READ_HERE, Cuts
from penstock.policies.offloading import (
    CutPace,
    HeldUp,
    Offload,
    OffloadLimits,
    OffloadProfile,
    Trial,
    candidate_cuts,
    decide,
    has_drifted,
    next_trial,
    with_bound,
)
from penstock.stream.checkpoint import Weights
from penstock.submission.options import JobOptions

READING = "from_service"  # the stage that waits for what others make
ENOUGH_OUTPUTS = 2  # of an epoch that ends inside a window
UNREADABLE = (DataError, FileNotFoundError, PermissionError, StorageUnavailableError)
WAITED = 0.1  # of a window: a trainer that waits less is not held up by anything there
TRIAL_TIMEOUT_S = 10.0  # so long the training waits for workers elsewhere, once

_log = logging.getLogger("penstock")


class ProfileMemory(Protocol):
    """Where profiles are remembered from run to run."""

    def recall(self) -> OffloadProfile | None: ...

    def learn(self, profile: OffloadProfile) -> None: ...


class OffloadCourse:
    """What is known so far, what is tried now, and what was decided. One for all epochs of a loader."""

    def __init__(
        self,
        cuts: Cuts,
        *,
        cores: float,
        limits: OffloadLimits,
        window_s: float,
        memory: ProfileMemory,
        resize: Callable[[int], None],
        fixed: Offload | None = None,
    ) -> None:
        """`resize` sets the number of guests. `fixed`: what is decided already, so that nothing is tried."""
        self._cuts, self._cores, self._limits, self._window_s = cuts, cores, limits, window_s
        self._memory, self._resize = memory, resize
        self._candidates = candidate_cuts(cuts.names)
        self.profile: OffloadProfile | None = None
        self.decision = fixed
        self._fixed = fixed is not None
        self._open_question = fixed is None
        """Something is still to be measured, or to be decided on what is known."""
        self._trial: Trial | None = None
        self.window: PaceWindow | None = None
        self.way = self._way_of(fixed) if fixed is not None else CutWay(cut=cuts.legal[0], place="here")

    def begin(self) -> None:
        """Choose how an epoch begins: by what is remembered, or with a trial."""
        if self.decision is None and self.profile is None:
            self.profile = self._memory.recall()
        if self._open_question:
            self._go_on()

    @property
    def timeout_s(self) -> float | None:
        """How long a trial elsewhere is waited for; None: as the user says."""
        return TRIAL_TIMEOUT_S if self._trial is not None and self._trial.place == "there" else None

    def _go_on(self) -> None:
        """Set the next trial, or decide."""
        self._trial = next_trial(self.profile, self._candidates, reads_here=READ_HERE)
        if self._trial is not None:
            cut = self._cuts.named(self._trial.cut or ALL_THERE)
            assert cut is not None
            self.way = CutWay(cut=cut, place=self._trial.place, max_workers=self._most_there(self._trial))
            self.window = PaceWindow(self._window_s)
            return
        assert self.profile is not None
        self.window = None
        self.decision = decide(self.profile, self._limits)
        self._open_question = False
        self._memory.learn(self.profile)
        self.way = self._way_of(self.decision)
        if self.decision.here:
            self._resize(self.decision.here)
        _log.info("offloading: %s", self.decision.reason)

    def _most_there(self, trial: Trial) -> int | None:
        return self._limits.most_there if trial.place == "there" else None

    def _way_of(self, decision: Offload) -> CutWay:
        cut = self._cuts.named(decision.cut or ALL_THERE)
        assert cut is not None
        most = None if decision.place == "here" or not decision.there else decision.here + decision.there
        guest_pace = decision.guest_pace if decision.place == "both" else 1.0
        return CutWay(cut=cut, place=decision.place, max_workers=most, guest_pace=guest_pace)

    def saw(self, pace: Pace, workers: int, held: HeldUp) -> None:
        """Take in what a trial measured, and go on."""
        trial, known = self._trial, self.profile
        assert trial is not None
        seen = CutPace(
            cut=trial.cut or ALL_THERE,
            per_s=pace.per_s,
            output_bytes=pace.output_bytes,
            here_cpu_s=0.0 if known is None else max(0.0, pace.cpu_s - known.step_cpu_s),
            workers=max(1, workers),
            reads_here=trial.cut == READ_HERE,
        )
        if known is None:
            known = OffloadProfile(
                step_per_s=pace.step_per_s, here_per_s=pace.per_s, cores=self._cores, step_cpu_s=pace.cpu_s
            )
        else:
            # With no guest at work beside it the step is what it is alone.
            known = replace(known, step_per_s=max(known.step_per_s, pace.step_per_s), cuts=(*known.cuts, seen))
        self.profile = with_bound(known, trial, held, seen) if pace.waited > WAITED else known
        self._go_on()

    def failed(self, error: Exception) -> bool:
        """Take in that a trial elsewhere failed; False: it was none, or this is the user's to know."""
        if self._trial is None or self._trial.place != "there" or self.profile is None:
            return False
        why = f"reading elsewhere failed ({type(error).__name__}: {error})"
        tried = {pace.cut for pace in self.profile.cuts}
        rest = [cut for cut in self._candidates if cut not in tried]
        if isinstance(error, UNREADABLE) and self._trial.cut != READ_HERE:
            rest = [cut for cut in rest if cut != READ_HERE]
        # Who cannot be reached or cannot run the code at one cut is not waited for at the next; where the data cannot
        # be read, it may be read here.
        failures = tuple(CutPace(cut=cut, per_s=0.0, failure=why) for cut in rest)
        self.profile = replace(self.profile, cuts=(*self.profile.cuts, *failures))
        self._go_on()
        return True

    def epoch_ended(self, outputs: int, wait_s: float, run_s: float) -> None:
        """Look back at an epoch that was read in one way: decide again if it went otherwise than expected."""
        if self.decision is None or self.profile is None or self._fixed or self._open_question or not outputs:
            return
        total = max(wait_s + run_s, 1e-9)
        if has_drifted(outputs / total, self.decision, self.profile, waited=wait_s / total):
            self.profile, self._open_question = None, True
            self._resize(int(self._cores))  # what all of this host makes is measured with all of it


class Offloaded:
    """See the module. A `WayOfReading`."""

    def __init__(self, plan: Plan, options: JobOptions, ways: CutWays, course: OffloadCourse) -> None:
        self._plan, self._options = plan, options
        self.ways, self.course = ways, course

    @property
    def signature(self) -> PipelineSignature:
        return self._plan.signature

    @property
    def options(self) -> JobOptions:
        return self._options

    def seed_of(self, seed: int | None) -> int:
        return self._plan.seed if seed is None else seed

    def open(self, epoch: int, seed: int | None, loaded: Loaded | None, weights: Weights | None) -> Epoch:
        self.course.begin()
        saved = None if loaded is None or loaded.place is None else loaded.place
        return OffloadedEpoch(self, epoch, self.seed_of(seed), saved, weights)

    def place_of(self, saved: Sequence[SavedState], changed: bool) -> Sequence[SavedState]:
        for one in saved:
            if parts_in(one.place) != [one.place]:
                raise StateMismatchError(
                    "the state was saved by a loader with operators after distribute(), or by none: one that was made "
                    "with offload() or distribute() may be loaded"
                )
        self.ways.way(self.course.way).place_of(saved, changed)
        return saved


class OffloadedEpoch:
    """An `Epoch`, and the iterator of its elements."""

    def __init__(
        self,
        kind: Offloaded,
        epoch: int,
        seed: int,
        saved: Sequence[SavedState] | None,
        weights: Weights | None,
    ) -> None:
        self._kind, self._epoch, self._seed, self._weights = kind, epoch, seed, weights
        self.elements: Iterator[Element] = self
        self._outputs = 0
        self._wait_s = self._run_s = 0.0
        self._bytes_before = 0
        """Of the ways before the present one."""
        self._left_at: float | None = None
        self._ended = False
        self._closed_for: Exception | None = None
        """What whoever reads on is told; None: nothing."""
        self._decided_at_once = kind.course.window is None
        self._way = kind.course.way
        self._resting: Sequence[SavedState] | None = saved
        """Where to go on, while nothing is open."""
        self._inner: Epoch | None = None
        while self._inner is None:
            try:
                self._open(rejoins=True)
            except Exception as error:
                if not kind.course.failed(error):
                    raise

    # Reading

    def __iter__(self) -> Iterator[Element]:
        return self

    def __next__(self) -> Element:
        if self._ended:
            raise StopIteration
        if self._closed_for is not None:
            raise self._closed_for
        course = self._kind.course
        asked_at = perf_counter()
        ran_s = 0.0 if self._left_at is None else asked_at - self._left_at
        while True:
            try:
                if self._inner is None or self._way != course.way:
                    self._move()
                assert self._inner is not None
                element = next(self._inner.elements)
                break
            except StopIteration:
                self._end(ran_s)
                raise
            except Exception as error:
                if error is self._closed_for or not course.failed(error):
                    raise
        got_at = self._left_at = perf_counter()
        self._outputs += 1
        self._wait_s += got_at - asked_at
        self._run_s += ran_s
        if course.window is not None:
            self._count(course.window, asked_at, got_at, ran_s)
        return element

    def _count(self, window: PaceWindow, asked_at: float, got_at: float, ran_s: float) -> None:
        """Count an output for the trial. What a full window decides is done before the next output."""
        assert self._inner is not None
        inner = self._inner.statistics()
        spent_s = _spent_s(inner)
        if window.took(asked_at=asked_at, got_at=got_at, ran_s=ran_s, cpu_s=spent_s, read_bytes=inner.bytes):
            self._saw(window.pace(spent_s, inner.bytes), inner)

    def _saw(self, pace: Pace, inner: LoaderStatistics) -> None:
        kind = self._kind
        figures = kind.ways.figures(self._way, kind.course.timeout_s)
        ahead = inner.buffered_elements / max(1, len(inner.streams))
        kind.course.saw(pace, len(inner.workers), held_up(figures, ahead=ahead))

    def _move(self) -> None:
        """Read on in the way that the course says, where the trainer stands."""
        if self._inner is not None:
            self._bytes_before += self._inner.statistics().bytes
            state = SavedState.read(self.note_state()())
            self._resting = [state] if state.phase == "reading" else None
            self._inner.close()
            self._inner = None
        self._open(rejoins=False)

    def _open(self, *, rejoins: bool) -> None:
        """`rejoins`: the state may be of this way's own job, and its attempt still be there."""
        course, saved = self._kind.course, self._resting
        self._way = course.way
        way = self._kind.ways.way(course.way, course.timeout_s)
        loaded = None
        if saved is not None:
            place = way.place_of(saved, False)
            loaded = Loaded(epoch=self._epoch, seed=self._seed, state={}, place=place, changed=not rejoins)
        self._inner = way.open(self._epoch, self._seed, loaded, self._weights)
        self._resting = None

    def _end(self, ran_s: float) -> None:
        self._ended = True
        self._run_s += ran_s
        course = self._kind.course
        if self._decided_at_once:
            course.epoch_ended(self._outputs, self._wait_s, self._run_s)
        elif course.window is not None and course.window.outputs >= ENOUGH_OUTPUTS and self._inner is not None:
            inner = self._inner.statistics()
            self._saw(course.window.pace(_spent_s(inner), inner.bytes), inner)

    # The rest

    def note_state(self) -> Callable[[], dict[str, Any]]:
        saved, cut = self._resting, self._way.cut.name
        inner = None if self._inner is None else self._inner.note_state()

        def made() -> dict[str, Any]:
            if inner is not None:
                state = SavedState.read(inner())
            elif saved is not None:
                state = saved[0]
            else:
                return self._save("start", None, None, 0, cut)
            if state.phase == "reading" and state.place is None:
                return self._save("start", None, state.weights, state.skipped, cut)
            return self._save(state.phase, state.place, state.weights, state.skipped, cut)

        return made

    def _save(self, phase: Phase, place: Any, weights: Weights | None, skipped: int, cut: str) -> dict[str, Any]:
        return save(
            self._kind,
            epoch=self._epoch,
            seed=self._seed,
            phase=phase,
            weights=weights or self._weights,
            place=place,
            skipped=skipped,
            cut=cut,
        )

    def set_weights(self, weights: Weights) -> None:
        if self._inner is not None:
            self._inner.set_weights(weights)
        self._weights = weights

    def statistics(self) -> LoaderStatistics:
        """Of the present way, but for what is counted over all of them: outputs, times and bytes."""
        inner = LoaderStatistics() if self._inner is None else self._inner.statistics()
        return replace(
            inner,
            elements=self._outputs,
            wait_s=self._wait_s,
            run_s=self._run_s,
            bytes=self._bytes_before + inner.bytes,
        )

    def close(self, why: Exception | None = None) -> None:
        if not self._ended:
            self._closed_for = why
        if self._inner is not None:
            self._inner.close(why)


def _spent_s(inner: LoaderStatistics) -> float:
    """Return the processor time of this process so far; a thread that waits inside an operator is as good as busy."""
    stages = [stage for stage in inner.stages if not stage.name.startswith(READING)]
    return process_time() + sum(max(0.0, stage.busy_s - stage.cpu_s) for stage in stages)
