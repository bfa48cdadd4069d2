"""What agents and clients said of themselves with their last beats, job by job. Kept in memory only.

Rates are taken over the few beats that are kept, by the clock of whoever counted: how long a beat was on its way, or
was waited for, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from penstock.control.records import Lease
from penstock.control.state import ClusterState
from penstock.control.totals import JobTotals, samples_of, sum_beats, sum_runners
from penstock.core.ids import ClientId, JobName, WorkerId
from penstock.wire.figures import JobFigures, RunnerFigures, TrainerFigures, WaitsFor, WorkerFigures
from penstock.wire.jobs import Slot
from penstock.wire.messages import Beat

MOSTLY = 0.5
"""The share of the time from which on something is what a worker waits for."""

Sample = TypeVar("Sample", RunnerFigures, Beat)


class ServingRunner(NamedTuple):
    """A process in a worker's place, for one job."""

    job: JobName
    worker: WorkerId
    samples: tuple[RunnerFigures, ...]
    """What it said lately, oldest first; at least one."""

    @property
    def figures(self) -> RunnerFigures:
        return self.samples[-1]


class ReadingClient(NamedTuple):
    """A consumer that reads a job now, and what it said last."""

    job: JobName
    slot: Slot
    beat: Beat


def serving_runners(state: ClusterState, only: JobName | None = None) -> tuple[ServingRunner, ...]:
    """Return what is known of the processes that serve; there is one a job and worker."""
    found: dict[tuple[JobName, WorkerId], ServingRunner] = {}
    for job, runners in state.runners.items():
        for runner in runners.values() if only in (None, job) else ():
            worker = state.workers.get(runner.worker)
            agent = None if worker is None else state.agents.get(worker.agent)
            samples = () if agent is None or not runner.ready else samples_of(agent, runner.runner)
            if samples:
                found[job, runner.worker] = ServingRunner(job, runner.worker, samples)
    return tuple(found.values())


def reading_clients(state: ClusterState) -> tuple[ReadingClient, ...]:
    found: dict[tuple[JobName, Slot], ReadingClient] = {}
    for job in state.clients:
        for lease in reading_leases(state, job):
            if lease.beats:
                found[job, lease.slot] = ReadingClient(job, lease.slot, lease.beats[-1])
    return tuple(found.values())


def per_second(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    """Return how fast a value grew over the samples.

    >>> per_second([RunnerFigures(at_s=2.0, rounds=10), RunnerFigures(at_s=4.0, rounds=40)], lambda s: s.rounds)
    15.0
    """
    took_s = samples[-1].at_s - samples[0].at_s if samples else 0.0
    return (value(samples[-1]) - value(samples[0])) / took_s if took_s > 0 else 0.0


def waits_for(samples: Sequence[RunnerFigures]) -> WaitsFor:
    """Say what holds a process up.

    >>> before = RunnerFigures(at_s=0.0, streams=1)
    >>> waits_for([before, RunnerFigures(at_s=10.0, streams=1, credit_wait_s=9.0, busy_s=1.0)])
    'credit'
    >>> waits_for([before, RunnerFigures(at_s=10.0, streams=1, busy_s=10.0, cores=1.0)])
    'processor'
    >>> waits_for([before, RunnerFigures(at_s=10.0, streams=1, busy_s=10.0, cores=0.1)])
    'input'
    """
    now = samples[-1]
    credit, busy = per_second(samples, lambda s: s.credit_wait_s), per_second(samples, lambda s: s.busy_s)
    if not now.streams or not credit + busy:
        return ""
    if credit / (credit + busy) >= MOSTLY:
        return "credit"
    return "processor" if now.cores >= MOSTLY * busy else "input"


def job_figures(state: ClusterState, job: JobName) -> JobFigures:
    """Return all that is known in numbers of a job."""
    serving = serving_runners(state, job)
    totals = state.totals.get(job, JobTotals())
    total = sum_runners([totals.runners, *(each.figures for each in serving)])
    workers = tuple(_worker(state, each) for each in serving)
    return JobFigures(
        job=job,
        outputs=total.rounds,
        sent_bytes=total.nbytes,
        busy_s=total.busy_s,
        credit_wait_s=total.credit_wait_s,
        cpu_s=total.cpu_s,
        outputs_per_s=sum(worker.outputs_per_s for worker in workers),
        sent_bytes_per_s=sum(worker.sent_bytes_per_s for worker in workers),
        stages=total.stages,
        workers=workers,
        trainers=_trainers(totals, reading_leases(state, job)),
    )


def reading_leases(state: ClusterState, job: JobName) -> list[Lease]:
    """Return the leases of those who read: of an epoch that was opened ahead nobody has taken anything."""
    found = []
    for lease in state.leases(job):
        iteration = state.iteration(job, lease.attempt)
        held = None if iteration is None else iteration.opened.get(lease.slot)
        if held is None or not (held.ahead and held.client == lease.client):
            found.append(lease)
    return found


def _worker(state: ClusterState, serving: ServingRunner) -> WorkerFigures:
    figures, samples = serving.figures, serving.samples
    return WorkerFigures(
        worker=serving.worker,
        host=state.agents[state.workers[serving.worker].agent].host,
        kind=figures.kind,
        streams=figures.streams,
        outputs=figures.rounds,
        sent_bytes=figures.nbytes,
        busy_s=figures.busy_s,
        credit_wait_s=figures.credit_wait_s,
        cpu_s=figures.cpu_s,
        outputs_per_s=per_second(samples, lambda s: s.rounds),
        sent_bytes_per_s=per_second(samples, lambda s: s.nbytes),
        cores=figures.cores,
        threads=figures.threads,
        resident_bytes=figures.rss_bytes,
        memory_bytes=figures.memory_bytes,
        waits_for=waits_for(samples),
        stages=figures.stages,
    )


def _trainers(totals: JobTotals, leases: Sequence[Lease]) -> tuple[TrainerFigures, ...]:
    by_slot: dict[Slot, dict[ClientId, Beat]] = {
        slot: {beat.client: beat for beat in past} for slot, past in totals.readers.items()
    }
    reading: dict[Slot, tuple[Beat, ...]] = {}
    for lease in leases:
        if lease.beats:
            by_slot.setdefault(lease.slot, {})[lease.client] = lease.beats[-1]
            reading[lease.slot] = lease.beats
    return tuple(_trainer(slot, sum_beats(beats.values()), reading.get(slot, ())) for slot, beats in by_slot.items())


def _trainer(slot: Slot, total: Beat, now: Sequence[Beat]) -> TrainerFigures:
    waiting, running = per_second(now, lambda b: b.wait_s), per_second(now, lambda b: b.run_s)
    return TrainerFigures(
        rank=slot.consumer,
        replica=slot.replica,
        trainer=slot.trainer,
        batches=total.batches,
        nbytes=total.nbytes,
        wait_s=total.wait_s,
        run_s=total.run_s,
        skipped=total.skipped,
        shared=total.shared,
        batches_per_s=per_second(now, lambda b: b.batches),
        wait_fraction=waiting / (waiting + running) if waiting + running > 0 else 0.0,
        buffered_elements=now[-1].buffered_elements if now else 0,
        buffered_bytes=now[-1].buffered_bytes if now else 0,
    )
