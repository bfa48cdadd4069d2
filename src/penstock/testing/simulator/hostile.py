"""A friend that is let in and means harm: it hears what others ask, and asks the same in its own name.

Whatever it asks is another's, so all of it is refused: the dispatcher's actor raises if a request of this one's changes
anything or tells anybody anything. It also claims to have seen positions that the journal never had.
"""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from penstock.control.draft import Decision
from penstock.core.ids import AttemptId
from penstock.testing.simulator.world import DISPATCHER, HEALS_AT_S, Failed, Mail, Peer, World
from penstock.wire.messages import Answer, Done, NotKnown, OpenEpoch, Refused, Request
from penstock.wire.principals import Principal, Role

NAME = "mallory"
ROLES: tuple[Role, ...] = ("trainer", "runner", "provisioner")
EVERY_S = 0.2
FALSE_POSITIONS = (0, 1_000, 1 << 40, (1 << 60) - 1)


class HostileFriend(Peer):
    """Draws from a generator of its own: what others do is what they would do without it, if it is refused."""

    def __init__(self, world: World, seed: int) -> None:
        rng = random.Random(f"hostile {seed}")
        super().__init__(world, NAME, Principal(rng.choice(ROLES), NAME))
        self._rng = rng
        self.asked = 0
        world.at(EVERY_S, self, self._attack)

    def _attack(self) -> None:
        if self.world.overheard:
            self.asked += 1
            request = self._as_own(self._rng.choice(self.world.overheard))
            seen = self._rng.choice(FALSE_POSITIONS)
            mail = Mail(self.asked, request, seen, self._rng.randbytes(16))
            self.world.at(0.002, None, self.world.deliver, self.world.now, self.name, DISPATCHER, mail)
        if self.world.now < 2 * HEALS_AT_S:
            self.world.at(EVERY_S, self, self._attack)

    def _as_own(self, request: Any) -> Any:
        if isinstance(request, OpenEpoch):  # a job that nobody has made yet would be its own
            return replace(request, rejoin=request.rejoin or AttemptId("guessed"), trust=("team",))
        return request

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
