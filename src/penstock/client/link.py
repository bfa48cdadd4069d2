"""The way to the dispatcher: found, dialled, and asked to open an epoch.

A service that is not there yet is waited for, with a message now and then; only `timeout` makes that an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from time import monotonic, sleep

import zmq

from penstock.client.board import Board
from penstock.core.errors import (
    DispatcherUnavailableError,
    JobMismatchError,
    PenstockError,
    ServiceFileMissingError,
    SupersededError,
    WaitTimeoutError,
)
from penstock.core.ids import AttemptId, BlobHash, ClientId, JobName, RunnerId
from penstock.graph.codec import decode_graph
from penstock.graph.difference import difference
from penstock.wire.blobs import put_blob_pieces
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials, ServiceFile
from penstock.wire.messages import (
    Answer,
    BlobPiece,
    EpochOpened,
    GetBlob,
    GetSpec,
    ListWorkers,
    NotKnown,
    NotYet,
    OpenEpoch,
    Push,
    Request,
    Spec,
    Superseded,
    ViewMoved,
    Workers,
)
from penstock.wire.slab_reader import SlabReader
from penstock.wire.sockets import Context

ASK_S = 10.0
"""How long one question waits before something is said; waiting goes on."""
SAY_EVERY_S = 30.0
FIRST_WORD_S = 3.0
NOT_YET_S = (0.02, 0.5)
LOOK_S = 0.2
ALL_WORKERS_S = 5.0  # those of a service that has just been started have registered by then, or will not soon
"""The first and the longest pause after "not yet"."""

_log = logging.getLogger("penstock")


class Patience:
    """Waits for one thing: says so now and then, and gives up at the deadline."""

    def __init__(self, timeout_s: float | None, what: str) -> None:
        self._began = monotonic()
        self._timeout_s, self._what = timeout_s, what
        self._say_at = self._began + FIRST_WORD_S

    @property
    def left_s(self) -> float | None:
        return None if self._timeout_s is None else self._timeout_s - (monotonic() - self._began)

    def wait(self, pause_s: float, why: str) -> None:
        self.check(why)
        left = self.left_s
        sleep(pause_s if left is None else max(0.0, min(pause_s, left)))

    def check(self, why: str) -> None:
        now = monotonic()
        waited_s = now - self._began
        if self._timeout_s is not None and waited_s >= self._timeout_s:
            raise WaitTimeoutError(self._what, why, waited_s)
        if now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            _log.warning("still waiting for %s (%.0f s): %s", self._what, waited_s, why)


class ServiceLink:
    """One process's connection to one service."""

    def __init__(self, service: ServiceFile, *, name: str) -> None:
        self.address = service.address
        self.credentials: Credentials = service.credentials
        self.pid = os.getpid()
        self.context: Context = zmq.Context()
        self.boards: dict[ClientId, Board] = {}
        """Where changes of the views that are being read go."""
        self.control = ControlClient(
            service.address, service.credentials, name=name, on_push=self._pushed, on_reconnect=self._reconnected
        )
        self.slabs: dict[RunnerId, SlabReader] = {}
        """Mapped once a process, and kept: what it placed stays readable when its connection, or itself, is gone, and
        what the trainer still held when an epoch ended is given back in the next."""
        self.finished: dict[JobName, AttemptId] = {}
        """Which attempt of a job was read to its end last."""
        self._closed = False

    def _pushed(self, push: Push) -> None:
        match push:
            case ViewMoved():
                for board in list(self.boards.values()):
                    board.put_change(push.change)
            case Superseded():
                superseded = self.boards.get(push.client)
                if superseded is not None:
                    superseded.put_refusal(SupersededError(push.reason))

    def _reconnected(self) -> None:
        """A dispatcher that was started again starts nothing for us before it has heard of us."""
        for board in list(self.boards.values()):
            board.miss()

    def ask(self, body: Request, patience: Patience, what: str) -> Answer:
        """Ask until there is an answer."""
        while True:
            left = patience.left_s
            try:
                return self.control.ask(
                    body, timeout_s=ASK_S if left is None else max(0.05, min(ASK_S, left)), what=what
                )
            except DispatcherUnavailableError as error:
                patience.check(str(error))

    def count_workers(self, patience: Patience, expected: int) -> int:
        """Return how many workers there are now; waits for the first, and for a while for those that are expected."""
        wait_for_all_until = monotonic() + min(ALL_WORKERS_S, patience.left_s or ALL_WORKERS_S)
        while True:
            answer = self.ask(ListWorkers(), patience, "the list of workers")
            found = len(answer.workers) if isinstance(answer, Workers) else 0
            if found >= max(1, expected) or (found and monotonic() >= wait_for_all_until):
                return found
            patience.wait(LOOK_S, f"the service at {self.address} has {found or 'no'} worker yet")

    def open_epoch(
        self, request: OpenEpoch, blobs: Mapping[BlobHash, bytes], patience: Patience
    ) -> EpochOpened | NotKnown:
        """Open, sending what the dispatcher misses; `NotKnown` is for who wanted to rejoin."""
        pause_s, longest_s = NOT_YET_S
        while True:
            try:
                answer = self.ask(request, patience, f"opening epoch {request.epoch} of job {request.job!r}")
            except JobMismatchError as refused:
                raise JobMismatchError(f"{refused}{self._difference(request, blobs)}") from None
            if isinstance(answer, (EpochOpened, NotKnown)):
                return answer
            if not isinstance(answer, NotYet):
                raise TypeError(f"OpenEpoch was answered with {type(answer).__name__}")
            ours = [blobs[missing] for missing in answer.missing_blobs if missing in blobs]
            for blob in ours:
                for piece in put_blob_pieces(blob):
                    self.ask(piece, patience, "storing the pipeline")
            if not ours:
                patience.wait(pause_s, answer.waiting_for or "the dispatcher says: not yet")
                pause_s = min(longest_s, pause_s * 2)

    def _difference(self, request: OpenEpoch, blobs: Mapping[BlobHash, bytes]) -> str:
        """Return in words how the pipeline differs from the job's, as far as that can be had."""
        try:
            spec = self.control.ask(GetSpec(job=request.job), timeout_s=ASK_S, what="the job's description")
            if not isinstance(spec, Spec) or spec.spec.graph == request.spec.graph:
                return ""
            theirs = decode_graph(self._fetch(spec.spec.graph))
            found = difference(theirs, decode_graph(blobs[request.spec.graph]))
        except PenstockError:
            return ""
        return f" Against the job's pipeline: {'; '.join(found[:8])}." if found else ""

    def _fetch(self, name: BlobHash) -> bytes:
        content = b""
        while True:
            request = GetBlob(hash=name, offset=len(content))
            piece = self.control.ask(request, timeout_s=ASK_S, what="the job's pipeline")
            if not isinstance(piece, BlobPiece):
                raise PenstockError(f"GetBlob was answered with {type(piece).__name__}")
            content += piece.piece
            if len(content) >= piece.size or not piece.piece:
                return content

    def close(self) -> None:
        """Never waits for anybody's answer for more than a second."""
        if self._closed or os.getpid() != self.pid:
            return
        self._closed = True
        self.control.close()
        self.context.destroy(linger=0)
        for reader in self.slabs.values():
            reader.close()
        self.slabs.clear()


def find_when_there(find: Callable[[], ServiceFile], patience: Patience) -> ServiceFile:
    """Wait for a service file that is not written yet."""
    while True:
        try:
            return find()
        except ServiceFileMissingError as error:
            patience.wait(0.2, str(error))
