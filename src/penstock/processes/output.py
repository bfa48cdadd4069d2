"""What user code prints or logs, carried to whoever reads its data.

Descriptors 1 and 2 become the two ends of one pipe, so that prints of C libraries count too. A thread reads it line by
line. With readers connected the lines go to them; without any, to the process's own stderr. A loop that prints per
element must not drown the data: past a rate, lines are counted instead of sent.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from time import monotonic

from penstock.core.plain_text import plain_text

LINES_PER_S = 100
MAX_LINE_BYTES = 8_192
FLUSH_S = 1.0
CLOSE_WAIT_S = 0.5


class LineLimit:
    """Lets so many lines through a second, and says how many it left out.

    >>> limit = LineLimit(2)
    >>> [limit.admit(line, now=0.0) for line in "abcd"], limit.admit("e", now=1.0)
    ([['a'], ['b'], [], []], ['... 2 lines left out', 'e'])
    """

    def __init__(self, lines_per_s: int = LINES_PER_S) -> None:
        self._most = lines_per_s
        self._second = 0.0
        self._passed = 0
        self._left_out = 0

    def admit(self, line: str, *, now: float) -> list[str]:
        said = self.settle(now=now)
        if self._passed >= self._most:
            self._left_out += 1
            return said
        self._passed += 1
        return [*said, line]

    def settle(self, *, now: float) -> list[str]:
        """Return what is to be said about lines left out, once their second is over."""
        if now - self._second < 1.0:
            return []
        self._second, self._passed = now, 0
        left_out, self._left_out = self._left_out, 0
        return [f"... {left_out} lines left out"] if left_out else []


class OutputCapture:
    """Redirects this process's stdout and stderr. `deliver(text)` says whether anybody took the text."""

    def __init__(self, worker: str, deliver: Callable[[str], bool]) -> None:
        self._worker = worker
        self._deliver = deliver
        self._limit = LineLimit()
        self._own_stdout, self.own_stderr = os.dup(1), os.dup(2)
        """The process's own streams, as they were before."""
        self._reading, writing = os.pipe()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="penstock output", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rest = b""
        while True:
            piece = os.read(self._reading, 65_536)
            if not piece:
                break
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._forward(lines)
        if rest:
            self._forward([rest])

    def _forward(self, lines: list[bytes]) -> None:
        now = monotonic()
        texts = (plain_text(line[:MAX_LINE_BYTES].decode(errors="replace")) for line in lines)
        self._say([said for text in texts for said in self._limit.admit(text, now=now)])

    def settle(self) -> None:
        """Say what was left out, when nothing is printed any more; called about once a second."""
        self._say(self._limit.settle(now=monotonic()))

    def _say(self, lines: list[str]) -> None:
        if lines and not self._deliver("\n".join(lines)):
            text = "".join(f"[{self._worker}] {line}\n" for line in lines)
            with contextlib.suppress(OSError):
                os.write(self.own_stderr, text.encode())

    def close(self) -> None:
        """Give stdout and stderr back. What was printed until now is still forwarded."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os.dup2(self._own_stdout, 1)
        os.dup2(self.own_stderr, 2)  # drops the pipe's last writing ends, which ends the thread
        os.close(self._own_stdout)
        self._thread.join(CLOSE_WAIT_S)
        if not self._thread.is_alive():
            os.close(self._reading)
            os.close(self.own_stderr)
