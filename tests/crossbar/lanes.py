"""Cases run in a process of their own, one after another: one that hangs takes its lane with it, and nothing else."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec

from .case import Case
from .driver import Limits, Services
from .judge import judge
from .verdict import Verdict

ROOT = Path(__file__).parents[2]
GRACE_S = 10.0
CASES_A_LANE = 200  # then a new one: what a process gathers over many cases is not what they are about


class Order(msgspec.Struct, frozen=True):
    case: Case
    limits: Limits


class Lane:
    """The parent's end: `run` gives a case to the process and waits for its verdict."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._left = 0

    def run(self, case: Case, limits: Limits) -> Verdict:
        if self._process is None or self._process.poll() is not None or self._left <= 0:
            self.close()
            self._start()
        self._left -= 1
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(Order(case, limits)) + b"\n")
            self._process.stdin.flush()
            # The plain and the undisturbed run take their time beside the case itself.
            line = read_line(self._process.stdout, 2 * limits.case_s + GRACE_S)
        except BrokenPipeError:
            line = b""
        if line is None:
            self.close()
            return Verdict(
                kind="hang", text="the process of the case did not answer", seconds=2 * limits.case_s + GRACE_S
            )
        if not line:
            code = self._process.wait()
            self.close()
            return Verdict(kind="process died", text=f"the process of the case ended with {code}")
        verdict = msgspec.json.decode(line, type=Verdict)
        if verdict.kind:
            self.close()  # threads may still wait, and streams turn in circles, which later cases would pay for
        return verdict

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        command = [sys.executable, "-W", "ignore", "-m", "tests.crossbar", "--lane"]
        stderr = None if os.environ.get("CROSSBAR_STDERR") else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT, env=environment
        )
        self._left = CASES_A_LANE

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()  # processes of its services end with it
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None


def read_line(pipe: IO[bytes], seconds: float) -> bytes | None:
    """Return a line, nothing at the end, None if neither comes in time. Verdicts come as one line each."""
    ready, _, _ = select.select([pipe], [], [], seconds)
    return pipe.readline() if ready else None


def serve_lane() -> None:
    """The process's end: orders on stdin, verdicts on stdout, until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what functions print goes elsewhere
    services = Services()
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        verdict = judge(order.case, services, order.limits)
        answers.write(msgspec.json.encode(verdict) + b"\n")
        answers.flush()
    services.close()
    if threading.active_count() > 1:
        os._exit(0)  # a thread that waits for ever must not keep the process
