"""Who may ask what: a table of requests and roles.

Each cell is None (that role may not ask it at all) or the condition under which it may. A condition is a pure function
of the state. It holds for what does not exist, so that whoever asks is told that, and by the part that knows.

`refusal` is asked before anything else is. What a listing shows is the same rule: `may_read`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from penstock.control.fitting import runners_of
from penstock.control.records import Job, Opened
from penstock.control.state import ClusterState
from penstock.core.ids import AgentId, AttemptId, BlobHash, ClientId, JobName, RunnerId, WorkerId
from penstock.wire.admissions import ExpectRunner, WhoReads
from penstock.wire.caching import JudgeCaching
from penstock.wire.fetching import FindFellows
from penstock.wire.jobs import JobSpec
from penstock.wire.messages import (
    AgentBeat,
    AgentLeaving,
    Beat,
    CloseClient,
    DrainWorker,
    EndStream,
    GetBlob,
    GetFigures,
    GetPipeline,
    GetSpec,
    GrantSplits,
    ListJobs,
    ListWorkers,
    OpenEpoch,
    PutBlob,
    PutPipeline,
    Rebind,
    Refused,
    RegisterAgent,
    Request,
    RunnerGone,
    RunnerReady,
    SteerJob,
)
from penstock.wire.principals import Principal, Role
from penstock.wire.scaling import GetDecisions, LearnMetric, Provide, RecallMetric, ScaleJob

KIND = "not_permitted"


class Condition(NamedTuple):
    """`words` says who one has to be: "only ... may"."""

    words: str
    holds: Callable[[ClusterState, Principal, Any], bool]


# Who may read what


def may_read(principal: Principal, spec: JobSpec) -> bool:
    """Whether somebody may read and steer a job, or read a registered pipeline, with all that it is made of."""
    return principal.role == "operator" or principal.name == spec.owner or principal.name in spec.share_with


def readable_jobs(state: ClusterState, principal: Principal) -> frozenset[JobName]:
    if principal.role == "provisioner":
        return frozenset(state.jobs)
    return frozenset(name for name, job in state.jobs.items() if may_read(principal, job.spec))


def may_use_blob(state: ClusterState, principal: Principal, blob: BlobHash) -> bool:
    """Whether a blob is of something that somebody may read or, as a runner, runs."""
    return any(blob in (spec.graph, spec.splits) for spec in _specs_of(state, principal))


def _specs_of(state: ClusterState, principal: Principal) -> Iterator[JobSpec]:
    if principal.role == "runner":
        yield from (job.spec for job in state.jobs.values() if _runs(state, principal.name, job))
        return
    yield from (job.spec for job in state.jobs.values() if may_read(principal, job.spec))
    yield from (spec for spec in state.pipelines.values() if may_read(principal, spec))


# Conditions


def _anybody(state: ClusterState, principal: Principal, request: object) -> bool:
    return True


def _opens_job(state: ClusterState, principal: Principal, request: OpenEpoch) -> bool:
    job = state.jobs.get(request.job)
    if job is None:
        return True
    held = (opened for iteration in job.iterations.values() for opened in iteration.opened.values())
    is_client = all(opened.by == principal.name for opened in held if opened.client == request.client)
    return is_client and may_read(principal, job.spec)


def _reads_job(
    state: ClusterState, principal: Principal, request: GetFigures | SteerJob | GetSpec | GetDecisions
) -> bool:
    job = state.jobs.get(request.job)
    return job is None or may_read(principal, job.spec)


def _reads_pipeline(state: ClusterState, principal: Principal, request: GetPipeline) -> bool:
    spec = state.pipelines.get(request.id)
    return spec is None or may_read(principal, spec)


def _owns_pipeline(state: ClusterState, principal: Principal, request: PutPipeline) -> bool:
    spec = state.pipelines.get(request.id)
    return spec is None or spec.owner == principal.name


def _reads_blob(state: ClusterState, principal: Principal, request: GetBlob) -> bool:
    return may_use_blob(state, principal, request.hash)


def _is_client(state: ClusterState, principal: Principal, request: Beat | CloseClient) -> bool:
    held = _opened_by(state, request.job, request.attempt, request.client)
    return all(opened.by == principal.name for opened in held)


def _reads_attempt(state: ClusterState, principal: Principal, request: Rebind) -> bool:
    iteration = state.iteration(request.job, request.attempt)
    return iteration is None or any(held.by == principal.name for held in iteration.opened.values())


def _is_consumer(state: ClusterState, principal: Principal, request: EndStream) -> bool:
    """Whether nobody else reads as this consumer: one that a lost journal knew is told to open the epoch again."""
    iteration = state.iteration(request.job, request.attempt)
    if iteration is None:
        return True
    readers = [held.by for slot, held in iteration.opened.items() if slot.consumer == request.consumer]
    return not readers or principal.name in readers


def _is_agent(state: ClusterState, principal: Principal, request: AgentBeat | AgentLeaving) -> bool:
    return _agent_is(state, principal, request.agent)


def _registers_its_own(state: ClusterState, principal: Principal, request: RegisterAgent) -> bool:
    if not _agent_is(state, principal, request.agent):
        return False
    if not {place.worker for place in request.runners} <= {place.worker for place in request.workers}:
        return False
    workers_are_its = all(_has_worker(state, principal, place.worker) for place in request.workers)
    return workers_are_its and all(_has_runner(state, principal, run.job, run.runner) for run in request.runners)


def _has_place(state: ClusterState, principal: Principal, request: RunnerReady) -> bool:
    place = request.place
    return (
        _agent_is(state, principal, request.agent)
        and _has_worker(state, principal, place.worker)
        and _has_runner(state, principal, place.job, place.runner)
    )


def _had_runner(state: ClusterState, principal: Principal, request: RunnerGone) -> bool:
    return (
        _agent_is(state, principal, request.agent)
        and _has_worker(state, principal, request.worker)
        and _has_runner(state, principal, request.job, request.runner)
    )


def _expects_its_own(state: ClusterState, principal: Principal, request: ExpectRunner) -> bool:
    is_agent = _agent_is(state, principal, request.agent)
    return is_agent and _has_runner(state, principal, request.job, request.runner)


def _agent_is(state: ClusterState, principal: Principal, agent_id: AgentId) -> bool:
    agent = state.agents.get(agent_id)
    return agent is None or agent.principal == principal


def _has_worker(state: ClusterState, principal: Principal, worker_id: WorkerId) -> bool:
    worker = state.workers.get(worker_id)
    return worker is None or _agent_is(state, principal, worker.agent)


def _has_runner(state: ClusterState, principal: Principal, job: JobName, runner_id: RunnerId) -> bool:
    runner = runners_of(state, job).get(runner_id)
    return runner is None or _has_worker(state, principal, runner.worker)


def _has_the_stream(state: ClusterState, principal: Principal, request: GrantSplits) -> bool:
    """Whether the stream is bound to this runner. One that asks about an older binding is told so, and granted
    nothing."""
    iteration = state.iteration(request.job, request.attempt)
    stream = None if iteration is None else iteration.streams.get(request.stream)
    if stream is None or stream.binding != request.binding:
        return True
    return stream.bound is not None and stream.bound.runner == principal.name


def _runs_job(
    state: ClusterState, principal: Principal, request: GetSpec | WhoReads | JudgeCaching | FindFellows
) -> bool:
    job = state.jobs.get(request.job)
    return job is None or _runs(state, principal.name, job)


def _runs(state: ClusterState, runner: str, job: Job) -> bool:
    if RunnerId(runner) in runners_of(state, job.name):
        return True
    # After the dispatcher's restart the journal knows whom streams are bound to, and agents have yet to say who lives.
    return any(iteration.streams.has_some(RunnerId(runner)) for iteration in job.iterations.values())


def _opened_by(state: ClusterState, job: JobName, attempt: AttemptId, client: ClientId) -> list[Opened]:
    iteration = state.iteration(job, attempt)
    return [] if iteration is None else [held for held in iteration.opened.values() if held.client == client]


def _is_provisioner(state: ClusterState, principal: Principal, request: Provide) -> bool:
    known = state.provisioners.get(request.provisioner)
    return known is None or known.by == principal.name


ANY = Condition("", _anybody)
OPENS_IT = Condition("its owner, those it is shared with (share_with=) and operators", _opens_job)
OF_THE_JOB = Condition("its owner, those it is shared with (share_with=) and operators", _reads_job)
OF_THE_PIPELINE = Condition("its owner, those it is shared with (share_with=) and operators", _reads_pipeline)
REGISTERED_IT = Condition("who registered it", _owns_pipeline)
OF_THE_BLOB = Condition("who may read a job or pipeline it is of, and their runners", _reads_blob)
THE_CLIENT = Condition("the principal that opened the epoch as this client", _is_client)
A_READER = Condition("a principal that reads this epoch", _reads_attempt)
THE_CONSUMER = Condition("the principal that reads as this consumer", _is_consumer)
THE_AGENT = Condition("the agent that registered under this id", _is_agent)
ITS_OWN_WORKERS = Condition("the agent that has this id and these workers", _registers_its_own)
HAS_THE_PLACE = Condition("the agent that has this id and this worker", _has_place)
HAD_THE_RUNNER = Condition("the agent that has this id and this worker", _had_runner)
STARTS_IT = Condition("the agent that has this id and starts this runner", _expects_its_own)
BOUND_TO_IT = Condition("the runner that the stream is bound to", _has_the_stream)
THE_PROVISIONER = Condition("the provisioner that has this id", _is_provisioner)
A_RUNNER_OF_IT = Condition("a runner of the job", _runs_job)


NAMED = (OPENS_IT, OF_THE_JOB, OF_THE_PIPELINE, REGISTERED_IT)
"""What is asked for by a name that anybody may have taken."""


class Row(NamedTuple):
    """What a request takes of each role; None: that role may not ask it. `what` names it in a refusal."""

    what: Callable[[Any], str]
    operator: Condition | None
    agent: Condition | None
    provisioner: Condition | None
    runner: Condition | None
    trainer: Condition | None


def _row(
    what: str,
    *,
    operator: Condition | None = None,
    agent: Condition | None = None,
    provisioner: Condition | None = None,
    runner: Condition | None = None,
    trainer: Condition | None = None,
) -> Row:
    return Row(lambda request: what.format(r=request), operator, agent, provisioner, runner, trainer)


PERMISSIONS: dict[type[Request], Row] = {
    OpenEpoch: _row("read job {r.job!r}", operator=OPENS_IT, trainer=OPENS_IT),
    PutBlob: _row("store blobs", operator=ANY, trainer=ANY),
    Beat: _row("beat for client {r.client!r}", operator=THE_CLIENT, trainer=THE_CLIENT),
    Rebind: _row("rebind streams of job {r.job!r}", operator=A_READER, trainer=A_READER),
    EndStream: _row("end streams of job {r.job!r}", operator=THE_CONSUMER, trainer=THE_CONSUMER),
    CloseClient: _row("close client {r.client!r}", operator=THE_CLIENT, trainer=THE_CLIENT),
    ListJobs: _row("list jobs", operator=ANY, provisioner=ANY, trainer=ANY),
    GetFigures: _row("see figures of job {r.job!r}", operator=ANY, trainer=OF_THE_JOB),
    SteerJob: _row("{r.action} job {r.job!r}", operator=ANY, trainer=OF_THE_JOB),
    ListWorkers: _row("list workers", operator=ANY, provisioner=ANY, trainer=ANY),
    DrainWorker: _row("drain worker {r.worker!r}", operator=ANY),
    PutPipeline: _row("register pipeline {r.id!r}", operator=REGISTERED_IT, trainer=REGISTERED_IT),
    GetPipeline: _row("read pipeline {r.id!r}", operator=ANY, trainer=OF_THE_PIPELINE),
    RegisterAgent: _row("register workers as agent {r.agent!r}", agent=ITS_OWN_WORKERS),
    AgentBeat: _row("speak as agent {r.agent!r}", agent=THE_AGENT),
    RunnerReady: _row("speak as agent {r.agent!r}", agent=HAS_THE_PLACE),
    RunnerGone: _row("speak as agent {r.agent!r}", agent=HAD_THE_RUNNER),
    AgentLeaving: _row("speak as agent {r.agent!r}", agent=THE_AGENT),
    ExpectRunner: _row("speak as agent {r.agent!r}", agent=STARTS_IT),
    GrantSplits: _row("ask for splits of stream {r.stream!r}", runner=BOUND_TO_IT),
    GetBlob: _row("fetch blob {r.hash}", operator=OF_THE_BLOB, runner=OF_THE_BLOB, trainer=OF_THE_BLOB),
    GetSpec: _row("see job {r.job!r}", operator=ANY, runner=A_RUNNER_OF_IT, trainer=OF_THE_JOB),
    ScaleJob: _row("scale job {r.job!r}", operator=ANY, trainer=OF_THE_JOB),
    GetDecisions: _row("see decisions about job {r.job!r}", operator=ANY, trainer=OF_THE_JOB),
    Provide: _row("bring workers as {r.provisioner!r}", provisioner=THE_PROVISIONER),
    JudgeCaching: _row("say what job {r.job!r} keeps", runner=A_RUNNER_OF_IT),
    FindFellows: _row("ask who runs job {r.job!r}", runner=A_RUNNER_OF_IT),
    LearnMetric: _row("keep figures", operator=ANY, trainer=ANY),
    RecallMetric: _row("see figures that it kept", operator=ANY, trainer=ANY),
    WhoReads: _row("ask who reads job {r.job!r}", runner=A_RUNNER_OF_IT),
}


def refusal(state: ClusterState, principal: Principal, request: Request) -> Refused | None:
    """Return why a principal may not ask this; None: it may.

    >>> refusal(ClusterState(), Principal("trainer", "eve"), DrainWorker(worker="w0")).reason
    "trainer/eve may not drain worker 'w0': that takes the role operator; use a key of that role"
    """
    row = PERMISSIONS[type(request)]
    condition: Condition | None = getattr(row, principal.role)
    if condition is not None and condition.holds(state, principal, request):
        return None
    if condition is None:
        roles = " or ".join(role for role in _roles(row))
        needed = f"that takes the role {roles}; use a key of that role"
    elif condition in NAMED and (owner := _owner(state, request)) not in ("", principal.name):
        # Names are one space for all, so that what is shared is called the same by all: here somebody came first.
        other = "id" if isinstance(request, PutPipeline | GetPipeline) else "job= name"
        needed = (
            f"it is {owner!r}'s, and only {condition.words} may; have {owner!r} share it "
            f"(access=ps.Access(share_with={principal.name!r})), or give another {other}"
        )
    else:
        needed = f"only {condition.words} may; ask its owner, or use the key that it belongs to"
    return Refused(reason=f"{principal} may not {row.what(request)}: {needed}", kind=KIND)


def _owner(state: ClusterState, request: Request) -> str:
    """Return whose the job or pipeline is that a request names; "": nobody's, or it names none."""
    if isinstance(request, PutPipeline | GetPipeline):
        pipeline = state.pipelines.get(request.id)
        return "" if pipeline is None else pipeline.owner
    job = state.jobs.get(getattr(request, "job", JobName("")))
    return "" if job is None else job.spec.owner


def _roles(row: Row) -> list[Role]:
    roles: tuple[Role, ...] = ("operator", "agent", "provisioner", "runner", "trainer")
    return [role for role in roles if getattr(row, role) is not None]


def distrust(made: str, owner: str, principal: Principal, trusted: tuple[str, ...]) -> Refused | None:
    """Return why a reader does not get what somebody else made unasked: it runs, or gives what ran, of their code."""
    if owner in (principal.name, *trusted):
        return None
    return Refused(
        reason=(
            f"{made} by {owner!r}: who reads it gets what that principal's code makes; allow it with "
            f"access=ps.Access(trust={owner!r}), or read something else"
        ),
        kind=KIND,
    )
