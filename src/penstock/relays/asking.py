"""Relays: what a trainer reads for a runner, as data.

A runner whose job is read by its trainers asks one of them for each part of a source that its engine opens: a split
from a place on, or elements by their index. One such reading is a relay. It is asked for message by message:

| state of a relay, at the runner | how it is left |
|---|---|
| waiting | somebody offers to read: it is asked of the one who has the fewest asks |
| asked | rows, the end or a failure arrive; who was asked is lost: waiting |
| arrived | the engine takes the rows: what follows them is asked for while it works on these |
| ended, failed | the engine closes it |

Rules:

1. An ask says all that is to be known: which source, from where, how many bytes at most. It is the credit for its one
   answer. Asked again, of anybody, it gives the same rows, so that it may be repeated at any time.
2. The runner's place moves when rows arrive, once: of several answers to one ask the first counts. So no row is lost or
   comes twice, whoever dies. A trainer keeps nothing for a runner: a source gives again what it gave.
3. One answer a relay is on its way or waits for the engine, beside the one that the engine works on: a runner holds two
   messages a relay, and a trainer what was asked for and not sent, up to a limit, or one answer for each runner.

Nothing here reads, waits or knows an element; what arrives with rows is handed on unseen.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from penstock.core.ids import RunnerId
from penstock.wire.frames import AskRows, RelayFailed, RelayRows, RemoteFailure

MOST_INDICES = 1_024  # of one ask: the indices of small elements would be more than the elements


class RelayStart(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be read: a split from a place on, or elements by index, which are drawn as they are asked for."""

    source: int
    """The source's number in the job's plan."""
    key: str
    split: int = -1
    index: int = 0
    offset: int | None = None
    indices: Iterable[int] = ()


class ArrivedRows(NamedTuple):
    rows: RelayRows
    payload: Any
    indices: tuple[int, ...]
    """Which elements they are, where they were asked for by index; those that could not be read are among them."""


class AskTrainer(NamedTuple):
    """An ask, for one who reads for the runner."""

    peer: bytes
    message: AskRows


# The runner's end


class Relay:
    """One reading, from the engine's opening it on until it is closed."""

    def __init__(self, start: RelayStart, most_bytes: int) -> None:
        self.start, self._most_bytes = start, most_bytes
        self._index, self._offset = start.index, start.offset
        self._drawn: Iterator[int] = iter(start.indices)
        self._indices: tuple[int, ...] = ()
        """What was asked for by index, and has not arrived."""
        self._arrived: ArrivedRows | None = None
        self.ended = self.closed = False
        self.failure: RemoteFailure | None = None

    @property
    def is_open(self) -> bool:
        """Something is still to be asked for."""
        return not (self.ended or self.closed or self.failure is not None)

    def draw(self) -> None:
        """Draw the indices of the next ask, where elements are read by index; with none left it has ended."""
        if self.start.split < 0:
            self._indices += tuple(islice(self._drawn, MOST_INDICES - len(self._indices)))
            self.ended = not self._indices

    def ask(self, number: int) -> AskRows:
        """Return the ask for what follows all that has arrived."""
        return AskRows(
            ask=number,
            source=self.start.source,
            key=self.start.key,
            most_bytes=self._most_bytes,
            split=self.start.split,
            index=self._index,
            offset=self._offset,
            indices=self._indices,
        )

    def arrive(self, rows: RelayRows, payload: Any) -> None:
        if rows.count:
            self._index = rows.indices[-1] + 1 if rows.indices else self._index + rows.count
            self._offset = rows.offsets[-1] if rows.offsets else None
        covered, self._indices = self._indices[: rows.covers], self._indices[rows.covers :]
        self._arrived = ArrivedRows(rows, payload, covered)
        self.ended = rows.ended

    def fail(self, failure: RemoteFailure) -> None:
        self.failure = failure

    def take(self) -> ArrivedRows | None:
        taken, self._arrived = self._arrived, None
        return taken

    def close(self) -> None:
        self.closed, self._arrived = True, None


class RelayAsker:
    """A runner's. Asks are collected, and sent in the order given."""

    def __init__(self) -> None:
        self._offers: dict[bytes, str] = {}
        """Who reads for this runner, and under which name."""
        self._asked: dict[int, tuple[Relay, bytes]] = {}
        self._waiting: list[Relay] = []
        """Relays that nobody can be asked for."""
        self._numbers = 0
        self._asks: list[AskTrainer] = []

    def asks(self) -> list[AskTrainer]:
        """Return what is to be sent, and forget it."""
        found, self._asks = self._asks, []
        return found

    def offer(self, peer: bytes, name: str) -> None:
        """Somebody reads for this runner; who did so under that name before is lost."""
        for other in [each for each, known in self._offers.items() if known == name and each != peer]:
            self.lose(other)
        self._offers[peer] = name
        waiting, self._waiting = self._waiting, []
        for relay in waiting:
            self._ask(relay)

    def lose(self, peer: bytes) -> None:
        """One who read for this runner is gone: what was asked there is asked of others."""
        self._offers.pop(peer, None)
        lost = [number for number, (_, asked) in self._asked.items() if asked == peer]
        for relay in [self._asked.pop(number)[0] for number in lost]:
            if not self._is_asked(relay):
                self._ask(relay)

    def open(self, start: RelayStart, most_bytes: int) -> Relay:
        relay = Relay(start, most_bytes)
        self._go_on(relay)
        return relay

    def receive(self, peer: bytes, message: RelayRows | RelayFailed, payload: Any = None) -> bool:
        """Take in an answer; False: nobody waits for it."""
        relay, asked = self._asked.get(message.ask, (None, b""))
        if relay is None or asked != peer:
            return False
        self._forget(relay)
        if isinstance(message, RelayRows):
            relay.arrive(message, payload)
        else:
            relay.fail(message.failure)
        return True

    def take(self, relay: Relay) -> ArrivedRows | None:
        """Return the rows that are next, and ask for those after them; None: there are none yet, or no more."""
        taken = relay.take()
        if taken is not None:
            self._go_on(relay)
        return taken

    def repeat(self, relay: Relay) -> None:
        """Ask again for what did not come: an answer may be lost while its connection stands."""
        if relay.is_open and self._is_asked(relay):
            self._ask(relay)

    def close(self, relay: Relay) -> None:
        """The engine takes no more of it."""
        relay.close()
        self._forget(relay)
        self._waiting = [each for each in self._waiting if each is not relay]

    def _go_on(self, relay: Relay) -> None:
        if relay.is_open:
            relay.draw()
        if relay.is_open:
            self._ask(relay)

    def _ask(self, relay: Relay) -> None:
        if not self._offers:
            self._waiting.append(relay)
            return
        asked = Counter(peer for _, peer in self._asked.values())
        peer = min(self._offers, key=lambda each: asked[each])
        self._numbers += 1
        self._asked[self._numbers] = (relay, peer)
        self._asks.append(AskTrainer(peer, relay.ask(self._numbers)))

    def _is_asked(self, relay: Relay) -> bool:
        return any(each is relay for each, _ in self._asked.values())

    def _forget(self, relay: Relay) -> None:
        for number in [number for number, (each, _) in self._asked.items() if each is relay]:
            del self._asked[number]


# The trainer's end


class GivenAsk(NamedTuple):
    runner: RunnerId
    message: AskRows


class RelayGiver:
    """A trainer's: for whom it reads next. Asks are answered in the order they came in, while there is room."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: how much may be read and not sent."""
        self._most_bytes = most_bytes
        self._asks: deque[GivenAsk] = deque()
        self._reading: list[GivenAsk] = []

    def ask(self, runner: RunnerId, message: AskRows) -> None:
        self._asks.append(GivenAsk(runner, message))

    def next(self, unsent: Mapping[RunnerId, int]) -> GivenAsk | None:
        """Return what is to be read now; None: nothing, or too much is read and not sent.

        `unsent` has the bytes that wait for each runner. One answer of each is read in any case: a runner that takes
        nothing in holds up no other.
        """
        held = Counter(unsent)
        for reading in self._reading:
            held[reading.runner] += reading.message.most_bytes
        room = self._most_bytes - held.total()
        ask = next((each for each in self._asks if not held[each.runner] or each.message.most_bytes <= room), None)
        if ask is not None:
            self._asks.remove(ask)
            self._reading.append(ask)
        return ask

    def read(self, ask: GivenAsk) -> bool:
        """It has been read; False: its runner is gone."""
        found = [each for each in self._reading if each is ask]
        self._reading = [each for each in self._reading if each is not ask]
        return bool(found)

    def lose(self, runner: RunnerId) -> None:
        self._asks = deque(ask for ask in self._asks if ask.runner != runner)
        self._reading = [ask for ask in self._reading if ask.runner != runner]
