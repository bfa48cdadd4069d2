"""A stranger in a process of its own: many connections at once to one listener, with garbage of all kinds.

    python -m tests.security.attack ADDRESS CONNECTIONS SECONDS

It prints one JSON line when it ends. Some connections are patient, and stay until they are hung up on: they say
nothing, half a greeting, or a greeting and half a frame. The others are loud: random bytes; a greeting and a frame that
claims much; a greeting and a command that is none; an HTTP request. Once closed, each comes again. So many are patient
that those that are open are about as many as are asked for.
"""

from __future__ import annotations

import json
import random
import resource
import selectors
import socket
import statistics
import sys
import time

from penstock.wire.addresses import split_tcp
from tests.security.strangers import SIGNATURE, frame

PATIENT_BURST, LOUD_BURST = 50, 5  # new connections in a turn: the listener's backlog is not what is tested
LOUD_SHARE = 20  # one in so many
SETTLED_S = 2.0  # from when on it is counted how many are open
GARBAGE_BYTES = 60_000


class Nuisance:
    """One connection after another, each with a piece of garbage."""

    def __init__(self, rng: random.Random, target: tuple[int, object], *, loud: bool) -> None:
        self._rng, (self._family, self._address) = rng, target
        self.loud = loud
        self.socket: socket.socket | None = None
        self._to_send = b""
        self.mechanism = b"CURVE".ljust(20, b"\0")

    def begin(self) -> socket.socket | None:
        peer = socket.socket(self._family, socket.SOCK_STREAM)
        peer.setblocking(False)
        try:
            peer.connect(self._address)
        except BlockingIOError:
            if self._family == socket.AF_UNIX:  # its backlog is full
                peer.close()
                return None
        except OSError:
            peer.close()
            return None
        self.socket = peer
        self._to_send = self._garbage()
        return peer

    def _garbage(self) -> bytes:
        rng = self._rng
        greeting = SIGNATURE + b"\x03\x01" + self.mechanism + bytes(32)
        if not self.loud:
            kind = rng.randrange(3)
            if kind == 0:
                return b""
            if kind == 1:
                return greeting[: rng.randrange(1, 11)]  # of a signature that may still become one
            return greeting + frame(rng.randrange(1_000, 8_000)) + bytes(rng.randrange(900))
        kind = rng.randrange(5)
        if kind == 0:
            return rng.randbytes(rng.randrange(1, GARBAGE_BYTES))
        if kind == 1:
            return greeting + frame(rng.choice((79_000_000, 1 << 40, 16_000)), command=rng.random() < 0.5) + bytes(1000)
        if kind == 2:
            command = rng.choice(
                (b"\x05HELLO", b"\x05READY", b"\x08INITIATE", b"\x07MESSAGE", b"\x04PING", b"\x05ERROR")
            )
            body = command + rng.randbytes(rng.choice((0, 10, 194, 240)))
            return greeting + bytes((0x04, len(body))) + body
        if kind == 3:
            return b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        return greeting + rng.randbytes(rng.randrange(1, GARBAGE_BYTES))

    def advance(self) -> bool:
        """Send what can be sent, take what came; False: the other side is through with us."""
        assert self.socket is not None
        try:
            if self._to_send:
                self._to_send = self._to_send[self.socket.send(self._to_send) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        try:
            return self.socket.recv(65536) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def attack(address: str, connections: int, seconds: float, *, seed: int = 0) -> dict[str, float]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rng = random.Random(seed)
    if address.startswith("ipc://"):
        target: tuple[int, object] = (socket.AF_UNIX, address.removeprefix("ipc://"))
    else:
        target = (socket.AF_INET, split_tcp(address))
    selector = selectors.DefaultSelector()
    loud = [Nuisance(rng, target, loud=True) for _ in range(connections // LOUD_SHARE)]
    patient = [Nuisance(rng, target, loud=False) for _ in range(connections)]
    made = refused = most = 0
    began, counts = time.monotonic(), []
    while time.monotonic() < began + seconds:
        for idle, burst in ((patient, PATIENT_BURST), (loud, LOUD_BURST)):
            for _ in range(min(burst, len(idle))):
                nuisance = idle.pop()
                peer = nuisance.begin()
                if peer is None:
                    refused += 1
                    idle.append(nuisance)
                    break
                made += 1
                selector.register(peer, selectors.EVENT_READ | selectors.EVENT_WRITE, nuisance)
        held = len(selector.get_map())
        most = max(most, held)
        if time.monotonic() > began + SETTLED_S:
            counts.append(held)
        for key, _ in selector.select(0.01):
            nuisance = key.data
            if nuisance.advance():
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if nuisance._to_send else 0)
                if wanted != key.events:
                    selector.modify(key.fileobj, wanted, nuisance)
            else:
                selector.unregister(key.fileobj)
                nuisance.socket.close()
                (loud if nuisance.loud else patient).append(nuisance)
        time.sleep(0.005)  # the attacked shares its processors with us
    held = statistics.median(counts) if counts else most
    return {"made": made, "refused": refused, "most_at_once": most, "held": held}


if __name__ == "__main__":
    print(json.dumps(attack(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))), flush=True)
