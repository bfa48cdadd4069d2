"""A command in the foreground, of which a test reads what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

DEADLINE_S = 60.0


class Running:
    """A process whose lines are read one by one."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        self.said: list[str] = []

    @staticmethod
    @contextmanager
    def command(*command: str, **environment: str) -> Iterator[Running]:
        """Start it, and end it with whatever is below it."""
        running = Running(*command, **environment)
        try:
            yield running
        finally:
            running.process.kill()
            running.process.wait()
            assert running.process.stdout is not None
            running.process.stdout.close()

    def wait_said(self, text: str) -> str:
        assert self.process.stdout is not None
        giving_up = threading.Timer(DEADLINE_S, self.process.kill)
        giving_up.start()
        try:
            while line := self.process.stdout.readline():
                self.said.append(line)
                if text in line:
                    return line
        finally:
            giving_up.cancel()
        raise AssertionError(f"it ended, or took longer than {DEADLINE_S:.0f} s, without {text!r}: {self.said}")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)
