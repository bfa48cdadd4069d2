"""One stream as its reader sees it: what has arrived, what was taken, where it is open.

| from | by | to |
|---|---|---|
| closed | the view shows a binding that is newer than the last one tried | open, there |
| open | a gap, a refusal, a lost connection: the binding is given up | closed |
| open | the end, or a failure, has arrived | complete |
| complete | the last round that arrived is taken | ended |
| ended | another attempt begins, in which others go on with the stream | closed |

Rules:

1. A frame counts only if it is of the present incarnation (binding, opening) and begins at the round that is due. An
   older one is dropped; a gap means that something was lost, and the stream is opened anew.
2. What arrived stays good whatever becomes of the connection: a new opening begins after it, at the cut it came with.
3. Where trainers share a stream, rounds may be gone: a frame says how many are, and may begin before what is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from penstock.core.ids import RunnerId, StreamId
from penstock.stream.credit import CreditLine
from penstock.stream.position import Gaps, Standing, with_gap
from penstock.wire.frames import Rounds, StreamEnded, StreamFailed
from penstock.wire.jobs import Cut, StreamView

Doing: TypeAlias = Literal["gave nothing", "is being opened", "is bound to no worker", "has ended"]
Verdict: TypeAlias = Literal["taken", "stale", "gap"]

PATIENT_FAILURES = 2  # so many openings in a row may fail before the next is delayed
LONGEST_DELAY_S = 2.0
NEVER = -1
FEW_STREAMS = 2  # are described each by itself
_PLURALS: dict[Doing, str] = {
    "gave nothing": "give nothing",
    "is being opened": "are being opened",
    "is bound to no worker": "are bound to no worker",
    "has ended": "have ended",
}


class Arrived:
    """A frame of rounds that has arrived. `payload` is the caller's: what the rounds are decoded from."""

    __slots__ = ("at", "begun", "header", "payload")

    def __init__(self, header: Rounds, payload: Any, at: int) -> None:
        self.header, self.payload = header, payload
        self.at = at
        """How many of its rounds were taken, or are not this reader's to take."""
        self.begun = False

    @property
    def left(self) -> int:
        """How many rounds can be taken in a row."""
        header = self.header
        if not header.holes:
            return header.count - self.at
        ahead = (start - header.seq - self.at for start, _ in header.holes)
        return min((left for left in ahead if left > 0), default=header.count - self.at)

    @property
    def round_bytes(self) -> float:
        return self.header.nbytes / self.header.count

    def begin(self) -> None:
        self.begun = True

    def take_until(self, at: int) -> int:
        """Count rounds as taken; return how many more they are. Those that are to be skipped then, are."""
        more, seq = at - self.at, self.header.seq
        self.at = next((stop - seq for start, stop in self.header.holes if start - seq == at), at)
        return more


class StreamReader:
    """See the module. `standing` is what the trainer took; `due`, `cut` and `cut_round` are what has arrived."""

    def __init__(self, view: StreamView, standing: Standing, *, shared: bool = False, fresh: bool = False) -> None:
        """`shared`: trainers read it together. `fresh`: nothing of it was ever received by this one of them.

        Where the standing notes gaps, other ranks of this trainer are to skip the same. So it is opened in every new
        binding, after its end too: who serves it then has to know.
        """
        self.view = view
        self.standing = standing
        self.credit = CreditLine()
        self.frames: deque[Arrived] = deque()
        self.queued_bytes = 0
        self.due = standing.round
        self.cut: Cut = standing.cut
        self.cut_round = standing.cut_round
        self.end: StreamEnded | None = None
        self.failure: StreamFailed | None = None
        self.runner: RunnerId | None = None
        """Where it is open."""
        self.opening = 0
        self.told_end = False
        self.elements = 0
        self.skipped = 0
        self.gaps: Gaps = standing.gaps or ()
        """Rounds that were skipped, up to what has arrived."""
        self._shared, self._fresh = shared, fresh
        self._binding = self._given_up = NEVER
        """Of the last opening; found not to work: a newer one is waited for."""
        self._failures = 0
        self._not_before = self._heard_at = 0.0

    @property
    def stream(self) -> StreamId:
        return self.view.stream

    @property
    def number(self) -> int:
        return self.view.number

    @property
    def is_tail(self) -> bool:
        return self.view.feed.kind == "tail"

    @property
    def is_open(self) -> bool:
        return self.runner is not None

    @property
    def complete(self) -> bool:
        """All there is has arrived."""
        return self.end is not None or self.failure is not None

    @property
    def exhausted(self) -> bool:
        """Nothing is left to take, and nothing will come."""
        return self.standing.ended or (self.view.lost and not self.frames)

    @property
    def ready(self) -> bool:
        """There is something to deal with: rounds, the end, or a failure."""
        return bool(self.frames) or (self.complete and not self.standing.ended)

    @property
    def next_round(self) -> int:
        """Which the trainer takes next; those between may be gone."""
        return self.frames[0].header.seq + self.frames[0].at if self.frames else self.standing.round

    @property
    def is_fresh(self) -> bool:
        """Nothing of it was received by this trainer, who shares it with others."""
        return self._fresh

    # Opening

    def show(self, view: StreamView) -> None:
        self.view = view

    def wants_opening(self, now: float) -> bool:
        return self.may_be_opened and bool(self.view.address) and now >= self._not_before

    @property
    def may_be_opened(self) -> bool:
        """The view shows a binding that was not tried: it is opened when its time comes."""
        view = self.view
        newer = view.runner is not None and view.binding > max(self._binding, self._given_up)
        over = self.complete or self.standing.ended
        return newer and (not over or self._tells_gaps) and not view.lost

    @property
    def _tells_gaps(self) -> bool:
        return self.standing.gaps is not None and self.failure is None

    def open(self, opening: int, window: int, now: float) -> int:
        """Note a new opening where the view says; return its first credit."""
        self.runner, self.opening, self._binding = self.view.runner, opening, self.view.binding
        self._heard_at = now
        return self.credit.open(window, queued_bytes=self.queued_bytes)

    def close(self) -> None:
        self.runner = None

    def give_up(self, now: float) -> int | None:
        """This binding does not work: return it, unless that was found before."""
        if self._given_up >= self._binding:
            return None
        self._given_up = self._binding
        self._failures += 1
        if self._failures > PATIENT_FAILURES:
            self._not_before = now + min(LONGEST_DELAY_S, 0.1 * 2 ** (self._failures - PATIENT_FAILURES))
        self.close()
        return self._given_up

    def ask_again(self) -> bool:
        """An ended stream is needed once more: say whether that has to be asked for, of the present binding."""
        asked, self._given_up = self._given_up >= self.view.binding, max(self._given_up, self.view.binding)
        return not asked

    def take_back(self) -> None:
        """Forget what arrived and was not taken: the stream is to be opened anew, in the same binding too."""
        self.frames.clear()
        self.queued_bytes = 0
        self.due, self.cut, self.cut_round = self.standing.round, self.standing.cut_here, self.standing.round
        self.gaps = self.standing.gaps or ()
        self.end = self.failure = None
        self._binding = NEVER
        self.close()

    # Receiving

    def _verdict(self, message: Rounds | StreamEnded | StreamFailed) -> Verdict:
        over = self.complete or self.standing.ended
        if not self.is_open or over or (message.binding, message.opening) != (self._binding, self.opening):
            return "stale"
        if self._shared and not isinstance(message, StreamFailed):
            count = message.count if isinstance(message, Rounds) else 1
            return "taken" if message.seq - message.skipped <= self.due < message.seq + count else "gap"
        return "taken" if message.seq == self.due else "gap"

    def receive(self, message: Rounds | StreamEnded | StreamFailed, payload: Any, now: float) -> Verdict:
        found = self._verdict(message)
        if found != "taken":
            return found
        self._heard_at = now
        match message:
            case Rounds():
                self._note_gap(message.seq + message.had)
                self._skip_to(message.seq)
                self.frames.append(Arrived(message, payload, max(self.due - message.seq, message.had)))
                self.queued_bytes += message.nbytes
                self.due = message.seq + message.count
                self.cut, self.cut_round = message.cut, self.due
                self._failures = 0
            case StreamEnded():
                self._note_gap(message.seq)
                self._skip_to(message.seq)
                self.end = message
            case StreamFailed():
                self.failure = message
        return found

    def _note_gap(self, until: int) -> None:
        if self.standing.gaps is not None and until > self.due:
            self.gaps = with_gap(self.gaps, self.due, until)

    def _skip_to(self, seq: int) -> None:
        if not self._shared:
            return
        if seq > self.due:
            self.skipped += 0 if self._fresh else seq - self.due
            self.due = seq
        self._fresh = False

    # Taking

    def begin(self, now: float) -> Arrived:
        """Return the frame whose turn it is; at its first round its bytes are credited."""
        frame = self.frames[0]
        if not frame.begun:
            frame.begin()
            nbytes = frame.header.nbytes
            self.standing = self.standing.moved(frame.header.seq + frame.at)
            self.queued_bytes -= nbytes
            self.credit.take(nbytes, now=now)
        return frame

    def took(self, frame: Arrived, at: int) -> int:
        """The trainer has taken the frame's rounds before `at`; return how many more those are."""
        rounds = frame.take_until(at)
        self.elements += rounds
        self.standing = self.standing.taken(frame.header, frame.at, rounds)
        if frame.at == frame.header.count:
            self.frames.popleft()
        return rounds

    def took_end(self) -> StreamEnded:
        """All rounds were taken; return the end that had arrived."""
        assert self.end is not None
        there = self.standing.moved(self.due).reached(self.end.cut, self.end.done)
        self.standing = there.at_end(leftover=self.end.leftover)
        return self.end

    def pass_by(self) -> None:
        """Others have read it, and it is gone: to this trainer it has ended."""
        self.standing = self.standing.at_end(leftover=False)
        self.told_end = True

    def told(self) -> None:
        self.told_end = True

    def describe(self, now: float) -> str:
        """Say what it is waiting for, for people."""
        name = "tail" if self.is_tail else f"stream {self.number}"
        match self.doing:
            case "is being opened":
                return f"{name} is being opened on worker {self.view.worker}"
            case "gave nothing":
                return f"{name} on worker {self.view.worker} gave nothing for {self.silent_s(now):.0f} s"
            case other:
                return f"{name} {other}"

    @property
    def doing(self) -> Doing:
        if self.standing.ended:
            return "has ended"
        if self.view.runner is None:
            return "is bound to no worker"
        return "gave nothing" if self.is_open else "is being opened"

    def silent_s(self, now: float) -> float:
        return now - self._heard_at


def describe_streams(readers: Sequence[StreamReader], now: float) -> list[str]:
    """Say what streams wait for, for people: a sentence each for a few of them, and one for many."""
    said: list[str] = []
    for doing, plural in _PLURALS.items():
        group = [reader for reader in readers if reader.doing == doing]
        if len(group) <= FEW_STREAMS:
            said += [reader.describe(now) for reader in group]
            continue
        longest = max(group, key=lambda reader: reader.silent_s(now))
        example = f"; {longest.describe(now)}, the longest" if doing == "gave nothing" else ""
        said.append(f"{len(group)} streams {plural}{example}")
    return said
