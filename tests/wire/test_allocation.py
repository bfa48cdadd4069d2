"""Memory of received messages: kept by the process, unless its user said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

MESSAGES = 50
PAGES = (8 << 20) // 4096

RECEIVE = f"""
import resource, sys, threading
import zmq
from penstock.wire.allocation import keep_freed_memory

if "keep" in sys.argv:
    keep_freed_memory()
context = zmq.Context()
source, sink = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
port = source.bind_to_random_port("tcp://127.0.0.1")
sink.connect(f"tcp://127.0.0.1:{{port}}")
sink.setsockopt(zmq.RCVTIMEO, 10_000)
payload = bytes(8 << 20)

def receive(count):
    for _ in range(count):
        source.send(payload, copy=False)
        sink.recv(copy=False)

receive(5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
receive({MESSAGES})
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
context.destroy(linger=0)
"""


def faults(*arguments: str, **environment: str) -> float:
    """Return the page faults for each message of 8 MB, in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", RECEIVE, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(ran.stdout) / MESSAGES


def test_messages_reuse_memory() -> None:
    assert faults("keep") < PAGES / 10


def test_what_the_user_has_set_stands() -> None:
    assert faults("keep", MALLOC_MMAP_THRESHOLD_="65536") > PAGES / 2
