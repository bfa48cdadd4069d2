"""A dispatcher that writes down what it is asked and answers as a test says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import zmq
from tests.keys import SERVER, knows
from tests.waiting import wait_until

from penstock.wire.addresses import Listening
from penstock.wire.credentials import Credentials
from penstock.wire.framing import decode_ask, encode_tell
from penstock.wire.messages import Done, RegisterAgent
from penstock.wire.sockets import Guard, bind_router


class FakeDispatcher:
    def __init__(self, credentials: Credentials, port: int = 0) -> None:
        self.asked: list[Any] = []
        self.answers: dict[type, Callable[[Any], Any]] = {}
        self._context: Any = zmq.Context()
        self._guard = Guard(self._context, knows(credentials))
        self._guard.start()
        self._socket, self.address = bind_router(self._context, Listening(port=port), "dispatcher", SERVER, data=False)
        self._agent = b""
        self._pushes: list[Any] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def push(self, body: Any) -> None:
        self._pushes.append(body)

    def wait_asked(self, kind: type, condition: Callable[[Any], bool] = lambda body: True, since: int = 0) -> Any:
        def matching() -> list[Any]:
            return [body for body in self.asked[since:] if isinstance(body, kind) and condition(body)]

        return wait_until(matching, kind.__name__)[0]

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            while self._pushes and self._agent:
                self._socket.send_multipart([self._agent, encode_tell(0, 1, self._pushes.pop(0))])
            if not self._socket.poll(5):
                continue
            peer, frame = self._socket.recv_multipart()
            ask = decode_ask(frame)
            if isinstance(ask.body, RegisterAgent):
                self._agent = peer
            self.asked.append(ask.body)
            answer = self.answers.get(type(ask.body), lambda body: Done())(ask.body)
            if answer is not None:
                with contextlib.suppress(zmq.ZMQError):  # whoever asked may be gone by now
                    self._socket.send_multipart([peer, encode_tell(ask.number, 1, answer)])
        self._socket.close(linger=0)
        self._guard.close()
        self._context.destroy(linger=0)
