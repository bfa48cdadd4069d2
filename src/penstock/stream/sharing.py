"""A stream that several trainers share: one run makes its rounds, a window keeps them, each trainer has its place.

Rules, beside those of all streams (`stream.serving`):

1. A round is made when a trainer that is through with the window has credit for it, and for nobody else.
2. `skip`: what does not fit into the window's budget goes, oldest first, whoever has not read it. A reader that comes
   too late for a round is told how many it missed. `wait`: a round goes when every trainer has taken it; until then the
   front-runner waits. A trainer that keeps others waiting and is silent for long is passed over from then on.
3. A trainer that holds nothing begins at the oldest round in the window, or, if this process has served it before,
   after what it was sent: nobody is given a round twice. One with a state in which it has taken nothing begins where it
   first began. With `trainers` all begin at the stream's beginning.
4. After a loss the run starts again at the newest cut (`skip`) or the oldest (`wait`); those ahead of it wait until it
   gets there, and discard by number.
5. The window outlives readers, bindings and runs. Rounds follow from the stream's list of splits, so those of an older
   binding are as good. It goes with the stream, or when another epoch needs its memory.
6. **A trainer of several ranks moves as one.** They begin at the same round. What any of them was given stays in the
   window until all of them have taken it, so that whatever one of them skips, all skip; and a run starts at the oldest
   cut, as with `wait`. So its ranks take equal steps.

A place is known in two ways. What was *sent* is where a trainer begins that comes back with nothing. What was *taken*
is what the trainer itself said with its credit: everything from there on is kept for it, where anything is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from penstock.core.ids import StreamId
from penstock.stream.serving import FRAME_BYTES, PROBE_S, End, Reader, Served
from penstock.stream.window import Entry, Window
from penstock.wire.delivery import Delivery
from penstock.wire.frames import OpenStream
from penstock.wire.jobs import Cut

GATHER_SHARED_S = 0.3  # after a loss: how long the first reader to return waits for the others
FRAMES_A_WINDOW = 8  # at least: what goes from the window goes frame by frame

RankKey: TypeAlias = tuple[int, int]
"""(trainer, seat in the round)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingTerms:
    """What a job says about its sharing. `trainers`: how many read every epoch from its beginning; 0: whoever comes."""

    waits: bool
    trainers: int
    timeout_s: float


class RankReader(Reader):
    """One rank of a trainer."""

    def __init__(self, peer: bytes, message: OpenStream, key: RankKey, next_round: int | None, now: float) -> None:
        super().__init__(peer, message, key[1])
        self.trainer = key[0]
        self.name = message.trainer or str(key[0])
        self.next_round = next_round
        """What it is sent next; None: whatever is the oldest when the first can be sent."""
        self.taken = message.round if next_round is None else next_round
        """The first round its trainer has not taken."""
        self.heard_at = now
        self.told_end = False
        self.passed_over = False

    @property
    def hungry(self) -> bool:
        return self.sent_bytes < self.credit and not self.passed_over

    def wants(self, round_: int) -> bool:
        """It has had everything before that round, and has credit for more."""
        return self.hungry and (self.next_round is None or self.next_round >= round_)

    def hear(self, credit: int, taken: int, now: float) -> None:
        self.grant(credit)
        self.taken = max(self.taken, taken)
        self.heard_at = now
        self.passed_over = False

    def begin_at(self, round_: int) -> None:
        self.next_round = self.taken = round_

    def send(self, after: int, nbytes: int) -> None:
        self.next_round = self.due = after
        self.sent_bytes += nbytes

    def tell_end(self) -> None:
        self.told_end = True

    def pass_over(self) -> None:
        self.passed_over = True


class Life:
    """A trainer's reading of the stream, from where all its ranks begin that hold nothing of it."""

    def __init__(self, begun: int | None) -> None:
        self.begun = begun
        """None: wherever the window begins when the first of them can be sent something."""
        self._given = False
        self._seats: set[int] = set()

    def join(self, seat: int) -> bool:
        """Take a rank in that holds nothing; False: it was in before, so that its trainer has begun anew."""
        new = seat not in self._seats
        self._seats.add(seat)
        return new

    def begin(self, round_: int) -> int:
        self.begun = round_ if self.begun is None else self.begun
        return self.begun

    def give(self, round_: int) -> bool:
        """One of them is sent its first round, and all begin there; False: that was known."""
        first, self._given = not self._given, True
        self.begun = round_ if first else self.begun
        return first


class Absent(NamedTuple):
    """A rank that is expected: its connection was lost, or others of its trainer have begun."""

    name: str
    taken: int
    since: float


class Offer(NamedTuple):
    """Rounds of the window that a reader is to be sent."""

    entry: Entry
    skipped: int
    """Rounds before them that are gone."""
    had: int
    """How many of them this trainer had before it came back without its state."""
    shared: bool
    """They were made for another trainer."""


class Shared(Served[RankKey, RankReader]):
    def __init__(self, stream: StreamId, delivery: Delivery, terms: SharingTerms, *, now: float) -> None:
        super().__init__(stream, delivery, now=now)
        self._sharing = terms
        self._lowest_first = terms.waits or delivery.width > 1
        """A run starts at the oldest cut."""
        self._window = Window(Cut(), 0)
        self._end: End | None = None
        self._evicted: list[Entry] = []
        self._absent: dict[RankKey, Absent] = {}
        self._sent: dict[int, int] = {}
        """By trainer: the first round that none of its ranks was sent, or that it has not taken, if it said so."""
        self._lives: dict[int, Life] = {}
        """By trainer."""
        self._fronts: dict[int, int] = {}
        """By trainer: the first round that none of its ranks was sent."""
        self._names: dict[int, str] = {}
        """Of all trainers that ever came."""
        self._passed_over: set[RankKey] = set()
        """Rounds they need are gone, and nobody makes them again for them."""
        self._first_at: float | None = None
        self._given_up = False
        """Trainers that have not come yet are not waited for any more."""

    # What readers say

    def _key(self, message: OpenStream) -> RankKey:
        return message.replica, self.delivery.seat_of(message.consumer)

    def _let_in(self, peer: bytes, message: OpenStream, now: float) -> None:
        key = self._key(message)
        self._absent.pop(key, None)
        life = self._life_of(key, message)
        next_round = life.begun if message.fresh else message.round
        reader = self.readers[key] = RankReader(peer, message, key, next_round, now)
        self._names[key[0]] = reader.name
        self._first_at = now if self._first_at is None else self._first_at
        if next_round is not None:
            self._fronts[key[0]] = max(next_round, self._fronts.get(key[0], next_round))
        self._admit(reader, now)

    def _life_of(self, key: RankKey, message: OpenStream) -> Life:
        """Return the reading that a rank is part of; a new one if it holds nothing and was part of the last."""
        trainer, seat = key
        life = self._lives.get(trainer)
        if life is None:
            # Of several ranks one may have begun elsewhere; and what is gone from the window they skip together.
            from_beginning = self._sharing.trainers or self.delivery.width > 1
            life = self._lives[trainer] = Life(message.round if from_beginning and message.fresh else None)
        if message.begun >= 0:
            life.give(message.begun)
        if message.fresh and not life.join(seat) and not message.returning:
            life = self._lives[trainer] = Life(self._sent.get(trainer, life.begun))
            life.join(seat)
        return life

    def _admit(self, reader: RankReader, now: float) -> None:
        """See that the run gets to where the reader stands, or was."""
        if self._start_at is not None:
            return
        if self._run is None and self._end is None and not len(self._window):
            if reader.cut.engine is None and reader.cut_round == 0:
                self._start_again(reader)
            else:
                self._start_at = now + GATHER_SHARED_S
        elif self._needs_again(reader):
            self._start_again(reader)
        elif reader.cut_round > self._window.end:
            if not self._lowest_first:
                self._start_again(reader)
            elif self._run is None:
                self._go_on()
        elif self._end is None and (self._run is None or self._run.failed):
            self._go_on()

    def _needs_again(self, reader: RankReader) -> bool:
        """Rounds are to be made once more for it: they were made elsewhere, or before it came."""
        if not self._lowest_first or reader.next_round is None or (reader.trainer, reader.seat) in self._passed_over:
            return False
        if not self._sharing.waits and reader.next_round >= self._fronts[reader.trainer]:
            return False  # the whole trainer skips them
        return reader.next_round < self._window.first

    def _forget_readers(self, now: float) -> None:
        """What was made stays; who has not come again yet is expected."""
        for key, reader in list(self.readers.items()):
            self._forget(key, reader, now)

    def _forget_all(self, now: float) -> None:
        self.readers.clear()
        self._absent.clear()
        self._clear()

    def _forget(self, key: RankKey, reader: RankReader, now: float, *, leaving: bool = False, taken: int = -1) -> None:
        """Let a reader go; it is expected back unless it left. `taken`: where its trainer stands, if it says so."""
        del self.readers[key]
        if self._lowest_first and not leaving and not reader.told_end and not reader.passed_over:
            self._absent[key] = Absent(reader.name, reader.taken, now)
        if taken >= 0:
            others = [other.taken for other in self.readers.values() if other.trainer == key[0]]
            self._sent[key[0]] = max(taken, *others) if others else taken
        if not any(trainer == key[0] for trainer, _ in (*self.readers, *self._absent)):
            self._fronts.pop(key[0], None)

    def take_credit(self, peer: bytes, opening: int, credit: int, taken: int, now: float) -> None:
        for _, reader in self._of(peer, opening):
            reader.hear(credit, taken, now)

    def close_reader(
        self, peer: bytes, opening: int | None, now: float, *, leaving: bool = False, taken: int = -1
    ) -> None:
        for key, reader in self._of(peer, opening):
            self._forget(key, reader, now, leaving=leaving, taken=taken)

    def tick(self, now: float) -> list[bytes]:
        if self.readers:
            self.idle_since = now
        if self._start_at is not None and now >= self._start_at and self.readers:
            held = [reader for reader in self.readers.values() if reader.next_round is not None]
            choose = min if self._lowest_first else max
            self._start_again(choose(held or self.readers.values(), key=lambda reader: reader.cut_round))
        if now - self._probed_at < PROBE_S:
            return []
        self._probed_at = now
        return [reader.peer for reader in self.readers.values() if not reader.hungry]

    def retire(self) -> None:
        """Another epoch needs the memory: if nobody reads this one, let go of what can be made again."""
        if not self.readers and not self._absent and not self._lacks_trainers:
            self._stop()
            self._clear()
            self._window, self._end = Window(Cut(), 0), None

    @property
    def holds_memory(self) -> bool:
        return self.running or bool(len(self._window))

    # The run

    def _start_again(self, reader: RankReader) -> None:
        """Begin to make rounds where a reader stands, with an empty window."""
        self._clear()
        self._window, self._end = Window(reader.cut, reader.cut_round), None
        self._go_on()

    def _go_on(self) -> None:
        self._start(self._window.end_cut, self._window.end)

    def frame_bytes(self, share: int) -> int:
        """Return how large a frame is to be, where this stream's window may have `share` bytes."""
        return max(1, min(FRAME_BYTES, share // FRAMES_A_WINDOW))

    def room(self, run: int, share: int) -> int | None:
        """Return how many bytes may be made now, where the window may have `share`; None: none yet."""
        if not self.is_current(run) or self._wanted_by() is None:
            return None
        frame_bytes = self.frame_bytes(share)
        # Where rounds are kept for somebody, there must be room before one is made; else it is taken afterwards.
        return None if self._lowest_first and not self.make_room(frame_bytes, share) else frame_bytes

    def _wanted_by(self) -> int | None:
        """Return the first trainer that is through with what was made and has credit for more."""
        end = self._window.end
        return next((reader.trainer for reader in self.readers.values() if reader.wants(end)), None)

    # The window

    def evicted(self) -> list[Entry]:
        """Return what has left the window, and forget it."""
        found, self._evicted = self._evicted, []
        return found

    @property
    def window_bytes(self) -> int:
        return self._window.nbytes

    def grow(self, entry: Entry, nbytes: int) -> None:
        """What an entry holds takes so much more, in compressed form as well."""
        self._window.grow(entry, nbytes)

    def _clear(self) -> None:
        while len(self._window):
            self._evicted.append(self._window.evict())

    def make_room(self, nbytes: int, share: int) -> bool:
        """Let go of the oldest rounds until so much fits; False if those left are still needed."""
        while len(self._window) and self._window.nbytes + nbytes > share:
            if not self.evict():
                return False
        return True

    def evict(self) -> bool:
        """Let the oldest rounds go, unless they are kept for somebody; say whether they went."""
        if not len(self._window) or self._needs(self._window.oldest.after):
            return False
        self._evicted.append(self._window.evict())
        return True

    def _needs(self, after: int) -> bool:
        """Say whether a round before `after` is kept for somebody."""
        if not self._lowest_first:
            return False
        kept_until = self._fronts if not self._sharing.waits else {}
        reading = (r for r in self.readers.values() if not r.passed_over and r.next_round is not None)
        return (
            self._lacks_trainers
            or any(r.taken < after <= kept_until.get(r.trainer, after) for r in reading)
            or any(one.taken < after <= kept_until.get(key[0], after) for key, one in self._absent.items())
        )

    @property
    def _lacks_trainers(self) -> bool:
        """Somebody is still to come and read from the beginning."""
        return not self._given_up and len(self._names) < self._sharing.trainers

    def pass_over(self, share: int, now: float) -> list[str]:
        """Wait no longer for trainers that say nothing, where others do wait for them; return who it is, in words."""
        window = self._window
        full = len(window) > 0 and window.nbytes + self.frame_bytes(share) > share
        if not full or self._wanted_by() is None or not self._needs(window.oldest.after):
            return []
        after, timeout_s, passed = window.oldest.after, self._sharing.timeout_s, []
        if self._lacks_trainers and self._first_at is not None and now - self._first_at > timeout_s:
            self._given_up = True
            passed.append(f"{len(self._names)} of {self._sharing.trainers} trainers have come")
        for key, reader in self.readers.items():
            if reader.taken < after and not reader.passed_over and now - reader.heard_at > timeout_s:
                reader.pass_over()
                self._passed_over.add(key)
                passed.append(f"trainer {reader.name!r} is silent")
        for key, absent in list(self._absent.items()):
            if absent.taken < after and now - absent.since > timeout_s:
                del self._absent[key]
                self._passed_over.add(key)
                passed.append(f"trainer {absent.name!r} is gone")
        return passed

    # Serving

    def add(self, run: int, entry: Entry) -> bool:
        """Put rounds into the window; False: the run was abandoned."""
        found = self._current(run)
        if found is None:
            return False
        self._window.add(entry.for_trainer(self._wanted_by()))
        found.give_until(entry.after)
        return True

    def offer(self, reader: RankReader) -> Offer | None:
        """Return what the window has for a reader, as far as its credit goes."""
        if self._run is None and self._end is None:
            return None
        self._begin(reader)
        if not reader.hungry:
            return None
        assert reader.next_round is not None
        entry = self._window.holding(reader.next_round)
        if entry is None:
            return None
        return Offer(
            entry,
            skipped=max(0, entry.seq - reader.due),
            had=max(0, reader.next_round - entry.seq),
            shared=entry.made_for != reader.trainer,
        )

    def _begin(self, reader: RankReader) -> None:
        """Let a trainer that holds nothing begin where the window does."""
        if reader.next_round is not None:
            return
        first = self._lives[reader.trainer].begin(self._window.first)
        reader.begin_at(first)
        self._fronts[reader.trainer] = max(first, self._fronts.get(reader.trainer, first))

    def sent(self, reader: RankReader, offer: Offer, nbytes: int) -> None:
        """A reader was sent what it was offered."""
        entry = offer.entry
        if self._lives[reader.trainer].give(entry.seq):
            self._expect_ranks(reader, entry.seq)
        reader.send(entry.after, nbytes)
        self._note_sent(reader, entry.after)

    def _expect_ranks(self, reader: RankReader, round_: int) -> None:
        """One rank of a trainer is given its first round: it is kept for the others, who have not come yet."""
        ranks = [(reader.trainer, seat) for seat in range(self.delivery.width)]
        missing = [key for key in ranks if key not in self.readers and key not in self._absent]
        self._absent.update({key: Absent(reader.name, round_, reader.heard_at) for key in missing})

    def _note_sent(self, reader: RankReader, after: int) -> None:
        trainer = reader.trainer
        self._sent[trainer] = max(after, self._sent.get(trainer, after))
        self._fronts[trainer] = max(after, self._fronts.get(trainer, after))
        self._passed_over.discard((trainer, reader.seat))

    def tell_ends(self) -> None:
        """Tell the end to who has had all there is."""
        end = self._end
        if end is None:
            return
        for reader in self.readers.values():
            if reader.told_end:
                continue
            self._begin(reader)
            assert reader.next_round is not None
            if reader.next_round >= end.seq or not len(self._window):
                self._tell_end(reader, end, skipped=max(0, end.seq - reader.due))
                after = max(end.seq, reader.due)
                reader.send(after, 0)
                reader.tell_end()
                self._note_sent(reader, after)

    def _tell_ends(self, end: End) -> None:
        self._end = end
        self.tell_ends()
