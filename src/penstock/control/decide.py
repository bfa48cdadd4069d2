"""What to do about a request, and when time passes.

Both functions are pure: they read the state and return a `Decision`; nothing has changed until its events are applied.
The clock (`now`, monotonic seconds), randomness (`draw`, a fresh id each time) and which blobs are stored are passed
in. Every request is idempotent: decided again after its events were applied, it gives the same answer and no more
events than a beat would.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import assert_never

from msgspec.structs import replace

from penstock.control import events as e
from penstock.control.agents import (
    agent_beat,
    agent_leaving,
    drain_worker,
    expect_runner,
    lose_silent_runners,
    register_agent,
    remove_agent,
    runner_gone,
    runner_ready,
)
from penstock.control.caching import caching_lines, find_fellows, judge_caching
from penstock.control.clients import beat, close_client, rebind_stream
from penstock.control.draft import Asker, Decision, Draft
from penstock.control.ending import end_stream
from penstock.control.figures import job_figures
from penstock.control.fitting import runners_of
from penstock.control.granting import grant_splits
from penstock.control.learning import learn_metric, recall_metric
from penstock.control.opening import missing_blobs, open_epoch
from penstock.control.permissions import distrust, readable_jobs, refusal
from penstock.control.placing import has_waited_for_shares, rebind
from penstock.control.providing import lose_silent_provisioners, provide
from penstock.control.records import Job
from penstock.control.runners import LINGER_S, RESTART_GRACE_S, START_TIMEOUT_S, settle, settle_all
from penstock.control.scaling import scale_jobs
from penstock.control.scaling_rules import DEFAULT_RULES, ScalingRules
from penstock.control.state import ClusterState
from penstock.control.views import decision_lines, job_lines, worker_lines
from penstock.core.errors import InvalidArgumentError
from penstock.core.ids import BlobHash, JobName
from penstock.wire.admissions import ExpectRunner, KnownReader, WhoReads
from penstock.wire.caching import JudgeCaching
from penstock.wire.fetching import FindFellows
from penstock.wire.messages import (
    AgentBeat,
    AgentLeaving,
    Answer,
    Beat,
    CloseClient,
    Done,
    DrainWorker,
    EndStream,
    FiguresAnswer,
    GetBlob,
    GetFigures,
    GetPipeline,
    GetSpec,
    GrantSplits,
    Jobs,
    ListJobs,
    ListWorkers,
    NotKnown,
    OpenEpoch,
    PutBlob,
    PutPipeline,
    Rebind,
    Refused,
    RegisterAgent,
    Request,
    RunnerGone,
    RunnerReady,
    Spec,
    SteerJob,
    Workers,
)
from penstock.wire.modes import check_workers
from penstock.wire.principals import Principal
from penstock.wire.scaling import Decisions, GetDecisions, LearnMetric, Provide, RecallMetric, ScaleJob

__all__ = ["Decision", "decide", "tick"]

AGENT_LOST_AFTER_S = 5.0
RUNNER_LOST_AFTER_S = 5.0
CLIENT_LOST_AFTER_S = 30.0
STOPPED_FOR_S = 2.0  # between two ticks: it was the dispatcher that was away, not everybody else


def decide(
    state: ClusterState,
    request: Request,
    *,
    principal: Principal,
    key: str = "",
    now: float,
    peer: str,
    draw: Callable[[], str],
    blobs: Container[BlobHash] = frozenset(),
    rules: ScalingRules = DEFAULT_RULES,
) -> Decision:
    """Return what a request leads to.

    `principal` asks, having shown the key of the verifier `key`; answers and pushes go to `peer`. `blobs` are those
    that are there and that the principal may refer to.
    """
    refused = refusal(state, principal, request)
    if refused is not None:
        return Decision((), refused)
    asker = Asker(principal, key, peer)
    if state.began_at is None:
        return _begin(
            state, now, lambda begun: _decide(begun, request, asker, now=now, draw=draw, blobs=blobs, rules=rules)
        )
    return _decide(state, request, asker, now=now, draw=draw, blobs=blobs, rules=rules)


def _decide(
    state: ClusterState,
    request: Request,
    asker: Asker,
    *,
    now: float,
    draw: Callable[[], str],
    blobs: Container[BlobHash],
    rules: ScalingRules,
) -> Decision:
    if isinstance(request, GrantSplits):
        return grant_splits(state, request)
    if isinstance(request, Beat):
        return beat(state, request, asker, now=now, draw=draw)
    if isinstance(request, AgentBeat):
        return agent_beat(state, request, now=now, peer=asker.peer, draw=draw)
    draft = Draft(state, now=now, draw=draw)
    answer = _answer(draft, request, asker, blobs, rules)
    return draft.decision(answer)


def _begin(state: ClusterState, now: float, then: Callable[[ClusterState], Decision]) -> Decision:
    """Take up what a journal left: leases begin now, and views get higher versions than any before."""
    first: tuple[e.AnyEvent, ...] = (e.DispatcherBegan(state.generation + 1), e.LeasesBegan(now), e.Ticked(now))
    begun = state.copy()
    for event in first:
        begun.apply(event)
    rest = then(begun)
    return Decision(first + rest.events, rest.answer, rest.pushes)


def _answer(draft: Draft, request: Request, asker: Asker, blobs: Container[BlobHash], rules: ScalingRules) -> Answer:
    match request:
        case OpenEpoch():
            return open_epoch(draft, request, asker, blobs)
        case EndStream():
            return end_stream(draft, request)
        case Rebind():
            return rebind_stream(draft, request)
        case CloseClient():
            return close_client(draft, request)
        case RegisterAgent():
            return register_agent(draft, request, asker)
        case RunnerReady():
            return runner_ready(draft, request, asker.peer)
        case ExpectRunner():
            return expect_runner(draft, request, asker.peer)
        case WhoReads():
            return _who_reads(draft.state, request)
        case RunnerGone():
            return runner_gone(draft, request)
        case AgentLeaving():
            return agent_leaving(draft, request)
        case DrainWorker():
            return drain_worker(draft, request)
        case SteerJob():
            return _steer(draft, request)
        case ListJobs():
            readable = readable_jobs(draft.state, asker.principal)
            return Jobs(jobs=job_lines(draft.state, draft.now, readable, rules.rent))
        case ScaleJob():
            return _scale(draft, request)
        case GetDecisions():
            known = draft.state.jobs.get(request.job)
            if known is None:
                return NotKnown(what=f"job {request.job!r}")
            return Decisions(decisions=decision_lines(known, draft.now), caching=caching_lines(known, draft.now))
        case JudgeCaching():
            return judge_caching(draft, request)
        case FindFellows():
            return find_fellows(draft.state, request, asker.principal.name)
        case Provide():
            return provide(draft, request, asker.principal, rules)
        case LearnMetric():
            return learn_metric(draft, request, asker.principal)
        case RecallMetric():
            return recall_metric(draft.state, request, asker.principal)
        case GetFigures():
            if request.job not in draft.state.jobs:
                return NotKnown(what=f"job {request.job!r}")
            return FiguresAnswer(figures=job_figures(draft.state, request.job))
        case ListWorkers():
            return Workers(workers=worker_lines(draft.state, readable_jobs(draft.state, asker.principal)))
        case PutPipeline():
            return _put_pipeline(draft, request, asker.principal, blobs)
        case GetPipeline():
            found = draft.state.pipelines.get(request.id)
            if found is None:
                return NotKnown(what=f"pipeline {request.id!r}")
            what = f"pipeline {request.id!r} was registered"
            return distrust(what, found.owner, asker.principal, request.trust) or Spec(spec=found)
        case GetSpec():
            job = draft.state.jobs.get(request.job)
            if job is None:
                return NotKnown(what=f"job {request.job!r}")
            if request.attempt not in (None, *job.iterations):
                return NotKnown(what=f"attempt {request.attempt!r} of job {request.job!r}")
            return Spec(spec=job.spec, dropped=job.dropped, suspects=job.suspects)
        case PutBlob() | GetBlob():
            raise TypeError(f"{type(request).__name__}: blobs are kept beside the core, which only asks what is there")
        case GrantSplits() | Beat() | AgentBeat():
            raise TypeError(f"{type(request).__name__} is decided without a draft")
        case _:
            assert_never(request)


def _steer(draft: Draft, request: SteerJob) -> Answer:
    job = draft.state.jobs.get(request.job)
    if job is None:
        return Refused(
            reason=f"there is no job {request.job!r}; `penstock jobs` lists those there are", kind="unknown_job"
        )
    paused, failure = job.paused, job.failure
    match request.action:
        case "cancel":
            failure = failure or "the job was cancelled"
        case "pause":
            paused = True
        case "resume":
            paused = False
        case _:
            assert_never(request.action)
    if (paused, failure) != (job.paused, job.failure):
        draft.emit(e.JobSteered(request.job, paused, failure))
        settle(draft, request.job)
        draft.publish()
    return Done()


def _scale(draft: Draft, request: ScaleJob) -> Answer:
    job = draft.state.jobs.get(request.job)
    if job is None:
        return Refused(
            reason=f"there is no job {request.job!r}; `penstock jobs` lists those there are", kind="unknown_job"
        )
    if job.spec.sharding.off:
        return Refused(
            reason=f"job {request.job!r} has sharding='off': every worker reads everything, so that their number is "
            "what is read; it is not scaled",
            kind="invalid_argument",
        )
    try:
        workers = check_workers("workers", request.workers)
    except InvalidArgumentError as error:
        return Refused(reason=str(error), kind="invalid_argument")
    if workers != job.scaling.asked:
        draft.emit(e.JobRescaled(request.job, workers))
        settle(draft, request.job)
        draft.publish()
    return Done()


def _who_reads(state: ClusterState, request: WhoReads) -> Answer:
    job = state.jobs.get(request.job)
    for iteration in () if job is None or not request.verifier else job.iterations.values():
        for held in iteration.opened.values():
            if held.reading == request.verifier and not held.closed:
                return KnownReader(principal=str(Principal("trainer", held.by)))
    for runner in runners_of(state, request.job).values():
        if request.verifier and runner.verifier == request.verifier:
            return KnownReader(principal=str(Principal("runner", runner.runner)))
    return NotKnown(what=f"the reader of job {request.job!r} that shows this key")


def _put_pipeline(draft: Draft, request: PutPipeline, principal: Principal, blobs: Container[BlobHash]) -> Answer:
    held = draft.state.pipelines.get(request.id)
    if held is not None and held.fingerprint != request.spec.fingerprint:
        return Refused(
            reason=(
                f"pipeline {request.id!r} is registered with another structure: fingerprint {held.fingerprint} there, "
                f"{request.spec.fingerprint} here; register it under another id"
            ),
            kind="pipeline_mismatch",
        )
    if held is None:
        waiting = missing_blobs(request.spec, blobs)
        if waiting is not None:
            return waiting
        draft.emit(e.PipelineRegistered(request.id, replace(request.spec, owner=principal.name)))
    return Done()


def tick(state: ClusterState, *, now: float, draw: Callable[[], str], rules: ScalingRules = DEFAULT_RULES) -> Decision:
    """Return what follows from time having passed: who is lost, what is collected, which processes start and stop."""
    if state.began_at is None:
        return _begin(state, now, lambda begun: tick(begun, now=now, draw=draw, rules=rules))
    draft = Draft(state, now=now, draw=draw)
    if state.ticked_at is not None and now - state.ticked_at > STOPPED_FOR_S:
        draft.emit(e.LeasesBegan(now))
    draft.emit(e.Ticked(now))
    lost = [agent for agent in draft.state.agents.values() if now - agent.seen > AGENT_LOST_AFTER_S]
    for agent in lost:
        remove_agent(draft, agent.agent, f"agent {agent.agent!r} silent for {now - agent.seen:.1f} s")
    unsettled = lose_silent_runners(draft, RUNNER_LOST_AFTER_S)
    for job, leases in draft.before.clients.items():
        for lease in (draft.state.clients.get(job) or leases).values():
            if now - lease.seen > CLIENT_LOST_AFTER_S:
                draft.emit(e.ClientGone(job, lease.client, now))
    _collect_jobs(draft)
    for name in list(draft.state.jobs):
        _rebind_orphans(draft, name)
    lose_silent_provisioners(draft)
    for name in scale_jobs(draft, rules):
        settle(draft, name)
    if lost:
        settle_all(draft)
    else:
        for name in {**draft.state.jobs, **draft.state.runners}:
            if name in unsettled or _is_due(draft, name):
                settle(draft, name)
    if len(draft.events) > 1:
        draft.publish()
    return draft.decision()


def _collect_jobs(draft: Draft) -> None:
    for name, since in list(draft.state.idle_since.items()):
        job = draft.state.jobs[name]
        if job.failure or draft.now - since > max(job.spec.collect_after_s, _way_back_s(draft, job, since)):
            draft.emit(e.JobCollected(name, job.failure or f"nobody read it for {draft.now - since:.0f} s"))


def _way_back_s(draft: Draft, job: Job, idle_since: float) -> float:
    """Return how long the readers of a job may take to be heard of again.

    Those that held it when the dispatcher died, or before, are reading on, and have to find out first.
    """
    began_at = draft.state.began_at
    held = any(not opened.closed for iteration in job.iterations.values() for opened in iteration.opened.values())
    return RESTART_GRACE_S if held and began_at is not None and idle_since <= began_at else 0.0


def _rebind_orphans(draft: Draft, name: JobName) -> None:
    """After a restart: streams bound to processes that nobody has registered since."""
    began_at = draft.state.began_at
    if began_at is None or draft.now - began_at <= AGENT_LOST_AFTER_S:
        return
    for iteration in draft.iterations(name):
        orphans = iteration.streams.bound_beside(draft.state.runners.get(name))
        if orphans:
            rebind(draft, name, iteration.attempt, orphans)


def _is_due(draft: Draft, name: JobName) -> bool:
    """Whether time alone may change a job's processes; anything else settles it when it happens."""
    state = draft.state
    runners = runners_of(state, name)
    if name not in state.jobs:
        return bool(runners)
    if any(job == name for _, job in state.failed_starts):
        return True
    idle_since = state.idle_since.get(name)
    if idle_since is not None and runners and draft.now - idle_since > LINGER_S:
        return True
    if any(draft.now - runner.since > START_TIMEOUT_S for runner in runners.starting()):
        return True
    return has_waited_for_shares(draft, name)
