"""A dispatcher to load, and those who load it: a process of its own, asked over real sockets."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from harness import BenchError

from penstock.core.ids import AgentId, AttemptId, ClientId, Fingerprint, JobName, RunnerId, WorkerId
from penstock.dispatcher.main import DispatcherConfig
from penstock.wire.addresses import Listening
from penstock.wire.blobs import blob_hash, put_blob_pieces
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials, KnownKey
from penstock.wire.jobs import JobSpec, StreamView
from penstock.wire.messages import (
    PROTOCOL,
    AgentBeat,
    Ask,
    Beat,
    Done,
    EpochOpened,
    ExpectRunner,
    OpenEpoch,
    RegisterAgent,
    RunnerPlace,
    RunnerReady,
    StartRunner,
    Tell,
    WorkerPlace,
)
from penstock.wire.modes import Ranks, Sharding
from penstock.wire.sockets import dial

DEADLINE_S = 60.0
SERVER = Credentials.new("operator", "server")
TRAINER = Credentials.new("trainer", "benchmark", server=SERVER.public)
AGENT_KEY = Credentials.new("agent", "fleet", server=SERVER.public)
JOB = JobName("bench")
AGENT, CLIENT = AgentId("agent"), ClientId("client")

_tells = msgspec.msgpack.Decoder(Tell)


def decode_tell(frame: bytes) -> Tell:
    return _tells.decode(frame)


class Process:
    """A dispatcher's process; `started_s` is from starting Python to the first request it takes."""

    def __init__(self, journal: Path) -> None:
        self._folder = tempfile.mkdtemp(prefix="penstock-bench-")
        config = DispatcherConfig(
            server=SERVER,
            known=tuple(KnownKey(key.public, key.principal) for key in (TRAINER, AGENT_KEY)),
            journal=str(journal),
            listening=Listening(folder=self._folder),
        )
        code = (
            "import sys, msgspec, time\nfrom penstock.dispatcher.main import DispatcherConfig, run\n"
            "config = msgspec.json.decode(sys.argv[1], type=DispatcherConfig)\nbegin = time.perf_counter()\n"
            "run(config, ready=lambda address: print(address, time.perf_counter() - begin, flush=True))"
        )
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, msgspec.json.encode(config).decode()],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().split()
        if not line:
            raise BenchError("the dispatcher did not start")
        self.started_s = time.perf_counter() - begin
        self.address, self.opened_s = line[0], float(line[1])

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def running(journal: Path) -> Iterator[Process]:
    process = Process(journal)
    try:
        yield process
    finally:
        process.kill()


@contextlib.contextmanager
def control(
    address: str, key: Credentials = TRAINER, on_push: Callable[[Any], None] | None = None
) -> Iterator[ControlClient]:
    with ControlClient(address, key, name="bench", on_push=on_push) as client:
        yield client


def put(client: ControlClient, data: bytes) -> None:
    for piece in put_blob_pieces(data):
        client.ask(piece, timeout_s=DEADLINE_S, what="storing a blob")


def spec(graph: bytes, listing: bytes, splits: int) -> JobSpec:
    return JobSpec(
        fingerprint=Fingerprint("f"),
        graph=blob_hash(graph),
        splits=blob_hash(listing),
        split_counts=(splits,),
        seed=7,
        ranks=Ranks(),
        sharding=Sharding(),
    )


def opening(job_spec: JobSpec) -> OpenEpoch:
    return OpenEpoch(
        job=JOB, client=CLIENT, consumer=0, replica=0, epoch=0, spec=job_spec, attempt=AttemptId("a1"), host="h"
    )


@contextlib.contextmanager
def bound_streams(
    address: str, client: ControlClient, workers: int, splits: int
) -> Iterator[tuple[AttemptId, list[tuple[StreamView, Credentials]]]]:
    """Open a job that so many workers run, and keep all of them alive; gives the attempt and its streams, each with the
    key of the process that runs it.
    """
    graph, listing = b"graph", b"listing"
    put(client, graph)
    put(client, listing)
    pushed: list[StartRunner] = []
    keys: dict[RunnerId, Credentials] = {}
    with control(
        address, AGENT_KEY, lambda push: pushed.append(push) if isinstance(push, StartRunner) else None
    ) as agent:
        places = tuple(WorkerPlace(worker=WorkerId(f"w{i}")) for i in range(workers))
        agent.ask(RegisterAgent(agent=AGENT, host="h", workers=places), timeout_s=DEADLINE_S, what="agent")
        request = opening(spec(graph, listing, splits))
        client.ask(request, timeout_s=DEADLINE_S, what="opening")
        deadline = time.monotonic() + DEADLINE_S
        bound: list[StreamView] = []
        while len(bound) < workers:
            if time.monotonic() > deadline:
                raise BenchError(f"{workers} streams were not bound within {DEADLINE_S:.0f} s")
            while pushed:
                asked = pushed.pop()
                key = keys[asked.runner] = Credentials.new("runner", asked.runner, server=SERVER.public)
                expect = ExpectRunner(agent=AGENT, job=asked.job, runner=asked.runner, verifier=key.public)
                agent.ask(expect, timeout_s=DEADLINE_S, what="expecting a runner")
                place = RunnerPlace(
                    runner=asked.runner,
                    worker=asked.worker,
                    job=asked.job,
                    address="tcp://h:1",
                    verifier=key.public,
                )
                if agent.ask(RunnerReady(agent=AGENT, place=place), timeout_s=DEADLINE_S, what="a runner") != Done():
                    raise BenchError("a runner was refused")
            answer = client.ask(request, timeout_s=DEADLINE_S, what="opening")
            assert isinstance(answer, EpochOpened)
            bound = [stream for stream in answer.view.streams if stream.runner is not None]
            time.sleep(0.01)
        runners = tuple(stream.runner for stream in bound if stream.runner is not None)
        attempt = answer.view.attempt
        stop = threading.Event()

        def live() -> None:
            while not stop.wait(1.0):
                agent.post(AgentBeat(agent=AGENT, runners=runners))
                client.post(Beat(job=JOB, client=CLIENT, consumer=0, attempt=attempt, version=answer.view.version))

        alive = threading.Thread(target=live)
        alive.start()
        try:
            yield attempt, [(stream, keys[stream.runner]) for stream in bound if stream.runner is not None]
        finally:
            stop.set()
            alive.join(DEADLINE_S)


class Asker:
    """A socket with one question under way, without a thread: many of them load one dispatcher from one process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: Credentials) -> None:
        self.socket = dial(context, key, address, data=False)
        if not self.socket.poll(int(DEADLINE_S * 1000), zmq.POLLOUT):
            raise BenchError("an asker was not let in")
        self._number = 0

    def ask(self, body: Any) -> int:
        self._number += 1
        self.socket.send(msgspec.msgpack.encode(Ask(PROTOCOL, self._number, 0, body)))
        return self._number

    def answers(self) -> list[Tell]:
        """Return what has come, pushes left out."""
        found = []
        while True:
            try:
                told = _tells.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return found
            if told.number:
                found.append(told)

    def close(self) -> None:
        self.socket.close(linger=0)


@contextlib.contextmanager
def askers(address: str, keys: Iterable[Credentials]) -> Iterator[list[Asker]]:
    """Give an asker for each key."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[Asker] = []
    try:
        made.extend(Asker(context, address, key) for key in keys)
        yield made
    finally:
        for asker in made:
            asker.close()
        context.destroy(linger=0)
