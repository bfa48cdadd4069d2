"""Connections to a process of each other host that runs the same job: one thread with their sockets, for any that ask.

Whom to ask the dispatcher says, and it tells them whose key this runner shows. A fellow that does not answer in time,
or whose connection is lost, is left alone for a while: it costs what was asked of it then, and no more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

import msgspec
import zmq

from penstock.core.errors import PenstockError
from penstock.core.ids import JobName, RunnerId
from penstock.wire.addresses import RunnerAddress, is_unix
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials
from penstock.wire.fetching import FellowsFound, FindFellows, FromFellow, ToFellow
from penstock.wire.framing import Assembly, Outbox, decode_message
from penstock.wire.guard import Context
from penstock.wire.messages import Answer
from penstock.wire.sockets import Bell, Watch, dial

FIRST_LIST_S = 1.0  # that the first question waits for the dispatcher to say who there is
LIST_EVERY_S = 5.0  # while questions are asked: hosts come and go
AWAY_S = 30.0
LOOK_S = 0.5
CLOSE_WAIT_S = 1.0

_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_answers: msgspec.msgpack.Decoder[ToFellow] = msgspec.msgpack.Decoder(ToFellow)


class FellowAnswer(NamedTuple):
    """What a fellow said, and the buffers that came with it. Without a header: it is not there."""

    fellow: RunnerId
    header: ToFellow | None = None
    buffers: Sequence[Any] = ()


AnswerQueue: TypeAlias = SimpleQueue[FellowAnswer]


class _FellowQuestion(NamedTuple):
    fellow: RunnerId
    number: int
    message: bytes
    answers: AnswerQueue | None


class _Fellow:
    """One connection; only the thread touches it."""

    def __init__(self, context: Context, credentials: Credentials, address: RunnerAddress) -> None:
        self.socket = dial(context, credentials.toward(address.key), address.socket, data=True)
        self.watch = Watch(self.socket)
        self._assembly = Assembly()
        self.outbox = Outbox(self.socket)
        self.asked: dict[int, AnswerQueue] = {}

    def put(self, question: _FellowQuestion) -> None:
        if question.answers is not None:
            self.asked[question.number] = question.answers
        self.outbox.put(question.message)

    def receive(self, name: RunnerId) -> None:
        while True:
            try:
                whole = self._assembly.add(self.socket.recv(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return
            if whole is None:
                continue
            header, parts = whole
            answer = decode_message(_answers, header)
            waiting = self.asked.pop(answer.number, None)
            if waiting is not None:
                waiting.put(FellowAnswer(name, answer, [part.buffer for part in parts]))


class FellowLinks:
    """A runner's. Any thread may ask; nothing is dialled before somebody does."""

    def __init__(self, context: Context, control: ControlClient, credentials: Credentials, job: JobName) -> None:
        # A shadow: `destroy` of the owner's context does not reach into our thread for its sockets, but ends its poll.
        self._context: Context = zmq.Context.shadow(context.underlying)
        self._control, self._credentials, self._job = control, credentials, job
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._bell = Bell()
        self._listed = threading.Event()
        self._list_at = 0.0
        self._places: dict[RunnerId, RunnerAddress] = {}
        self._away: dict[RunnerId, float] = {}
        self._questions: deque[_FellowQuestion] = deque()
        self._fellows: dict[RunnerId, _Fellow] = {}
        """Only the thread's."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def known(self) -> list[RunnerId]:
        """Return whom something can be asked now."""
        now = monotonic()
        with self._lock:
            due = now >= self._list_at and not self._closed
            if due:
                self._list_at = now + LIST_EVERY_S
        if due:
            try:
                self._control.post(FindFellows(job=self._job), self._heard)
            except PenstockError:
                self._listed.set()  # this runner ends
        self._listed.wait(FIRST_LIST_S)
        self._listed.set()
        return [runner for runner in list(self._places) if self._away.get(runner, 0.0) <= now]

    def _heard(self, answer: Answer) -> None:
        if isinstance(answer, FellowsFound):
            found = {place.runner: RunnerAddress.parse(place.address) for place in answer.fellows}
            self._places = {runner: address for runner, address in found.items() if not is_unix(address.socket)}
            self._bell.ring()
        self._listed.set()

    def ask(self, fellows: Sequence[RunnerId], question: Callable[[int], FromFellow]) -> AnswerQueue:
        """Ask some the same, each by a number of its own; each gives one answer, or is away."""
        answers: AnswerQueue = SimpleQueue()
        for fellow in fellows:
            number = next(self._numbers)
            self._put(_FellowQuestion(fellow, number, _encoder.encode(question(number)), answers))
        return answers

    def tell(self, fellow: RunnerId, message: FromFellow) -> None:
        """Say something that needs no answer."""
        self._put(_FellowQuestion(fellow, 0, _encoder.encode(message), None))

    def _put(self, question: _FellowQuestion) -> None:
        with self._lock:
            if self._closed:
                if question.answers is not None:
                    question.answers.put(FellowAnswer(question.fellow))
                return
            self._questions.append(question)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="penstock fellows", daemon=True)
                self._thread.start()
        self._bell.ring()

    def give_up(self, fellow: RunnerId) -> None:
        """A fellow took too long."""
        self._away[fellow] = monotonic() + AWAY_S
        self._bell.ring()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._bell.ring()
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)
        else:
            self._bell.close()

    # The thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._follow_list()
                while self._questions:
                    question = self._questions.popleft()
                    fellow = self._fellows.get(question.fellow)
                    if fellow is not None:
                        fellow.put(question)
                    elif question.answers is not None:
                        question.answers.put(FellowAnswer(question.fellow))
                for name, fellow in list(self._fellows.items()):
                    self._look_after(name, fellow)
                self._wait()
        except zmq.ContextTerminated:
            pass  # the context went first
        except Exception:
            _log.exception("other hosts are not asked any more")
        finally:
            self._closed = True
            for name in list(self._fellows):
                self._drop(name)
            while self._questions:
                question = self._questions.popleft()
                if question.answers is not None:
                    question.answers.put(FellowAnswer(question.fellow))
            self._bell.close()

    def _follow_list(self) -> None:
        now, places = monotonic(), self._places
        for name in [name for name in self._fellows if name not in places or self._away.get(name, 0.0) > now]:
            self._drop(name)
        for name, address in places.items():
            if name not in self._fellows and self._away.get(name, 0.0) <= now:
                self._fellows[name] = _Fellow(self._context, self._credentials, address)

    def _look_after(self, name: RunnerId, fellow: _Fellow) -> None:
        try:
            fellow.receive(name)
            fellow.outbox.flush()
            lost = fellow.watch.lost()
        except PenstockError as error:  # what it said is no message
            lost = str(error)
        if lost is not None:
            _log.info("another host cannot be asked for what it keeps", extra={"runner": name, "reason": lost})
            self._away[name] = monotonic() + AWAY_S
            self._list_at = 0.0
            self._drop(name)

    def _drop(self, name: RunnerId) -> None:
        fellow = self._fellows.pop(name)
        for answers in fellow.asked.values():
            answers.put(FellowAnswer(name))
        fellow.socket.close(linger=0)

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.descriptor, zmq.POLLIN)
        for fellow in self._fellows.values():
            poller.register(fellow.socket, fellow.outbox.interest)
            poller.register(fellow.watch.socket, zmq.POLLIN)
        if any(woken == self._bell.descriptor for woken, _ in poller.poll(int(LOOK_S * 1000))):
            self._bell.quiet()
