"""What the control thread and the trainer's thread tell each other, and the bell between them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from penstock.wire.bell import Bell
from penstock.wire.jobs import JobView


@dataclass(slots=True)
class Metrics:
    """How the trainer fares; written by its thread, read by the one that beats."""

    batches: int = 0
    nbytes: int = 0
    wait_s: float = 0.0
    run_s: float = 0.0
    buffered: int = 0
    skipped: int = 0
    shared: int = 0

    def ran(self, seconds: float) -> None:
        self.run_s += seconds

    def waited(self, seconds: float) -> None:
        self.wait_s += seconds

    def received(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def took(self, batches: int, *, shared: int) -> None:
        """The trainer took elements, some of which had been made for another trainer."""
        self.batches += batches
        self.shared += shared

    def missed(self, skipped: int) -> None:
        self.skipped = skipped

    def holds(self, nbytes: int) -> None:
        """So much has arrived and was not taken."""
        self.buffered = nbytes


class Board:
    """The newest view, and whether the dispatcher still knows us."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.metrics = Metrics()
        self._lock = threading.Lock()
        self._view: JobView | None = None
        self._unread = False
        self._forgotten = ""
        self._refusal: Exception | None = None

    def put_view(self, view: JobView) -> None:
        """Take a view over unless it is older than the one here."""
        with self._lock:
            held = self._view
            if held is not None and (view.attempt != held.attempt or view.version <= held.version):
                return
            self._view, self._unread = view, True
        self.bell.ring()

    def replace_view(self, view: JobView) -> None:
        """Begin with the view of an opening, whatever was here."""
        with self._lock:
            self._view, self._unread, self._forgotten = view, False, ""

    def take_view(self) -> JobView | None:
        """Return the view if it is new since the last call."""
        with self._lock:
            self._unread, unread = False, self._unread
            return self._view if unread else None

    @property
    def version(self) -> int:
        with self._lock:
            return 0 if self._view is None else self._view.version

    def put_forgotten(self, what: str) -> None:
        """The dispatcher does not know this reader any more: it must open again."""
        with self._lock:
            self._forgotten = what or "the dispatcher does not know this reader"
        self.bell.ring()

    def take_forgotten(self) -> str:
        with self._lock:
            found, self._forgotten = self._forgotten, ""
            return found

    def put_refusal(self, error: Exception) -> None:
        """Reading cannot go on: another reader took the place, or the job is gone."""
        with self._lock:
            self._refusal = error
        self.bell.ring()

    @property
    def refusal(self) -> Exception | None:
        with self._lock:
            return self._refusal
