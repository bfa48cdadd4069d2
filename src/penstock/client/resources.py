"""What an epoch's reader must give back, kept apart from it: dropped without a word, everything is still closed."""

from __future__ import annotations

import os
from typing import Any

import zmq

from penstock.client.connection import RunnerConnection
from penstock.client.session import EpochSession
from penstock.core.ids import RunnerId


class Resources:
    def __init__(self, session: EpochSession) -> None:
        self._session = session
        self.connections: dict[RunnerId, RunnerConnection] = {}
        self.finished = False
        """The epoch was read to its end."""
        self._pid = os.getpid()

    def poll(self, timeout_s: float) -> None:
        """Wait until something arrives, the bell rings, or the time is over."""
        watched: list[tuple[Any, int]] = [(self._session.board.bell.descriptor, zmq.POLLIN)]
        for connection in self.connections.values():
            interest = zmq.POLLIN | zmq.POLLOUT if connection.pending else zmq.POLLIN
            watched.append((connection.socket, interest))
            watched.append((connection.watch.socket, zmq.POLLIN))
        zmq.zmq_poll(watched, max(1, int(timeout_s * 1000)))

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child owns none of it
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self._session.close(finished=self.finished)
