"""What agents and clients said of themselves with their last beats, job by job. Kept in memory only."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.control.records import Agent
from penstock.control.state import ClusterState
from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.wire.jobs import Slot
from penstock.wire.messages import Beat, RunnerFigures


class WorkerFigures(msgspec.Struct, frozen=True):
    """A process in a worker's place, for one job."""

    job: JobName
    worker: WorkerId
    figures: RunnerFigures


class ClientFigures(msgspec.Struct, frozen=True):
    """A consumer that reads a job now."""

    job: JobName
    slot: Slot
    beat: Beat


def worker_figures(state: ClusterState) -> tuple[WorkerFigures, ...]:
    """Return what is known of the processes that serve; there is one a job and worker."""
    told = {runner: figures for agent in state.agents.values() for runner, figures in _told_by(agent)}
    found: dict[tuple[JobName, WorkerId], WorkerFigures] = {}
    for job, runners in state.runners.items():
        for runner in runners.values():
            if runner.ready and runner.runner in told:
                found[job, runner.worker] = WorkerFigures(job, runner.worker, told[runner.runner])
    return tuple(found.values())


def _told_by(agent: Agent) -> Iterator[tuple[RunnerId, RunnerFigures]]:
    for runner, told in agent.statistics.items():
        try:
            yield RunnerId(runner), msgspec.convert(told, RunnerFigures)
        except msgspec.ValidationError:
            continue  # of another release


def client_figures(state: ClusterState) -> tuple[ClientFigures, ...]:
    found: dict[tuple[JobName, Slot], ClientFigures] = {}
    for job, leases in state.clients.items():
        for lease in leases.values():
            if lease.beat is not None:
                found[job, lease.slot] = ClientFigures(job, lease.slot, lease.beat)
    return tuple(found.values())
