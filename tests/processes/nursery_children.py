"""What the children of test nurseries do. Nurseries find this module by the `sys.path` they are prepared with."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.processes.nursery_link import NurseryLink, Spawn, Told


class Note(msgspec.Struct):
    path: str
    text: str = ""


def write(config: Note) -> None:
    Path(config.path).write_text(config.text)


def say_ready_and_wait(config: bytes, ready: Callable[[str], None]) -> None:
    ready(f"{config.decode()} {os.getpid()}")
    time.sleep(60)


def report_twice(config: bytes, ready: Callable[[str], None], report: Callable[[str], None]) -> None:
    report("one")
    report("two\nlines")
    ready("")
    time.sleep(60)


def fail(config: bytes) -> None:
    raise RuntimeError(config.decode())


def leave(config: bytes) -> None:
    sys.exit(int(config))


def ignore_sigterm(config: bytes, ready: Callable[[str], None]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready("")
    time.sleep(60)


def leave_a_record(config: bytes, record: mmap.mmap) -> None:
    record[: len(config)] = config
    os.kill(os.getpid(), signal.SIGSEGV)


def spawn_another(config: bytes, ready: Callable[[str], None], nursery: NurseryLink) -> None:
    """Ready text: the grandchild's pid. Bodies it is told are answered by becoming ready again."""
    nursery.send(Spawn(id="grandchild", entry="nursery_children:say_ready_and_wait", config=b"g"))
    spawned = nursery.receive(30)
    ready(str(spawned.pid))  # type: ignore[union-attr]
    while True:
        event = nursery.receive(30)
        if isinstance(event, Told):
            ready(f"told {event.body.decode()}")


def start_a_program(config: bytes, ready: Callable[[str], None]) -> None:
    """As a user's function may: it is not a child of the nursery, and has no parent-death signal."""
    program = subprocess.Popen(["sleep", "60"])
    ready(str(program.pid))
    time.sleep(60)


def list_descriptors(config: bytes, ready: Callable[[str], None]) -> None:
    ready(
        " ".join(
            sorted(
                os.readlink(f"/proc/self/fd/{name}").split(":")[0]
                for name in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{name}")
            )
        )
    )
    time.sleep(60)


def draw(config: bytes, ready: Callable[[str], None]) -> None:
    import random

    import numpy as np

    ready(f"{np.random.random()} {random.random()}")
    time.sleep(60)
