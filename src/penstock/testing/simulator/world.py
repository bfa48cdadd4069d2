"""A cluster's time and network, in one process: seeded, so that a run can be had again.

Everything that happens is an entry of one heap, ordered by time and then by when it was put there. While the network is
bad, requests and answers are lost, doubled, held back and overtaken; after `HEALS_AT_S` it is good, so that what does
not finish then never would. The data plane is connections: in order and lossless until they are cut, and each end
learns of that at its own time.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from penstock.wire.messages import Answer, Push, Request
from penstock.wire.principals import Principal

DISPATCHER = "dispatcher"
HEALS_AT_S = 5.0
RESEND_S = 0.6
NOTICED_S = 3.0
"""A process that is silent for longer is given up by those connected to it."""
NOTHING_SEEN = -(1 << 62)


class Failed(AssertionError):
    """A promise was broken; the message says which."""


class Mail(NamedTuple):
    """A question to the dispatcher, its answer, or (with number 0) a push."""

    number: int
    body: Any
    position: int
    """The highest position in the journal that the sender knows of."""
    proof: bytes = b""
    """What the dispatcher signed it with."""


class World:
    """See the module."""

    def __init__(self, seed: int, *, readers: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.actors: dict[str, Actor] = {}
        self.cuts: list[tuple[float, str, str]] = []
        """(until, sender, receiver): nothing gets through in that direction."""
        self.log: list[str] = []
        self.overheard: deque[Request] = deque(maxlen=64)
        """What the dispatcher was asked last."""
        self._readers = readers
        """Trainers that have not read everything."""
        self._heap: list[tuple[float, int, Actor | None, Callable[..., None], tuple[Any, ...]]] = []
        self._entries, self._ids = count(), count(1)

    def draw(self, kind: str = "r") -> str:
        return f"{kind}{next(self._ids)}"

    def note(self, text: str) -> None:
        self.log.append(f"{self.now:7.3f} {text}")

    def at(self, delay_s: float, actor: Actor | None, act: Callable[..., None], *args: Any) -> None:
        """Have something done later, unless its actor is dead by then."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._entries), actor, act, args))

    def end_reading(self) -> None:
        self._readers -= 1

    def run(self, *, until: float, most: int) -> bool:
        """Let things happen; return whether all was read before `until` and `most` happenings."""
        for _ in range(most):
            if not self._readers:
                return True
            if not self._heap or self._heap[0][0] > until:
                return False
            self.now, _, actor, act, args = heapq.heappop(self._heap)
            self._let(actor, act, args)
        return False

    def _let(self, actor: Actor | None, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if actor is None or (actor.alive and actor.frozen_until <= self.now):
            act(*args)
        elif actor.alive:
            self.at(actor.frozen_until - self.now, actor, act, *args)

    # The network

    def send(self, sender: str, receiver: str, mail: Mail) -> None:
        if receiver == DISPATCHER:
            self.overheard.append(mail.body)
        for delay_s in self._delays_s(sender, receiver):
            self.at(delay_s, None, self.deliver, self.now, sender, receiver, mail)

    def _delays_s(self, sender: str, receiver: str) -> list[float]:
        """Return how long each copy takes to arrive: there may be none, or two."""
        if self.now >= HEALS_AT_S:
            return [0.002]
        if any(until > self.now and (a, b) == (sender, receiver) for until, a, b in self.cuts):
            return []
        rng, luck = self.rng, self.rng.random()
        copies = 0 if luck < 0.04 else 2 if luck > 0.96 else 1
        return [0.001 + 0.01 * late if (late := rng.random()) < 0.93 else rng.uniform(0.05, 1.5) for _ in range(copies)]

    def deliver(self, sent_at: float, sender: str, receiver: str, mail: Mail) -> None:
        actor = self.actors[receiver]
        if sent_at >= actor.reachable_from:
            self._let(actor, actor.receive, (sender, mail))


class Actor:
    """A process: it has one life. What was sent to its name before `reachable_from` does not get to it."""

    def __init__(self, world: World, name: str, principal: Principal, *, reachable_from: float = 0.0) -> None:
        self.world, self.name, self.reachable_from = world, name, reachable_from
        self.principal = principal
        """Who it is, as the dispatcher's guard would say."""
        self.alive = True
        self.frozen_until = 0.0
        world.actors[name] = self

    def receive(self, sender: str, mail: Mail) -> None:
        raise NotImplementedError

    def die(self, *, silently: bool = False) -> None:
        """End; `silently`: nobody is left to close the connections, so that the other ends find out late."""
        self.alive = False


class Peer(Actor):
    """Somebody who asks the dispatcher, again and again until there is an answer, and has connections to others."""

    def __init__(self, world: World, name: str, principal: Principal) -> None:
        super().__init__(world, name, principal)
        self.links: dict[str, Link] = {}
        """Connections of which it does not know that they are cut, by name."""
        self._asked: dict[int, Callable[[Answer], None] | None] = {}
        self._numbers = count(1)
        self._seen, self._proof = NOTHING_SEEN, b""

    def ask(self, body: Request, then: Callable[[Answer], None] | None = None) -> None:
        number = next(self._numbers)
        self._asked[number] = then
        self._send(number, body)

    def _send(self, number: int, body: Request) -> None:
        if number in self._asked:
            self.world.send(self.name, DISPATCHER, Mail(number, body, self._seen, self._proof))
            self.world.at(RESEND_S, self, self._send, number, body)

    def receive(self, sender: str, mail: Mail) -> None:
        if not mail.number:
            self.pushed(mail.body)
            return
        if mail.position > self._seen:
            self._seen, self._proof = mail.position, mail.proof
        then = self._asked.pop(mail.number, None)
        if then is not None:
            then(mail.body)

    def pushed(self, push: Push) -> None: ...

    def heard(self, link: Link, header: Any, payload: Any) -> None:
        """Something came over a connection."""

    def lost(self, link: Link) -> None:
        """A connection is gone."""
        del self.links[link.name]

    def die(self, *, silently: bool = False) -> None:
        super().die()
        for link in self.links.values():
            link.cut(silently=silently)

    def freeze(self, seconds: float) -> None:
        """Do nothing for a while; those connected to it find it silent, and give it up."""
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)
        if seconds > NOTICED_S:
            for link in self.links.values():
                link.cut(silently=True)

    def connect(self, to: str) -> Link:
        """Return a new connection. If nobody is there any more, it is lost in a moment."""
        other = self.world.actors[to]
        assert isinstance(other, Peer)
        link = Link(self.world, self, other)
        self.links[link.name] = other.links[link.name] = link
        if not other.alive:
            link.cut()
        return link


class Link:
    """A connection between two peers; `to` is the name of the one it was made to."""

    def __init__(self, world: World, one: Peer, other: Peer) -> None:
        self.world, self.to = world, other.name
        self.name = world.draw("link")
        self.is_cut = False
        self._ends = {one.name: other, other.name: one}
        """The other end, by the name of each."""
        self._sent_until = {one.name: 0.0, other.name: 0.0}

    def send(self, sender: Peer, header: Any, payload: Any = None) -> None:
        world = self.world
        late = 0.5 if world.now < HEALS_AT_S and world.rng.random() < 0.03 else 0.0
        at = max(self._sent_until[sender.name], world.now + world.rng.uniform(0.001, 0.01) + late)
        self._sent_until[sender.name] = at
        receiver = self._ends[sender.name]
        world.at(at - world.now, receiver, self._deliver, receiver, header, payload)

    def _deliver(self, receiver: Peer, header: Any, payload: Any) -> None:
        if not self.is_cut:
            receiver.heard(self, header, payload)

    def cut(self, *, silently: bool = False) -> None:
        """End it; what is on its way is lost."""
        if self.is_cut:
            return
        self.is_cut = True
        for end in self._ends.values():
            after_s = self.world.rng.uniform(1.0, 3.0) if silently else self.world.rng.uniform(0.001, 0.2)
            self.world.at(after_s, end, end.lost, self)
