"""From beats to `Measured`: what a job did between two looks at the counters of all who read and serve it.

Whoever counts does so from zero on and by its own clock, so that a window is the difference of two counts, and how long
a beat was on its way changes nothing. A reader's seconds are those it was busy and those it waited: the time between
two epochs is in no window. A rank's counts go on from epoch to epoch, over the readers that it has in them: a window
may hold several epochs, or the end of one and the beginning of the next.

- A worker's rate is taken from workers that waited for credit for less than 1 - FULL of the window, and had something
  to do: at the end of an epoch some have no stream that runs.
- A stage that has one thread and is never idle is as good as a processor in use, whatever it does: it can do no more.
- Until a worker has made its first output it starts, imports and opens: a window begins anew with that (`scaling`).
- A worker counts by its size, and its rate is that of so many workers of size 1.
- A worker that waits for credit holds one batch that is made and not sent; what its engine has made ahead is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.control.figures import reading_leases
from penstock.control.records import Runner
from penstock.control.scaling_records import JobCounters
from penstock.control.state import ClusterState
from penstock.control.totals import JobTotals, runner_figures, sum_beats
from penstock.core.ids import JobName, RunnerId
from penstock.policies.scaling.records import Measured, ReaderPace, leading_pace
from penstock.wire.figures import RunnerFigures, StageFigures
from penstock.wire.jobs import Slot
from penstock.wire.messages import Beat

WINDOW_S = 1.5  # a beat a second of each: one or two are in it, and their own clocks say how far they are apart
LONGEST_WINDOW_S = 30.0  # of a trainer whose steps are long
FEWEST_BATCHES = 8  # of each rank: a mean over fewer says little
FULL = 0.95


def count(state: ClusterState, job: JobName, now: float) -> JobCounters:
    """Return what all had counted when they were last heard."""
    totals = state.totals.get(job, JobTotals())
    by_slot = {slot: {beat.client: beat for beat in reversed(past)} for slot, past in totals.readers.items()}
    leases = reading_leases(state, job)
    for lease in leases:
        if lease.beats:
            by_slot.setdefault(lease.slot, {})[lease.client] = lease.beats[-1]
    readers = {slot: sum_beats(beats.values()) for slot, beats in by_slot.items()}
    runners, sizes = {}, {}
    for runner in (state.runners.get(job) or {}).values():
        figures = _last_figures(state, runner) if runner.ready else None
        if figures is not None:
            runners[runner.runner] = figures
            sizes[runner.runner] = state.allotted.sizes.size(runner.worker)
    return JobCounters(now, readers, runners, frozenset(lease.slot for lease in leases), sizes)


def serving(state: ClusterState, job: JobName) -> frozenset[RunnerId]:
    """Return the processes that serve a job, whether anything is known of them in numbers or not."""
    runners = state.runners.get(job)
    return frozenset() if runners is None else frozenset(runner.runner for runner in runners.ready())


def _last_figures(state: ClusterState, runner: Runner) -> RunnerFigures | None:
    worker = state.workers.get(runner.worker)
    agent = None if worker is None else state.agents.get(worker.agent)
    for told in reversed(agent.told if agent is not None else ()):
        if runner.runner in told:
            try:
                return runner_figures(told[runner.runner])
            except msgspec.ValidationError:
                return None  # of another release
    return None


def has_ended(before: JobCounters, now: JobCounters) -> bool:
    """Say whether a window is long enough: all were heard again, and readers took enough to tell a mean."""
    took_s = now.at_s - before.at_s
    if took_s < WINDOW_S:
        return False
    if took_s >= LONGEST_WINDOW_S:
        return True
    if any(now.readers[slot].at_s == before.readers[slot].at_s for slot in before.readers.keys() & now.readers):
        return False
    if any(now.runners[r].at_s - before.runners[r].at_s < WINDOW_S / 2 for r in before.runners.keys() & now.runners):
        return False
    ranks = _by_slot(before, now)
    return bool(ranks) and min(batches for batches, _, _ in ranks.values()) >= FEWEST_BATCHES


def measure(before: JobCounters, now: JobCounters, *, width: int) -> Measured:
    """Return the window between two counts. `width` is how many batches a round of a worker has, one for each rank."""
    ranks = _by_slot(before, now)
    pace, seconds = _leading(ranks)
    same = [runner for runner in now.runners if runner in before.runners]
    runners = [(before.runners[runner], now.runners[runner]) for runner in same]
    sizes = [now.sizes.get(runner, 1.0) for runner in same]
    rates, held, full = 0.0, [], 0.0
    for (was, now_is), size in zip(runners, sizes):
        took_s = max(now_is.at_s - was.at_s, 1e-9)
        credit, busy_s = now_is.credit_wait_s - was.credit_wait_s, now_is.busy_s - was.busy_s
        waited = credit / (credit + busy_s) if credit + busy_s > 0 else 0.0
        held.append(waited)
        if 1 - waited >= FULL and (busy_s or was.streams or now_is.streams):
            rates += width * (now_is.rounds - was.rounds) / took_s
            full += size
    use = [_use(was, now_is) for was, now_is in runners]
    queued = [beat.buffered_elements for slot, beat in now.readers.items() if not slot.replica]
    return Measured(
        seconds=seconds or now.at_s - before.at_s,
        workers=sum(sizes),
        pace=pace,
        worker_per_s=rates / full if full else None,
        busy=_mean(max(1 - waited, used) for waited, used in zip(held, (stages for _, stages, _ in use))),
        queue=_mean(queued),
        buffered=_mean(held),
        processor=_mean(processor for processor, _, _ in use),
        memory=_mean(memory for _, _, memory in use),
        filled=not any(_threads(now_is) > _threads(was) for was, now_is in runners),
    )


def _by_slot(before: JobCounters, now: JobCounters) -> dict[Slot, tuple[float, float, float]]:
    """Return (batches, busy seconds, waiting seconds) of each rank in the window. Replicas read what their rank does.

    One that was not there at its beginning has counted from zero on; one that reads no more counts if it has read.
    """
    grown = {slot: _grown(before.readers.get(slot), beat) for slot, beat in now.readers.items() if not slot.replica}
    return {slot: each for slot, each in grown.items() if slot in now.reading or any(each)}


def _grown(was: Beat | None, beat: Beat) -> tuple[float, float, float]:
    if was is None:
        return beat.batches, beat.run_s, beat.wait_s
    return beat.batches - was.batches, beat.run_s - was.run_s, beat.wait_s - was.wait_s


def _leading(ranks: dict[Slot, tuple[float, float, float]]) -> tuple[ReaderPace | None, float]:
    """Return the trainer with the largest demand, and how many seconds its window has."""
    paces: dict[str, tuple[ReaderPace, float]] = {}
    for trainer in dict.fromkeys(slot.trainer for slot in ranks):
        own = [each for slot, each in ranks.items() if slot.trainer == trainer]
        batches, run_s, wait_s = (sum(each[at] for each in own) for at in range(3))
        taken = max(batches, 1e-9)
        pace = ReaderPace(batches=batches, step_s=run_s / taken, wait_s=wait_s / taken, ranks=len(own))
        if batches:
            paces[trainer] = pace, (run_s + wait_s) / len(own)
    leading = leading_pace(pace for pace, _ in paces.values())
    if leading is None:
        return None, 0.0
    return next(each for each in paces.values() if each[0] is leading)


def _use(was: RunnerFigures, now: RunnerFigures) -> tuple[float, float, float]:
    """Return what a worker uses of its processor, how busy its busiest stage is, and its share of its memory."""
    took_s = max(now.at_s - was.at_s, 1e-9)
    processor = (now.cpu_s - was.cpu_s) / took_s / max(now.threads, 1)
    earlier = {(stage.node, stage.name): stage for stage in was.stages}
    stages = [(stage, _busy(earlier.get((stage.node, stage.name)), stage) / took_s) for stage in now.stages]
    busiest = max((busy / max(stage.threads, 1) for stage, busy in stages), default=0.0)
    single = max((busy for stage, busy in stages if stage.threads <= 1), default=0.0)
    memory = now.rss_bytes / now.memory_bytes if now.memory_bytes else 0.0
    return min(max(processor, single), 1.0), min(busiest, 1.0), min(memory, 1.0)


def _busy(was: StageFigures | None, stage: StageFigures) -> float:
    return stage.busy_s - (0.0 if was is None else was.busy_s)


def _threads(figures: RunnerFigures) -> int:
    return sum(stage.threads for stage in figures.stages)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def numbers_of(measured: Measured) -> dict[str, float]:
    """Return what a decision is told with."""
    found = {
        "workers": measured.workers,
        "demand_per_s": measured.demand_per_s,
        "taken_per_s": measured.taken_per_s,
        "waiting": measured.waiting,
        "busy": measured.busy,
        "processor": measured.processor,
    }
    if measured.worker_per_s is not None:
        found["worker_per_s"] = measured.worker_per_s
    return {name: float(f"{value:.4g}") for name, value in found.items()}
