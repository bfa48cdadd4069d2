"""What a dialled socket does not take yet waits, in order, and is counted."""

from __future__ import annotations

from typing import Any, cast

import zmq

from penstock.wire.framing import Outbox, cut_request


class Door:
    """Takes so many frames, and then no more."""

    def __init__(self) -> None:
        self.open_for = 0
        self.taken: list[bytes] = []

    def send(self, frame: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if not self.open_for:
            raise zmq.Again
        self.open_for -= 1
        self.taken.append(frame)


def test_frames_wait_until_the_socket_takes_them_and_go_in_order() -> None:
    door, large = Door(), bytes(20_000)
    outbox = Outbox(cast(Any, door))
    assert (outbox.interest, outbox.nbytes) == (zmq.POLLIN, 0)
    outbox.put(b"small")
    outbox.put(large)
    outbox.flush()
    expected = [b"small", *cut_request(large)]
    assert outbox.interest == zmq.POLLIN | zmq.POLLOUT and outbox.nbytes == sum(map(len, expected))
    door.open_for = 2
    outbox.flush()
    assert door.taken == expected[:2] and outbox.nbytes == sum(map(len, expected[2:]))
    door.open_for = 9
    outbox.flush()
    assert door.taken == expected and (outbox.interest, outbox.nbytes) == (zmq.POLLIN, 0)
