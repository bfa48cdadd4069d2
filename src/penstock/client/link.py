"""The way to the dispatcher: found, dialled, asked to open an epoch; and the board where what it says of one is put.

A service that is not there yet is waited for, with a message now and then; only `timeout` makes that an error.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic, sleep
from typing import NamedTuple
from weakref import WeakMethod

import zmq

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
from penstock.graph.randomized import identified
from penstock.wire.blobs import fetch_blob, put_blob_pieces
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials, ServiceFile
from penstock.wire.guard import Context
from penstock.wire.jobs import HeldView, JobSpec, JobView, StreamView, ViewChange
from penstock.wire.leases import SlabReader
from penstock.wire.messages import (
    Answer,
    EpochOpened,
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
from penstock.wire.sockets import Bell

ASK_S = 10.0
"""How long one question waits before something is said; waiting goes on."""
SAY_EVERY_S = 30.0
FIRST_WORD_S = 3.0
NOT_YET_S = (0.02, 0.5)
"""The first and the longest pause after "not yet"."""
LOOK_S = 0.2
ALL_WORKERS_S = 20.0  # those of a service that has just been started have registered by then, or will not soon

_log = logging.getLogger("penstock")


class Patience:
    """Waits for one thing: says so now and then, and gives up at the deadline."""

    def __init__(self, timeout_s: float | None, what: str, *, first_word_s: float = FIRST_WORD_S) -> None:
        self._began = monotonic()
        self._timeout_s, self._what = timeout_s, what
        self._say_at = self._began + first_word_s

    def at_most(self, seconds: float) -> float:
        """Return so long, or what is left until the deadline."""
        if self._timeout_s is None:
            return seconds
        return max(0.0, min(seconds, self._began + self._timeout_s - monotonic()))

    @property
    def is_due(self) -> bool:
        """Something is to be said, or the time is over."""
        return monotonic() >= self._say_at or self.at_most(1.0) == 0.0

    def say(self, why: str) -> None:
        waited_s = monotonic() - self._began
        if self._timeout_s is not None and waited_s >= self._timeout_s:
            raise WaitTimeoutError(self._what, why, waited_s)
        self._say_at = monotonic() + SAY_EVERY_S
        _log.warning("still waiting for %s (%.0f s): %s", self._what, waited_s, why)

    def wait(self, pause_s: float, why: str) -> None:
        if self.is_due:
            self.say(why)
        sleep(self.at_most(pause_s))


class News(NamedTuple):
    """What the control thread has to say: the newest view, and its streams that are new or changed since the last."""

    view: JobView
    streams: tuple[StreamView, ...]
    forgotten: str
    """Why the epoch has to be opened again; empty: the dispatcher knows this reader."""
    refusal: Exception | None


class Board:
    """What the control thread tells the trainer's thread about one epoch, and the bell between them."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` is called, in the thread that puts, when the dispatcher is to be asked what has changed."""
        self.bell = Bell()
        self.unread = False
        """Whether the dispatcher has said something that `next()` has not taken."""
        self.ask = ask
        """Asks the dispatcher what has changed; called when something may have been pushed that did not come."""
        self._lock = threading.Lock()
        self._held: HeldView | None = None
        self._early = False
        """Whether a change came before the view that it changes."""
        self._forgotten = ""
        self._refusal: Exception | None = None
        self._when_refused: WeakMethod[Callable[[], None]] | None = None

    def put(self, told: JobView | ViewChange) -> None:
        """Take a view or a change over, unless it is older than what is here, or of another attempt."""
        with self._lock:
            if self._held is None:
                self._early = True
                return
            fit = self._held.take_view(told) if isinstance(told, JobView) else self._held.take_change(told)
            self.unread |= fit == "taken"
        if fit == "taken":
            self.bell.ring()
        elif fit == "missed":
            self.ask()

    def replace_view(self, view: JobView) -> None:
        """Begin with the view of an opening, whatever was here."""
        with self._lock:
            self._held, self._forgotten, self.unread = HeldView(view), "", self._refusal is not None
            self._held.take_news()
            self._early, early = False, self._early
        if early:
            self.ask()

    def put_forgotten(self, what: str) -> None:
        """The dispatcher does not know this reader any more: it must open again."""
        with self._lock:
            self._forgotten, self.unread = what, True
        self.bell.ring()

    def when_refused(self, act: WeakMethod[Callable[[], None]]) -> None:
        """Have something done, in the thread that puts it, when there is a refusal."""
        self._when_refused = act

    def put_refusal(self, error: Exception) -> None:
        """Reading cannot go on: another reader took the place, or the job is gone."""
        with self._lock:
            self._refusal, self.unread = error, True
        act = None if self._when_refused is None else self._when_refused()
        if act is not None:
            act()
        self.bell.ring()

    def take(self) -> News:
        """Return what is new since the last call, or since the opening."""
        with self._lock:
            assert self._held is not None
            self.unread = False
            self._forgotten, forgotten = "", self._forgotten
            return News(self._held.view, self._held.take_news(), forgotten, self._refusal)

    @property
    def version(self) -> int:
        with self._lock:
            return 0 if self._held is None else self._held.version


class ServiceLink:
    """One process's connection to one service."""

    def __init__(self, service: ServiceFile, *, name: str) -> None:
        self.address = service.address
        self.reading_key = Credentials.new(service.credentials.role, service.credentials.name)
        """What is shown to runners, where job code could take it: it opens nothing but what is read there."""
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
                    board.put(push.change)
            case Superseded():
                superseded = self.boards.get(push.client)
                if superseded is not None:
                    superseded.put_refusal(SupersededError(push.reason))

    def _reconnected(self) -> None:
        """A dispatcher that was started again starts nothing for us before it has heard of us."""
        for board in list(self.boards.values()):
            board.ask()

    def ask(self, body: Request, patience: Patience, what: str) -> Answer:
        """Ask until there is an answer."""
        while True:
            try:
                return self.control.ask(body, timeout_s=max(0.05, patience.at_most(ASK_S)), what=what)
            except DispatcherUnavailableError as error:
                patience.wait(0.0, str(error))

    def count_workers(self, patience: Patience, expected: int) -> int:
        """Return how many workers there are now; waits for the first, and for a while for those that are expected."""
        wait_for_all_until = monotonic() + patience.at_most(ALL_WORKERS_S)
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
            if isinstance(answer, EpochOpened):
                self._check_code(request, answer.spec, blobs)
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

    def _check_code(self, request: OpenEpoch, joined: JobSpec, blobs: Mapping[BlobHash, bytes]) -> None:
        """Refuse a job of somebody else's whose pipeline is not what its fingerprint says.

        A fingerprint is its maker's claim. The dispatcher has seen that a blob is what its name says; where the names
        differ, operators and the digests of their functions are compared here, without loading any of it.
        """
        if joined.owner not in request.trust or joined.graph == request.spec.graph:
            return
        different = self._difference(request, blobs)
        if different:
            raise JobMismatchError(
                f"job {request.job!r} claims the fingerprint of this pipeline and has another one.{different} Give "
                "another job= name, and tell its owner"
            )

    def _difference(self, request: OpenEpoch, blobs: Mapping[BlobHash, bytes]) -> str:
        """Return in words how the pipeline differs from the job's, as far as that can be had."""
        try:
            spec = self.control.ask(GetSpec(job=request.job), timeout_s=ASK_S, what="the job's description")
            if not isinstance(spec, Spec) or spec.spec.graph == request.spec.graph:
                return ""
            ask = partial(self.control.ask, timeout_s=ASK_S, what="the job's pipeline")
            theirs = decode_graph(fetch_blob(spec.spec.graph, ask))
            ours = decode_graph(blobs[request.spec.graph])
        except PenstockError:
            return ""
        drawing = [
            name for name, graph in (("this loader", ours), ("the job", theirs)) if identified(graph) is not None
        ]
        if len(drawing) == 1:
            return (
                f" Only {drawing[0]} has a function that takes rng after distribute(), which needs the elements' "
                "identities: those who read one job all have one there, or none."
            )
        found = difference(theirs, ours)
        return f" Against the job's pipeline: {'; '.join(found[:8])}." if found else ""

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
