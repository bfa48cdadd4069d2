"""Who changed what, and who was refused: one JSON line each, in files of bounded size that their owner alone reads."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.control.draft import Decision
from penstock.control.events import ConsumerOpened, JobCreated, JobSteered, PipelineRegistered, WorkerDrained
from penstock.control.permissions import KIND as NOT_PERMITTED
from penstock.dispatcher.allowances import KIND as LIMIT_REACHED
from penstock.wire.messages import Refused, Request, SteerJob
from penstock.wire.principals import Principal

MOST_BYTES = 16 << 20  # of each of two files: the one that is written, and the one before
REFUSALS_EVERY_S = 1.0  # of one principal and request: who is refused all the time pushes nothing else out

_log = logging.getLogger(__name__)


class AuditLog:
    """Appends to `path`; None: nothing is kept. A disk that is full stops the log, not the service."""

    def __init__(self, path: Path | None, *, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._descriptor = -1
        self._size = 0
        self._refused: dict[tuple[Principal, str], tuple[float, int]] = {}
        """When a refusal was last written, and how many have not been since."""
        self._lines: list[bytes] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open(path)

    def decided(self, principal: Principal, request: Request, decision: Decision, now: float) -> None:
        """Note what a request has changed, or that it was refused. `now` is a clock that goes forward."""
        if self._path is None:
            return
        if isinstance(decision.answer, Refused):
            if decision.answer.kind in (NOT_PERMITTED, LIMIT_REACHED):
                self.refused(principal, type(request).__name__, decision.answer.reason, now)
            return
        made = {event.job for event in decision.events if isinstance(event, JobCreated)}
        for event in decision.events:
            match event:
                case ConsumerOpened():
                    did = "opened" if event.job in made else "joined"
                    self.note(principal, did, job=event.job, client=event.client, reader=event.reader)
                case JobSteered() if isinstance(request, SteerJob):
                    did = {"cancel": "cancelled", "pause": "paused", "resume": "resumed"}[request.action]
                    self.note(principal, did, job=event.job)
                case WorkerDrained():
                    self.note(principal, "drained", worker=event.worker)
                case PipelineRegistered():
                    self.note(principal, "registered", pipeline=event.id)

    def refused(self, principal: Principal, request: str, reason: str, now: float) -> None:
        if len(self._refused) > 10_000:
            self._refused.clear()
        at, unwritten = self._refused.get((principal, request), (float("-inf"), 0))
        if now - at < REFUSALS_EVERY_S:
            self._refused[principal, request] = (at, unwritten + 1)
            return
        self._refused[principal, request] = (now, 0)
        self.note(principal, "refused", request=request, reason=reason, before=unwritten)

    def note(self, principal: Principal, did: str, **what: str | int) -> None:
        if self._path is None:
            return
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._lines.append(msgspec.json.encode({"at": at, "who": str(principal), "did": did, **what}) + b"\n")

    def write(self) -> None:
        """Write what was noted: called after the commit, so that the log says nothing that did not happen."""
        lines, self._lines = self._lines, []
        if lines and self._path is not None:
            try:
                self._append(self._path, lines)
            except OSError as error:
                _log.error("the audit log cannot be written", extra={"path": str(self._path), "why": error})

    def drop(self) -> None:
        """Forget what was noted and not written: it was undone."""
        self._lines.clear()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, path: Path, lines: Iterable[bytes]) -> None:
        for line in lines:
            if self._size and self._size + len(line) > self._most_bytes:
                os.replace(path, path.with_name(path.name + ".1"))
                self.close()
                self._open(path)
            os.write(self._descriptor, line)
            self._size += len(line)

    def _open(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        os.fchmod(self._descriptor, 0o600)
        self._size = os.fstat(self._descriptor).st_size
