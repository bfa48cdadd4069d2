"""What an epoch's reader must give back, kept apart from it: dropped without a word, everything is still closed."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import zmq

from penstock.client.connection import RunnerConnection
from penstock.client.session import EpochSession
from penstock.core.ids import RunnerId

LEAVE_MS = 1_000  # for a last word to those who may be waiting for this trainer


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
        linger_ms = LEAVE_MS if self._session.spec.sharing else 0
        for connection in self.connections.values():
            if linger_ms:
                with contextlib.suppress(zmq.ZMQError):  # the link went first
                    connection.leave(settled=self.settled)
            connection.close(linger_ms=linger_ms)
        self.connections.clear()
        self._session.close(finished=self.finished)
