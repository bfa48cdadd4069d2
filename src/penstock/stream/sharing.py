"""A stream that several trainers share: one run makes its rounds, a window keeps them, each trainer has its place.

Rules, beside those of all streams (`stream.serving`):

1. A round is made when a trainer that is through with the window has credit for it, and for nobody else.
2. `skip`: what does not fit into the window's budget goes, oldest first, whoever has not read it. A reader that comes
   too late for a round is told how many it missed. `wait`: a round goes when every trainer has taken it; until then the
   front-runner waits. A trainer that keeps others waiting and is silent for long is passed over from then on.
3. A trainer that holds nothing begins at the oldest round in the window. In another life, without its states, it begins
   after what this process has sent it: nobody is given a round twice. In the same life it begins where it first began.
   With `trainers` all begin at the stream's beginning.
4. After a loss the run starts again at the newest cut (`skip`) or the oldest (`wait`); those ahead of it wait until it
   gets there, and discard by number.
5. The window outlives readers, bindings and runs. Rounds follow from the stream's list of splits, so those of an older
   binding are as good. It goes with the stream, or when another epoch needs its memory.
6. **A trainer of several ranks moves as one** (`stream.window`): a round is given to all of its ranks or to none, and
   what is gone before then, all of them skip. What one of them was given is kept, or made again, for the others. So a
   run starts at the oldest cut, as with `wait`, and its ranks take equal steps.

A place is known in two ways. What was *sent* is where a trainer begins that comes back with nothing. What was *taken*
is what the trainer itself said with its credit: everything from there on is kept for it, where anything is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from penstock.core.ids import AttemptId, StreamId
from penstock.stream.position import Gaps
from penstock.stream.rounds import FRAME_BYTES, End
from penstock.stream.serving import Key, Served
from penstock.stream.window import GATHER_RANKS_S, Entry, RankReader, Team, Window
from penstock.wire.frames import OpenStream
from penstock.wire.jobs import Cut, Delivery, Named

GATHER_SHARED_S = 0.3  # after a loss: how long the first reader to return waits for the others
FRAMES_A_WINDOW = 8  # at least: what goes from the window goes frame by frame


class Absent(NamedTuple):
    """A rank that is expected: its connection was lost, or others of its trainer have begun."""

    taken: int
    since: float


class Offer(NamedTuple):
    """Rounds of the window that a reader is to be sent."""

    entry: Entry
    skipped: int
    """How many rounds before them are gone from the window."""
    had: int
    """How many of them this trainer had before it came back without its state."""
    holes: Gaps
    """Those among them that its trainer skips."""
    shared: bool
    """Whether they were made for another trainer."""


class Shared(Served[RankReader]):
    def __init__(self, stream: StreamId, delivery: Delivery, *, now: float) -> None:
        super().__init__(stream, delivery, now=now)
        self._waits, self._lowest_first = not delivery.skips, not delivery.skips or delivery.width > 1
        """Whether trainers are waited for; and a run starts at the oldest of the readers' cuts, not at the newest."""
        self._trainers, self.timeout_s = 0, 0.0
        """How many read every epoch from its beginning, 0: whoever comes; how long one may be silent."""
        if delivery.sharing is not None:
            self._trainers, self.timeout_s = delivery.sharing.trainers or 0, delivery.sharing.trainer_timeout_s
        self.window = Window(Cut(), 0)
        self._end: End | None = None
        self._evicted: list[Entry] = []
        self._absent: dict[Key, Absent] = {}
        self._teams: dict[str, Team] = {}
        """The ranks of each trainer that ever came."""
        self._passed_over: set[Key] = set()
        """Readers that need rounds which are gone from the window and are not made again."""
        self._first_at: float | None = None
        self._given_up = False
        """Whether trainers that have not come yet are waited for no more."""

    # What readers say

    def _key(self, message: OpenStream) -> Key:
        return message.trainer, self.delivery.seat_of(message.consumer)

    def _refusal(self, message: OpenStream) -> str:
        team = self._teams.get(message.trainer)
        if team is not None and message.life < team.life:
            return "the trainer has begun anew, without its states"
        return super()._refusal(message)

    def _let_in(self, peer: bytes, message: OpenStream, now: float) -> None:
        key = trainer, seat = self._key(message)
        team = self._teams.get(trainer)
        if team is None or message.life > team.life:
            team = self._teams[trainer] = self._new_team(trainer, message)
        self._absent.pop(key, None)
        team.hear(seat, message)
        reader = self.readers[key] = RankReader(peer, message, key, now)
        self._first_at = now if self._first_at is None else self._first_at
        self._pass_gaps(trainer, team)
        team.await_ranks(now, self.timeout_s, complete=self._is_complete(trainer))
        self._admit(reader, now)
        self._begin_teams()

    def _begin_teams(self) -> None:
        """Let trainers that hold nothing begin, once their ranks are there: none of them may hold something.

        They begin after what they were sent in earlier lives, or where the window does, once there is one. Ranks
        that begin without others skip nothing by it, or have waited long.
        """
        is_made = self._run is not None or self._end is not None
        for trainer, team in self._teams.items():
            first = self.window.first if team.before is None else team.before
            alone = team.skips_alone or (team.impatient and first == 0)
            if not team.begun and (team.before is not None or is_made) and (alone or self._is_complete(trainer)):
                team.begin_at(first)
                self._pass_gaps(trainer, team)

    def _pass_gaps(self, trainer: str, team: Team) -> None:
        """See that no rank of a trainer stands in a gap: what is skipped is not its to have."""
        for mate in self._mates(trainer):
            mate.move_to(team.past_gaps(mate.next_round))

    def _new_team(self, trainer: str, message: OpenStream) -> Team:
        """Begin a life of a trainer. What is left of the last one is gone, and nothing is given once more."""
        for key in [key for key in self.readers if key[0] == trainer]:
            del self.readers[key]
        self._absent = {key: absent for key, absent in self._absent.items() if key[0] != trainer}
        last = self._teams.get(trainer)
        had = () if last is None else tuple(had for had in (last.had, last.before) if had is not None)
        return Team(message.life, before=max(had, default=None), begun=not had and self._trainers > 0)

    def with_mates(self, readers: list[RankReader]) -> list[RankReader]:
        """Return readers, and all ranks of their trainers."""
        if self.delivery.width == 1:
            return readers
        trainers = {reader.trainer for reader in readers}
        return [reader for reader in self.readers.values() if reader.trainer in trainers]

    def _mates(self, trainer: str) -> list[RankReader]:
        return [reader for reader in self.readers.values() if reader.trainer == trainer]

    def _is_complete(self, trainer: str) -> bool:
        """Say whether all ranks of a trainer are here, or have been here to the end."""
        ended = self._teams[trainer].ended
        return all((trainer, seat) in self.readers or seat in ended for seat in range(self.delivery.width))

    def _admit(self, reader: RankReader, now: float) -> None:
        """See that the run gets to where the reader stands, or was."""
        self._begin_teams()
        if self._start_at is not None:
            return
        again = [mate for mate in self._mates(reader.trainer) if self._needs_again(mate)]
        if self._run is None and self._end is None and not len(self.window):
            if reader.cut.engine is None and reader.cut_round == 0:
                self._start_again(reader)
            else:
                self._start_at = now + GATHER_SHARED_S
        elif again:
            self._start_again(min(again, key=lambda mate: mate.cut_round))
        elif reader.cut_round > self.window.end:
            if not self._lowest_first:
                self._start_again(reader)
            elif self._run is None:
                self._go_on()
        elif self._end is None and (self._run is None or self._run.failed):
            self._go_on()

    def _needs_again(self, reader: RankReader) -> bool:
        """Rounds are to be made once more for it: they were made elsewhere, or before it came."""
        if not self._lowest_first or reader.next_round >= self.window.first:
            return False
        team = self._teams[reader.trainer]
        if self.delivery.width > 1 and reader.next_round < team.front:
            # Another rank of its trainer was given them, unless it goes back as well.
            return team.impatient or self._is_complete(reader.trainer)
        return self._waits and team.begun and (reader.trainer, reader.seat) not in self._passed_over

    def _forget_all(self, now: float) -> None:
        self.readers.clear()
        self._absent.clear()
        self._clear()

    def _forget(self, key: Key, reader: RankReader, now: float, *, leaving: bool = False, taken: int = -1) -> None:
        """What was made stays; the reader is expected back unless it left."""
        del self.readers[key]
        trainer, seat = key
        team = self._teams[trainer]
        if self._lowest_first and not leaving and seat not in team.ended and not reader.passed_over:
            self._absent[key] = Absent(reader.taken, now)
        if taken >= 0:
            team.leave(max([taken, *(mate.taken for mate in self._mates(trainer))]))
        team.await_ranks(now, self.timeout_s, complete=self._is_complete(trainer))

    def tick(self, now: float) -> list[bytes]:
        probed = super().tick(now)
        for trainer, team in self._teams.items():
            if team.await_ranks(now, self.timeout_s, complete=self._is_complete(trainer)):
                for reader in self._mates(trainer):
                    self._admit(reader, now)
        self._begin_teams()
        return probed

    def _begin(self) -> None:
        held = [reader for reader in self.readers.values() if self._teams[reader.trainer].begun]
        choose = min if self._lowest_first else max
        self._start_again(choose(held or self.readers.values(), key=lambda reader: reader.cut_round))

    def _blocking(self) -> list[RankReader]:
        return [reader for reader in self.readers.values() if not reader.hungry]

    def retire(self, attempt: AttemptId) -> None:
        """Another epoch may need the memory: if nobody reads this one, let go of what can be made again."""
        other = self._terms is None or self._terms.attempt != attempt
        if other and not self.readers and not self._absent and not self._lacks_trainers:
            self._stop()
            self._clear()
            self.window, self._end = Window(Cut(), 0), None

    @property
    def holds_memory(self) -> bool:
        return self.running or bool(len(self.window))

    # The run

    def _start_again(self, reader: RankReader) -> None:
        """Begin to make rounds where a reader stands, with an empty window."""
        self._clear()
        self.window, self._end = Window(reader.cut, reader.cut_round), None
        self._go_on()

    def _go_on(self) -> None:
        self._start(self.window.end_cut, self.window.end)

    def frame_bytes(self, share: int) -> int:
        """Return how large a frame is to be, where this stream's window may have `share` bytes."""
        return max(1, min(FRAME_BYTES, share // FRAMES_A_WINDOW))

    def room(self, run: int, share: int) -> int | None:
        """Return how many bytes may be made now, where the window may have `share`; None: none yet."""
        if self.current(run) is None or self._wanted_by() is None:
            return None
        frame_bytes = self.frame_bytes(share)
        # Where rounds are kept for somebody, there must be room before one is made; else it is taken afterwards.
        return None if self._lowest_first and not self.make_room(frame_bytes, share) else frame_bytes

    def _wanted_by(self) -> str | None:
        """Return the first trainer for which the window has nothing and that has credit for more."""
        # Of an empty window even a reader that went back behind it is through: what it lacks is gone.
        after = self.window.end if len(self.window) else 0
        wanting = (reader for reader in self.readers.values() if reader.hungry and reader.next_round >= after)
        return next((reader.trainer for reader in wanting if self._may_have(reader)), None)

    def _may_have(self, reader: RankReader) -> bool:
        """Say whether a rank may be given its next round: others of its trainer were, or all of them can be."""
        if self.delivery.width == 1:
            return True
        team = self._teams[reader.trainer]
        if reader.next_round < team.front:
            return reader.next_round >= self.window.first  # else they are made again, if the others do not go back too
        can = all(
            mate.hungry and mate.next_round >= team.front
            for mate in self._mates(reader.trainer)
            if not mate.passed_over and mate.seat not in team.ended
        )
        return can and (
            team.skips_alone
            or (team.impatient and team.begun and reader.next_round >= self.window.first)
            or self._is_complete(reader.trainer)
        )

    # The window

    def evicted(self) -> list[Entry]:
        """Return what has left the window, and forget it."""
        found, self._evicted = self._evicted, []
        return found

    def _clear(self) -> None:
        while len(self.window):
            self._evicted.append(self.window.evict())

    def make_room(self, nbytes: int, share: int) -> bool:
        """Let go of the oldest rounds until so much fits; False if those left are still needed."""
        while len(self.window) and self.window.nbytes + nbytes > share:
            if not self.evict():
                return False
        return True

    def evict(self) -> bool:
        """Let the oldest rounds go, unless they are kept for somebody; say whether they went."""
        if not len(self.window) or self._needs(self.window.oldest.after):
            return False
        self._evicted.append(self.window.evict())
        return True

    def _needs(self, after: int) -> bool:
        """Say whether a round before `after` is kept for somebody."""
        if not self._lowest_first:
            return False
        teams = self._teams
        reading = [r for r in self.readers.values() if not r.passed_over and teams[r.trainer].begun]
        if self._waits:
            absent = any(one.taken < after for one in self._absent.values())
            return self._lacks_trainers or absent or any(r.taken < after for r in reading)
        absent = any(one.taken < after <= teams[key[0]].front for key, one in self._absent.items())
        return absent or any(r.next_round < after <= teams[r.trainer].front for r in reading)

    @property
    def _lacks_trainers(self) -> bool:
        """Somebody is still to come and read from the beginning."""
        return not self._given_up and len(self._teams) < self._trainers

    def pass_over(self, share: int, now: float) -> list[str]:
        """Wait no longer for trainers that say nothing, where others do wait for them; return who it is, in words."""
        window = self.window
        full = len(window) > 0 and window.nbytes + self.frame_bytes(share) > share
        if not full or self._wanted_by() is None or not self._needs(window.oldest.after):
            return []
        after, timeout_s, passed = window.oldest.after, self.timeout_s, []
        gone_s = timeout_s if self._waits else min(timeout_s, GATHER_RANKS_S)
        if self._lacks_trainers and self._first_at is not None and now - self._first_at > timeout_s:
            self._given_up = True
            passed.append(f"{len(self._teams)} of {self._trainers} trainers have come")
        for key, reader in self.readers.items():
            if reader.taken < after and not reader.passed_over and now - reader.heard_at > timeout_s:
                reader.pass_over()
                self._passed_over.add(key)
                passed.append(f"trainer {reader.trainer!r} is silent")
        for key, absent in list(self._absent.items()):
            if absent.taken < after and now - absent.since > gone_s:
                del self._absent[key]
                self._passed_over.add(key)
                passed.append(f"trainer {key[0]!r} is gone")
        return passed

    # Serving

    def add(self, run: int, entry: Entry) -> bool:
        """Put rounds into the window; False: the run was abandoned."""
        found = self.current(run)
        if found is None:
            return False
        self.window.add(replace(entry, made_for=self._wanted_by()))
        self._run = found._replace(next_round=entry.after)
        return True

    def offer(self, reader: RankReader) -> Offer | None:
        """Return what the window has for a reader, as far as its credit goes.

        It is asked of every reader after every frame: for one that has all there is, that is two comparisons.
        """
        at = reader.next_round
        if at >= self.window.end or not reader.hungry or not self._may_have(reader):
            return None
        entry = self.window.holding(at)
        if entry is None:
            return None
        team = self._teams[reader.trainer]
        return Offer(
            entry,
            skipped=max(0, entry.seq - reader.due),
            had=max(0, at - entry.seq),
            holes=team.gaps_in(at, entry.after) if at < team.gaps_end else (),
            shared=entry.made_for != reader.trainer,
        )

    def sent(self, reader: RankReader, offer: Offer, nbytes: int) -> None:
        """A reader was sent what it was offered."""
        self._give(reader, self._teams[reader.trainer], offer.entry.seq, offer.entry.after, nbytes)

    def _give(self, reader: RankReader, team: Team, start: int, after: int, nbytes: int) -> None:
        """Rounds up to `after` are sent to a reader; those before `start` that it was not sent are gone."""
        trainer = reader.trainer
        if self.delivery.width > 1 and reader.next_round < start:
            team.skip(reader.next_round, start)
            self._pass_gaps(trainer, team)
        team.give(reader.seat, after)
        reader.give(after, nbytes)
        if after < team.gaps_end:
            reader.move_to(team.past_gaps(after))
        self._passed_over.discard((trainer, reader.seat))

    def tell_ends(self) -> None:
        """Tell the end to who has had all there is."""
        end = self._end
        if end is None:
            return
        for reader in self.readers.values():
            team = self._teams[reader.trainer]
            if reader.seat in team.ended:
                continue
            if reader.next_round >= end.seq or (not len(self.window) and self._may_have(reader)):
                self._tell_end(reader, end, skipped=max(0, end.seq - reader.due))
                team.end(reader.seat)
                self._give(reader, team, end.seq, max(end.seq, reader.due), 0)

    def _tell_ends(self, end: End, done: Iterable[Named]) -> None:
        self._end = end
        self.tell_ends()
