"""Where each trainer stands in a stream that several of them share, and who is waited for.

A place is known in two ways. What was *sent* is where a trainer begins that comes back with nothing: it is given no
round twice. What was *taken* is what the trainer itself said with its credit: with `sharing="wait"` everything from
there on is kept for it.

Pure bookkeeping, guarded by the stream's lock; the time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.wire.frames import OpenStream
from penstock.wire.jobs import Cut, JobSpec


@dataclass(slots=True, kw_only=True)
class SharedReader:
    trainer: int
    name: str
    peer: bytes
    opening: int
    credit: int
    slab: bool
    cut: Cut
    cut_round: int
    due: int
    """What it takes for the next round: those between it and what it is sent are skipped."""
    next_round: int | None
    """What it is sent next; None: whatever is the oldest when the first can be sent."""
    taken: int
    """The first round its trainer has not taken."""
    heard_at: float
    sent_bytes: int = 0
    told_end: bool = False
    passed_over: bool = False
    was_passed_over: bool = False
    """Rounds it needs are gone, and nobody makes them again for it."""

    @property
    def hungry(self) -> bool:
        return self.sent_bytes < self.credit and not self.passed_over

    def wants(self, round_: int) -> bool:
        """It has had everything before that round, and has credit for more."""
        return self.hungry and (self.next_round is None or self.next_round >= round_)


@dataclass(slots=True)
class Absent:
    """A trainer that is expected back: its connection was lost."""

    name: str
    taken: int
    since: float


class Places:
    """The trainers of one stream in one process."""

    def __init__(self, spec: JobSpec) -> None:
        self.waits = spec.sharing == "wait"
        self._number, self._timeout_s = spec.trainers, spec.trainer_timeout_s
        self.readers: dict[int, SharedReader] = {}
        self.absent: dict[int, Absent] = {}
        self.names: dict[int, str] = {}
        """Of all that ever came."""
        self._sent: dict[int, int] = {}
        self._passed_over: set[int] = set()
        self._first_at: float | None = None
        self._given_up = False
        """Nobody is waited for any more who has not come yet."""

    def admit(self, peer: bytes, message: OpenStream, now: float) -> SharedReader:
        """Take a reader in, in place of an older one of the same trainer."""
        trainer = message.replica
        next_round: int | None = message.round
        absent = self.absent.pop(trainer, None)
        if message.fresh:
            next_round = self._sent.get(trainer, message.round if self._number else None)
        elif absent is not None:
            next_round = max(message.round, absent.taken)
        reader = SharedReader(
            trainer=trainer,
            name=message.trainer or str(trainer),
            peer=peer,
            opening=message.opening,
            credit=message.credit,
            slab=message.slab,
            cut=message.cut,
            cut_round=message.cut_round,
            due=message.round,
            next_round=next_round,
            taken=message.round if next_round is None else next_round,
            heard_at=now,
            was_passed_over=trainer in self._passed_over,
        )
        self.readers[trainer] = reader
        self.names[trainer] = reader.name
        self._first_at = now if self._first_at is None else self._first_at
        return reader

    def sent(self, reader: SharedReader, after: int) -> None:
        reader.next_round = reader.due = after
        self._sent[reader.trainer] = after
        self._passed_over.discard(reader.trainer)

    def forget(self, reader: SharedReader, now: float, *, leaving: bool = False, taken: int = -1) -> None:
        """Let a reader go; it is expected back unless it left. `taken`: where its trainer stands, if it says so."""
        del self.readers[reader.trainer]
        if self.waits and not leaving and not reader.told_end and not reader.passed_over:
            self.absent[reader.trainer] = Absent(reader.name, reader.taken, now)
        if taken >= 0:
            self._sent[reader.trainer] = taken

    # Who is waited for

    @property
    def lacks_trainers(self) -> bool:
        """Somebody is still to come and read from the beginning."""
        return not self._given_up and len(self.names) < self._number

    def needs(self, after: int) -> bool:
        """Say whether a round before `after` is kept for somebody."""
        if not self.waits:
            return False
        reading = (r.taken for r in self.readers.values() if not r.passed_over and r.next_round is not None)
        return (
            self.lacks_trainers
            or any(taken < after for taken in reading)
            or any(one.taken < after for one in self.absent.values())
        )

    def demand(self, end: int) -> bool:
        """Somebody is through with what was made, and has credit for more."""
        return any(reader.wants(end) for reader in self.readers.values())

    def pass_over(self, after: int, now: float) -> list[str]:
        """Wait no longer for those who need rounds before `after` and have said nothing for long; return who it is."""
        passed = []
        if self.lacks_trainers and self._first_at is not None and now - self._first_at > self._timeout_s:
            self._given_up = True
            passed.append(f"{len(self.names)} of {self._number} trainers have come")
        for reader in self.readers.values():
            if reader.taken < after and not reader.passed_over and now - reader.heard_at > self._timeout_s:
                reader.passed_over = True
                self._passed_over.add(reader.trainer)
                passed.append(f"trainer {reader.name!r} is silent")
        for trainer, absent in list(self.absent.items()):
            if absent.taken < after and now - absent.since > self._timeout_s:
                del self.absent[trainer]
                self._passed_over.add(trainer)
                passed.append(f"trainer {absent.name!r} is gone")
        return passed
