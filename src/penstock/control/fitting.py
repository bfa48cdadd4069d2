"""Which workers may serve which job, and what to tell people when none may."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from penstock.control.records import Agent, Iteration, Job, Runner, Runners, Worker
from penstock.control.state import ClusterState
from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.wire.jobs import JobSpec, delivery_of
from penstock.wire.modes import WorkersAsked, guest_of

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
    if not set(spec.placement.requires) <= set(worker.tags):
        return Misfit("tags")
    if not spec.placement.takes(agent.host, creator=spec.host, tags=worker.tags):
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


def asked_of(job: Job) -> WorkersAsked:
    """Return how many workers somebody wants a job to have; None: nobody said, and it has all that fit."""
    return job.spec.placement.workers if job.scaling.asked is None else job.scaling.asked


def is_given(state: ClusterState, job: Job, worker: WorkerId) -> bool:
    """Say whether a worker that fits a job is the job's to use."""
    return asked_of(job) is None or worker in state.allotted.workers.get(job.name, ())


def fitting_workers(state: ClusterState, job: Job) -> list[Worker]:
    """Return the workers to serve a job: those that do already first, then guests of its trainer, then the least busy.

    Of one that is scaled: those it was given, and those on which it is and that have not been dealt since they came.
    """
    spec = job.spec
    serving = {runner.worker for runner in runners_of(state, job.name).values()}
    if asked_of(job) is not None:
        kept = (worker for worker in serving if state.allotted.spares(job.name, worker))
        names = dict.fromkeys((*state.allotted.workers.get(job.name, ()), *sorted(kept)))
        known = [worker for name in names if (worker := state.workers.get(name)) is not None]
        return [worker for worker in known if misfit(state, spec, worker) is None]
    busy: dict[WorkerId, int] = {}
    for runners in state.runners.values():
        for runner in runners.values():
            busy[runner.worker] = busy.get(runner.worker, 0) + 1
    found = [worker for worker in state.workers.values() if misfit(state, spec, worker) is None]
    found.sort(
        key=lambda each: (
            each.worker not in serving,
            not guest_of(each.tags),
            busy.get(each.worker, 0),
            each.worker,
        )
    )
    return found[: most_workers(spec)]


def most_workers(spec: JobSpec) -> int | None:
    """Return how many workers serve a job at most; None: all that fit."""
    fixed = delivery_of(spec).streams
    limits = [limit for limit in (spec.placement.max_workers, None if fixed is None else max(1, fixed)) if limit]
    return min(limits, default=None)


def spec_of(job: Job, iteration: Iteration) -> JobSpec:
    """Return the job as one of its epochs has it: one that goes on from a checkpoint has the streams it had there."""
    if job.spec.feeds or not iteration.width:
        return job.spec
    return job.spec.with_streams(iteration.width)


def runners_of(state: ClusterState, name: JobName) -> Runners:
    return state.runners.get(name) or Runners()


def may_take_streams(state: ClusterState, runner: Runner) -> bool:
    worker = state.workers.get(runner.worker) if runner.ready else None
    return worker is not None and not worker.leaving and worker.worker not in state.drained


def ready_runners(state: ClusterState, job: Job) -> dict[RunnerId, Runner]:
    """Return the processes that serve a job and may be given streams."""
    serving = runners_of(state, job.name).ready()
    return {runner.runner: runner for runner in serving if may_take_streams(state, runner)}


def is_served(state: ClusterState, job: Job) -> bool:
    """Say whether there is such a process."""
    return any(may_take_streams(state, runner) for runner in runners_of(state, job.name).ready())


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


def waiting_for_runners(state: ClusterState, job: Job) -> str:
    """Return what keeps a job from having a process; empty: it has one."""
    if is_served(state, job):
        return ""
    if not state.workers:
        return "no worker is connected"
    if asked_of(job) is not None and not state.allotted.workers.get(job.name):
        shortage = state.allotted.shortages.get(job.name)
        if shortage:
            return f"no worker is free for it: {shortage}"
    kinds: set[Hindrance] = set()
    for worker in state.workers.values():
        found = misfit(state, job.spec, worker)
        if found is None:
            failed = [f for (_, name), f in state.failed_starts.items() if name == job.name]
            if failed:
                return f"a worker's process ended before it was ready: {failed[-1].reason}"
            return "a worker's process is starting"
        kinds.add(found.kind)
    if "versions" in kinds:
        return "no worker has the trainer's versions"
    if "host" in kinds and job.spec.placement.guests:
        here = job.spec.placement.target == "local"
        return "the trainer's guest workers have not joined" if here else "there are no workers but guests"
    if "host" in kinds:
        return (
            "no worker runs on the trainer's host"
            if job.spec.placement.target == "local"
            else "no worker runs on another host than the trainer's"
        )
    if "tags" in kinds:
        return f"no worker has the tags {', '.join(job.spec.placement.requires)}"
    return "all workers are being drained"
