"""Requests of agents: which workers there are, which processes serve, which have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.control import events as e
from penstock.control.blaming import blame
from penstock.control.draft import Asker, Decision, Draft
from penstock.control.fitting import runners_of
from penstock.control.placing import release_streams
from penstock.control.records import Agent, Runner
from penstock.control.runners import remove_runner, runner_died, settle_all, settle_arrived, start_of, stop_runner
from penstock.control.state import ClusterState
from penstock.core.ids import AgentId, JobName, RunnerId, WorkerId
from penstock.wire.admissions import ExpectRunner
from penstock.wire.messages import (
    AgentBeat,
    AgentLeaving,
    Answer,
    Done,
    DrainWorker,
    NotKnown,
    Push,
    Refused,
    RegisterAgent,
    RunnerGone,
    RunnerPlace,
    RunnerReady,
    StopRunner,
)
from penstock.wire.principals import is_name

REPEAT_START_S = 1.0  # a beat's time: what was asked for longer ago is named in the agent's next one, unless lost


def register_agent(draft: Draft, request: RegisterAgent, asker: Asker) -> Answer:
    """Take an agent's word for what it has: processes it does not name are gone, others go on."""
    workers = [place.worker for place in request.workers]
    dropped = [worker for worker in draft.state.workers_of(request.agent) if worker not in workers]
    peer = asker.peer
    draft.emit(
        e.AgentRegistered(
            request.agent, peer, request.host, request.workers, request.versions, draft.now, asker.principal
        )
    )
    serving = {place.runner for place in request.runners}
    # Of one that takes over another agent's worker, or no longer has what it had, others may be affected too.
    others_affected = bool(dropped) or any(_is_anothers(draft, worker, request.agent) for worker in workers)
    for runner in _runners_on(draft, [*workers, *dropped]):
        if runner.ready and runner.runner not in serving:
            runner_died(draft, runner, f"agent {request.agent!r} does not have this process")
            others_affected = True
        elif runner.runner not in serving:
            # The agent that was asked for it may be no more, or the connection. Asked for twice, it starts once.
            draft.push_to_worker(runner.worker, start_of(runner))
    for place in request.runners:
        others_affected |= _serve(draft, place, peer)
    for name in list(draft.state.jobs):
        others_affected |= _release_unknown(draft, name, workers)
    if others_affected:
        settle_all(draft)
    else:
        settle_arrived(draft, workers, [r for r in _runners_on(draft, workers) if r.ready])
    draft.publish()
    return Done()


def _is_anothers(draft: Draft, worker: WorkerId, agent: AgentId) -> bool:
    held = draft.before.workers.get(worker)
    return held is not None and held.agent != agent


def _serve(draft: Draft, place: RunnerPlace, peer: str) -> bool:
    """Take a process into service, unless its job or its place is somebody else's by now.

    Return whether others were stopped for it.
    """
    state = draft.state
    present = runners_of(state, place.job).on(place.worker)
    rivals = [r for r in present if r.runner != place.runner]
    needed = place.job in state.jobs and place.worker in state.workers and is_name(place.runner)
    if not needed or any(r.ready for r in rivals):
        draft.pushes.append(
            (peer, StopRunner(runner=place.runner, reason="stopped: the job does not need this process"))
        )
        return False
    for rival in rivals:
        stop_runner(draft, rival, "stopped: an older process serves in its place")
    if not any(r.runner == place.runner and r.ready and r.address == place.address for r in present):
        draft.emit(e.RunnerServes(place.job, place.worker, place.runner, place.address, draft.now, place.verifier))
    return bool(rivals)


def _release_unknown(draft: Draft, name: JobName, workers: Iterable[WorkerId]) -> bool:
    """After a restart: let go of streams bound to processes of these workers that are no more; say whether any were."""
    known = runners_of(draft.state, name)
    gone: dict[RunnerId, None] = {}
    for iteration in draft.iterations(name):
        for worker in workers:
            for stream in iteration.streams.at(worker):
                if stream.bound is not None and stream.bound.runner not in known:
                    gone[stream.bound.runner] = None
    for runner in gone:
        release_streams(draft, name, runner, "its process is gone", graceful=False)
    return bool(gone)


def _runners_on(draft: Draft, workers: Iterable[WorkerId]) -> list[Runner]:
    return [runner for runners in draft.state.runners.values() for worker in workers for runner in runners.on(worker)]


def agent_beat(state: ClusterState, request: AgentBeat, *, now: float, peer: str, draw: Callable[[], str]) -> Decision:
    """Keep an agent's lease. There is a beat a second of each, so no draft is made but for one that was doubted."""
    agent = state.agents.get(request.agent)
    if agent is None:
        return Decision((), NotKnown(what=f"agent {request.agent!r}"))
    for worker in agent.workers:
        if worker not in state.workers:
            # A late word of the agent that had it before took it over, and was then lost with it.
            return Decision((), NotKnown(what=f"worker {worker!r} of agent {request.agent!r}"))
    seen = e.AgentSeen(request.agent, peer, now, request.statistics, request.runners)
    pushes = (*_stops_of_unknown(state, request, peer), *_starts_unheard(state, request, agent, peer, now))
    if not agent.doubted:
        return Decision((seen,), Done(), pushes)
    draft = Draft(state, now=now, draw=draw)
    draft.emit(seen)
    draft.pushes.extend(pushes)
    settle_all(draft)
    draft.publish()
    return draft.decision(Done())


def _stops_of_unknown(state: ClusterState, request: AgentBeat, peer: str) -> Iterable[tuple[str, Push]]:
    for runner in request.runners:
        if not any(runner in runners for runners in state.runners.values()):
            yield peer, StopRunner(runner=runner, reason="stopped: nobody knows this process any more")


def _starts_unheard(
    state: ClusterState, request: AgentBeat, agent: Agent, peer: str, now: float
) -> Iterable[tuple[str, Push]]:
    """Ask again for processes that the agent does not name: what it was pushed may be lost."""
    for runners in state.runners.values():
        for worker in agent.workers:
            for runner in runners.on(worker):
                unheard = not runner.ready and runner.runner not in request.runners
                if unheard and now - runner.since >= REPEAT_START_S:
                    yield peer, start_of(runner)


def _hear(draft: Draft, agent: AgentId) -> None:
    """Whatever a doubted agent says shows that it is there."""
    found = draft.state.agents.get(agent)
    if found is not None and found.doubted:
        draft.emit(e.AgentSeen(agent, found.peer, draft.now))


def expect_runner(draft: Draft, request: ExpectRunner, peer: str) -> Answer:
    """Note by which key a process that starts will be known."""
    found = runners_of(draft.state, request.job).get(request.runner)
    worker = None if found is None else draft.state.workers.get(found.worker)
    if found is None or worker is None or worker.agent != request.agent:
        draft.pushes.append(
            (peer, StopRunner(runner=request.runner, reason="stopped: another process was asked for since"))
        )
    elif found.verifier != request.verifier:
        draft.emit(e.RunnerExpected(request.job, request.runner, request.verifier))
    return Done()


def runner_ready(draft: Draft, request: RunnerReady, peer: str) -> Answer:
    if request.agent not in draft.state.agents:
        return NotKnown(what=f"agent {request.agent!r}")
    place = request.place
    if place.runner not in runners_of(draft.state, place.job):
        draft.pushes.append(
            (peer, StopRunner(runner=place.runner, reason="stopped: another process was asked for since"))
        )
        return Done()
    _hear(draft, request.agent)
    others_affected = bool(draft.events)
    others_affected |= _serve(draft, place, peer)
    if draft.events:
        if others_affected:
            settle_all(draft)
        else:
            settle_arrived(draft, (), [draft.state.runners[place.job][place.runner]])
        draft.publish()
    return Done()


def runner_gone(draft: Draft, request: RunnerGone) -> Answer:
    _hear(draft, request.agent)
    blame(draft, request)
    runner = runners_of(draft.state, request.job).get(request.runner)
    if runner is not None:
        agent = draft.state.agents.get(request.agent)
        if agent is not None and request.figures is not None:
            draft.emit(e.AgentSeen(request.agent, agent.peer, draft.now, {request.runner: request.figures}))
        runner_died(draft, runner, request.reason)
    else:
        release_streams(draft, request.job, request.runner, request.reason, graceful=False)
    if draft.events:
        settle_all(draft)
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
    if request.gone and not draft.state.workers_of(request.agent):
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
    for runner, heard in draft.state.heard.items():
        if draft.now - heard > after_s:
            for found in [runners[runner] for runners in draft.state.runners.values() if runner in runners]:
                reason = f"not seen alive for {draft.now - heard:.1f} s"
                draft.push_to_worker(found.worker, StopRunner(runner=runner, reason=f"stopped: {reason}"))
                remove_runner(draft, found, reason, graceful=False)
                lost.add(found.job)
    return lost


def remove_agent(draft: Draft, agent: AgentId, reason: str) -> None:
    """An agent is lost, and with it all its processes, as far as anybody can tell. What they still say is refused."""
    workers = draft.state.workers_of(agent)
    draft.emit(e.AgentRemoved(agent, reason))
    for runner in _runners_on(draft, workers):
        remove_runner(draft, runner, reason, graceful=False)
