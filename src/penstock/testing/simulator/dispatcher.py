"""The real control core, under a dispatcher that can be killed at any moment and a disk that tells what it has kept."""

from __future__ import annotations

import zlib
from typing import Literal, TypeAlias

from penstock.control.decide import decide, tick
from penstock.control.draft import Decision
from penstock.control.events import AnyEvent, JobCollected, JobCreated, LeasesBegan, SplitsGranted, decode, encode
from penstock.control.snapshot import restore, snapshot
from penstock.control.state import ClusterState
from penstock.core.ids import BlobHash, StreamId
from penstock.testing.simulator.world import DISPATCHER, Asked, Failed, Message, Pushed, Told, World
from penstock.wire.messages import Granted, GrantSplits

Bug: TypeAlias = Literal[
    "",
    "no_sync",
    "reply_before_commit",
    "prefetched_in_state",
    "incremental_credits",
    "unnamed_boundary",
    "torn_trainer",
]
Tail: TypeAlias = Literal["kept", "lost", "torn"]
"""What becomes of records that were written and not synced."""

BLOBS = frozenset({BlobHash("graph"), BlobHash("splits")})


class Disk:
    """Records with checksums: a torn one is dropped, and with it all after it."""

    def __init__(self, position: int = 0) -> None:
        self.base: bytes | None = None
        self.records: list[bytes] = []
        self.synced = 0
        self.position = position
        """Of what is synced. It only grows, so that those who have seen a higher one know of something lost."""
        self.grants: set[tuple[StreamId, int, int, int]] = set()
        """Every split whose grant has reached the disk for good."""

    def write(self, events: list[AnyEvent]) -> None:
        body = encode(events)
        self.records.append(zlib.crc32(body).to_bytes(4, "big") + body)

    def sync(self) -> None:
        for record in self.records[self.synced :]:
            for event in decode(record[4:]):
                if isinstance(event, SplitsGranted):
                    self.grants.update((event.stream, event.source, event.pass_, o) for o in event.ordinals)
        self.position += len(self.records) - self.synced
        self.synced = len(self.records)

    def jump(self, position: int) -> None:
        """Go on above what somebody has seen of a journal that was lost."""
        self.position = position

    def compact(self, data: bytes) -> None:
        """Replace everything by a snapshot, in one step."""
        self.base, self.records, self.synced = data, [], 0

    def crash(self, tail: Tail) -> None:
        kept = self.records[: self.synced]
        rest = self.records[self.synced :]
        if tail == "kept":
            kept += rest
        elif tail == "torn" and rest:
            kept += [*rest[:-1], rest[-1][: len(rest[-1]) // 2]]
        self.records = kept

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


class FakeDispatcher:
    """Takes all requests that wait, decides them, writes and syncs one record, and only then says anything."""

    name = DISPATCHER

    def __init__(self, world: World, bug: Bug) -> None:
        self.world, self.bug = world, bug
        self.disk = Disk()
        self.state = ClusterState()
        self.alive = True
        self.frozen_until = 0.0
        self._inbox: list[tuple[str, Asked]] = []
        self._busy = False
        self._life = 0
        world.actors[DISPATCHER] = self
        world.at(0.0, self, self._tick, self._life)

    def crash(self, tail: Tail, down_s: float, *, wiped: bool = False) -> None:
        """Die, and start again later from what the disk kept; `wiped`: from nothing."""
        if self.alive:
            self.alive = False
            self.disk.crash(tail)
            if wiped:
                # A newer journal begins below all that an older one reached: else it could catch up unnoticed.
                self.disk = Disk(self.disk.position - 1_000_000)
            self._inbox, self._busy = [], False
            self._life += 1
            self.world.at(down_s, None, self._restart)

    def _restart(self) -> None:
        self.state = self.disk.load()
        if not self.disk.records and self.disk.base is None:
            self.world.forgotten[DISPATCHER] = self.world.now  # another process: its connections are new
        self.alive = True
        self.world.at(0.0, self, self._tick, self._life)

    def receive(self, sender: str, message: Message) -> None:
        if isinstance(message, Asked):
            self._inbox.append((sender, message))
            self._start()

    def _start(self) -> None:
        if not self._busy:
            self._busy = True
            self.world.at(0.001, self, self._decide, self._life)

    def _tick(self, life: int) -> None:
        if life == self._life:
            decision = tick(self.state, now=self.world.now, draw=self.world.draw)
            self._take([(decision, "", 0)], life)
            self.world.at(0.5, self, self._tick, life)

    def _decide(self, life: int) -> None:
        if life != self._life:
            return
        waiting, self._inbox = self._inbox, []
        taken = []
        for sender, asked in waiting:
            if asked.seen is not None and asked.seen > self.disk.position:
                taken.append((self._reconcile(asked.seen), "", 0))
            decision = decide(
                self.state, asked.body, now=self.world.now, peer=sender, draw=self.world.draw, blobs=BLOBS
            )
            for event in decision.events:
                self.state.apply(event)
            self._check_grant(asked, decision)
            taken.append((decision, sender, asked.number))
        self._take(taken, life, applied=True)

    def _reconcile(self, seen: int) -> Decision:
        """Forget every attempt: a peer has seen more of the journal than there is. All come back with their states."""
        events: list[AnyEvent] = []
        for job in self.state.jobs.values():
            events += [JobCollected(job.name, "the journal lost its end"), JobCreated(job.name, job.spec)]
        events.append(LeasesBegan(self.world.now))
        for event in events:
            self.state.apply(event)
        self.disk.jump(seen + 1_000)
        return Decision(tuple(events))

    def _check_grant(self, asked: Asked, decision: Decision) -> None:
        """An answer is the stream's list after `after`: neither reordered nor forgotten."""
        if isinstance(asked.body, GrantSplits) and isinstance(decision.answer, Granted):
            again = decide(self.state, asked.body, now=self.world.now, peer="", draw=self.world.draw)
            if again.answer != decision.answer or again.events:
                raise Failed(f"asked twice, {asked.body} was answered {decision.answer} and {again.answer}")

    def _take(self, taken: list[tuple[Decision, str, int]], life: int, *, applied: bool = False) -> None:
        hard: list[AnyEvent] = []
        for decision, _, _ in taken:
            for event in decision.events:
                if not applied:
                    self.state.apply(event)
                if event.JOURNALED:
                    hard.append(event)
        if self.bug == "reply_before_commit":
            self._say(taken)
        if hard:
            self.disk.write(hard)
        self.world.at(self.world.rng.uniform(0.001, 0.02) if hard else 0.0, self, self._commit, taken, life)

    def _commit(self, taken: list[tuple[Decision, str, int]], life: int) -> None:
        if life != self._life:
            return
        if self.bug != "no_sync":
            self.disk.sync()
        if self.bug != "reply_before_commit":
            self._say(taken)
        # Memory may be ahead of what is synced: a snapshot holds only what a reader of the disk would find.
        if 20 < self.disk.synced == len(self.disk.records) and self.world.rng.random() < 0.2:
            self.disk.compact(snapshot(self.state))
        self._busy = False
        if self._inbox:
            self._start()

    def _say(self, taken: list[tuple[Decision, str, int]]) -> None:
        for decision, sender, number in taken:
            if decision.answer is not None and number:
                self._check_synced(decision)
                self.world.send(DISPATCHER, sender, Told(number, decision.answer, self.disk.position))
            for peer, push in decision.pushes:
                self.world.send(DISPATCHER, peer, Pushed(push))

    def _check_synced(self, decision: Decision) -> None:
        for event in decision.events:
            if isinstance(event, SplitsGranted):
                for ordinal in event.ordinals:
                    if (event.stream, event.source, event.pass_, ordinal) not in self.disk.grants:
                        raise Failed(f"split {ordinal} was granted to {event.stream} before that was on disk")
