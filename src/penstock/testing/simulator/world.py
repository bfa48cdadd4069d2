"""A cluster's time and network, in one process: seeded, so that a run can be had again.

Everything that happens is an entry of one heap, ordered by time and then by when it was put there. While the network is
bad, requests and answers are lost, doubled, held back and overtaken; after `heals_at` it is good, so that what does not
finish then never would. The data plane is connections: in order and lossless until they are cut, and each end learns of
that at its own time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from penstock.wire.messages import Answer, Push, Request

Message = Any  # what actors tell each other about the cluster: the classes below


class Failed(AssertionError):
    """A promise was broken; the message says which."""


class Asked(msgspec.Struct, frozen=True):
    """`seen` is the highest journal position the asker has heard of."""

    number: int
    body: Request
    seen: int | None = None


class Told(msgspec.Struct, frozen=True):
    number: int
    body: Answer
    position: int = 0


class Pushed(msgspec.Struct, frozen=True):
    body: Push


class Actor(Protocol):
    name: str
    alive: bool
    frozen_until: float

    def receive(self, sender: str, message: Message) -> None: ...


class World:
    """See the module."""

    def __init__(self, seed: int, *, heals_at: float) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.heals_at = heals_at
        self.actors: dict[str, Actor] = {}
        self.cuts: list[tuple[float, str, str]] = []
        """(until, sender, receiver): nothing gets through in that direction."""
        self.forgotten: dict[str, float] = {}
        """To this receiver, nothing that was sent before gets through."""
        self.log: list[str] = []
        self._heap: list[tuple[float, int, Actor | None, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._ids = 0
        self._reading = 0
        """Trainers that have not read everything."""

    def draw(self, kind: str = "r") -> str:
        self._ids += 1
        return f"{kind}{self._ids}"

    def note(self, text: str) -> None:
        self.log.append(f"{self.now:7.3f} {text}")

    def at(self, delay_s: float, actor: Actor | None, act: Callable[..., None], *args: Any) -> None:
        """Have something done later, unless its actor is dead by then."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, actor, act, args))

    def begin_reading(self) -> None:
        self._reading += 1

    def end_reading(self) -> None:
        self._reading -= 1

    def run(self, *, until: float, most: int) -> bool:
        """Let things happen; return whether all was read before `until` and `most` happenings."""
        for _ in range(most):
            if not self._reading:
                return True
            if not self._heap:
                return False
            when, _, actor, act, args = heapq.heappop(self._heap)
            if when > until:
                return False
            self.now = max(self.now, when)
            if actor is not None:
                if not actor.alive:
                    continue
                if actor.frozen_until > self.now:
                    self.at(actor.frozen_until - self.now, actor, act, *args)
                    continue
            act(*args)
        return False

    # The network

    def send(self, sender: str, receiver: str, message: Message) -> None:
        rng = self.rng
        if self.now >= self.heals_at:
            self.at(0.002, None, self._deliver, self.now, sender, receiver, message)
            return
        if any(until > self.now and (a, b) == (sender, receiver) for until, a, b in self.cuts):
            return
        luck = rng.random()
        if luck < 0.04:
            return
        for _ in range(2 if luck > 0.96 else 1):
            late = rng.random()
            delay_s = 0.001 + 0.01 * late if late < 0.93 else rng.uniform(0.05, 1.5)
            self.at(delay_s, None, self._deliver, self.now, sender, receiver, message)

    def _deliver(self, sent_at: float, sender: str, receiver: str, message: Message) -> None:
        actor = self.actors.get(receiver)
        if actor is None or not actor.alive or sent_at < self.forgotten.get(receiver, 0.0):
            return
        if actor.frozen_until > self.now:
            self.at(actor.frozen_until - self.now, None, self._deliver, sent_at, sender, receiver, message)
            return
        actor.receive(sender, message)


DISPATCHER = "dispatcher"
RESEND_S = 0.6


class Peer:
    """Somebody who asks the dispatcher, again and again until there is an answer."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.frozen_until = 0.0
        self._asked: dict[int, tuple[Request, Callable[[Answer], None] | None]] = {}
        self._numbers = 0
        self._seen: int | None = None
        self.links: dict[str, Link] = {}
        world.actors[name] = self

    def ask(self, body: Request, then: Callable[[Answer], None] | None = None) -> None:
        self._numbers += 1
        self._asked[self._numbers] = (body, then)
        self._send(self._numbers)

    def _send(self, number: int) -> None:
        asked = self._asked.get(number)
        if asked is not None:
            self.world.send(self.name, DISPATCHER, Asked(number, asked[0], self._seen))
            self.world.at(RESEND_S, self, self._send, number)

    def receive(self, sender: str, message: Message) -> None:
        match message:
            case Told():
                self._seen = message.position if self._seen is None else max(self._seen, message.position)
                _, then = self._asked.pop(message.number, (None, None))
                if then is not None:
                    then(message.body)
            case Pushed():
                self.pushed(message.body)

    def pushed(self, push: Push) -> None: ...

    def heard(self, link: Link, header: Any, payload: Any) -> None:
        """Something came over a connection."""

    def lost(self, link: Link) -> None:
        """A connection is gone."""

    def die(self, *, silently: bool = False) -> None:
        """End; `silently`: nobody is left to close the connections, so that the other ends find out late."""
        self.alive = False
        self.world.actors.pop(self.name, None)
        for link in list(self.links.values()):
            link.cut(silently=silently)

    def freeze_until(self, when: float) -> None:
        self.frozen_until = max(self.frozen_until, when)

    def connect(self, to: str) -> Link | None:
        """Return a new connection; None: there is nobody."""
        other = self.world.actors.get(to)
        if not isinstance(other, Peer):
            return None
        link = Link(self.world, self, other)
        self.links[link.name] = other.links[link.name] = link
        return link


class Link:
    """A connection between two peers."""

    def __init__(self, world: World, one: Peer, other: Peer) -> None:
        self.world = world
        self.name = world.draw("link")
        self._ends = {one.name: other, other.name: one}
        """The other end, by the name of each."""
        self._sent_until = {one.name: 0.0, other.name: 0.0}
        self.is_cut = False

    def send(self, sender: Peer, header: Any, payload: Any = None) -> None:
        world = self.world
        late = 0.5 if world.now < world.heals_at and world.rng.random() < 0.03 else 0.0
        at = max(self._sent_until[sender.name], world.now + world.rng.uniform(0.001, 0.01) + late)
        self._sent_until[sender.name] = at
        world.at(at - world.now, None, self._deliver, self._ends[sender.name], header, payload)

    def _deliver(self, receiver: Peer, header: Any, payload: Any) -> None:
        if self.is_cut or not receiver.alive:
            return
        if receiver.frozen_until > self.world.now:
            wait_s = receiver.frozen_until - self.world.now
            self.world.at(wait_s, None, self._deliver, receiver, header, payload)
            return
        receiver.heard(self, header, payload)

    def cut(self, *, silently: bool = False) -> None:
        """End it; what is on its way is lost."""
        if self.is_cut:
            return
        self.is_cut = True
        for end in self._ends.values():
            end.links.pop(self.name, None)
            after_s = self.world.rng.uniform(1.0, 3.0) if silently else self.world.rng.uniform(0.001, 0.2)
            self.world.at(after_s, end, end.lost, self)
