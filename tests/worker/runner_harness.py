"""A runner in this process, a dispatcher that only grants, and a reader that writes down what it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import zmq
from tests.job_specs import job_spec
from tests.keys import SERVER, knows, new_key

from penstock.api.dataset import Dataset
from penstock.core.ids import AttemptId, JobName, RunnerId, StreamId, WorkerId
from penstock.graph.codec import encode_graph
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.processes.runner_config import RunnerConfig
from penstock.runtime.distributable import for_workers
from penstock.sources.listing_codec import encode_listings, split_counts
from penstock.sources.registry import open_source
from penstock.wire.addresses import Listening, RunnerAddress, host_id
from penstock.wire.admissions import KnownReader, WhoReads
from penstock.wire.blobs import blob_hash
from penstock.wire.credentials import Credentials
from penstock.wire.elements import unflatten
from penstock.wire.frames import (
    NO_STORAGE_OPTIONS,
    CloseStream,
    Credit,
    FromRunner,
    OpenStream,
    Output,
    Rounds,
    SourceStorageOptions,
    StreamEnded,
    StreamFailed,
    StreamRefused,
    UseSlabs,
)
from penstock.wire.framing import Assembly, decode_ask, encode_tell
from penstock.wire.jobs import Cut, FeedSpec, JobSpec, Named
from penstock.wire.leases import SlabReader
from penstock.wire.messages import BlobPiece, GetBlob, GetSpec, Granted, GrantSplits, Refused, Spec
from penstock.wire.runs import decode_run
from penstock.wire.sockets import Guard, bind_router, dial
from penstock.worker.runner import JobRunner

DEADLINE_S = 60.0
PLENTY = 1 << 40
ATTEMPT = AttemptId("att")
RUNNER = RunnerId("runner-1")
GRANTED = FeedSpec("granted")


def decode_frame(header: Rounds, buffers: list[Any]) -> list[Any]:
    """Return the elements of a frame: one by itself, several as a run."""
    return [unflatten(header.layout, buffers)] if header.count == 1 else decode_run(header.layout, buffers)


class Dispatcher:
    """Knows one job. Grants every (source, pass) in order, `at_once` at a time, to whoever asks next."""

    def __init__(self, credentials: Credentials) -> None:
        self.spec: JobSpec | None = None
        self.blobs: dict[str, bytes] = {}
        self.at_once = 1
        self.dropped: tuple[tuple[int, int, int], ...] = ()
        self.refuse = ""
        self.silent = False
        self.lists: dict[tuple[str, int, int], list[int]] = {}
        self.next: dict[tuple[int, int], int] = {}
        self._context: zmq.Context[Any] = zmq.Context()
        self._guard = Guard(self._context, knows(credentials))
        self._guard.start()
        self._socket, self.address = bind_router(self._context, Listening(), "dispatcher", SERVER, data=False)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping:
            if not self._socket.poll(20) or self.silent:
                continue
            peer, frame = self._socket.recv_multipart()
            ask = decode_ask(frame)
            with suppress(zmq.ZMQError):  # whoever asked is gone
                self._socket.send_multipart([peer, encode_tell(ask.number, 1, self._answer(ask.body))])
        self._socket.close(linger=0)

    def _answer(self, body: object) -> Any:
        assert self.spec is not None
        if isinstance(body, GetSpec):
            return Spec(spec=self.spec, dropped=self.dropped)
        if isinstance(body, GetBlob):
            blob = self.blobs[body.hash]
            return BlobPiece(size=len(blob), piece=blob[body.offset : body.offset + 5000])
        if isinstance(body, GrantSplits):
            return Refused(reason=self.refuse) if self.refuse else self._grant(body)
        if isinstance(body, WhoReads):
            return KnownReader(principal="trainer/test")
        return Refused(reason=f"not asked for in tests: {body}")

    def _grant(self, body: GrantSplits) -> Granted:
        assert self.spec is not None
        known = self.lists.setdefault((body.stream, body.source, body.pass_), [])
        at = 0 if body.after is None else known.index(body.after) + 1
        if at == len(known):
            first = self.next.get((body.source, body.pass_), 0)
            stop = min(first + self.at_once, self.spec.split_counts[body.source])
            known.extend(range(first, stop))
            self.next[body.source, body.pass_] = stop
        return Granted(ordinals=tuple(known[at:]))

    def close(self) -> None:
        self._stopping = True
        self._thread.join(DEADLINE_S)
        self._guard.close()
        self._context.destroy(linger=0)


@dataclass
class Received:
    """What one opening received."""

    elements: list[Any] = field(default_factory=list)
    frames: list[Rounds] = field(default_factory=list)
    done: set[tuple[int, int, int]] = field(default_factory=set)
    end: StreamEnded | None = None
    failure: StreamFailed | None = None
    refusal: StreamRefused | None = None

    @property
    def over(self) -> bool:
        return self.end is not None or self.failure is not None or self.refusal is not None


class Reader:
    """A consumer: opens streams, reads rounds and checks that their numbers follow each other."""

    def __init__(
        self, address: RunnerAddress, credentials: Credentials, *, slab: bool = False, process: str = ""
    ) -> None:
        """`process`: another's name, for tests of what happens when it ends."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._dial = partial(dial, self._context, credentials.toward(address.key), address.socket, data=True)
        self._socket = self._dial()
        self._assembly = Assembly()
        self.slabs = SlabReader.connect(address.slab) if slab else None
        assert self.slabs is not None or not slab
        if self.slabs is not None:
            if process:
                self.slabs.name = f"{process}/secret"
            self._use_slabs(self.slabs)
        self.received: dict[tuple[str, int], Received] = {}
        self.output: list[str] = []
        self._next: dict[tuple[str, int], int] = {}
        self._opening = 0

    def open(
        self,
        number: int = 0,
        *,
        consumer: int = 0,
        round: int = 0,
        cut: Cut = Cut(),  # noqa: B008
        cut_round: int | None = None,
        feed: FeedSpec = GRANTED,
        binding: int = 1,
        opening: int | None = None,
        credit: int = PLENTY,
        share: int = 1,
        runner: RunnerId = RUNNER,
        epoch: int = 0,
        replica: int = 0,
        storage: SourceStorageOptions = NO_STORAGE_OPTIONS,
    ) -> Received:
        self._opening = self._opening + 1 if opening is None else opening
        stream = StreamId(f"{ATTEMPT}.{number}")
        received = self.received[stream, self._opening] = Received()
        self._next[stream, self._opening] = round
        self.say(
            OpenStream(
                stream=stream,
                binding=binding,
                opening=self._opening,
                consumer=consumer,
                round=round,
                cut=cut,
                cut_round=round if cut_round is None else cut_round,
                feed=feed,
                share=share,
                attempt=ATTEMPT,
                epoch=epoch,
                runner=runner,
                credit=credit,
                slab=self.slabs is not None,
                replica=replica,
                storage=storage,
            )
        )
        return received

    def reconnect(self) -> None:
        """Close the connection without reading what is under way, or a last word, and make another."""
        self._socket.close(linger=0)
        self._socket, self._assembly = self._dial(), Assembly()
        if self.slabs is not None:
            self.slabs.close_connection(self._connection)
            self._use_slabs(self.slabs)

    def _use_slabs(self, slabs: SlabReader) -> None:
        using = slabs.open_connection()
        self._connection = using.connection
        self.say(using)

    @property
    def opening(self) -> int:
        return self._opening

    def say(self, message: OpenStream | UseSlabs | Credit | CloseStream) -> None:
        assert self._socket.poll(DEADLINE_S * 1000, zmq.POLLOUT), "the runner does not let us in"
        self._socket.send(msgspec.msgpack.encode(message))

    def credit(self, number: int, credit: int, returned: tuple[int, ...] = (), opening: int | None = None) -> None:
        stream = StreamId(f"{ATTEMPT}.{number}")
        opening = self._opening if opening is None else opening
        self.say(Credit(stream=stream, opening=opening, credit=credit, returned=returned))

    def close_stream(self, number: int) -> None:
        self.say(CloseStream(stream=StreamId(f"{ATTEMPT}.{number}"), opening=self._opening))

    def read_until(self, condition: Callable[[], bool], what: str = "what the test waits for") -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come; received {self.received}"
            if self._socket.poll(50):
                self._take(self._socket.recv(copy=False))

    def read_for(self, seconds: float) -> None:
        """Read what comes within a while, for tests that say that nothing more comes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._socket.poll(20):
                self._take(self._socket.recv(copy=False))

    def _take(self, frame: zmq.Frame) -> None:
        whole = self._assembly.add(frame)
        if whole is None:
            return
        header, parts = whole
        message = msgspec.msgpack.decode(header, type=FromRunner)
        if isinstance(message, Output):
            self.output.append(message.text)
            return
        received = self.received[message.stream, message.opening]
        if isinstance(message, Rounds):
            key = (message.stream, message.opening)
            assert message.seq == self._next[key], f"round {message.seq} where {self._next[key]} was due"
            self._next[key] += message.count
            buffers: Any = [part.buffer for part in parts]
            if message.slab is not None:
                assert self.slabs is not None and not parts
                buffers = self.slabs.claim(message.slab).arrays()
            elements = decode_frame(message, buffers)
            assert len(elements) == message.count
            received.elements.extend(elements)
            received.frames.append(message)
        elif isinstance(message, StreamEnded):
            received.end = message
        elif isinstance(message, StreamFailed):
            received.failure = message
        elif isinstance(message, StreamRefused):
            received.refusal = message
        if isinstance(message, (Rounds, StreamEnded)):
            received.done |= ordinals(message.done)

    def close(self) -> None:
        if self.slabs is not None:
            self.slabs.close()
        self._socket.close(linger=0)
        self._context.destroy(linger=0)


def ordinals(named: tuple[Named, ...]) -> set[tuple[int, int, int]]:
    return {(entry.source, entry.pass_, ordinal) for entry in named for ordinal in entry.ordinals}


class Harness:
    def __init__(self) -> None:
        self.credentials = new_key("runner", RUNNER)
        self.dispatcher = Dispatcher(self.credentials)
        self.runners: list[JobRunner] = []
        self.readers: list[Reader] = []
        self.at_end: list[Callable[[], None]] = []

    def serve(
        self,
        dataset: Dataset,
        *,
        threads: int = 2,
        memory_bytes: int = 256 << 20,
        keep_grants: bool = False,
        **spec: Any,
    ) -> JobRunner:
        """Start a runner for a job over this dataset."""
        if not keep_grants:
            self.dispatcher.lists.clear()
            self.dispatcher.next.clear()
        graph = for_workers(dataset.node, spec.get("policy", "dynamic"))
        sources = [open_source(node) for node in walk(graph) if isinstance(node, SourceNode)]
        blobs = [encode_graph(graph), encode_listings(sources)]
        self.dispatcher.blobs = {blob_hash(blob): blob for blob in blobs}
        self.dispatcher.spec = job_spec(
            graph=blob_hash(blobs[0]),
            splits=blob_hash(blobs[1]),
            split_counts=split_counts(sources),
            seed=spec.pop("seed", 11),
            **spec,
        )
        return self.another_runner(threads=threads, memory_bytes=memory_bytes)

    def another_runner(self, *, threads: int = 2, memory_bytes: int = 256 << 20) -> JobRunner:
        runner = JobRunner(
            RunnerConfig(
                runner=RUNNER,
                worker=WorkerId("w1"),
                job=JobName("job"),
                dispatcher=self.dispatcher.address,
                credentials=self.credentials,
                memory_bytes=memory_bytes,
                threads=threads,
                host=host_id(),
            )
        )
        runner.start()
        self.runners.append(runner)
        return runner

    def reader(self, runner: JobRunner | None = None, *, slab: bool = False, process: str = "") -> Reader:
        reader = Reader((runner or self.runners[-1]).address, self.credentials, slab=slab, process=process)
        self.readers.append(reader)
        return reader

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        for runner in self.runners:
            runner.close()
        for end in self.at_end:
            end()
        self.dispatcher.close()


@contextmanager
def harness() -> Iterator[Harness]:
    made = Harness()
    try:
        yield made
    finally:
        made.close()
