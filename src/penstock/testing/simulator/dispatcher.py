"""The real control core, under a dispatcher that can be killed at any moment and a disk that tells what it has kept."""

from __future__ import annotations

import random
import zlib
from typing import Any, Literal, TypeAlias

from msgspec.structs import replace

from penstock.control.decide import decide, tick
from penstock.control.draft import Decision
from penstock.control.events import AnyEvent, JobCollected, JobCreated, LeasesBegan, decode, encode
from penstock.control.snapshot import restore, snapshot
from penstock.control.state import ClusterState
from penstock.core.ids import AttemptId, BlobHash
from penstock.testing.simulator.world import DISPATCHER, HEALS_AT_S, Actor, Failed, Mail, Peer, World
from penstock.wire.messages import Answer, Done, Granted, GrantSplits, NotKnown, OpenEpoch, Refused, Request
from penstock.wire.positions import PositionSigner
from penstock.wire.principals import Principal, Role

Tail: TypeAlias = Literal["kept", "lost", "torn"]
"""What becomes of records that were written and not synced."""
TakenRequests: TypeAlias = list[tuple[Decision, str, int]]
"""What was decided, who asked for it and with which number; 0: nobody."""

BLOBS = frozenset({BlobHash("graph"), BlobHash("splits")})
FEWEST_TO_COMPACT = 20
SIGNER = PositionSigner("every dispatcher of a world has one secret")
HOSTILE = "mallory"
ROLES: tuple[Role, ...] = ("trainer", "runner", "provisioner")
EVERY_S = 0.2
FALSE_POSITIONS = (0, 1_000, 1 << 40, (1 << 60) - 1)


class Disk:
    """Records with checksums: a torn one is dropped, and with it all after it."""

    def __init__(self, position: int = 0) -> None:
        self.base: bytes | None = None
        self.records: list[bytes] = []
        self.synced = 0
        self.position = position
        """The position of what is synced. It only grows, so that those who have seen a higher one know of something
        lost."""

    def write(self, events: list[AnyEvent]) -> int:
        """Write a record, if there are events; return which position is reached when all is synced."""
        if events:
            body = encode(events)
            self.records.append(zlib.crc32(body).to_bytes(4, "big") + body)
        return self.position + len(self.records) - self.synced

    def sync(self) -> None:
        self.position += len(self.records) - self.synced
        self.synced = len(self.records)

    def jump(self, position: int) -> None:
        """Go on above what somebody has seen of a journal that was lost."""
        self.position = position

    def compact(self, state: ClusterState) -> None:
        """Replace everything by a snapshot, in one step."""
        self.base, self.records, self.synced = snapshot(state), [], 0

    def crash(self, tail: Tail) -> None:
        rest = self.records[self.synced :]
        if tail == "torn" and rest:
            self.records[-1] = rest[-1][: len(rest[-1]) // 2]
        elif tail == "lost":
            del self.records[self.synced :]

    def emptied(self) -> Disk:
        """Return one that has lost everything.

        A newer journal begins below all that an older one reached: else it could catch up unnoticed.
        """
        return Disk(self.position - 1_000_000)

    def load(self) -> ClusterState:
        state = ClusterState() if self.base is None else restore(self.base)
        for place, record in enumerate(self.records):
            if zlib.crc32(record[4:]).to_bytes(4, "big") != record[:4]:
                del self.records[place:]
                break
            for event in decode(record[4:]):
                state.apply(event)
        self.sync()
        return state


class FakeDispatcher(Actor):
    """Takes all requests that wait, decides them, writes and syncs one record, and only then says anything."""

    def __init__(self, world: World, disk: Disk) -> None:
        # One that lost its journal has new connections.
        is_new = disk.base is None and not disk.records
        super().__init__(
            world, DISPATCHER, Principal("operator", DISPATCHER), reachable_from=world.now if is_new else 0.0
        )
        self.disk, self._state = disk, disk.load()
        self._inbox: list[tuple[str, Mail]] = []
        self._busy = False
        world.at(0.0, self, self._tick)

    def receive(self, sender: str, mail: Mail) -> None:
        self._inbox.append((sender, mail))
        self._start()

    def _start(self) -> None:
        if self._inbox and not self._busy:
            self._busy = True
            self.world.at(0.001, self, self._decide)

    def _tick(self) -> None:
        decision = tick(self._state, now=self.world.now, draw=self.world.draw)
        self._write([(self._applied(decision), "", 0)])
        self.world.at(0.5, self, self._tick)

    def _decide(self) -> None:
        waiting, self._inbox = self._inbox, []
        taken: TakenRequests = []
        for sender, (number, request, seen, proof) in waiting:
            if seen > self.disk.position and SIGNER.verifies(seen, proof):
                if sender == HOSTILE:
                    raise Failed(f"a hostile friend is believed to have seen position {seen}")
                taken.append((self._reconcile(seen), "", 0))
            principal = self.world.actors[sender].principal
            decision = decide(
                self._state,
                request,
                principal=principal,
                now=self.world.now,
                peer=sender,
                draw=self.world.draw,
                blobs=BLOBS,
            )
            if principal.name == HOSTILE:
                check_unharmed(request, decision)
            taken.append((self._applied(decision), sender, number))
            self._check_grant(request, principal, decision)
        self._write(taken)

    def _applied(self, decision: Decision) -> Decision:
        for event in decision.events:
            self._state.apply(event)
        return decision

    def _reconcile(self, seen: int) -> Decision:
        """Forget every attempt: a peer has seen more of the journal than there is. All come back with their states."""
        events: list[AnyEvent] = []
        for job in self._state.jobs.values():
            events += [JobCollected(job.name, "the journal lost its end"), JobCreated(job.name, job.spec)]
        self.disk.jump(seen + 1_000)
        return self._applied(Decision((*events, LeasesBegan(self.world.now))))

    def _check_grant(self, request: Request, principal: Principal, decision: Decision) -> None:
        """An answer is the stream's list after `after`: neither reordered nor forgotten."""
        if isinstance(request, GrantSplits) and isinstance(decision.answer, Granted):
            again = decide(self._state, request, principal=principal, now=self.world.now, peer="", draw=self.world.draw)
            if again.answer != decision.answer or again.events:
                raise Failed(f"asked twice, {request} was answered {decision.answer} and {again.answer}")

    def _write(self, taken: TakenRequests) -> None:
        hard = [event for decision, _, _ in taken for event in decision.events if event.JOURNALED]
        position = self.disk.write(hard)
        self.world.at(self.world.rng.uniform(0.001, 0.02) if hard else 0.0, self, self._commit, taken, position)

    def _commit(self, taken: TakenRequests, position: int) -> None:
        disk = self.disk
        disk.sync()
        if disk.position < position:
            raise Failed(f"{[decision.answer for decision, _, _ in taken]} was said before that was on disk")
        proof = SIGNER.proof(disk.position)
        for decision, sender, number in taken:
            if decision.answer is not None and number:
                self.world.send(DISPATCHER, sender, Mail(number, decision.answer, disk.position, proof))
            for peer, push in decision.pushes:
                self.world.send(DISPATCHER, peer, Mail(0, push, disk.position, proof))
        # Memory may be ahead of what is synced: a snapshot holds only what a reader of the disk would find.
        if FEWEST_TO_COMPACT < disk.synced == len(disk.records) and self.world.rng.random() < 0.2:
            disk.compact(self._state)
        self._busy = False
        self._start()


class HostileFriend(Peer):
    """A friend that is let in and means harm: it hears what others ask, and asks the same in its own name.

    Whatever it asks is another's, so all of it is refused: the dispatcher's actor raises if a request of this one's
    changes anything or tells anybody anything. It also claims to have seen positions that the journal never had. It
    draws from a generator of its own: what others do is what they would do without it, if it is refused.
    """

    def __init__(self, world: World, seed: int) -> None:
        rng = random.Random(f"hostile {seed}")
        super().__init__(world, HOSTILE, Principal(rng.choice(ROLES), HOSTILE))
        self._rng = rng
        self.asked = 0
        world.at(EVERY_S, self, self._attack)

    def _attack(self) -> None:
        if self.world.overheard:
            self.asked += 1
            request: Any = self._rng.choice(self.world.overheard)
            if isinstance(request, OpenEpoch):  # a job that nobody has made yet would be its own
                request = replace(request, rejoin=request.rejoin or AttemptId("guessed"), trust=("team",))
            seen = self._rng.choice(FALSE_POSITIONS)
            mail = Mail(self.asked, request, seen, self._rng.randbytes(16))
            self.world.at(0.002, None, self.world.deliver, self.world.now, self.name, DISPATCHER, mail)
        if self.world.now < 2 * HEALS_AT_S:
            self.world.at(EVERY_S, self, self._attack)

    def receive(self, sender: str, mail: Mail) -> None:
        check_refused(mail.body)


def check_refused(answer: Answer | None) -> None:
    """Raise if it is told anything. What is over already is done: nothing follows from that."""
    if not isinstance(answer, Refused | NotKnown | Done):
        raise Failed(f"a hostile friend was answered {answer}")


def check_unharmed(request: Request, decision: Decision) -> None:
    """Raise if what a hostile friend asked for changes anything, or makes anybody be told something."""
    check_refused(decision.answer)
    if decision.events or decision.pushes:
        raise Failed(f"a hostile friend's {request} led to {decision.events} and {decision.pushes}")
