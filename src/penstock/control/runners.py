"""Which processes should exist: one a worker and job, for jobs that somebody reads.

`settle` brings a job's processes and streams in line with the state, whatever has just changed; every decision that may
change who is there ends with it. Asked twice, it does nothing the second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from penstock.control import events as e
from penstock.control.completing import complete
from penstock.control.draft import Draft
from penstock.control.fitting import asked_of, fitting_workers, is_given, misfit, most_workers, runners_of
from penstock.control.placing import place_streams, release_streams
from penstock.control.records import Job, Runner, Worker
from penstock.core.ids import JobName, RunnerId, WorkerId
from penstock.wire.messages import StartRunner, StopRunner

START_TIMEOUT_S = 90.0  # a framework is imported first: from a slow disk, on a busy host, that takes most of a minute
LINGER_S = 3.0  # the next epoch of a loader that is iterated again finds its processes warm
RESTART_GRACE_S = 30.0  # after a dispatcher's restart, clients have that long to be heard again
FIRST_BACKOFF_S = 0.5  # a process that dies while starting will likely do so again: not at full speed
LONGEST_BACKOFF_S = 10.0


def settle(draft: Draft, name: JobName) -> None:
    """Start and stop a job's processes, and give them its streams, whatever may have changed."""
    state = draft.state
    job = state.jobs.get(name)
    keep = job is not None and is_kept(draft, job)
    fitting = fitting_workers(state, job) if job is not None and keep else []
    allowed = {worker.worker for worker in fitting}
    for runner in runners_of(state, name).values():
        if runner.worker not in allowed:
            stop_runner(draft, runner, "stopped: the job does not need this process any more")
        elif not runner.ready and draft.now - runner.since > START_TIMEOUT_S:
            reason = f"stopped: not ready within {START_TIMEOUT_S:.0f} s"
            stop_runner(draft, runner, reason)
            _back_off(draft, runner, reason)
    if job is None:
        return
    for iteration in draft.iterations(name):
        complete(draft, name, iteration.attempt)  # a stream given up may have been the last
    if keep and _must_run(draft, name):
        _start_on(draft, name, fitting)
    place_streams(draft, name)


def settle_all(draft: Draft) -> None:
    for name in {**draft.state.jobs, **draft.state.runners}:
        settle(draft, name)


def settle_arrived(draft: Draft, workers: Collection[WorkerId], runners: Sequence[Runner]) -> None:
    """Do what `settle_all` does where nothing changed but that these workers and processes have come.

    Its cost does not grow with how many others there are: they are where the last `settle` left them.
    """
    arrived: dict[JobName, list[Runner]] = {}
    for runner in runners:
        arrived.setdefault(runner.job, []).append(runner)
    for name in {**draft.state.jobs, **draft.state.runners} if workers else arrived:
        job = draft.state.jobs.get(name)
        here = [runner for worker in workers for runner in runners_of(draft.state, name).on(worker)]
        if job is None or not is_kept(draft, job) or not all(_still_fits(draft, job, runner) for runner in here):
            settle(draft, name)
            continue
        if workers and _must_run(draft, name):
            unserved = (w for w in sorted(workers) if not runners_of(draft.state, name).on(w))
            found = [draft.state.workers[worker] for worker in unserved]
            fitting = [
                worker
                for worker in found
                if misfit(draft.state, job.spec, worker) is None and is_given(draft.state, job, worker.worker)
            ]
            most = most_workers(job.spec)
            if (
                most is not None and asked_of(job) is None
            ):  # below it, all others that fit are served, or are to be spared for a while
                fitting = fitting[: max(0, most - len(runners_of(draft.state, name)))]
            _start_on(draft, name, fitting)
        if name in arrived:
            place_streams(draft, name, arrived[name])


def _still_fits(draft: Draft, job: Job, runner: Runner) -> bool:
    worker = draft.state.workers.get(runner.worker)
    if worker is None or misfit(draft.state, job.spec, worker) is not None:
        return False
    return asked_of(job) is None or draft.state.allotted.spares(job.name, runner.worker)


def _start_on(draft: Draft, name: JobName, workers: Iterable[Worker]) -> None:
    """Ask for a process on each of these workers that has none and is not to be spared for a while."""
    for worker in workers:
        failed = draft.state.failed_starts.get((worker.worker, name))
        if not runners_of(draft.state, name).on(worker.worker) and (failed is None or failed.not_before <= draft.now):
            runner_id = RunnerId(draft.draw())
            draft.emit(e.RunnerAsked(name, worker.worker, runner_id, draft.now))
            draft.push_to_worker(worker.worker, start_of(draft.state.runners[name][runner_id]))


def start_of(runner: Runner) -> StartRunner:
    return StartRunner(worker=runner.worker, job=runner.job, runner=runner.runner)


def is_kept(draft: Draft, job: Job) -> bool:
    """Whether processes that are there stay."""
    if job.paused or job.failure:
        return False
    idle_since = draft.state.idle_since.get(job.name)
    if idle_since is None:
        return True
    began_at, restarted = draft.state.began_at, draft.state.generation > 1
    may_come_back = restarted and began_at is not None and draft.now - began_at <= RESTART_GRACE_S
    return draft.now - idle_since <= LINGER_S or may_come_back


def _must_run(draft: Draft, name: JobName) -> bool:
    """Whether processes that are not there are started: somebody reads an epoch that has not finished."""
    read = {lease.attempt for lease in draft.state.leases(name)}
    return any(iteration.attempt in read and iteration.needs_runners for iteration in draft.iterations(name))


def stop_runner(draft: Draft, runner: Runner, reason: str) -> None:
    """End a process that is alive: its streams go on elsewhere, at their cuts."""
    draft.push_to_worker(runner.worker, StopRunner(runner=runner.runner, reason=reason))
    remove_runner(draft, runner, reason, graceful=True)


def remove_runner(draft: Draft, runner: Runner, reason: str, *, graceful: bool) -> None:
    draft.emit(e.RunnerRemoved(runner.job, runner.runner, reason))
    release_streams(draft, runner.job, runner.runner, reason, graceful=graceful)


def runner_died(draft: Draft, runner: Runner, reason: str) -> None:
    remove_runner(draft, runner, reason, graceful=False)
    if not runner.ready:
        _back_off(draft, runner, reason)


def _back_off(draft: Draft, runner: Runner, reason: str) -> None:
    failed = draft.state.failed_starts.get((runner.worker, runner.job))
    wait_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (0 if failed is None else failed.count))
    draft.emit(e.StartFailed(runner.job, runner.worker, reason, draft.now + wait_s))
