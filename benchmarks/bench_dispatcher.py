"""What one dispatcher carries: splits granted, restarts, heartbeats, large jobs. All journaled with full sync.

There is no peer to run beside it: the figures are held against fixed targets.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from harness import Bench, BenchError, main, say
from ours import dispatcher as load
from ours import joins as joins_core
from report import Result, machine, median_and_low, our_versions

from penstock.core.ids import AgentId, AttemptId, ClientId, StreamId, WorkerId
from penstock.wire.jobs import StreamView
from penstock.wire.messages import (
    AgentBeat,
    Done,
    EpochOpened,
    Granted,
    GrantSplits,
    ListJobs,
    RegisterAgent,
    RunnerPlace,
    RunnerReady,
    StartRunner,
    ViewMoved,
    WorkerPlace,
)
from penstock.wire.modes import Ranks

ASKERS = 8
EVENTS = 1_000_000
WORKERS = 5_000
CLIENTS = 8
FILES = 1_000_000
FILES_PER_SPLIT = 64


def at_least(bench: Bench, case: str, values: list[float], target: float, unit: str, **details: Any) -> None:
    ratio, low = median_and_low([value / target for value in values])
    bench.add(
        Result(
            bench=bench.name,
            case=case,
            ours=statistics.median(values),
            peer="target",
            theirs=target,
            unit=unit,
            ratio=ratio,
            low=low,
            target=1.0,
            details={"runs": len(values), **details, "versions": our_versions(), "machine": machine()},
        )
    )


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A directory on the disk of the checkout: /tmp may be memory, where a sync costs nothing."""
    path = Path(tempfile.mkdtemp(prefix="dispatcher-", dir=Path(__file__).resolve().parent.parent / ".bench"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


class Reader:
    """An asker that wants the next splits of one stream, several at a time."""

    def __init__(self, asker: load.Asker, attempt: AttemptId, stream: StreamView) -> None:
        self.asker, self.attempt, self.stream = asker, attempt, stream
        self.after: int | None = None
        self.given = 0

    def ask(self, seconds_per_split: float = 0.001) -> None:
        self.asker.ask(
            GrantSplits(
                job=load.JOB,
                attempt=self.attempt,
                stream=StreamId(self.stream.stream),
                binding=self.stream.binding,
                source=0,
                pass_=0,
                after=self.after,
                seconds_per_split=seconds_per_split,
            )
        )

    def take(self) -> bool:
        for told in self.asker.answers():
            if not isinstance(told.body, Granted) or not told.body.ordinals:
                raise BenchError(f"no splits: {told.body}")
            self.given += len(told.body.ordinals)
            self.after = told.body.ordinals[-1]
            return True
        return False


def granting(bench: Bench) -> None:
    seconds = bench.options.seconds
    with folder() as journal, load.running(journal) as process, load.control(process.address) as client:
        job = load.bound_streams(process.address, client, ASKERS, 1_000_000_000)
        with job as (attempt, streams), load.askers(process.address, [key for _, key in streams]) as askers:
            readers = {asker.socket: Reader(asker, attempt, stream) for asker, (stream, _) in zip(askers, streams)}
            poller = zmq.Poller()
            for socket, reader in readers.items():
                poller.register(socket, zmq.POLLIN)
                reader.ask()
            rates, cpu = [], process.cpu_s()
            begun = time.perf_counter()
            for _ in range(bench.options.pairs):
                begin, before = time.perf_counter(), sum(reader.given for reader in readers.values())
                while time.perf_counter() - begin < seconds:
                    for socket, _ in poller.poll(1000):
                        if readers[socket].take():
                            readers[socket].ask()
                given = sum(reader.given for reader in readers.values()) - before
                rates.append(given / (time.perf_counter() - begin))
            busy = (process.cpu_s() - cpu) / (time.perf_counter() - begun)
    at_least(bench, f"splits granted to {ASKERS} askers", rates, 20_000, "splits/s", cpu_share=round(busy, 2))


def restarting(bench: Bench) -> None:
    """The history is made through the dispatcher itself, one split an event, all streams asking at once."""
    events = EVENTS // 20 if bench.options.quick else EVENTS
    say(f"dispatcher/restart: making {events:,} events")
    with folder() as journal:
        with load.running(journal) as process, load.control(process.address) as client:
            job = load.bound_streams(process.address, client, 200, 1_000_000_000)
            with job as (attempt, streams), load.askers(process.address, [key for _, key in streams]) as askers:
                history([Reader(asker, attempt, stream) for asker, (stream, _) in zip(askers, streams)], events)
            client.ask(ListJobs(), timeout_s=load.DEADLINE_S, what="jobs")
            position = client.seen
        whole, opened = [], []
        for _ in range(3 if bench.options.quick else 7):
            begin = time.perf_counter()
            with load.running(journal) as process, load.control(process.address) as client:
                client.ask(ListJobs(), timeout_s=load.DEADLINE_S, what="jobs")
                whole.append(time.perf_counter() - begin)
                opened.append(process.opened_s)
                if client.seen < position:
                    raise BenchError(f"position {client.seen} after a restart, {position} before")
        size = sum(file.stat().st_size for file in journal.iterdir())
    details = {"events": position, "opening_s": round(statistics.median(opened), 3), "journal_bytes": size}
    bench.limit("killed, restarted, first answer", whole, 2.0, unit="s", **details)


def history(readers: list[Reader], events: int) -> None:
    """Grant one split an event: each stream's next question follows its last answer, all streams at once."""
    by_socket = {reader.asker.socket: reader for reader in readers}
    poller = zmq.Poller()
    for socket, reader in by_socket.items():
        poller.register(socket, zmq.POLLIN)
        reader.ask(0.0)
    done = 0
    while done < events:
        for socket, _ in poller.poll(1000):
            if by_socket[socket].take():
                done += 1
                by_socket[socket].ask(0.0)


class Herd:
    """Agents of one worker each, over a few sockets. What they hear has to be `Done`."""

    def __init__(self, askers: list[load.Asker]) -> None:
        self._askers = askers
        self._sent_at: dict[tuple[int, int], float] = {}
        self.waits: list[float] = []

    def register(self, number: int) -> None:
        place = WorkerPlace(worker=WorkerId(f"w{number}"))
        self._ask(number, RegisterAgent(agent=AgentId(f"agent{number}"), host=f"h{number}", workers=(place,)))

    def beat(self, number: int) -> None:
        self._ask(number, AgentBeat(agent=AgentId(f"agent{number}"), runners=()))

    def _ask(self, number: int, body: Any) -> None:
        place = number % len(self._askers)
        self._sent_at[place, self._askers[place].ask(body)] = time.perf_counter()

    def collect(self) -> None:
        for number, asker in enumerate(self._askers):
            for told in asker.answers():
                if told.body != Done():
                    raise BenchError(f"an agent was answered {told.body}")
                self.waits += [time.perf_counter() - self._sent_at.pop((number, told.number))]

    def drain(self) -> None:
        deadline = time.monotonic() + load.DEADLINE_S
        while self._sent_at:
            if time.monotonic() > deadline:
                raise BenchError(f"{len(self._sent_at)} questions were not answered in {load.DEADLINE_S:.0f} s")
            self.collect()
            time.sleep(0.001)


def heartbeats(bench: Bench) -> None:
    workers = WORKERS // 10 if bench.options.quick else WORKERS
    seconds = 3 if bench.options.quick else 10
    with (
        folder() as journal,
        load.running(journal) as process,
        load.askers(process.address, [load.AGENT_KEY] * 50) as askers,
    ):
        herd = Herd(askers)
        begin = time.perf_counter()
        for number in range(workers):
            herd.register(number)
            if number % 250 == 249:
                for earlier in range(number):
                    herd.beat(earlier)
                herd.drain()
        registered_s = time.perf_counter() - begin
        herd.waits.clear()
        cpu, begin, sent = process.cpu_s(), time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            while sent < elapsed * workers:
                herd.beat(sent % workers)
                sent += 1
            herd.collect()
            time.sleep(0.002)
        herd.drain()
        took = time.perf_counter() - begin
        busy = (process.cpu_s() - cpu) / took
    waits = sorted(herd.waits)
    details = {
        "beats": sent,
        "took_s": round(took, 2),
        "registered_s": round(registered_s, 2),
        "p50_ms": round(waits[len(waits) // 2] * 1e3, 2),
    }
    bench.limit(f"{workers:,} workers beating each second: cores", [busy], 1.0, unit="cores", **details)
    late = waits[int(0.99 * len(waits))]
    bench.limit(f"{workers:,} workers beating each second: p99 answer", [late], 1.0, unit="s", **details)


def registering(bench: Bench) -> None:
    files = FILES // 10 if bench.options.quick else FILES
    names = [f"s3://bucket/imagenet/train/n{i % 1000:08d}/n{i % 1000:08d}_{i:07d}.JPEG" for i in range(files)]
    seconds, size = [], 0
    for _ in range(2 if bench.options.quick else 5):
        with folder() as journal, load.running(journal) as process, load.control(process.address) as client:
            begin = time.perf_counter()
            groups = [(names[i : i + FILES_PER_SPLIT], os.urandom(8)) for i in range(0, files, FILES_PER_SPLIT)]
            graph, listing = b"graph", msgspec.msgpack.encode(groups)
            load.put(client, graph)
            load.put(client, listing)
            request = load.opening(load.spec(graph, listing, len(groups)))
            answer = client.ask(request, timeout_s=load.DEADLINE_S, what="opening")
            if not isinstance(answer, EpochOpened):
                raise BenchError(f"not opened: {answer}")
            seconds.append(time.perf_counter() - begin)
            size = len(listing)
    bench.limit(f"a job over {files:,} files registers", seconds, 10.0, unit="s", listing_bytes=size)


class Arrivals:
    """Workers that join the job of some clients over real sockets, and how many bytes those clients are sent."""

    def __init__(self, process: load.Process, agents: list[load.Asker], clients: list[load.Asker]) -> None:
        self._agents, self._clients = agents, clients
        self._poller = zmq.Poller()
        for asker in (*agents, *clients):
            self._poller.register(asker.socket, zmq.POLLIN)
        self._sent = dict.fromkeys((asker.socket for asker in clients), 0)
        self._shown = dict.fromkeys((asker.socket for asker in clients), 0)
        self._open(process)

    def _open(self, process: load.Process) -> None:
        graph, listing = b"graph", b"listing"
        with load.control(process.address) as control:
            load.put(control, graph)
            load.put(control, listing)
        described = msgspec.structs.replace(load.spec(graph, listing, 1_000_000), ranks=Ranks(len(self._clients)))
        for number, asker in enumerate(self._clients):
            asker.ask(
                msgspec.structs.replace(
                    load.opening(described),
                    consumer=number,
                    client=ClientId(f"client{number}"),
                    attempt=AttemptId(f"a{number}"),
                )
            )
        self._until(lambda: all(self._sent.values()), "the epoch is open")
        self._sent = dict.fromkeys(self._sent, 0)

    def join(self, number: int) -> None:
        asker = self._agents[number % len(self._agents)]
        agent, worker = AgentId(f"agent{number:012x}"), WorkerId(f"worker{number:010x}")
        asker.ask(RegisterAgent(agent=agent, host=f"h{number}", workers=(WorkerPlace(worker=worker),)))
        asked: list[StartRunner] = []
        self._until(lambda: bool(asked), "a process is asked for", asked)
        place = RunnerPlace(asked[0].runner, asked[0].worker, asked[0].job, joins_core.address(number))
        asker.ask(RunnerReady(agent=agent, place=place))
        self._until(lambda: min(self._shown.values()) > number, "the clients are shown its stream")

    def _until(self, condition: Callable[[], bool], what: str, asked: list[StartRunner] | None = None) -> None:
        deadline = time.monotonic() + load.DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise BenchError(f"waited {load.DEADLINE_S:.0f} s until {what}")
            for socket, _ in self._poller.poll(1000):
                frame = socket.recv()
                body = load.decode_tell(frame).body
                if socket in self._sent:
                    self._sent[socket] += len(frame)
                if isinstance(body, ViewMoved):
                    self._shown[socket] += len(body.change.made)
                elif isinstance(body, StartRunner) and asked is not None:
                    asked.append(body)

    @property
    def sent_bytes(self) -> int:
        return max(self._sent.values())


def joins(bench: Bench) -> None:
    """5,000 workers join one job one by one; what each of its clients is sent grows with them and not with the square.

    On the dispatcher's decisions alone, and over sockets with fewer.
    """
    many = WORKERS // 10 if bench.options.quick else WORKERS
    half, whole = joins_core.join(many, CLIENTS), joins_core.join(2 * many, CLIENTS)
    share = many / WORKERS
    results = [
        bench.limit(
            f"{many:,} workers join: sent to each of {CLIENTS} clients", [half.sent_bytes], 3e6 * share, unit="B"
        ),
        bench.limit("twice as many: sent", [whole.sent_bytes / half.sent_bytes], 2.1, unit="times as much"),
        bench.limit(f"{many:,} workers join: processor time", [half.cpu_s], 10.0 * share, unit="s"),
        bench.limit("twice as many: processor time", [whole.cpu_s], 10.0 * share, unit="s"),
    ]
    fewer = many // 10
    keys = [load.AGENT_KEY] * 20 + [load.TRAINER] * CLIENTS
    with folder() as journal, load.running(journal) as process, load.askers(process.address, keys) as askers:
        arrivals = Arrivals(process, askers[:20], askers[20:])
        cpu = process.cpu_s()
        for number in range(fewer):
            arrivals.join(number)
        cpu_s, sent = process.cpu_s() - cpu, arrivals.sent_bytes
    share = fewer / WORKERS
    results += [
        bench.limit(f"{fewer:,} workers join over sockets: sent to each client", [sent], 3e6 * share, unit="B"),
        bench.limit(f"{fewer:,} workers join over sockets: processor time", [cpu_s], 10.0 * share, unit="s"),
    ]
    missed = [result.case for result in results if result.ratio < 1.0]
    if missed:
        raise BenchError(f"missed: {'; '.join(missed)}")


CASES = {
    "granting": granting,
    "registering": registering,
    "heartbeats": heartbeats,
    "restarting": restarting,
    "joins": joins,
}


def run(bench: Bench) -> None:
    for name, case in CASES.items():
        if bench.options.case in name:
            case(bench)


if __name__ == "__main__":
    main("dispatcher", run)
