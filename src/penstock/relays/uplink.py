"""The uplink: this process reads for the runners of its job, beside the trainer's thread.

One thread has the sockets: a connection to each runner that serves an open stream, apart from the one that outputs come
by, so that neither waits for the other. A few threads read, and put what they read into a connection's outbox. For whom
is read next, and how much may wait to be sent, is said by `relays.asking`.

A connection that is lost is dialled again, and given up if its runner lets nobody in for a while: then it is gone.
Nothing is kept for it: a runner asks again for what it still needs.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import msgspec
import zmq

from penstock.core.errors import PenstockError
from penstock.core.ids import RunnerId
from penstock.relays.asking import GivenAsk, RelayGiver
from penstock.relays.trainer_sources import TrainerSources
from penstock.wire.addresses import RunnerAddress
from penstock.wire.allocation import keep_freed_memory
from penstock.wire.credentials import Credentials
from penstock.wire.failures import describe_failure
from penstock.wire.frames import AskRows, FromRunner, OfferReading, RelayFailed
from penstock.wire.framing import Outbox, decode_message
from penstock.wire.guard import Context
from penstock.wire.sockets import Bell, Watch, dial

READERS = 4  # threads: a disk, or a store far away, has a few readings under way
LOOK_S = 0.5  # how often connections are looked at while nothing arrives
AGAIN_S = 1.0  # before a runner is dialled again that did not let us in
MOST_TRIES = 30
QUEUED_FRAMES = 64  # in a socket: what waits beyond is counted here
CLOSE_S = 2.0

_log = logging.getLogger("penstock")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRunner] = msgspec.msgpack.Decoder(FromRunner)


class UplinkStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What was read for runners so far."""

    answers: int = 0
    sent_bytes: int = 0
    read_s: float = 0.0
    """Reading and encoding it, over all threads."""
    unsent_bytes: int = 0
    """Read, and not on its way yet."""


class _Dial(NamedTuple):
    address: str
    at: float = 0.0
    """Not before."""
    tries: int = 0
    """How often it was tried in vain."""


class _RunnerWay:
    """The connection to one runner. Of the thread that has the sockets, but for the outbox."""

    def __init__(self, context: Context, key: Credentials, dialled: _Dial, name: str) -> None:
        parsed = RunnerAddress.parse(dialled.address)
        self.dialled = dialled
        self.socket = dial(context, key.toward(parsed.key), parsed.socket, data=True, queue=QUEUED_FRAMES)
        self.watch = Watch(self.socket)
        self.stood = False
        """Whether the runner has let us in."""
        self.outbox = Outbox(self.socket)
        self.outbox.put(_encoder.encode(OfferReading(name=name)))

    def receive(self) -> list[FromRunner]:
        found: list[FromRunner] = []
        try:
            while True:
                found.append(decode_message(_decoder, self.socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return found

    def lost(self) -> bool:
        reason = self.watch.lost()
        self.stood |= self.watch.connected
        return reason is not None


class Uplink:
    """One loader's. Used from the trainer's thread; its own do the rest."""

    def __init__(self, key: Credentials, sources: TrainerSources, memory_bytes: int) -> None:
        """`key`: what runners are shown. `memory_bytes`: how much may be read and not sent."""
        self._key, self._sources = key, sources
        self._name = secrets.token_hex(8)
        self._context: Context = zmq.Context()
        self._bell = Bell()
        self._changed = threading.Condition()
        """Over all that follows."""
        self._giver = RelayGiver(memory_bytes)
        self._dials: dict[RunnerId, _Dial] = {}
        """What is to be dialled."""
        self._ways: dict[RunnerId, _RunnerWay] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._counts = UplinkStatistics()
        keep_freed_memory()

    # The trainer's thread

    def reach(self, runner: RunnerId, address: str) -> None:
        """Read for a runner from now on."""
        with self._changed:
            way = self._ways.get(runner)
            if self._closed or (way is not None and way.dialled.address == address):
                return
            self._dials[runner] = _Dial(address)
            if not self._threads:
                self._start("penstock uplink", self._serve)
                for number in range(READERS):
                    self._start(f"penstock uplink reading {number}", self._read_on)
        self._bell.ring()

    def statistics(self) -> UplinkStatistics:
        with self._changed:
            return msgspec.structs.replace(self._counts, unsent_bytes=sum(self._unsent.values()))

    def close(self) -> None:
        with self._changed:
            closed, self._closed = self._closed, True
            threads = list(self._threads)
            self._changed.notify_all()
        if closed:
            return
        self._bell.ring()
        until = monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - monotonic()))  # one may be in a source that does not answer
        if not threads:
            self._end()
        self._sources.close()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def _unsent(self) -> dict[RunnerId, int]:
        return {runner: way.outbox.nbytes for runner, way in self._ways.items()}

    # The sockets' thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                with self._changed:
                    self._dial()
                    for runner in list(self._ways):
                        self._look_after(runner, self._ways[runner])
                self._wait()
        finally:
            with self._changed:
                self._closed = True
                for way in self._ways.values():
                    way.socket.close(linger=0)
                self._changed.notify_all()
            self._end()

    def _dial(self) -> None:
        due = [runner for runner, dialled in self._dials.items() if monotonic() >= dialled.at]
        for runner, dialled in [(runner, self._dials.pop(runner)) for runner in due]:
            if runner in self._ways:
                self._drop(runner)
            try:
                self._ways[runner] = _RunnerWay(self._context, self._key, dialled, self._name)
            except (PenstockError, zmq.ZMQError) as error:
                _log.warning("runner %s cannot be reached to read for it: %s", runner, error)

    def _look_after(self, runner: RunnerId, way: _RunnerWay) -> None:
        had = way.outbox.nbytes
        try:
            way.outbox.flush()
            for message in way.receive():
                if isinstance(message, AskRows):
                    self._giver.ask(runner, message)
                    self._changed.notify()
            lost = way.lost()
        except (PenstockError, zmq.ZMQError) as error:
            _log.warning("the connection to read for runner %s is given up: %s", runner, error)
            lost = True
        if had != way.outbox.nbytes:
            self._changed.notify_all()
        if lost:
            self._drop(runner)
            tries = 0 if way.stood else way.dialled.tries + 1
            if tries < MOST_TRIES:
                self._dials.setdefault(runner, _Dial(way.dialled.address, monotonic() + AGAIN_S * (tries > 0), tries))
                self._bell.ring()

    def _drop(self, runner: RunnerId) -> None:
        self._ways.pop(runner).socket.close(linger=0)
        self._giver.lose(runner)
        self._changed.notify_all()

    def _wait(self) -> None:
        watched: list[tuple[Any, int]] = [(self._bell.descriptor, zmq.POLLIN)]
        for way in self._ways.values():
            watched.append((way.socket, way.outbox.interest))
            watched.append((way.watch.socket, zmq.POLLIN))
        if any(where == self._bell.descriptor for where, _ in zmq.zmq_poll(watched, int(LOOK_S * 1000))):
            self._bell.quiet()

    def _end(self) -> None:
        self._bell.close()
        self._context.destroy(linger=0)

    # The reading threads

    def _read_on(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (ask := self._giver.next(self._unsent)) is None:
                    self._changed.wait()
                if self._closed:
                    return
            assert ask is not None
            self._read(ask)

    def _read(self, ask: GivenAsk) -> None:
        began = perf_counter()
        try:
            message = self._sources.answer(ask.message)
        except Exception as error:  # whatever a source raises is the trainer's to see, and comes back to it
            message = _encoder.encode(RelayFailed(ask=ask.message.ask, failure=describe_failure(error)))
        with self._changed:
            counts = self._counts
            self._counts = msgspec.structs.replace(
                counts,
                answers=counts.answers + 1,
                sent_bytes=counts.sent_bytes + len(message),
                read_s=counts.read_s + perf_counter() - began,
            )
            if self._giver.read(ask) and ask.runner in self._ways:
                self._ways[ask.runner].outbox.put(message)
            self._changed.notify_all()
        self._bell.ring()
