"""ZeroMQ alone: a ROUTER and a DEALER, eight requests outstanding, payloads not copied. What the library can do at all.

    python -m peers.zmq_bare serve CONGESTION   # prints its port; ends when its stdin is closed

The server writes each batch anew into a buffer that ZeroMQ has finished with; no states, no credits, no errors. The
content is checked as everywhere.
"""

from __future__ import annotations

import socket as sockets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transfers
import zmq
from side import Workload

OUTSTANDING = 8
BUFFERS = OUTSTANDING + 4


def serve(congestion: str) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    listener = None
    if congestion == "system":
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    else:
        listener = sockets.socket()
        listener.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_CONGESTION, congestion.encode())
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        port = listener.getsockname()[1]
        socket.setsockopt(zmq.USE_FD, listener.detach())
        socket.bind(f"tcp://127.0.0.1:{port}")
    print(port, flush=True)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    buffers = [np.empty(transfers.BATCH_SHAPE, np.uint8) for _ in range(BUFFERS)]
    trackers: list[Any] = [None] * BUFFERS
    turn = 0
    while True:
        peer, number = socket.recv_multipart()
        buffer, tracker = buffers[turn], trackers[turn]
        if tracker is not None:
            tracker.wait()
        buffer[:] = transfers.row_values(int(number)).reshape(-1, 1, 1, 1)
        socket.send_multipart([peer, b"header"], zmq.SNDMORE)
        trackers[turn] = socket.send(buffer, copy=False, track=True)
        turn = (turn + 1) % BUFFERS


def _end_with_stdin() -> None:
    import os

    sys.stdin.read()
    os._exit(0)


def batches(congestion: str = "system") -> Workload:
    here = Path(__file__).resolve().parent.parent
    server = subprocess.Popen(
        [sys.executable, "-m", "peers.zmq_bare", "serve", congestion],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=here,
    )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    context = zmq.Context()

    def open_pipeline(n: int) -> Iterator[float]:
        total = transfers.batches_of(n)
        check = transfers.BatchCheck()
        with context.socket(zmq.DEALER) as socket:
            socket.connect(f"tcp://127.0.0.1:{port}")
            for number in range(min(OUTSTANDING, total)):
                socket.send(b"%d" % number)
            for number in range(total):
                _, payload = socket.recv_multipart(copy=False)
                if number + OUTSTANDING < total:
                    socket.send(b"%d" % (number + OUTSTANDING))
                check(np.frombuffer(payload.buffer, np.uint8).reshape(transfers.BATCH_SHAPE))
                yield transfers.BATCH_MB

    return Workload(
        open=open_pipeline,
        first=2000,
        packages=("pyzmq", "numpy"),
        notes={"how": f"ROUTER and DEALER, 8 requests outstanding, zero-copy; congestion control: {congestion}"},
    )


if __name__ == "__main__":
    serve(sys.argv[2])
