"""What an epoch's reader must give back, kept apart from it: dropped without a word, everything is still closed."""

from __future__ import annotations

import contextlib
import os
from time import monotonic
from typing import Any

import zmq

from penstock.client.connection import RunnerConnection
from penstock.client.session import EpochSession
from penstock.core.errors import PenstockError
from penstock.core.ids import RunnerId

LEAVE_S = 1.0  # for a last word to those who may be waiting for this trainer


class Resources:
    def __init__(self, session: EpochSession) -> None:
        self._session = session
        self.connections: dict[RunnerId, RunnerConnection] = {}
        self.finished = False
        """The epoch was read to its end."""
        self.settled = False
        """The marks are where the trainer stands."""
        self._pid = os.getpid()

    def poll(self, timeout_s: float) -> bool:
        """Wait until something arrives, the bell rings, or the time is over; return whether the bell rang."""
        bell = self._session.board.bell.descriptor
        watched: list[tuple[Any, int]] = [(bell, zmq.POLLIN)]
        for connection in self.connections.values():
            interest = zmq.POLLIN | zmq.POLLOUT if connection.pending else zmq.POLLIN
            watched.append((connection.socket, interest))
            watched.append((connection.watch.socket, zmq.POLLIN))
        return any(where == bell for where, _ in zmq.zmq_poll(watched, max(1, int(timeout_s * 1000))))

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child owns none of it
        shared = bool(self._session.spec.sharing)
        if shared:
            self._leave()
        for connection in self.connections.values():
            connection.drop_unread()
            connection.close(linger_ms=int(shared * LEAVE_S * 1000))
        self.connections.clear()
        self._session.close(finished=self.finished)

    def _leave(self) -> None:
        """Say the last word to all before waiting for any."""
        connections = self.connections.values()
        with contextlib.suppress(zmq.ZMQError):  # the link went first
            for connection in connections:
                connection.leave(settled=self.settled)
        until = monotonic() + LEAVE_S
        for connection in connections:
            with contextlib.suppress(zmq.ZMQError, PenstockError):  # or nonsense came
                connection.await_left(until)
