"""The loop, over real sockets: what is said was written, and nobody can disturb the others."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.control.events import JobCreated
from penstock.core.errors import RefusedError
from penstock.core.ids import AttemptId, ClientId, JobName
from penstock.dispatcher import database, journaled_state
from penstock.dispatcher.journaled_state import POSITION_LEAP
from penstock.dispatcher.main import Dispatcher
from penstock.wire.blobs import PIECE_BYTES, blob_hash, put_blob_pieces
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials
from penstock.wire.jobs import Cut, Position, Resume
from penstock.wire.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Ask,
    Beat,
    BlobPiece,
    Done,
    EpochOpened,
    GetBlob,
    GetSpec,
    GrantSplits,
    ListJobs,
    NotKnown,
    NotYet,
    Refused,
    Spec,
    Tell,
    TryAgain,
    ViewMoved,
)
from penstock.wire.positions import PositionSigner
from penstock.wire.sockets import dial
from tests.dispatcher.serving import (
    ATTEMPT,
    DEADLINE_S,
    JOB,
    KEY,
    RUNNER_KEYS,
    FakeAgent,
    attempt_of,
    bound_stream,
    client,
    grant,
    open_job,
    opening,
    put_blobs,
    served,
    spec,
)
from tests.keys import SERVER
from tests.waiting import wait_until


def ask(control: Any, body: Any) -> Any:
    return control.ask(body, timeout_s=DEADLINE_S, what=type(body).__name__)


def a_beat(attempt: AttemptId, version: int = 0) -> Beat:
    return Beat(job=JOB, client=ClientId("c1"), consumer=0, attempt=attempt, version=version)


class RawPeer:
    """A socket that may say anything."""

    def __init__(self, address: str, key: Credentials = KEY) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = dial(self.context, key, address, data=False)
        assert self.socket.poll(DEADLINE_S * 1000, zmq.POLLOUT)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def tell(self, body: Any, *, protocol: int = PROTOCOL, number: int = 1, seen: int = 0) -> Tell:
        self.send(msgspec.msgpack.encode([protocol, number, seen, body]))
        return self.receive()

    def receive(self) -> Tell:
        assert self.socket.poll(int(DEADLINE_S * 1000)), "no answer"
        return msgspec.msgpack.decode(self.socket.recv(), type=Tell)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.destroy(linger=0)


def test_a_job_is_opened_and_its_splits_are_granted_in_order(tmp_path: Path) -> None:
    with served(tmp_path) as running, client(running.address) as control:
        answer = ask(control, opening())
        assert isinstance(answer, NotYet) and set(answer.missing_blobs) == {spec().graph, spec().splits}
        put_blobs(control)
        open_job(control)
        agent = FakeAgent(running.address)
        agent.register()
        agent.serve_runner()
        stream = bound_stream(control)
        first = grant(control, stream, None)
        assert first == tuple(range(len(first))) and len(first) > 1
        assert grant(control, stream, None) == first, "asked twice, the same"
        assert grant(control, stream, first[-1])[0] == first[-1] + 1
        agent.close()


def test_grants_survive_a_restart_and_go_on(tmp_path: Path) -> None:
    with served(tmp_path) as running, client(running.address) as control:
        put_blobs(control)
        open_job(control)
        agent = FakeAgent(running.address)
        agent.register()
        place = agent.serve_runner()
        stream = bound_stream(control)
        first = grant(control, stream, None)
        agent.close()
        address, seen = running.address, control.seen
    with served(tmp_path) as running, client(running.address) as control:
        assert running.address == address, "the port is kept"
        agent = FakeAgent(running.address)
        agent.register(place)
        assert grant(control, stream, None) == first
        assert grant(control, stream, first[-1])[0] == first[-1] + 1
        assert isinstance(ask(control, GetSpec(job=JOB)), Spec)
        assert control.seen > seen
        agent.close()


def test_views_are_pushed_to_whoever_opened(tmp_path: Path) -> None:
    pushed: list[Any] = []
    with served(tmp_path) as running, client(running.address, on_push=pushed.append) as control:
        put_blobs(control)
        open_job(control)
        agent = FakeAgent(running.address)
        agent.register()
        agent.serve_runner()

        def bound() -> bool:
            return any(isinstance(p, ViewMoved) and any(s.runner for s in p.change.made) for p in pushed)

        wait_until(bound, "a view with a runner")
        agent.close()


def test_large_blobs_go_through_in_pieces(tmp_path: Path) -> None:
    data = os.urandom(2 * PIECE_BYTES + 5)
    with served(tmp_path) as running, client(running.address) as control:
        for piece in put_blob_pieces(data):
            assert ask(control, piece) == Done()
        put_blobs(control)
        open_job(control, opening(spec=spec(graph=blob_hash(data))))
    with served(tmp_path) as running, client(running.address) as control:
        found = b""
        while len(found) < len(data):
            answer = ask(control, GetBlob(hash=blob_hash(data), offset=len(found)))
            assert isinstance(answer, BlobPiece) and answer.size == len(data)
            found += answer.piece
        assert found == data


@pytest.mark.parametrize("journal", [True, False])
def test_the_same_with_and_without_a_journal_directory(tmp_path: Path, journal: bool) -> None:
    with served(tmp_path if journal else None) as running, client(running.address) as control:
        put_blobs(control)
        assert open_job(control).attempt.startswith(f"{ATTEMPT}-")


# Strangers


def test_garbage_is_counted_and_disturbs_nobody() -> None:
    with served() as running, client(running.address) as control:
        peer = RawPeer(running.address)
        for frames in (
            (b"garbage",),
            (b"",),
            (os.urandom(1000),),
            (b"\xdd\xff\xff\xff\xff",),  # an array of four billion
            (b"\x91" * 8_000,),  # nested beyond any stack
            (b"a", b"b", b"c"),
            (msgspec.msgpack.encode([PROTOCOL, 1]),),
            (msgspec.msgpack.encode([PROTOCOL, 0, 0, {"type": "list_jobs"}]),),
            (msgspec.msgpack.encode([PROTOCOL, 1, 1 << 62, {"type": "list_jobs"}]),),
            (msgspec.msgpack.encode([PROTOCOL, 1, -1, {"type": "list_jobs"}]),),
        ):
            peer.send(*frames)
        ask(control, ListJobs())
        wait_until(lambda: running.service.statistics.garbage == 10, "ten messages counted")
        assert running.service.statistics.failures == 0
        peer.close()


def test_requests_that_cannot_be_read_are_refused_by_number() -> None:
    with served() as running:
        peer = RawPeer(running.address)
        for body in ({"type": "no_such_request"}, {"type": "beat"}, 7, {"type": "get_blob", "hash": 3}):
            told = peer.tell(body, number=9)
            assert told.number == 9 and isinstance(told.body, Refused) and told.body.kind == "ProtocolError"
        for protocol in (0, PROTOCOL + 1):
            told = peer.tell({"type": "list_jobs"}, protocol=protocol)
            assert isinstance(told.body, Refused) and f"serves {OLDEST_PROTOCOL} to" in told.body.reason
        peer.close()


def test_peers_that_are_gone_are_not_waited_for(tmp_path: Path) -> None:
    with served(tmp_path) as running, client(running.address) as control:
        put_blobs(control)
        peer = RawPeer(running.address)
        told = peer.tell(msgspec.to_builtins(opening()))
        assert isinstance(told.body, EpochOpened)
        peer.close()
        agent = FakeAgent(running.address)
        agent.register()  # its view is pushed to nobody
        agent.serve_runner()
        wait_until(lambda: running.service.statistics.unreachable > 0, "a push to a peer that is gone")
        agent.close()


def test_a_request_that_makes_the_core_fail_is_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = journaled_state.decide

    def poisoned(state: Any, request: Any, **given: Any) -> Any:
        if isinstance(request, GetSpec) and request.job == "poison":
            raise ZeroDivisionError("a bug")
        return real(state, request, **given)

    monkeypatch.setattr(journaled_state, "decide", poisoned)
    with served(tmp_path) as running, client(running.address) as control:
        put_blobs(control)
        attempt = open_job(control).attempt
        with pytest.raises(RefusedError, match="ZeroDivisionError: a bug"):
            ask(control, GetSpec(job=JobName("poison")))
        assert ask(control, a_beat(attempt)) is not None
        wait_until(lambda: running.service.statistics.failures == 1, "the failure counted")


def test_a_decision_that_breaks_the_state_is_undone_and_the_others_are_decided_anew(tmp_path: Path) -> None:
    real = journaled_state.decide
    answers: list[Tell] = []

    def broken(state: Any, request: Any, **given: Any) -> Any:
        decision = real(state, request, **given)
        if isinstance(request, GetSpec):  # creates a job, then creates it again
            twice = JobCreated(JobName("half"), spec())
            return msgspec.structs.replace(decision, events=(twice, twice))
        return decision

    with pytest.MonkeyPatch.context() as patch, served(tmp_path) as running, client(running.address) as control:
        put_blobs(control)
        patch.setattr(journaled_state, "decide", broken)
        peer = RawPeer(running.address)
        bodies = [opening(), GetSpec(job=JOB), ListJobs()]
        for number, body in enumerate(bodies, 1):
            peer.send(msgspec.msgpack.encode(Ask(PROTOCOL, number, 0, body)))
        while len([tell for tell in answers if tell.number]) < 3:
            answers.append(peer.receive())
        by_number = {tell.number: tell.body for tell in answers if tell.number}
        assert isinstance(by_number[1], EpochOpened)
        assert isinstance(by_number[2], Refused) and "InvalidTransitionError" in by_number[2].reason
        jobs = ask(control, ListJobs()).jobs
        assert [line.job for line in jobs] == [JOB], "what the broken decision had begun is undone"
        peer.close()


# The disk


def with_failing_writes(fail: dict[str, Any]) -> Any:
    """Return a `prepare` that stands between a dispatcher and its files."""

    class Connection:
        def __init__(self, path: str) -> None:
            self._inner = database.connect(path)

        def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
            if fail["on"] and sql.split()[0] in ("INSERT", "COMMIT", "BEGIN", "DELETE", "UPDATE"):
                raise sqlite3.OperationalError("database or disk is full")
            return self._inner.execute(sql, parameters)

        def close(self) -> None:
            self._inner.close()

    def prepare(dispatcher: Dispatcher) -> None:
        kept = dispatcher.service._journaled
        for store in (kept._journal, kept._blobs):
            store._database._connect = Connection
            store._database.reopen()

    return prepare


def test_on_a_full_disk_nothing_is_acknowledged_and_the_rest_goes_on(tmp_path: Path) -> None:
    fail = {"on": False}
    with served(tmp_path, with_failing_writes(fail)) as running, client(running.address) as control:
        put_blobs(control)
        open_job(control)
        agent = FakeAgent(running.address)
        agent.register()
        place = agent.serve_runner()
        stream = bound_stream(control)
        first = grant(control, stream, None)
        fail["on"] = True
        assert stream.runner is not None
        peer, own = RawPeer(running.address, RUNNER_KEYS[stream.runner]), RawPeer(running.address)
        wanted = GrantSplits(
            job=JOB,
            attempt=attempt_of(stream),
            stream=stream.stream,
            binding=stream.binding,
            source=0,
            pass_=0,
            after=first[-1],
        )
        for number in range(1, 4):
            told = peer.tell(msgspec.to_builtins(wanted), number=number)
            while told.number != number:
                told = peer.receive()
            assert isinstance(told.body, TryAgain) and "disk is full" in told.body.reason
        piece = next(put_blob_pieces(b"new"))
        assert isinstance(own.tell(msgspec.to_builtins(piece, builtin_types=(bytes,)), number=4).body, TryAgain)
        assert grant(control, stream, None) == first, "what was granted is still known"
        assert ask(control, a_beat(attempt_of(stream))) is not None
        wait_until(lambda: running.service.statistics.broken, "the statistics say so")
        fail["on"] = False
        agent.register(place)  # as an agent does that is told `NotKnown`
        second = grant(control, stream, first[-1])
        assert second[0] == first[-1] + 1
        wait_until(lambda: not running.service.statistics.broken, "the statistics say so")
        assert running.service.statistics.write_failures >= 1
        peer.close()
        own.close()
        agent.close()
    with served(tmp_path) as running, client(running.address) as control:
        assert grant(control, stream, first[-1]) == second


def test_a_snapshot_is_taken_when_due_and_restart_reads_it(tmp_path: Path) -> None:
    def often(dispatcher: Dispatcher) -> None:
        dispatcher.service._journaled._journal._snapshot_events = 5

    with served(tmp_path, often) as running, client(running.address) as control:
        put_blobs(control)
        open_job(control)
        agent = FakeAgent(running.address)
        agent.register()
        agent.serve_runner()
        stream = bound_stream(control)
        given = [grant(control, stream, None)]
        for _ in range(20):
            given.append(grant(control, stream, given[-1][-1]))
        agent.close()
    with sqlite3.connect(tmp_path / "journal.db") as raw:
        assert raw.execute("SELECT count(*) FROM snapshots").fetchone() == (1,)
        assert raw.execute("SELECT count(*) FROM rows").fetchone()[0] < 10
    raw.close()
    with served(tmp_path) as running, client(running.address) as control:
        everything = grant(control, stream, None)
        assert everything == tuple(range(len(everything))) == sum(given, ())


# A lost end


def test_a_dispatcher_that_lost_its_journals_end_forgets_attempts_and_is_told_states(tmp_path: Path) -> None:
    with served(tmp_path / "journal") as running, client(running.address) as control:
        put_blobs(control)
        open_job(control)
        agent = FakeAgent(running.address)
        agent.register()
        place = agent.serve_runner()
        stream = bound_stream(control)
        first = grant(control, stream, None)
        agent.close()
    shutil.copytree(tmp_path / "journal", tmp_path / "yesterday")
    with served(tmp_path / "journal") as running, client(running.address) as control:
        agent = FakeAgent(running.address)
        agent.register(place)
        second = grant(control, stream, first[-1])
        ask(control, ListJobs())
        seen, proof = control.seen, control.proof
        agent.close()
    with served(tmp_path / "yesterday") as running, client(running.address) as control:
        agent = FakeAgent(running.address)
        agent.register(place)
        assert running.service.statistics.tails_lost == 0, "who has seen no more than we have is no witness"
        control.seen = seen  # the client of the runner that was granted the second splits
        ask(control, ListJobs())
        assert control.seen == seen, "who only says so is not believed"
        control.proof = proof
        asked = GrantSplits(
            job=JOB,
            attempt=attempt_of(stream),
            stream=stream.stream,
            binding=stream.binding,
            source=0,
            pass_=0,
            after=second[-1],
        )
        assert isinstance(ask(control, a_beat(attempt_of(stream))), NotKnown)
        assert control.seen >= seen + POSITION_LEAP
        assert stream.runner is not None
        with ControlClient(running.address, RUNNER_KEYS[stream.runner], name="runner") as runner:
            assert isinstance(ask(runner, asked), NotKnown)
        assert isinstance(ask(control, opening(rejoin=attempt_of(stream))), NotKnown)
        # The client holds a state: all of the first splits are done, the second are open.
        resume = Resume(
            epoch=0,
            consumers=1,
            streams=(
                Position(
                    number=0,
                    cut=Cut(engine=["@", 0, 0, second[0], 0], named=((0, 0, second),)),
                    round=5,
                    marks=(5,),
                    feed=stream.feed,
                ),
            ),
            done=((0, 0, ((0, len(first)),)),),
            digest="d",
        )
        view = open_job(control, opening(resume=msgspec.convert(msgspec.to_builtins(resume), Resume)))
        assert view.attempt != attempt_of(stream)
        assert ask(control, ListJobs()).jobs[0].splits_left == 1000 - len(first) - len(second)
        wait_until(lambda: running.service.statistics.tails_lost == 1, "the loss counted once")
        agent.close()


def test_an_empty_journal_among_live_clients_knows_nobody(tmp_path: Path) -> None:
    with served(tmp_path) as running, client(running.address) as control:
        control.seen, control.proof = 12_345, PositionSigner(SERVER.secret).proof(12_345)
        assert isinstance(ask(control, a_beat(ATTEMPT)), NotKnown)
        assert control.seen == 12_345 + POSITION_LEAP
        put_blobs(control)
        attempt = open_job(control).attempt
    with served(tmp_path) as running, client(running.address) as control:
        control.seen = 12_345 + POSITION_LEAP
        control.proof = PositionSigner(SERVER.secret).proof(control.seen)
        assert not isinstance(ask(control, a_beat(attempt)), NotKnown), "the leap is journaled: it is known to be ours"


def test_answers_carry_positions_that_only_grow(tmp_path: Path) -> None:
    with served(tmp_path) as running, client(running.address) as control:
        put_blobs(control)
        seen = [control.seen]
        for number in range(3):
            open_job(control, opening(job=JobName(f"job{number}"), attempt=AttemptId(f"a{number}")))
            seen.append(control.seen)
        assert seen == sorted(set(seen))
        answer = ask(control, ListJobs())
        assert len(answer.jobs) == 3 and control.seen == seen[-1]
