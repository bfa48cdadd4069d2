"""All of a reader's ways to runners, kept apart from it: dropped without a word, everything is still closed."""

from __future__ import annotations

import contextlib
import os
from time import monotonic
from typing import Any

import zmq
from msgspec.structs import replace

from penstock.client.connection import RunnerConnection
from penstock.client.session import EpochSession
from penstock.core.errors import PenstockError
from penstock.core.ids import RunnerId
from penstock.stream.consuming import Consumer, Tell
from penstock.wire.frames import CloseStream, Credit, OpenStream, ReturnLeases, Units

LEAVE_S = 1.0  # for a last word to those who may be waiting for this trainer


class Connections:
    """One connection a runner. All of it belongs to the thread that reads."""

    def __init__(self, session: EpochSession, consumer: Consumer) -> None:
        self._session, self._consumer = session, consumer
        self._connections: dict[RunnerId, RunnerConnection] = {}
        self._finished = self._settled = False
        self._pid = os.getpid()

    def all(self) -> list[RunnerConnection]:
        return list(self._connections.values())

    def tell(self, tell: Tell) -> None:
        """Send a message to a runner; what opens a stream may be the first thing it hears."""
        message = tell.message
        connection = self._connections.get(tell.runner)
        if isinstance(message, OpenStream):
            if connection is None:
                connection = self._connect(tell.runner, tell.address)
            message = replace(message, slab=connection.slabs is not None, storage=self._session.storage)
        elif connection is not None and isinstance(message, Credit) and connection.slabs is not None:
            message = replace(message, returned=connection.slabs.returned())
        if connection is not None:
            connection.send(message)

    def _connect(self, runner: RunnerId, address: str) -> RunnerConnection:
        session, link = self._session, self._session.link
        connection = RunnerConnection(
            link.context,
            link.credentials,
            runner,
            address,
            link.slabs.get(runner),
            access=session.access,
            transport=session.spec.transport,
        )
        self._connections[runner] = connection
        if connection.slabs is not None:
            link.slabs[runner] = connection.slabs
        return connection

    def feed(self, units: Units) -> None:
        reader = self._consumer.readers[units.stream]
        if reader.runner is not None:
            self._connections[reader.runner].send(units)

    def drop(self, connection: RunnerConnection) -> None:
        self._connections.pop(connection.runner, None)
        connection.close()

    def return_memory(self, *, idle: bool) -> None:
        """Give back what the trainer let go of; while it is busy only if that is much, for a credit soon says so."""
        for connection in self._connections.values():
            slabs = connection.slabs
            if slabs is not None and (idle or slabs.owes_much) and (returned := slabs.returned()):
                connection.send(ReturnLeases(leases=returned))

    def poll(self, timeout_s: float) -> bool:
        """Wait until something arrives, the bell rings, or the time is over; return whether the bell rang."""
        bell = self._session.board.bell.descriptor
        watched: list[tuple[Any, int]] = [(bell, zmq.POLLIN)]
        for connection in self._connections.values():
            interest = zmq.POLLIN | zmq.POLLOUT if connection.pending else zmq.POLLIN
            watched.append((connection.socket, interest))
            watched.append((connection.watch.socket, zmq.POLLIN))
        return any(where == bell for where, _ in zmq.zmq_poll(watched, max(1, int(timeout_s * 1000))))

    def settled(self, *, finished: bool) -> None:
        """What was taken is counted; `finished`: the epoch was read to its end."""
        self._settled, self._finished = True, finished

    def close_all(self, *, linger_ms: int = 0) -> None:
        for connection in self._connections.values():
            connection.close(linger_ms=linger_ms)
        self._connections.clear()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child owns none of it
        shared = self._session.delivery.shared
        if shared:
            self._leave()
        self._consumer.forget()
        self.close_all(linger_ms=int(shared * LEAVE_S * 1000))
        self._session.close(finished=self._finished)

    def _leave(self) -> None:
        """Say to all that the streams read there are not come back to, and then wait until they have heard it."""
        unheard = {runner: self._last_word(runner, connection) for runner, connection in self._connections.items()}
        until = monotonic() + LEAVE_S
        for runner, connection in self._connections.items():
            with contextlib.suppress(zmq.ZMQError, PenstockError):  # the link went first, or nonsense came
                connection.await_left(unheard[runner], until)

    def _last_word(self, runner: RunnerId, connection: RunnerConnection) -> set[Any]:
        unheard = set()
        with contextlib.suppress(zmq.ZMQError):
            for reader in self._consumer.open_at(runner):
                # Where the trainer stands, if that is known: should it return, it goes on there.
                taken = reader.standing.round if self._settled else -1
                connection.send(CloseStream(stream=reader.stream, opening=reader.opening, leaving=True, round=taken))
                unheard.add((reader.stream, reader.opening))
        return unheard
