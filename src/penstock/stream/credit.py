"""How much of a stream may be on its way to its reader.

Credit is an absolute position in bytes within an opening: the window, and what the trainer has taken since. It is given
back when the trainer takes a frame, not when the frame arrives.

A trainer that takes its time has the whole window ahead of it, so that it does not notice a worker's pauses. One that
takes as much as memory gives (1 GB/s and more) has a few frames ahead, which are still in the processor's cache.
"""

from __future__ import annotations

FAST_BYTES_PER_S = 1e9
PACE_S = 0.02  # a pace is measured over so long at least
NEAR_FRAMES = 3
NEAR_BYTES = 16 << 20  # and no less: small frames need more of them
RESTATE_PART = 8  # credit is said again when so many-th of what is ahead has been taken


class CreditLine:
    """
    >>> line = CreditLine()
    >>> line.open(1000, queued_bytes=300), line.granted
    (700, 700)
    >>> line.take(300, now=0.0); line.granted, line.is_due, line.grant(), line.is_due
    (1000, True, 1000, False)
    """

    def __init__(self) -> None:
        self.taken_bytes = 0
        """Over all openings."""
        self._window = self._depth = 0
        self._base = 0
        self._taken = 0
        self._sent = 0
        self._quiet = True
        self._pace_since = (0.0, 0)

    def open(self, window: int, *, queued_bytes: int) -> int:
        """Begin an opening, while so much that arrived was not taken; return its first credit."""
        self._window = self._depth = window
        self._base = window - queued_bytes
        self._taken = 0
        self._sent = max(0, self._base)
        return self._sent

    @property
    def granted(self) -> int:
        # It never goes back: what was granted may be on its way.
        return max(self._sent, self._base + self._taken - (self._window - self._depth))

    @property
    def is_due(self) -> bool:
        """Enough was taken to say so."""
        return (self.granted - self._sent) * RESTATE_PART >= self._depth

    def grant(self) -> int:
        """Return the credit that is being sent."""
        self._sent, self._quiet = self.granted, False
        return self._sent

    def was_quiet(self) -> bool:
        """Say whether none was sent since this was last asked."""
        quiet, self._quiet = self._quiet, True
        return quiet

    def take(self, nbytes: int, *, now: float) -> None:
        """The trainer begins a frame of that size."""
        self.taken_bytes += nbytes
        self._taken += nbytes
        since, taken_then = self._pace_since
        if now - since < PACE_S:
            return
        fast = self.taken_bytes - taken_then > FAST_BYTES_PER_S * (now - since)
        self._depth = min(self._window, max(NEAR_BYTES, NEAR_FRAMES * nbytes)) if fast else self._window
        self._pace_since = (now, self.taken_bytes)
