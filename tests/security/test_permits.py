"""Friends of one live dispatcher, in a process of its own: what each may ask, and what a hostile one gets."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq

from penstock.control.permissions import PERMISSIONS
from penstock.core.errors import AuthenticationError, NotPermittedError, PenstockError
from penstock.core.ids import AgentId, AttemptId, BlobHash, ClientId, JobName, WorkerId
from penstock.dispatcher.key_registry import KeyRecord, changed_keys
from penstock.dispatcher.main import DispatcherConfig
from penstock.wire.admissions import ExpectRunner, KnownReader, WhoReads
from penstock.wire.blobs import blob_hash, put_blob_pieces
from penstock.wire.caching import JudgeCaching
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials, KnownKey
from penstock.wire.fetching import FindFellows
from penstock.wire.messages import (
    PROTOCOL,
    AgentBeat,
    AgentLeaving,
    Beat,
    BlobPiece,
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
    NotYet,
    OpenEpoch,
    PutBlob,
    PutPipeline,
    Rebind,
    Refused,
    RegisterAgent,
    Request,
    RunnerGone,
    RunnerPlace,
    RunnerReady,
    SteerJob,
    StopRunner,
    Tell,
    WorkerPlace,
)
from penstock.wire.principals import ROLES, Role
from penstock.wire.scaling import GetDecisions, LearnMetric, Provide, RecallMetric, ScaleJob
from penstock.wire.sockets import dial
from tests.dispatcher.serving import (
    AGENT_KEY,
    DEADLINE_S,
    GRAPH,
    JOB,
    RUNNER_KEYS,
    FakeAgent,
    bound_stream,
    ended,
    opening,
    put_blobs,
    spec,
    started,
)
from tests.keys import SERVER, new_key
from tests.waiting import wait_until

ALICE, BOB = new_key("trainer", "alice"), new_key("trainer", "bob")
OLGA, EVE = new_key("operator", "olga"), new_key("agent", "eve")
SCALER = new_key("provisioner", "scaler")
KNOWN = tuple(KnownKey(key.public, key.principal) for key in (ALICE, BOB, OLGA, EVE, SCALER, AGENT_KEY))
READING = "r" * 40
BOBS = JobName("bobs")


@dataclass
class Live:
    """A dispatcher with a job of Alice's and one of Bob's, each with a process."""

    address: str
    process: subprocess.Popen[str]
    folder: Path
    agent: FakeAgent
    places: list[RunnerPlace]

    @functools.cached_property
    def attempt(self) -> AttemptId:
        return AttemptId(self.stream().stream.rpartition(".")[0])

    def ask(self, key: Credentials, request: Request) -> Any:
        with ControlClient(self.address, key, name="test") as control:
            return control.ask(request, timeout_s=DEADLINE_S, what=type(request).__name__)

    def stream(self, key: Credentials = ALICE, job: JobName = JOB, client: str = "c1") -> Any:
        with ControlClient(self.address, key, name="test") as control:
            return bound_stream(control, opening(job=job, client=ClientId(client), reading=READING))

    @property
    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "audit.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def live(folder: Path, **options: Any) -> Iterator[Live]:
    config = DispatcherConfig(
        server=SERVER,
        known=KNOWN,
        journal=str(folder / "journal"),
        registry=str(folder / "registry.json"),
        audit_log=str(folder / "audit.jsonl"),
        **options,
    )
    process, address = started(config)
    agent, places, over = FakeAgent(address), list[RunnerPlace](), threading.Event()

    def beat() -> None:
        while not over.wait(0.5):
            with contextlib.suppress(PenstockError):
                request = AgentBeat(agent=agent.agent, runners=tuple(place.runner for place in places))
                agent.control.ask(request, timeout_s=DEADLINE_S, what="a beat")

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        agent.register()
        for key, job, client in ((ALICE, JOB, "c1"), (BOB, BOBS, "c2")):
            with ControlClient(address, key, name="test") as control:
                put_blobs(control)
                request = opening(job=job, client=ClientId(client), reading=READING)
                assert isinstance(control.ask(request, timeout_s=DEADLINE_S, what="opening"), EpochOpened)
                places.append(agent.serve_runner())
        found = Live(address, process, folder, agent, places)
        assert found.ask(ALICE, PutPipeline(id="p", spec=spec())) == Done()
        yield found
    finally:
        over.set()
        beating.join()
        agent.close()
        process.terminate()
        ended(process)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("live")) as found:
        yield found


def about_alice(live: Live) -> dict[type[Request], Request]:
    """Return one request of each type about what is Alice's; those that are allowed change nothing that others need."""
    stream = live.stream()
    agent, worker = live.agent.agent, live.agent.worker
    (place,) = [place for place in live.places if place.runner == stream.runner]
    (piece,) = put_blob_pieces(GRAPH)
    requests: list[Request] = [
        opening(client=ClientId("c1"), trust=("alice",), reading=READING),
        piece,
        Beat(job=JOB, client=ClientId("c1"), consumer=0, attempt=live.attempt, version=0),
        Rebind(job=JOB, attempt=live.attempt, stream=stream.stream, binding=stream.binding - 1, reason="gap"),
        EndStream(job=JOB, attempt=live.attempt, stream=stream.stream, consumer=0, rounds=1),
        CloseClient(job=JOB, client=ClientId("c1"), consumer=0, attempt=live.attempt),
        ListJobs(),
        GetFigures(job=JOB),
        SteerJob(job=JOB, action="resume"),
        ListWorkers(),
        DrainWorker(worker=WorkerId("nobody's")),
        PutPipeline(id="p", spec=spec()),
        GetPipeline(id="p", trust=("alice",)),
        RegisterAgent(agent=agent, host="h", workers=(WorkerPlace(worker=worker),), runners=tuple(live.places)),
        AgentBeat(agent=agent, runners=tuple(each.runner for each in live.places)),
        RunnerReady(agent=agent, place=place),
        RunnerGone(agent=agent, runner=stream.runner, worker=worker, job=JOB, reason="killed"),
        AgentLeaving(agent=agent, workers=()),
        ExpectRunner(agent=agent, job=JOB, runner=stream.runner, verifier=place.verifier),
        GrantSplits(
            job=JOB,
            attempt=live.attempt,
            stream=stream.stream,
            binding=stream.binding,
            source=0,
            pass_=0,
            after=None,
        ),
        GetBlob(hash=blob_hash(GRAPH)),
        GetSpec(job=JOB),
        WhoReads(job=JOB, verifier=READING),
        ScaleJob(job=JOB, workers=1),
        GetDecisions(job=JOB),
        JudgeCaching(job=JOB, source=0),
        FindFellows(job=JOB),
        Provide(provisioner="pool", kind="local", have=(), most=0),
        LearnMetric(key="k", values={"pace": 1.0}),
        RecallMetric(key="k"),
    ]
    return {type(request): request for request in requests}


ENDS_SOMETHING = {EndStream, CloseClient, RunnerGone}
"""Allowed to those it belongs to, and tried with them by other tests."""
ITS_READERS = {OpenEpoch, Beat, Rebind, EndStream, CloseClient, PutPipeline}
"""An operator does these for itself, and not as somebody else's client."""
FOR_ALL_TRAINERS = {ListJobs, ListWorkers, PutBlob, GetBlob, LearnMetric, RecallMetric}
"""Bob has sent the same blob himself. What he learns and recalls is under keys of his own."""


def key_of(live: Live, role: Role) -> Credentials:
    if role == "runner":
        return RUNNER_KEYS[live.stream().runner]
    return {"operator": OLGA, "agent": AGENT_KEY, "provisioner": SCALER, "trainer": ALICE}[role]


def test_the_requests_are_all_there_are(shared: Live) -> None:
    assert set(about_alice(shared)) == set(get_args(Request)) == set(PERMISSIONS)


@pytest.mark.parametrize("role", ROLES)
def test_each_role_gets_what_the_table_says(shared: Live, role: Role) -> None:
    for kind, request in about_alice(shared).items():
        condition = getattr(PERMISSIONS[kind], role)
        refused = condition is None or (role == "operator" and kind in ITS_READERS)
        if not refused and kind in ENDS_SOMETHING:
            continue
        try:
            shared.ask(key_of(shared, role), request)
        except NotPermittedError as error:
            assert refused, (role, kind, error)
            if condition is None:
                needed = [each for each in ROLES if getattr(PERMISSIONS[kind], each) is not None]
                assert f"that takes the role {' or '.join(needed)}" in str(error)
        except Exception as error:
            assert not refused and type(error).__name__ in ("RefusedError",), (role, kind, error)
        else:
            assert not refused, (role, kind)


@pytest.mark.parametrize("key", [BOB, EVE], ids=["another trainer", "a foreign agent"])
def test_what_is_alices_is_refused_to_others_and_stays_as_it_is(shared: Live, key: Credentials) -> None:
    before = shared.ask(OLGA, ListJobs()).jobs[0]
    for kind, request in about_alice(shared).items():
        if key.role != "trainer" or kind not in FOR_ALL_TRAINERS:
            with pytest.raises(NotPermittedError):
                shared.ask(key, request)
    assert [line.job for line in shared.ask(BOB, ListJobs()).jobs] == [BOBS]
    after = shared.ask(OLGA, ListJobs()).jobs[0]
    assert (after.job, after.owner, after.clients, after.splits_left) == (
        before.job,
        before.owner,
        before.clients,
        before.splits_left,
    )
    assert any(line["did"] == "refused" and line["who"] == str(key.principal) for line in shared.audit)


def test_the_runner_of_another_job_gets_none_of_alices_splits_nor_who_reads(shared: Live) -> None:
    stranger = RUNNER_KEYS[shared.stream(BOB, BOBS, "c2").runner]
    requests = about_alice(shared)
    for kind in (GrantSplits, GetSpec, WhoReads, JudgeCaching, FindFellows):
        with pytest.raises(NotPermittedError):
            shared.ask(stranger, requests[kind])
    own = RUNNER_KEYS[shared.stream().runner]
    assert shared.ask(own, requests[WhoReads]) == KnownReader(principal="trainer/alice")


def test_code_is_stolen_neither_by_its_hash_nor_by_a_job_made_of_it(shared: Live) -> None:
    secret = b"a pickled function, and the password in its closure"
    for piece in put_blob_pieces(secret):
        assert shared.ask(ALICE, piece) == Done()
    stolen = blob_hash(secret)
    with pytest.raises(NotPermittedError, match="may not fetch blob"):
        shared.ask(BOB, GetBlob(hash=stolen))
    theirs = opening(job=JobName("thief"), client=ClientId("thief"), spec=spec(graph=stolen))
    answer = shared.ask(BOB, theirs)
    assert isinstance(answer, NotYet) and answer.missing_blobs == (stolen,), "who only knows its name does not have it"
    with pytest.raises(NotPermittedError):
        shared.ask(BOB, GetBlob(hash=stolen))
    assert isinstance(shared.ask(ALICE, GetBlob(hash=stolen)), BlobPiece)


# Positions


def told(live: Live, key: Credentials, *asks: list[Any]) -> list[Tell]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = dial(context, key, live.address, data=False)
    try:
        answers = []
        for ask in asks:
            peer.send(msgspec.msgpack.encode(ask))
            assert peer.poll(int(DEADLINE_S * 1000)), "no answer"
            answers.append(msgspec.msgpack.decode(peer.recv(), type=Tell))
        return answers
    finally:
        peer.close(linger=0)
        context.destroy(linger=0)


def test_a_false_position_neither_moves_the_journal_nor_makes_attempts_forgotten(tmp_path: Path) -> None:
    listing = msgspec.to_builtins(ListJobs())
    with live(tmp_path) as found:
        (first,) = told(found, BOB, [PROTOCOL, 1, 0, listing, b""])
        near, far = first.position + 1, (1 << 60) - 1
        false = [[PROTOCOL, 2, seen, listing, proof] for seen in (near, far) for proof in (b"", first.proof, bytes(16))]
        for answer in told(found, BOB, *false):
            assert answer.position - first.position < 1000
        beat = Beat(job=JOB, client=ClientId("c1"), consumer=0, attempt=found.attempt, version=0)
        assert not isinstance(found.ask(ALICE, beat), NotKnown), "nothing is forgotten"


# Revocation


def revoke(live: Live, key: Credentials) -> None:
    record = KeyRecord(name=key.name, role=key.role, verifier=key.public, made=0.0, revoked=time.time())
    with changed_keys(live.folder / "registry.json") as records:
        records.append(record)


def test_a_revoked_key_is_refused_within_two_seconds_and_its_processes_are_replaced(tmp_path: Path) -> None:
    stops: list[str] = []
    with live(tmp_path) as found:
        found.agent.control._on_push = lambda push: stops.append(push.runner) if isinstance(push, StopRunner) else None
        runner, others = found.stream().runner, found.stream(BOB, BOBS, "c2").runner
        with ControlClient(found.address, ALICE, name="reader") as reader:
            beat = Beat(job=JOB, client=ClientId("c1"), consumer=0, attempt=found.attempt, version=0)
            assert not isinstance(reader.ask(beat, timeout_s=DEADLINE_S, what="a beat"), Refused)
            revoke(found, ALICE)
            since = time.monotonic()
            with pytest.raises((NotPermittedError, AuthenticationError), match=r"revoked|refused"):
                while time.monotonic() - since < 5.0:
                    reader.ask(beat, timeout_s=DEADLINE_S, what="a beat")
                    time.sleep(0.05)
            assert time.monotonic() - since < 2.0
        with pytest.raises(AuthenticationError):
            found.ask(ALICE, ListJobs())
        wait_until(lambda: runner in stops, "the process whose memory it may have mapped is stopped")
        assert others not in stops
        with pytest.raises((NotPermittedError, AuthenticationError)):
            found.ask(RUNNER_KEYS[runner], GetSpec(job=JOB))
        assert [line.job for line in found.ask(BOB, ListJobs()).jobs] == [BOBS], "the others notice nothing"
        wait_until(lambda: any(line["did"] == "key revoked" for line in found.audit), "the audit")


def test_a_key_that_is_made_while_it_runs_is_let_in(tmp_path: Path) -> None:
    carol = new_key("trainer", "carol")
    with live(tmp_path) as found:
        with pytest.raises(AuthenticationError):
            found.ask(carol, ListJobs())
        with changed_keys(found.folder / "registry.json") as records:
            records.append(KeyRecord(name="carol", role="trainer", verifier=carol.public, made=time.time()))

        def let_in() -> bool:
            try:
                return bool(found.ask(carol, ListJobs()).jobs == ())
            except AuthenticationError:
                return False

        wait_until(let_in, "the new key")


def test_an_agent_that_is_no_agent_registers_no_worker(tmp_path: Path) -> None:
    request = RegisterAgent(agent=AgentId("mine"), host="h", workers=(WorkerPlace(worker=WorkerId("mine")),))
    with live(tmp_path) as found:
        for key in (BOB, OLGA):
            with pytest.raises(NotPermittedError, match="that takes the role agent"):
                found.ask(key, request)
        assert [line.worker for line in found.ask(OLGA, ListWorkers()).workers] == [found.agent.worker]
        assert found.ask(OLGA, GetBlob(hash=BlobHash(blob_hash(GRAPH)))).piece == GRAPH
