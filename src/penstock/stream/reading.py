"""One stream as its reader sees it: what has arrived, what was taken, where it is open; and which of them is next.

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
4. Credit is an absolute position in bytes within an opening: the window, and what the trainer has taken since. It is
   given back when the trainer takes a frame, not when the frame arrives.
5. A trainer that takes its time has the whole window ahead of it, so that it does not notice a worker's pauses. One
   that takes as much as memory gives (1 GB/s and more) has a few frames ahead: they are still in the processor's cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeAlias

from msgspec.structs import replace

from penstock.core.ids import RunnerId
from penstock.stream.position import Arrived, Lane, Serving, Standing
from penstock.wire.frames import Rounds, StreamEnded, StreamFailed
from penstock.wire.jobs import StreamView

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
FAST_BYTES_PER_S = 1e9
PACE_S = 0.02  # a pace is measured over so long at least
NEAR_FRAMES = 3
NEAR_BYTES = 16 << 20  # and no less: small frames need more of them
RESTATE_PART = 8  # credit is said again when so many-th of what is ahead has been taken
RUN_BYTES = 4 << 20  # of elements handed out together: they are held until the last of them was taken


class CreditLine:
    """How much of a stream may be on its way to its reader.

    >>> line = CreditLine()
    >>> line.open(1000, queued_bytes=300), line.granted
    (700, 700)
    >>> line.take(300, now=0.0); line.granted, line.is_due, line.grant(), line.is_due
    (1000, True, 1000, False)
    >>> line.open(1000, queued_bytes=0, depth=250); line.take(100, now=1.0); line.granted  # as any, once it is read
    250
    1100
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

    def open(self, window: int, *, queued_bytes: int, depth: int | None = None) -> int:
        """Begin an opening, while so much that arrived was not taken; return its first credit.

        `depth`: how much of the window may be used before something is taken; None: all of it.
        """
        self._window, self._depth = window, window if depth is None else depth
        self._base = window - queued_bytes
        self._taken = 0
        self._sent = max(0, self._base - (window - self._depth))
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


class StreamReader:
    """See the module. `standing` is where the trainer stands; `head` is where it will when all that came is taken."""

    def __init__(self, view: StreamView, standing: Standing, *, shared: bool = False, fresh: bool = False) -> None:
        """`shared`: trainers read it together. `fresh`: nothing of it was ever received by this one of them.

        Where the standing notes gaps, other ranks of this trainer are to skip the same. So it is opened in every new
        binding, after its end too: who serves it then has to know.
        """
        self.view = view
        self.stream, self.number = view.stream, view.number
        self.is_tail = view.feed.kind == "tail"
        self.standing = self.head = standing
        self.credit = CreditLine()
        self.frames: deque[Arrived] = deque()
        self.last: StreamEnded | StreamFailed | None = None
        """After it nothing comes."""
        self.fresh = fresh
        self.runner: RunnerId | None = None
        """Where it is open."""
        self.opening = 0
        self.told_end = False
        self.elements = self.skipped = 0
        self.shared = shared
        self._binding = self._given_up = NEVER
        """Of the last opening; found not to work: a newer one is waited for."""
        self.failures = 0
        """Openings in a row that came to nothing."""
        self._not_before = self._heard_at = 0.0

    @property
    def is_open(self) -> bool:
        return self.runner is not None

    @property
    def due(self) -> int:
        """The round that arrives next."""
        return self.head.round

    @property
    def queued_bytes(self) -> int:
        """Of frames that the trainer has not begun."""
        return sum(frame.header.nbytes for frame in self.frames if not frame.begun)

    @property
    def buffered(self) -> tuple[int, int]:
        """Elements and bytes that have arrived and were not taken. Any thread may ask."""
        frames = list(self.frames)  # at once: another thread may be taking them
        left = [frame.header.count - frame.at for frame in frames]
        return sum(left), int(sum(rounds * frame.round_bytes for rounds, frame in zip(left, frames)))

    @property
    def complete(self) -> bool:
        """All there is has arrived."""
        return self.last is not None

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
        tells_gaps = self.standing.gaps is not None and not isinstance(self.last, StreamFailed)
        over = self.complete or self.standing.ended
        return newer and (not over or tells_gaps) and not view.lost

    def open(self, opening: int, window: int, now: float, *, depth: int | None = None) -> int:
        """Note a new opening where the view says; return its first credit. `depth`: see `CreditLine.open`."""
        self.runner, self.opening, self._binding = self.view.runner, opening, self.view.binding
        self._heard_at = now
        return self.credit.open(window, queued_bytes=self.queued_bytes, depth=depth)

    def close(self) -> None:
        self.runner = None

    def give_up(self, now: float) -> int | None:
        """This binding does not work: return it, unless that was found before."""
        if self._given_up >= self._binding:
            return None
        self._given_up = self._binding
        self.failures += 1
        if self.failures > PATIENT_FAILURES:
            self._not_before = now + min(LONGEST_DELAY_S, 0.1 * 2 ** (self.failures - PATIENT_FAILURES))
        self.close()
        return self._given_up

    def ask_again(self) -> bool:
        """An ended stream is needed once more: say whether that has to be asked for, of the present binding."""
        asked, self._given_up = self._given_up >= self.view.binding, max(self._given_up, self.view.binding)
        return not asked

    def take_back(self) -> None:
        """Forget what arrived and was not taken: the stream is to be opened anew, in the same binding too."""
        self.frames.clear()
        self.head = self.standing.reached(self.standing.cut_here, ())
        self.last = None
        self._binding = NEVER
        self.close()

    # Receiving

    def _verdict(self, message: Rounds | StreamEnded | StreamFailed) -> Verdict:
        over = self.complete or self.standing.ended
        if not self.is_open or over or (message.binding, message.opening) != (self._binding, self.opening):
            return "stale"
        if self.shared and not isinstance(message, StreamFailed):
            count = message.count if isinstance(message, Rounds) else 1
            return "taken" if message.seq - message.skipped <= self.due < message.seq + count else "gap"
        return "taken" if message.seq == self.due else "gap"

    def receive(self, message: Rounds | StreamEnded | StreamFailed, payload: Any, now: float) -> Verdict:
        found = self._verdict(message)
        if found != "taken":
            return found
        self._heard_at = now
        if self.shared and not isinstance(message, StreamFailed):
            self._count_skipped(message.seq)
        match message:
            case Rounds():
                self.frames.append(Arrived(message, payload, max(self.due - message.seq, message.had)))
                due = message.seq + message.count
                self.head = self.head.moved(message.seq + message.had)
                self.head = replace(self.head, round=due, cut=message.cut, cut_round=due)
                self.failures = 0
            case StreamEnded():
                self.head = self.head.moved(message.seq)
                self.last = message
            case StreamFailed():
                self.last = message
        return found

    def _count_skipped(self, seq: int) -> None:
        """To one that is fresh nothing was skipped: it begins where the window does."""
        if not self.fresh and seq > self.due:
            self.skipped += seq - self.due
        self.fresh = False

    # Taking

    def begin(self, now: float) -> Arrived:
        """Return the frame whose turn it is; at its first round its bytes are credited."""
        frame = self.frames[0]
        if not frame.begun:
            frame.begin()
            self.standing = self.standing.moved(frame.header.seq + frame.at)
            self.credit.take(frame.header.nbytes, now=now)
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
        end = self.last
        assert isinstance(end, StreamEnded)
        there = self.standing.moved(self.due).reached(end.cut, end.done)
        self.standing = there.at_end(leftover=end.leftover)
        return end

    def pass_by(self) -> None:
        """Others have read it, and it is gone: to this trainer it has ended."""
        self.standing = self.standing.at_end(leftover=False)
        self.told_end = True

    def told(self) -> None:
        self.told_end = True

    def describe(self, now: float) -> str:
        """Say what it is waiting for, for people."""
        name = "tail" if self.is_tail else f"stream {self.number}"
        more: dict[Doing, str] = {
            "is being opened": f"is being opened on worker {self.view.worker}",
            "gave nothing": f"on worker {self.view.worker} gave nothing for {self.silent_s(now):.0f} s",
        }
        return f"{name} {more.get(self.doing, self.doing)}"

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


Choice: TypeAlias = Serving | StreamReader
"""What a consumer takes next: rounds, or a stream of which nothing is left but its end, or a failure."""


class ByArrival:
    """First come, first served."""

    def __init__(self, next_stream: int | None = None) -> None:
        self.next_stream = next_stream
        """Which the next element is to come from, where a state says so."""
        self._arrived: deque[StreamReader] = deque()
        """An entry for each thing that arrived."""

    def arrived(self, reader: StreamReader) -> None:
        self._arrived.append(reader)

    def choose(self, readers: Collection[StreamReader]) -> Choice | None:
        """Return what is next; None: it has not come yet."""
        arrived, wanted = self._arrived, self.next_stream
        if not arrived:
            return None
        if wanted is not None and all(reader.exhausted for reader in readers if reader.number == wanted):
            wanted = None
        found: StreamReader | None = arrived[0]
        if wanted is not None:
            found = next((reader for reader in arrived if reader.number == wanted), None)
        elif arrived[0].is_tail and not all(reader.exhausted or reader.is_tail for reader in readers):
            # One that came back with an older state reads streams again that have ended for the others. A state with
            # rounds of the tail says that all of them have.
            found = next((reader for reader in arrived if not reader.is_tail), None)
        if found is None:
            return None
        self.next_stream = None
        arrived.remove(found)
        return _all_of(found)

    def forget(self) -> None:
        self._arrived.clear()


class InTurns:
    """The stream with the lowest round, and of several the lowest number; the tail after all others.

    Turns begin when all streams are there: which is first must not depend on which was seen first.
    """

    next_stream: int | None = None

    def __init__(self, streams: int) -> None:
        self._streams = streams

    def arrived(self, reader: StreamReader) -> None:
        """When something came says nothing here."""

    def choose(self, readers: Collection[StreamReader]) -> Choice | None:
        in_turn = [reader for reader in readers if not reader.is_tail]
        if len(in_turn) < self._streams:
            return None
        active = sorted((r for r in in_turn if not r.exhausted), key=lambda reader: reader.number)
        if not active:
            return next((_all_of(reader) for reader in readers if reader.is_tail and reader.ready), None)
        lowest = min(reader.next_round for reader in active)
        due = [reader for reader in active if reader.next_round == lowest]
        if not due[0].ready:
            return None
        if len(active) == 1 or not due[0].frames:
            return _all_of(due[0])
        chosen, nbytes = [due[0]], due[0].frames[0].round_bytes
        for reader in due[1:]:
            if not reader.frames or nbytes + reader.frames[0].round_bytes > RUN_BYTES:
                break
            nbytes += reader.frames[0].round_bytes
            chosen.append(reader)
        if len(chosen) < len(active):
            return _serving(chosen, 1)
        rounds = min(reader.frames[0].left for reader in chosen)
        return _serving(chosen, max(1, min(rounds, int(RUN_BYTES / max(nbytes, 1.0)))))

    def forget(self) -> None:
        """Nothing is remembered."""


def _all_of(reader: StreamReader) -> Choice:
    return _serving([reader], reader.frames[0].left) if reader.frames else reader


def _serving(readers: Sequence[StreamReader], rounds: int) -> Serving:
    return Serving(tuple([Lane(each.number, each.frames[0], each.frames[0].at) for each in readers]), rounds)
