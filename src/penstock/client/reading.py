"""One stream as a client reads it: what has arrived, what was taken, and how much more may be sent. No sockets here.

Rules:

1. A frame counts only if it is of the present incarnation (binding, opening) and begins at the round that is due. An
   older one is dropped; a gap means that something was lost, and the stream is opened anew.
2. What arrived stays good whatever becomes of the connection: a new opening begins after it, at the cut it came with.
3. Credit is an absolute position within an opening: the window, and what the trainer has taken since. It is given back
   when the trainer takes a frame, not when the frame arrives.
4. A trainer that takes its time has the whole window ahead of it, so that it does not notice a worker's pauses. One
   that takes as much as memory gives (1 GB/s and more) has a few frames ahead, which are still in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.client.state import StreamMark
from penstock.core.element import Element
from penstock.core.ids import StreamId
from penstock.wire.frames import Rounds, StreamEnded, StreamFailed
from penstock.wire.jobs import Cut, StreamView

Verdict: TypeAlias = Literal["taken", "stale", "gap"]

FAST_BYTES_PER_S = 1e9
PACE_S = 0.02  # a pace is measured over so long at least
NEAR_FRAMES = 3
NEAR_BYTES = 16 << 20  # and no less: small frames need more of them


@dataclass(slots=True)
class Frame:
    """Rounds that have arrived. Elements are decoded when the trainer gets to them."""

    header: Rounds
    buffers: Sequence[Any]
    """As they arrived; of rounds in shared memory, their lease."""
    elements: Sequence[Element] | None = None
    at: int = 0
    """How many of its rounds were taken."""


class StreamReading:
    """See the module. `mark` is what the trainer took; `due`, `cut` and `cut_round` are what has arrived."""

    def __init__(self, view: StreamView, mark: StreamMark) -> None:
        self.stream: StreamId = view.stream
        self.number = view.number
        self.view = view
        self.mark = mark
        self.due = mark.round
        self.cut: Cut = mark.cut
        self.cut_round = mark.cut_round
        if mark.opened:
            self.cut, self.cut_round = mark.cut_here(), mark.round
        self.binding = -1
        """Of the present opening; -1: never opened."""
        self.given_up = -1
        """The binding that was found not to work: the next one is waited for."""
        self.opening = 0
        self.connection: Any = None
        self.queue: deque[Frame] = deque()
        self.queued_bytes = 0
        self.end: StreamEnded | None = None
        self.failure: StreamFailed | None = None
        self.failures = 0
        """Openings in a row that gave nothing."""
        self.not_before = 0.0
        self.heard_at = 0.0
        self.told_end = False
        self.window = 0
        self.depth = 0
        """How much of the window is used at the trainer's pace."""
        self.sent_credit = 0
        self.credited = False
        """Credit was sent since it was last asked whether any was."""
        self.received_bytes = 0
        self.taken_bytes = 0
        self.elements = 0
        self.shared = False
        """Other trainers read it too: rounds may be gone, and what comes may begin before what is due."""
        self.fresh = False
        """Nothing of it was ever received: what comes first is where this trainer begins."""
        self.skipped = 0
        self._base = 0
        self._taken = 0
        self._pace_since = (0.0, 0)

    @property
    def is_tail(self) -> bool:
        return self.view.feed.kind == "tail"

    @property
    def open(self) -> bool:
        return self.connection is not None

    @property
    def complete(self) -> bool:
        """All there is has arrived."""
        return self.end is not None or self.failure is not None

    @property
    def exhausted(self) -> bool:
        """Nothing is left to take, and nothing will come."""
        return self.mark.ended or (self.view.lost and not self.queue)

    @property
    def ready(self) -> bool:
        """There is something to deal with: rounds, the end, or a failure."""
        return bool(self.queue) or (self.complete and not self.mark.ended)

    # Opening

    def opened(self, connection: Any, opening: int, window: int) -> int:
        """Note a new opening and return its first credit."""
        self.connection, self.opening, self.binding = connection, opening, self.view.binding
        self.window = self.depth = window
        self._base = window - self.queued_bytes
        self._taken = 0
        self.sent_credit = max(0, self._base)
        return self.sent_credit

    def closed(self) -> None:
        self.connection = None

    def take_back(self) -> None:
        """Forget what has arrived and was not taken: the stream is to be opened anew, in the same binding too."""
        self.queue.clear()
        self.queued_bytes = 0
        self.due, self.cut, self.cut_round = self.mark.round, self.mark.cut_here(), self.mark.round
        self.end = self.failure = None
        self.binding = -1
        self.closed()

    @property
    def credit(self) -> int:
        # It never goes back: what was granted may be on its way.
        return max(self.sent_credit, self._base + self._taken - (self.window - self.depth))

    @property
    def credit_owed(self) -> int:
        return self.credit - self.sent_credit

    # Receiving

    def verdict(self, message: Rounds | StreamEnded | StreamFailed) -> Verdict:
        if not self.open or self.complete or (message.binding, message.opening) != (self.binding, self.opening):
            return "stale"
        if self.shared and not isinstance(message, StreamFailed):
            count = message.count if isinstance(message, Rounds) else 1
            return "taken" if message.seq - message.skipped <= self.due < message.seq + count else "gap"
        return "taken" if message.seq == self.due else "gap"

    def receive(self, header: Rounds, buffers: Sequence[Any]) -> Verdict:
        found = self.verdict(header)
        if found == "taken":
            if self.shared:
                self._skip_to(header.seq)
            self.queue.append(Frame(header, buffers, at=max(self.due - header.seq, header.had)))
            self.queued_bytes += header.nbytes
            self.received_bytes += header.nbytes
            self.due = header.seq + header.count
            self.cut, self.cut_round = header.cut, self.due
            self.failures = 0
        return found

    def receive_end(self, message: StreamEnded) -> Verdict:
        found = self.verdict(message)
        if found == "taken":
            if self.shared:
                self._skip_to(message.seq)
            self.end = message
        return found

    def receive_failure(self, message: StreamFailed) -> Verdict:
        found = self.verdict(message)
        if found == "taken":
            self.failure = message
        return found

    def _skip_to(self, seq: int) -> None:
        if seq > self.due:
            self.skipped += 0 if self.fresh else seq - self.due
            self.due = seq
        self.fresh = False

    # Taking

    def begin_frame(self) -> Frame:
        """Return the frame whose turn it is; at its first round its bytes are credited."""
        frame = self.queue[0]
        if frame.elements is None:
            self.mark.round = max(self.mark.round, frame.header.seq + frame.at)
            self.queued_bytes -= frame.header.nbytes
            self.taken_bytes += frame.header.nbytes
            self._taken += frame.header.nbytes
        return frame

    def follow_pace(self, now: float) -> None:
        """Look at how fast the trainer takes frames, having just begun one."""
        since, taken_then = self._pace_since
        if now - since < PACE_S:
            return
        fast = self.taken_bytes - taken_then > FAST_BYTES_PER_S * (now - since)
        near = max(NEAR_BYTES, NEAR_FRAMES * self.queue[0].header.nbytes)
        self.depth = min(self.window, near) if fast else self.window
        self._pace_since = (now, self.taken_bytes)

    def describe(self, now: float) -> str:
        """Say what it is waiting for, for people."""
        name = f"{'tail' if self.is_tail else f'stream {self.number}'}"
        if self.mark.ended:
            return f"{name} has ended"
        if self.view.runner is None:
            return f"{name} is bound to no worker"
        if not self.open:
            return f"{name} is being opened on worker {self.view.worker}"
        silent_s = now - self.heard_at
        return f"{name} on worker {self.view.worker} gave nothing for {silent_s:.0f} s"
