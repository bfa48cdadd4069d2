"""Requests of agents: which workers there are, which processes serve, which have ended."""

from __future__ import annotations

from penstock.control import events as e
from penstock.control.blaming import blame
from penstock.control.draft import Draft
from penstock.control.placing import release_streams
from penstock.control.records import Runner
from penstock.control.runners import remove_runner, runner_died, settle, settle_all, stop_runner
from penstock.core.ids import AgentId, JobName, RunnerId, WorkerId
from penstock.wire.messages import (
    AgentBeat,
    AgentLeaving,
    Answer,
    Done,
    DrainWorker,
    NotKnown,
    Refused,
    RegisterAgent,
    RunnerGone,
    RunnerPlace,
    RunnerReady,
    StopRunner,
)


def register_agent(draft: Draft, request: RegisterAgent, peer: str) -> Answer:
    """Take an agent's word for what it has: processes it does not name are gone, others go on."""
    workers = {place.worker for place in request.workers}
    dropped = [w.worker for w in draft.state.workers.values() if w.agent == request.agent and w.worker not in workers]
    draft.emit(e.AgentRegistered(request.agent, peer, request.host, request.workers, request.versions, draft.now))
    serving = {place.runner: place for place in request.runners}
    for runner in _runners_on(draft, {*workers, *dropped}):
        if runner.ready and runner.runner not in serving:
            runner_died(draft, runner, f"agent {request.agent!r} does not have this process")
    for place in request.runners:
        _serve(draft, place, peer)
    for name in list(draft.state.jobs):
        _release_unknown(draft, name, workers)
    settle_all(draft)
    draft.publish()
    return Done()


def _serve(draft: Draft, place: RunnerPlace, peer: str) -> None:
    """Take a process into service, unless its job or its place is somebody else's by now."""
    state = draft.state
    present = [r for r in state.runners.get(place.job, {}).values() if r.worker == place.worker]
    rivals = [r for r in present if r.runner != place.runner]
    if place.job not in state.jobs or place.worker not in state.workers or any(r.ready for r in rivals):
        draft.pushes.append(
            (peer, StopRunner(runner=place.runner, reason="stopped: the job does not need this process"))
        )
        return
    for rival in rivals:
        stop_runner(draft, rival, "stopped: an older process serves in its place")
    if not any(r.runner == place.runner and r.ready and r.address == place.address for r in present):
        draft.emit(e.RunnerServes(place.job, place.worker, place.runner, place.address, draft.now))


def _release_unknown(draft: Draft, name: JobName, workers: set[WorkerId]) -> None:
    """After a restart: streams bound to processes of these workers that are no more."""
    known = draft.state.runners.get(name, {})
    gone: dict[RunnerId, None] = {}
    for iteration in draft.iterations(name):
        for stream in iteration.streams.values():
            if stream.bound is not None and stream.bound.worker in workers and stream.bound.runner not in known:
                gone[stream.bound.runner] = None
    for runner in gone:
        release_streams(draft, name, runner, "its process is gone", graceful=False)


def _runners_on(draft: Draft, workers: set[WorkerId]) -> list[Runner]:
    return [r for runners in draft.state.runners.values() for r in runners.values() if r.worker in workers]


def agent_beat(draft: Draft, request: AgentBeat, peer: str) -> Answer:
    agent = draft.state.agents.get(request.agent)
    if agent is None:
        return NotKnown(what=f"agent {request.agent!r}")
    for worker in agent.workers:
        if worker not in draft.state.workers:
            # A late word of the agent that had it before took it over, and was then lost with it.
            return NotKnown(what=f"worker {worker!r} of agent {request.agent!r}")
    draft.emit(e.AgentSeen(request.agent, peer, draft.now, request.statistics, request.runners))
    for runner in request.runners:
        if not any(runner in runners for runners in draft.state.runners.values()):
            draft.pushes.append((peer, StopRunner(runner=runner, reason="stopped: nobody knows this process any more")))
    return Done()


def runner_ready(draft: Draft, request: RunnerReady, peer: str) -> Answer:
    if request.agent not in draft.state.agents:
        return NotKnown(what=f"agent {request.agent!r}")
    place = request.place
    if place.runner not in draft.state.runners.get(place.job, {}):
        draft.pushes.append(
            (peer, StopRunner(runner=place.runner, reason="stopped: another process was asked for since"))
        )
        return Done()
    _serve(draft, place, peer)
    if draft.events:
        settle(draft, place.job)
        draft.publish()
    return Done()


def runner_gone(draft: Draft, request: RunnerGone) -> Answer:
    blame(draft, request)
    runner = draft.state.runners.get(request.job, {}).get(request.runner)
    if runner is not None:
        runner_died(draft, runner, request.reason)
    else:
        release_streams(draft, request.job, request.runner, request.reason, graceful=False)
    if draft.events:
        settle(draft, request.job)
        draft.publish()
    return Done()


def agent_leaving(draft: Draft, request: AgentLeaving) -> Answer:
    if request.agent not in draft.state.agents:
        return Done()
    workers = {
        worker
        for worker in request.workers
        if worker in draft.state.workers and draft.state.workers[worker].agent == request.agent
    }
    if request.gone:
        for runner in _runners_on(draft, workers):
            remove_runner(draft, runner, f"worker {runner.worker!r} has left", graceful=False)
        for worker in sorted(workers & draft.state.drained):
            draft.emit(e.WorkerForgotten(worker))
    new = tuple(sorted(w for w in workers if request.gone or not draft.state.workers[w].leaving))
    if new:
        draft.emit(e.WorkersLeft(new, request.gone))
    if request.gone and not any(worker.agent == request.agent for worker in draft.state.workers.values()):
        draft.emit(e.AgentRemoved(request.agent, "all its workers have left"))
    if draft.events:
        settle_all(draft)
        draft.publish()
    return Done()


def drain_worker(draft: Draft, request: DrainWorker) -> Answer:
    worker = request.worker
    if worker not in draft.state.workers and worker not in draft.state.drained:
        return Refused(reason=f"there is no worker {worker!r}; `penstock jobs` lists them", kind="unknown_worker")
    if worker not in draft.state.drained:
        draft.emit(e.WorkerDrained(worker))
        settle_all(draft)
        draft.publish()
    return Done()


def lose_silent_runners(draft: Draft, after_s: float) -> set[JobName]:
    """Give up processes that their agents have not seen alive for a while; return the jobs they served.

    Such a one may be stopped, not dead: it is ended, so that it does not come back as somebody nobody expects.
    """
    lost: set[JobName] = set()
    for runner, heard in list(draft.state.heard.items()):
        if draft.now - heard > after_s:
            for found in [runners[runner] for runners in draft.state.runners.values() if runner in runners]:
                reason = f"not seen alive for {draft.now - heard:.1f} s"
                draft.push_to_worker(found.worker, StopRunner(runner=runner, reason=f"stopped: {reason}"))
                remove_runner(draft, found, reason, graceful=False)
                lost.add(found.job)
    return lost


def remove_agent(draft: Draft, agent: AgentId, reason: str) -> None:
    """An agent is lost, and with it all its processes, as far as anybody can tell. What they still say is refused."""
    workers = {worker.worker for worker in draft.state.workers.values() if worker.agent == agent}
    draft.emit(e.AgentRemoved(agent, reason))
    for runner in _runners_on(draft, workers):
        remove_runner(draft, runner, reason, graceful=False)
