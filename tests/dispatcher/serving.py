"""Dispatchers to test: in a thread of this process, and in a process of their own."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from penstock.core.ids import AgentId, AttemptId, ClientId, JobName, RunnerId, StreamId, WorkerId
from penstock.dispatcher.main import Dispatcher, DispatcherConfig
from penstock.wire.admissions import ExpectRunner
from penstock.wire.blobs import blob_hash, put_blob_pieces
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials, KnownKey
from penstock.wire.jobs import JobSpec, JobView, Resume, StreamView
from penstock.wire.messages import (
    Done,
    EpochOpened,
    Granted,
    GrantSplits,
    OpenEpoch,
    RegisterAgent,
    RunnerPlace,
    RunnerReady,
    StartRunner,
    WorkerPlace,
)
from tests.job_specs import job_spec
from tests.keys import SERVER, new_key
from tests.waiting import wait_until

DEADLINE_S = 30.0
KEY, AGENT_KEY = new_key(), new_key("agent", "fleet")
KNOWN = tuple(KnownKey(key.public, key.principal) for key in (KEY, AGENT_KEY))
RUNNER_KEYS: dict[RunnerId, Credentials] = {}
"""The keys that agents have made for their processes."""
GRAPH, SPLITS = b"a graph nobody reads", b"a list of splits nobody reads"
JOB, ATTEMPT = JobName("resnet"), AttemptId("a1")


class Served:
    """A dispatcher in a thread."""

    def __init__(self, config: DispatcherConfig, prepare: Callable[[Dispatcher], None] | None = None) -> None:
        self._stop = threading.Event()
        self._opened: queue.Queue[Dispatcher | BaseException] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(config, prepare))
        self._thread.start()
        found = self._opened.get(timeout=DEADLINE_S)
        if isinstance(found, BaseException):
            self._thread.join(DEADLINE_S)
            raise found
        self.dispatcher = found
        self.address = found.address
        self.service = found.service

    def _run(self, config: DispatcherConfig, prepare: Callable[[Dispatcher], None] | None) -> None:
        try:
            dispatcher = Dispatcher(config)
        except BaseException as error:
            self._opened.put(error)
            return
        try:
            if prepare is not None:
                prepare(dispatcher)
            self._opened.put(dispatcher)
            dispatcher.serve(self._stop.is_set)
        finally:
            dispatcher.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def served(
    journal: Path | None = None, prepare: Callable[[Dispatcher], None] | None = None, **options: Any
) -> Iterator[Served]:
    config = DispatcherConfig(server=SERVER, known=KNOWN, journal=None if journal is None else str(journal), **options)
    running = Served(config, prepare)
    try:
        yield running
    finally:
        running.close()


def started(
    config: DispatcherConfig, *, before: str = "", after: str = "", errors: IO[str] | None = None
) -> tuple[subprocess.Popen[str], str]:
    """Return a dispatcher's process and its address; `before` and `after` are code to run there around it.

    `errors`: the file it writes to that says too much for a pipe that nobody reads until it has ended.
    """
    code = (
        f"import sys, msgspec\n{before}\nfrom penstock.dispatcher.main import DispatcherConfig, run\n"
        "config = msgspec.json.decode(sys.argv[1], type=DispatcherConfig)\n"
        f"run(config, ready=lambda address: print(address, flush=True))\n{after}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, msgspec.json.encode(config).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if errors is None else errors,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        _, said = process.communicate(timeout=DEADLINE_S)
        raise RuntimeError(said)
    return process, address


def ended(process: subprocess.Popen[str]) -> str:
    """Return what a process that is ending wrote to stderr."""
    try:
        _, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        raise AssertionError(f"the dispatcher did not end: {errors}") from None
    return errors


@contextlib.contextmanager
def client(address: str, name: str = "test", **options: Any) -> Iterator[ControlClient]:
    with ControlClient(address, KEY, name=name, **options) as control:
        yield control


def spec(count: int = 1000, **changes: Any) -> JobSpec:
    given = {"graph": blob_hash(GRAPH), "splits": blob_hash(SPLITS), "split_counts": (count,)}
    return job_spec(**given | changes)


def put_blobs(control: ControlClient) -> None:
    for blob in (GRAPH, SPLITS):
        for piece in put_blob_pieces(blob):
            assert control.ask(piece, timeout_s=DEADLINE_S, what="storing a blob") == Done()


def opening(*, attempt: AttemptId = ATTEMPT, resume: Resume | None = None, **changes: Any) -> OpenEpoch:
    given: dict[str, Any] = {
        "job": JOB,
        "client": ClientId("c1"),
        "consumer": 0,
        "replica": 0,
        "epoch": 0,
        "spec": spec(),
        "attempt": attempt,
        "host": "h",
        "resume": resume,
    }
    return OpenEpoch(**given | changes)


def open_job(control: ControlClient, request: OpenEpoch | None = None) -> JobView:
    answer = control.ask(request or opening(), timeout_s=DEADLINE_S, what="opening")
    assert isinstance(answer, EpochOpened), answer
    return answer.view


class FakeAgent:
    """An agent with one worker, whose processes are only said to exist."""

    def __init__(self, address: str, number: int = 0, key: Credentials = AGENT_KEY) -> None:
        self.agent, self.worker = AgentId(f"agent{number}"), WorkerId(f"worker{number}")
        self.started: queue.Queue[StartRunner] = queue.Queue()
        self.control = ControlClient(address, key, name="agent", on_push=self._pushed)

    def _pushed(self, push: Any) -> None:
        if isinstance(push, StartRunner):
            self.started.put(push)

    def register(self, *runners: RunnerPlace) -> None:
        request = RegisterAgent(agent=self.agent, host="h", workers=(WorkerPlace(worker=self.worker),), runners=runners)
        assert self.control.ask(request, timeout_s=DEADLINE_S, what="registering") == Done()

    def expect_runner(self) -> StartRunner:
        """Say by which key the process that is to be started will be known; return what was asked for."""
        asked = self.started.get(timeout=DEADLINE_S)
        key = RUNNER_KEYS[asked.runner] = new_key("runner", asked.runner)
        expect = ExpectRunner(agent=self.agent, job=asked.job, runner=asked.runner, verifier=key.public)
        assert self.control.ask(expect, timeout_s=DEADLINE_S, what="expecting") == Done()
        return asked

    def serve_runner(self) -> RunnerPlace:
        asked = self.expect_runner()
        place = RunnerPlace(
            runner=asked.runner,
            worker=asked.worker,
            job=asked.job,
            address="tcp://127.0.0.1:1",
            verifier=RUNNER_KEYS[asked.runner].public,
        )
        answer = self.control.ask(RunnerReady(agent=self.agent, place=place), timeout_s=DEADLINE_S, what="ready")
        assert answer == Done(), answer
        return place

    def close(self) -> None:
        self.control.close()


def bound_stream(control: ControlClient, request: OpenEpoch | None = None) -> StreamView:
    """Return the first stream that a process runs, asking until there is one."""

    def found() -> StreamView | None:
        return next((stream for stream in open_job(control, request).streams if stream.runner is not None), None)

    stream = wait_until(found, "a bound stream")
    assert isinstance(stream, StreamView)
    return stream


def attempt_of(stream: StreamView) -> AttemptId:
    return AttemptId(stream.stream.rpartition(".")[0])


def grant(control: ControlClient, stream: StreamView, after: int | None, *, job: JobName = JOB) -> tuple[int, ...]:
    """Ask as the runner that the stream is bound to, where `control` asks."""
    request = GrantSplits(
        job=job,
        attempt=attempt_of(stream),
        stream=StreamId(stream.stream),
        binding=stream.binding,
        source=0,
        pass_=0,
        after=after,
        seconds_per_split=0.01,
    )
    assert stream.runner is not None
    with ControlClient(control.address, RUNNER_KEYS[stream.runner], name="runner") as runner:
        answer = runner.ask(request, timeout_s=DEADLINE_S, what="splits")
    assert isinstance(answer, Granted), answer
    return answer.ordinals
