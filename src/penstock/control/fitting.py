"""Which workers may serve which job, and what to tell people when none may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from penstock.control.records import Agent, Iteration, Job, Runner, Worker
from penstock.control.state import ClusterState
from penstock.core.ids import RunnerId, WorkerId
from penstock.wire.jobs import JobSpec

Hindrance: TypeAlias = Literal["leaving", "tags", "host", "versions"]


class Misfit(msgspec.Struct, frozen=True):
    """Why a worker is not used."""

    kind: Hindrance
    text: str = ""


def misfit(state: ClusterState, spec: JobSpec, worker: Worker) -> Misfit | None:
    """Return why `worker` may not serve a job of this spec, or None: it may."""
    agent = state.agents[worker.agent]
    if worker.leaving or worker.worker in state.drained:
        return Misfit("leaving")
    if not set(spec.requires) <= set(worker.tags):
        return Misfit("tags")
    if (spec.target == "local" and agent.host != spec.host) or (spec.target == "remote" and agent.host == spec.host):
        return Misfit("host")
    differing = differing_versions(spec, agent)
    if differing:
        return Misfit("versions", f"worker {worker.worker!r} has {', '.join(differing)}")
    return None


def differing_versions(spec: JobSpec, agent: Agent) -> list[str]:
    """Return each package whose version there is not the job's: Python by minor, numpy by major, others exactly.

    A package that is not installed there may be had under another name (opencv-python, opencv-python-headless): the
    process that imports it will tell.
    """
    there = agent.versions
    return [
        f"{package} {there[package]} instead of {version}"
        for package, version in spec.versions
        if package in there and _relevant(package, version) != _relevant(package, there[package])
    ]


def _relevant(package: str, version: str) -> tuple[str, ...]:
    """
    >>> _relevant("python", "3.11.9"), _relevant("numpy", "2.1.0"), _relevant("tiktoken", "0.7.0")
    (('3', '11'), ('2',), ('0.7.0',))
    """
    match package:
        case "python":
            return tuple(version.split(".")[:2])
        case "numpy":
            return tuple(version.split(".")[:1])
        case _:
            return (version,)


def fitting_workers(state: ClusterState, job: Job) -> list[Worker]:
    """Return the workers to serve a job: those that do already first, then the least busy."""
    spec = job.spec
    serving = {runner.worker for runner in state.runners.get(job.name, {}).values()}
    busy: dict[WorkerId, int] = {}
    for runners in state.runners.values():
        for runner in runners.values():
            busy[runner.worker] = busy.get(runner.worker, 0) + 1
    found = [worker for worker in state.workers.values() if misfit(state, spec, worker) is None]
    found.sort(key=lambda worker: (worker.worker not in serving, busy.get(worker.worker, 0), worker.worker))
    return found[: _most_workers(spec, len(found))]


def _most_workers(spec: JobSpec, found: int) -> int:
    most = found if spec.max_workers == 0 else min(found, spec.max_workers)
    fixed = fixed_streams(spec)
    return most if fixed is None else min(most, max(1, fixed))


def spec_of(job: Job, iteration: Iteration) -> JobSpec:
    """Return the job as one of its epochs has it: one that goes on from a checkpoint has the streams it had there."""
    if job.spec.feeds or not iteration.width:
        return job.spec
    return msgspec.structs.replace(job.spec, streams=iteration.width)


def fixed_streams(spec: JobSpec) -> int | None:
    """Return the number of streams where it is the job's to say, or None: as workers join."""
    if spec.sharding == "off":
        return None
    if spec.feeds:
        return len(spec.feeds)
    return max(1, spec.streams) if spec.order == "deterministic" or spec.coordinated else None


def ready_runners(state: ClusterState, job: Job) -> dict[RunnerId, Runner]:
    """Return the processes that serve a job and may be given streams."""
    return {
        runner.runner: runner
        for runner in state.runners.get(job.name, {}).values()
        if runner.ready
        and (worker := state.workers.get(runner.worker)) is not None
        and not worker.leaving
        and worker.worker not in state.drained
    }


def version_failure(state: ClusterState, job: Job) -> str:
    """Return why no worker can run the job's code, or an empty text: one can, or none is there."""
    reasons = []
    for worker in state.workers.values():
        found = misfit(state, job.spec, worker)
        if found is None:
            return ""
        if found.kind == "versions":
            reasons.append(found.text)
    if not reasons:
        return ""
    return (
        f"version mismatch: {'; '.join(sorted(reasons))}; install the trainer's versions there, or start other workers"
    )


def waiting_for_runners(state: ClusterState, job: Job, ready: Mapping[RunnerId, Runner]) -> str:
    """Return what keeps a job from having a process; empty: it has one."""
    if ready:
        return ""
    if not state.workers:
        return "no worker is connected"
    kinds = {found.kind if (found := misfit(state, job.spec, w)) else None for w in state.workers.values()}
    if None in kinds:
        failed = [f for (_, name), f in state.failed_starts.items() if name == job.name]
        if failed:
            return f"a worker's process ended before it was ready: {failed[-1].reason}"
        return "a worker's process is starting"
    if "versions" in kinds:
        return "no worker has the trainer's versions"
    if "host" in kinds:
        return (
            "no worker runs on the trainer's host"
            if job.spec.target == "local"
            else "no worker runs on another host than the trainer's"
        )
    if "tags" in kinds:
        return f"no worker has the tags {', '.join(job.spec.requires)}"
    return "all workers are being drained"
