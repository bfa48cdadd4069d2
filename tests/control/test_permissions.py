"""Who may ask what: the table, and what the control core does by it."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest

from penstock.control.decide import decide
from penstock.control.permissions import PERMISSIONS, refusal
from penstock.control.revoking import revoke
from penstock.control.snapshot import snapshot
from penstock.core.ids import AgentId, BlobHash, ClientId, JobName, RunnerId, WorkerId
from penstock.wire.admissions import ExpectRunner, KnownReader, WhoReads
from penstock.wire.caching import JudgeCaching
from penstock.wire.fetching import FindFellows
from penstock.wire.messages import (
    AgentBeat,
    AgentLeaving,
    Beat,
    CloseClient,
    Done,
    DrainWorker,
    EndStream,
    EpochOpened,
    GetBlob,
    GetFigures,
    GetPipeline,
    GetSpec,
    GrantSplits,
    ListJobs,
    ListWorkers,
    NotKnown,
    PutBlob,
    PutPipeline,
    Rebind,
    Refused,
    RegisterAgent,
    Request,
    RunnerGone,
    RunnerPlace,
    RunnerReady,
    Spec,
    SteerJob,
    StopRunner,
    Superseded,
    WorkerPlace,
)
from penstock.wire.principals import ROLES, Principal, Role
from penstock.wire.scaling import GetDecisions, LearnMetric, Provide, RecallMetric, ScaleJob
from tests.control.cluster import ALICE, BOB, FLEET, JOB, OPERATOR, Cluster, rebind, spec, started

PAIRS = list(product(get_args(Request), ROLES))
RUNNER_KEY = "k" * 40
POOL = Provide(provisioner="pool", kind="local", have=(), most=3)
OWN = {"operator": OPERATOR, "agent": FLEET, "trainer": ALICE, "provisioner": Principal("provisioner", "scaler")}


def cluster_of_alice(**changes: Any) -> Cluster:
    cluster = started(workers=2, **changes)
    cluster.ask(PutPipeline(id="p", spec=spec(graph="graph of p", **changes)), principal=ALICE)
    cluster.blobs = frozenset({*cluster.blobs, BlobHash("graph of p")})
    assert cluster.ask(PutPipeline(id="p", spec=spec(graph="graph of p", **changes)), principal=ALICE) == Done()
    cluster.ask(POOL, principal=OWN["provisioner"])
    return cluster


def of_alice(cluster: Cluster) -> dict[type[Request], Request]:
    """Return one request of each type about what is Alice's and her job's, as those it belongs to would send it."""
    stream = cluster.view().streams[0]
    attempt = cluster.view().attempt
    (lease,) = cluster.state.leases(JOB)
    assert stream.runner is not None and stream.worker is not None
    place = RunnerPlace(stream.runner, stream.worker, JOB, stream.address)
    agent = AgentId("A")
    requests: list[Request] = [
        cluster.opening(spec=spec(), trust=("alice",), rejoin=attempt),
        PutBlob(hash=BlobHash("x" * 40), offset=0, size=1, piece=b"x"),
        Beat(job=JOB, client=lease.client, consumer=0, attempt=attempt, version=0),
        Rebind(job=JOB, attempt=attempt, stream=stream.stream, binding=stream.binding, reason="gap"),
        EndStream(job=JOB, attempt=attempt, stream=stream.stream, consumer=0, rounds=3),
        CloseClient(job=JOB, client=lease.client, consumer=0, attempt=attempt),
        ListJobs(),
        GetFigures(job=JOB),
        SteerJob(job=JOB, action="cancel"),
        ListWorkers(),
        DrainWorker(worker=stream.worker),
        PutPipeline(id="p", spec=spec(graph="graph of p")),
        GetPipeline(id="p"),
        RegisterAgent(agent=agent, host="h1", workers=(WorkerPlace(WorkerId("w0")), WorkerPlace(WorkerId("w1")))),
        AgentBeat(agent=agent, runners=(stream.runner,)),
        RunnerReady(agent=agent, place=place),
        RunnerGone(agent=agent, runner=stream.runner, worker=stream.worker, job=JOB, reason="killed"),
        AgentLeaving(agent=agent, workers=(stream.worker,)),
        cluster.granting(stream),
        GetBlob(hash=BlobHash("graph")),
        GetSpec(job=JOB),
        ExpectRunner(agent=agent, job=JOB, runner=stream.runner, verifier=RUNNER_KEY),
        WhoReads(job=JOB, verifier="nobody's"),
        ScaleJob(job=JOB, workers=3),
        GetDecisions(job=JOB),
        JudgeCaching(job=JOB, source=0),
        FindFellows(job=JOB),
        POOL,
        LearnMetric(key="k", values={"pace": 1.0}),
        RecallMetric(key="k"),
    ]
    return {type(request): request for request in requests}


ONLY_ITS_OWN = {Beat, CloseClient, Rebind, EndStream, PutPipeline}
"""What an operator may do for itself, and not for others."""


def those_it_belongs_to(cluster: Cluster, role: Role) -> Principal:
    if role == "runner":
        runner = cluster.view().streams[0].runner
        assert runner is not None
        return Principal("runner", runner)
    return OWN[role]


def test_who_meets_a_name_that_is_taken_is_told_whose_it_is_and_what_to_do() -> None:
    cluster = cluster_of_alice()
    for request, other in (
        (cluster.opening(spec=spec()), "job= name"),
        (GetPipeline(id="p"), "id"),
        (PutPipeline(id="p", spec=spec(graph="another")), "id"),
    ):
        answer = cluster.ask(request, principal=Principal("trainer", "mallory"))
        assert isinstance(answer, Refused)
        assert "it is 'alice''s, and only " in answer.reason, answer
        share = "have 'alice' share it (access=ps.Access(share_with='mallory'))"
        assert answer.reason.endswith(f"{share}, or give another {other}"), answer


def test_the_table_has_every_request() -> None:
    assert set(PERMISSIONS) == set(get_args(Request))
    assert set(of_alice(cluster_of_alice())) == set(get_args(Request))


@pytest.mark.parametrize(("kind", "role"), PAIRS, ids=lambda each: getattr(each, "__name__", each))
def test_each_role_may_ask_what_the_table_says_and_nothing_else(kind: type[Request], role: Role) -> None:
    cluster = cluster_of_alice()
    request = of_alice(cluster)[kind]
    refused = refusal(cluster.state, those_it_belongs_to(cluster, role), request)
    condition = getattr(PERMISSIONS[kind], role)
    if condition is None:
        assert refused is not None and refused.kind == "not_permitted"
        assert "that takes the role" in refused.reason and f"{role}/" in refused.reason
    else:
        expected = role == "operator" and kind in ONLY_ITS_OWN
        assert (refused is not None) == expected, refused


STRANGERS = [BOB, Principal("agent", "eve"), Principal("runner", "eve"), Principal("provisioner", "eve")]
FOR_ANYBODY = {ListJobs, ListWorkers, PutBlob, LearnMetric, RecallMetric}


@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
def test_a_friend_that_asks_for_what_is_alices_is_refused_and_changes_nothing(stranger: Principal) -> None:
    cluster = cluster_of_alice()
    before = snapshot(cluster.state)
    soft = (cluster.state.agents, cluster.state.workers, dict(cluster.state.runners), dict(cluster.state.clients))
    for kind, request in of_alice(cluster).items():
        if kind in FOR_ANYBODY:
            continue
        if kind is GetBlob:
            assert refusal(cluster.state, stranger, request) is not None
            continue
        decision = cluster.decide(request, principal=stranger)
        assert isinstance(decision.answer, Refused) and decision.answer.kind == "not_permitted", (kind, decision)
        assert decision.events == () and decision.pushes == ()
    assert snapshot(cluster.state) == before
    assert soft == (
        cluster.state.agents,
        cluster.state.workers,
        dict(cluster.state.runners),
        dict(cluster.state.clients),
    )


def test_a_foreign_agent_takes_over_no_worker_and_no_process() -> None:
    cluster = cluster_of_alice()
    eve, stream = Principal("agent", "eve"), cluster.view().streams[0]
    assert stream.runner is not None and stream.worker is not None
    place = RunnerPlace(stream.runner, WorkerId("mine"), JOB, "tcp://eve:1")
    mine = (WorkerPlace(WorkerId("mine")),)
    tries: list[Request] = [
        RegisterAgent(agent=AgentId("E"), host="h", workers=(WorkerPlace(stream.worker),)),
        RegisterAgent(agent=AgentId("E"), host="h", workers=mine, runners=(place,)),
        RunnerGone(agent=AgentId("E"), runner=stream.runner, worker=WorkerId("mine"), job=JOB, reason="gone"),
        RunnerReady(agent=AgentId("E"), place=place),
        ExpectRunner(agent=AgentId("E"), job=JOB, runner=stream.runner, verifier=RUNNER_KEY),
    ]
    assert cluster.ask(RegisterAgent(agent=AgentId("E"), host="h", workers=mine), principal=eve) == Done()
    for request in tries:
        answer = cluster.ask(request, principal=eve)
        assert isinstance(answer, Refused) and answer.kind == "not_permitted", request


def test_a_runner_of_another_job_gets_neither_splits_nor_spec_nor_code() -> None:
    cluster = cluster_of_alice()
    other = spec(graph="graph of p", fingerprint="f2")
    opened = cluster.ask(cluster.opening(job=JobName("other"), spec=other), principal=BOB)
    assert isinstance(opened, EpochOpened)
    cluster.ready()
    runner = Principal("runner", next(iter(cluster.state.runners[JobName("other")])))
    about_alice = of_alice(cluster)
    for kind in (GrantSplits, GetSpec, GetBlob, WhoReads, JudgeCaching, FindFellows):
        assert refusal(cluster.state, runner, about_alice[kind]) is not None, kind
    assert refusal(cluster.state, runner, GetSpec(job=JobName("other"))) is None
    assert refusal(cluster.state, runner, GetBlob(hash=BlobHash("graph of p"))) is None


def test_an_older_binding_is_told_so_and_not_that_it_is_not_permitted() -> None:
    cluster = cluster_of_alice()
    stream = cluster.view().streams[0]
    former = Principal("runner", str(stream.runner))
    cluster.ask(rebind(cluster.view()))
    answer = cluster.ask(cluster.granting(stream), principal=former)
    assert isinstance(answer, Refused) and answer.kind == "stale"


# Sharing and trust


def test_who_a_job_is_shared_with_reads_and_steers_it_and_lists_it() -> None:
    cluster = cluster_of_alice(share_with=("bob",))
    assert [line.job for line in cluster.ask(ListJobs(), principal=BOB).jobs] == [JOB]
    assert cluster.ask(SteerJob(job=JOB, action="pause"), principal=BOB) == Done()
    assert isinstance(cluster.ask(GetPipeline(id="p", trust=("alice",)), principal=BOB), Spec)
    joined = cluster.ask(cluster.opening(replica=1, spec=spec(share_with=()), trust=("alice",)), principal=BOB)
    assert isinstance(joined, EpochOpened) and joined.spec.owner == "alice"


def test_joining_what_another_made_takes_ones_trust_by_name() -> None:
    cluster = cluster_of_alice(share_with=("bob",))
    for principal in (BOB, OPERATOR):
        refused = cluster.ask(cluster.opening(replica=1), principal=principal)
        assert refused == Refused(
            reason="job 'resnet' was made by 'alice': who reads it gets what that principal's code makes; allow it "
            "with access=ps.Access(trust='alice'), or read something else",
            kind="not_permitted",
        )


def test_listings_show_what_one_may_read() -> None:
    cluster = cluster_of_alice()
    scaler = OWN["provisioner"]
    assert cluster.ask(ListJobs(), principal=BOB).jobs == ()
    assert [line.jobs for line in cluster.ask(ListWorkers(), principal=BOB).workers] == [(), ()]
    for principal in (ALICE, OPERATOR, scaler):
        assert [line.job for line in cluster.ask(ListJobs(), principal=principal).jobs] == [JOB]
        assert [line.jobs for line in cluster.ask(ListWorkers(), principal=principal).workers] == [(JOB,), (JOB,)]


def test_a_job_that_is_over_is_made_anew_by_its_owner_only() -> None:
    cluster = cluster_of_alice(share_with=("bob",))
    (lease,) = cluster.state.leases(JOB)
    cluster.ask(SteerJob(job=JOB, action="cancel"))
    cluster.ask(CloseClient(job=JOB, client=lease.client, consumer=0, attempt=lease.attempt))
    refused = cluster.ask(cluster.opening(trust=("alice",)), principal=BOB)
    assert isinstance(refused, Refused) and "only 'alice', whose it was, makes it anew" in refused.reason
    assert isinstance(cluster.ask(cluster.opening()), EpochOpened)


# Keys of the moment


def test_a_runner_is_told_who_reads_its_job_by_the_key_that_the_reader_made() -> None:
    cluster = cluster_of_alice()
    cluster.open(replica=1, spec=spec(), reading="r" * 40)
    assert cluster.ask(WhoReads(job=JOB, verifier="r" * 40)) == KnownReader(principal="trainer/alice")
    assert isinstance(cluster.ask(WhoReads(job=JOB, verifier="q" * 40)), NotKnown)
    assert isinstance(cluster.ask(WhoReads(job=JOB, verifier="")), NotKnown)
    runner = cluster.view().streams[0].runner
    cluster.restart()
    answer = cluster.ask(WhoReads(job=JOB, verifier="r" * 40), principal=Principal("runner", str(runner)))
    assert answer == KnownReader(principal="trainer/alice"), "the journal knows"


def test_a_runner_is_told_of_another_of_its_job_and_of_no_other_runner() -> None:
    cluster = cluster_of_alice()
    (runner,) = (stream.runner for stream in cluster.view().streams[:1])
    asked = WhoReads(job=JOB, verifier=RUNNER_KEY)
    (agent,) = cluster.state.agents
    cluster.ask(ExpectRunner(agent=agent, job=JOB, runner=runner, verifier=RUNNER_KEY))
    assert cluster.ask(asked) == KnownReader(principal=f"runner/{runner}")
    other = cluster.ask(cluster.opening(job=JobName("other"), spec=spec(fingerprint="f2")))
    assert isinstance(other, EpochOpened)
    cluster.ready()
    stranger = Principal("runner", next(iter(cluster.state.runners[JobName("other")])))
    about_other = WhoReads(job=JobName("other"), verifier=RUNNER_KEY)
    assert isinstance(cluster.ask(about_other, principal=stranger), NotKnown), "it runs another job"


def test_the_key_of_a_runner_that_starts_is_its_agents_to_say() -> None:
    cluster = Cluster()
    cluster.register("w0")
    cluster.open()
    (runner,) = cluster.state.runners[JOB].values()
    expect = ExpectRunner(agent=AgentId("A"), job=JOB, runner=runner.runner, verifier=RUNNER_KEY)
    assert cluster.ask(expect) == Done()
    assert cluster.state.runners[JOB][runner.runner].verifier == RUNNER_KEY
    assert cluster.decide(expect).events == ()
    cluster.pushes(StopRunner)
    unknown = ExpectRunner(agent=AgentId("A"), job=JOB, runner=RunnerId("older"), verifier=RUNNER_KEY)
    assert cluster.ask(unknown) == Done()
    assert [push.runner for push in cluster.pushes(StopRunner)] == ["older"]


# Revocation


def revoked(cluster: Cluster, *, keys: frozenset[str] = frozenset(), gone: frozenset[Principal] = frozenset()) -> None:
    cluster.take(revoke(cluster.state, keys=keys, gone=gone, now=cluster.now, draw=cluster.draw))


def test_a_reader_whose_key_is_revoked_loses_its_lease_and_the_processes_are_replaced() -> None:
    cluster = cluster_of_alice(share_with=("bob",))
    cluster.ask(cluster.opening(replica=1, trust=("alice",), client=ClientId("bobs"), reading="b" * 40), principal=BOB)
    old = set(cluster.state.runners[JOB])
    cluster.pushed.clear()
    revoked(cluster, gone=frozenset({BOB}))
    assert [lease.client for lease in cluster.state.leases(JOB)] != [] and not cluster.state.reads(
        JOB, ClientId("bobs")
    )
    stopped = [push.runner for _, push in cluster.pushed if isinstance(push, StopRunner)]
    assert set(stopped) == old
    told = [push for _, push in cluster.pushed if isinstance(push, Superseded)]
    assert [push.client for push in told] == ["bobs"] and "revoked" in told[0].reason
    assert old.isdisjoint(cluster.state.runners[JOB]), "others were asked for"
    cluster.ready()
    assert all(stream.runner is not None for stream in cluster.view().streams)


def test_a_revoked_key_of_several_ends_what_it_opened_and_nothing_else() -> None:
    cluster = Cluster()
    cluster.register("w0")
    for replica, key in ((0, "old"), (1, "new")):
        request = cluster.opening(replica=replica)
        cluster.take(
            decide(
                cluster.state,
                request,
                principal=ALICE,
                key=key,
                now=cluster.now,
                peer="p",
                draw=cluster.draw,
                blobs=cluster.blobs,
            )
        )
    revoked(cluster, keys=frozenset({"old"}))
    assert [lease.key for lease in cluster.state.leases(JOB)] == ["new"]


def test_revoking_what_nobody_uses_changes_nothing() -> None:
    cluster = cluster_of_alice()
    decision = revoke(cluster.state, keys=frozenset({"x"}), gone=frozenset({BOB}), now=cluster.now, draw=cluster.draw)
    assert decision.events == () and decision.pushes == ()


def test_an_agent_whose_key_is_revoked_is_lost_with_its_processes() -> None:
    cluster = cluster_of_alice()
    revoked(cluster, gone=frozenset({FLEET}))
    assert len(cluster.state.agents) == 0 and JOB not in cluster.state.runners
