"""A stand-in for a dispatcher: a ROUTER in a thread, with a function that answers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from penstock.core.errors import ProtocolError
from penstock.wire.addresses import Listening
from penstock.wire.credentials import Credentials
from penstock.wire.framing import RequestAssembler, decode_ask, encode_tell
from penstock.wire.messages import Answer, Ask, Push
from penstock.wire.sockets import Guard, bind_router
from tests.keys import SERVER, knows

WAIT_S = 30.0


class Answerer:
    """Serves at an address until closed. `answer` returns None to stay silent."""

    def __init__(
        self, credentials: Credentials, answer: Callable[[Ask], Answer | None], *, port: int = 0, position: int = 7
    ) -> None:
        self.asked: list[Ask] = []
        self.protocol_errors: list[str] = []
        self.peers: list[bytes] = []
        self._answer, self._position = answer, position
        self._assembler = RequestAssembler()
        self._context = zmq.Context()
        self.guard = Guard(self._context, knows(credentials))
        self.guard.start()
        self._socket, self.address = bind_router(self._context, Listening(port=port), "answerer", SERVER, data=False)
        self.port = int(self.address.rpartition(":")[2])
        self._stopping = threading.Event()
        self._pushes: list[Push] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def push(self, body: Push) -> None:
        self._pushes.append(body)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._pushes and self.peers:
                self._socket.send_multipart([self.peers[-1], encode_tell(0, self._position, self._pushes.pop(0))])
            if not self._socket.poll(10):
                continue
            peer, *frames = self._socket.recv_multipart()
            try:
                whole = self._assembler.add(peer, frames[0], principal=peer, now=0.0)
                if whole is None:
                    continue
                ask = decode_ask(whole)
            except ProtocolError as error:
                self.protocol_errors.append(str(error))
                continue
            self.asked.append(ask)
            self.peers.append(peer)
            answer = self._answer(ask)
            if answer is not None:
                self._socket.send_multipart([peer, encode_tell(ask.number, self._position, answer)])
        self._socket.close(linger=0)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S)
        self.guard.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> Answerer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
