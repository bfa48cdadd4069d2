"""What the control thread and the trainer's thread tell each other, and the bell between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakMethod

from penstock.wire.jobs import JobView, StreamView, ViewChange
from penstock.wire.sockets import Bell
from penstock.wire.views import HeldView


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


@dataclass(frozen=True, slots=True)
class ViewNews:
    """The newest view, and those of its streams that are new or changed since the last that was taken."""

    view: JobView
    streams: tuple[StreamView, ...]


class Board:
    """The newest view, and whether the dispatcher still knows us."""

    def __init__(self, ask: Callable[[], None] | None = None) -> None:
        """`ask` is called, in the thread that puts, when the dispatcher is to be asked what has changed."""
        self.bell = Bell()
        self.metrics = Metrics()
        self._ask = ask
        self._lock = threading.Lock()
        self._held: HeldView | None = None
        self._early = False
        """A change came before the view that it is of."""
        self._unread = False
        self._forgotten = ""
        self._refusal: Exception | None = None
        self._when_refused: WeakMethod[Callable[[], None]] | None = None

    def put_view(self, view: JobView) -> None:
        """Take a view over unless it is older than the one here."""
        with self._lock:
            if self._held is None:
                self._held = HeldView(view)
            elif self._held.take_view(view) != "taken":
                return
            self._unread = True
        self.bell.ring()

    def put_change(self, change: ViewChange) -> None:
        """Take a change over, unless it is known or of another attempt."""
        with self._lock:
            self._early |= self._held is None
            fit = "known" if self._held is None else self._held.take_change(change)
            self._unread |= fit == "taken"
        if fit == "taken":
            self.bell.ring()
        elif fit == "missed":
            self.miss()

    def miss(self) -> None:
        """Something may have been pushed that did not come."""
        if self._ask is not None:
            self._ask()

    def replace_view(self, view: JobView) -> None:
        """Begin with the view of an opening, whatever was here."""
        with self._lock:
            self._held, self._unread, self._forgotten = HeldView(view), False, ""
            self._held.take_news()
            self._early, early = False, self._early
        if early:
            self.miss()

    def take_news(self) -> ViewNews | None:
        """Return what is new since the last call, or since the opening; None: nothing."""
        with self._lock:
            self._unread, unread = False, self._unread
            if not unread or self._held is None:
                return None
            return ViewNews(self._held.view, self._held.take_news())

    def take_view(self) -> JobView | None:
        """Return the view if it is new since the last call."""
        news = self.take_news()
        return None if news is None else news.view

    @property
    def version(self) -> int:
        with self._lock:
            return 0 if self._held is None else self._held.version

    def put_forgotten(self, what: str) -> None:
        """The dispatcher does not know this reader any more: it must open again."""
        with self._lock:
            self._forgotten = what or "the dispatcher does not know this reader"
        self.bell.ring()

    def take_forgotten(self) -> str:
        with self._lock:
            found, self._forgotten = self._forgotten, ""
            return found

    def when_refused(self, act: WeakMethod[Callable[[], None]]) -> None:
        """Have something done, in the thread that puts it, when there is a refusal."""
        self._when_refused = act

    def put_refusal(self, error: Exception) -> None:
        """Reading cannot go on: another reader took the place, or the job is gone."""
        with self._lock:
            self._refusal = error
        act = None if self._when_refused is None else self._when_refused()
        if act is not None:
            act()
        self.bell.ring()

    @property
    def refusal(self) -> Exception | None:
        with self._lock:
            return self._refusal
