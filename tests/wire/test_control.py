from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from penstock.core.errors import (
    AuthenticationError,
    DispatcherUnavailableError,
    InvalidPipelineError,
    PenstockError,
    RefusedError,
)
from penstock.wire.control import ControlClient
from penstock.wire.framing import encode_tell
from penstock.wire.messages import Answer, Ask, Done, Jobs, ListJobs, Refused, StopRunner, TryAgain
from tests.keys import new_key
from tests.waiting import wait_until
from tests.wire.services import Answerer

KEY = new_key()


def client_of(server: Answerer, **given: object) -> ControlClient:
    return ControlClient(server.address, KEY, name="test", **given)  # type: ignore[arg-type]


def test_an_answer_comes_back_with_the_journals_position() -> None:
    with Answerer(KEY, lambda ask: Jobs(jobs=())) as server, client_of(server) as client:
        assert client.ask(ListJobs(), timeout_s=30, what="the jobs") == Jobs(jobs=())
        assert client.seen == 7
        client.ask(ListJobs(), timeout_s=30, what="the jobs")
        assert server.asked[-1].seen == 7


def test_many_threads_ask_at_once_and_each_gets_its_own_answer() -> None:
    with Answerer(KEY, lambda ask: Jobs(jobs=())) as server, client_of(server) as client:
        done: list[Answer] = []

        def ask() -> None:
            done.extend(client.ask(ListJobs(), timeout_s=30, what="the jobs") for _ in range(20))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(done) == 160


def test_a_request_without_an_answer_is_sent_again() -> None:
    seen: list[int] = []

    def answer(ask: Ask) -> Answer | None:
        seen.append(ask.number)
        return Done() if seen.count(ask.number) > 1 else None

    with Answerer(KEY, answer) as server, client_of(server) as client:
        assert client.ask(ListJobs(), timeout_s=30, what="the jobs") == Done()


def test_a_request_asked_before_the_dispatcher_is_there_is_answered_once_it_is() -> None:
    with Answerer(KEY, lambda ask: Done()) as server:
        port = server.port
    got: list[Answer] = []
    with ControlClient(f"tcp://127.0.0.1:{port}", KEY, name="early") as client:
        client.post(ListJobs(), got.append)
        with Answerer(KEY, lambda ask: Done(), port=port):
            wait_until(lambda: got == [Done()], "the answer")


def test_a_dispatcher_that_comes_back_is_asked_again_and_the_caller_is_told() -> None:
    back = threading.Event()
    with Answerer(KEY, lambda ask: Done()) as server:
        client = client_of(server, on_reconnect=back.set)
        client.ask(ListJobs(), timeout_s=30, what="the jobs")
        port = server.port
    with client, Answerer(KEY, lambda ask: Done(), port=port):
        client.ask(ListJobs(), timeout_s=30, what="the jobs")
        assert back.wait(30)


def test_a_dispatcher_that_takes_us_for_somebody_else_is_dialled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.wire.control.REDIAL_S", 0.3)
    back = threading.Event()
    server = Answerer(KEY, lambda ask: Done() if len(set(server.peers)) > 1 else None)
    with server, client_of(server, on_reconnect=back.set) as client:
        assert client.ask(ListJobs(), timeout_s=60, what="the jobs") == Done()
        assert back.is_set()


def test_the_error_at_the_deadline_names_the_address_and_what_was_asked() -> None:
    with (
        ControlClient("tcp://127.0.0.1:1", KEY, name="lonely") as client,
        pytest.raises(DispatcherUnavailableError, match=r"tcp://127\.0\.0\.1:1 to list jobs within 0\.2 s \(not conn"),
    ):
        client.ask(ListJobs(), timeout_s=0.2, what="list jobs")


def test_a_key_that_is_not_known_is_an_error_at_once_and_is_counted() -> None:
    with Answerer(KEY, lambda ask: Done()) as server:
        with ControlClient(server.address, new_key(), name="wrong") as client:
            started = time.monotonic()
            with pytest.raises(AuthenticationError, match="key that the service knows"):
                client.ask(ListJobs(), timeout_s=60, what="the jobs")
            assert time.monotonic() - started < 20
            with pytest.raises(AuthenticationError):
                client.ask(ListJobs(), timeout_s=60, what="the jobs")
        wait_until(lambda: server.guard.refused > 0, "the refusal to be counted")
        with client_of(server) as client:
            assert client.ask(ListJobs(), timeout_s=30, what="the jobs") == Done()
        assert not server.protocol_errors


def test_a_server_that_is_another_is_an_error_at_once() -> None:
    keys, mixed = KEY, KEY.toward(KEY.public)
    with Answerer(keys, lambda ask: Done()) as server:
        with (
            ControlClient(server.address, mixed, name="wrong") as client,
            pytest.raises(AuthenticationError),
        ):
            client.ask(ListJobs(), timeout_s=60, what="the jobs")
        with ControlClient(server.address, keys, name="right") as client:
            assert client.ask(ListJobs(), timeout_s=30, what="the jobs") == Done()


def test_a_refusal_is_raised_as_the_error_it_names() -> None:
    answers: list[Answer] = [Refused(reason="no such thing", kind="invalid_pipeline"), Refused(reason="just no")]
    with Answerer(KEY, lambda ask: answers[ask.number - 1]) as server, client_of(server) as client:
        with pytest.raises(InvalidPipelineError, match="no such thing"):
            client.ask(ListJobs(), timeout_s=30, what="the jobs")
        with pytest.raises(RefusedError, match="just no"):
            client.ask(ListJobs(), timeout_s=30, what="the jobs")


def test_try_again_is_tried_again_and_its_reason_is_in_the_error() -> None:
    count = [0]

    def answer(ask: Ask) -> Answer:
        count[0] += 1
        return TryAgain(reason="the disk is full") if count[0] < 3 else Done()

    with Answerer(KEY, answer) as server, client_of(server) as client:
        assert client.ask(ListJobs(), timeout_s=30, what="the jobs") == Done()
        count[0] = -1000
        with pytest.raises(DispatcherUnavailableError, match="disk is full"):
            client.ask(ListJobs(), timeout_s=1, what="the jobs")


def test_pushes_reach_the_callback_and_a_failing_callback_does_no_harm() -> None:
    got: list[object] = []

    def on_push(body: object) -> None:
        got.append(body)
        raise RuntimeError("a bug in the callback")

    with Answerer(KEY, lambda ask: Done()) as server, client_of(server, on_push=on_push) as client:
        client.ask(ListJobs(), timeout_s=30, what="the jobs")
        server.push(StopRunner(runner="r1", reason="done"))  # type: ignore[arg-type]
        wait_until(lambda: bool(got), "the push")
        assert client.ask(ListJobs(), timeout_s=30, what="the jobs") == Done()


def test_messages_of_another_protocol_are_dropped_and_others_are_served() -> None:
    import msgspec
    import zmq

    from penstock.wire.sockets import dial

    with Answerer(KEY, lambda ask: Done()) as server:
        context = zmq.Context()
        socket = dial(context, KEY, server.address, data=False)
        assert socket.poll(30_000, zmq.POLLOUT)
        for frame in (msgspec.msgpack.encode([99, 1, 0, {"type": "list_jobs"}]), b"\xc1garbage", b"", b"\x94\x02"):
            socket.send(frame)
        wait_until(lambda: len(server.protocol_errors) == 4, "the refusals")
        assert "upgrade the older side" in server.protocol_errors[0]
        with client_of(server) as client:
            assert client.ask(ListJobs(), timeout_s=30, what="the jobs") == Done()
        socket.close(linger=0)
        context.destroy(linger=0)
    assert encode_tell(1, 2, Done())


def test_closing_with_the_dispatcher_gone_or_silent_takes_no_longer_than_its_deadline() -> None:
    client = ControlClient("tcp://127.0.0.1:1", KEY, name="lonely")
    client.post(ListJobs())
    started = time.monotonic()
    client.close()
    client.close()
    with Answerer(KEY, lambda ask: None) as server:
        client = client_of(server)
        client.post(ListJobs())
        wait_until(lambda: bool(server.asked), "the post")
        client.close()
    assert time.monotonic() - started < 10
    with pytest.raises(PenstockError, match="closed"):
        client.ask(ListJobs(), timeout_s=1, what="the jobs")


def test_somebody_who_waits_is_told_when_the_client_is_closed() -> None:
    with Answerer(KEY, lambda ask: None) as server:
        client = client_of(server)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                client.ask(ListJobs(), timeout_s=60, what="the jobs")
            except PenstockError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: bool(server.asked), "the question")
        client.close()
        thread.join(30)
        assert "closed while waiting" in str(errors[0])


def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on() -> None:
    with Answerer(KEY, lambda ask: Done()) as server, client_of(server) as client:
        client.ask(ListJobs(), timeout_s=30, what="the jobs")
        child = os.fork()
        if child == 0:
            try:
                client.ask(ListJobs(), timeout_s=1, what="the jobs")
            except PenstockError as error:
                client.close()
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.ask(ListJobs(), timeout_s=30, what="the jobs") == Done()


def test_no_descriptor_is_left_behind() -> None:
    def once() -> None:
        with Answerer(KEY, lambda ask: Done()) as server, client_of(server) as client:
            client.ask(ListJobs(), timeout_s=30, what="the jobs")

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_process_with_an_open_client_exits() -> None:
    code = (
        "from penstock.wire.control import ControlClient; from penstock.wire.credentials import Credentials\n"
        "client = ControlClient('tcp://127.0.0.1:1', Credentials.new(server='0' * 40), name='left open')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
