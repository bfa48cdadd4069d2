"""A runner's end of relays: who reads for it, what has arrived, and the engine's threads that wait for it.

What is asked of whom is decided in `relays.asking`. What trainers send is heard in the data socket's thread, where
nothing waits; the engine's threads take it, and wait while there is none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeAlias

from penstock.relays.asking import ArrivedRows, Relay, RelayAsker, RelayStart
from penstock.runtime.streams import StreamStopped
from penstock.wire.allocation import keep_freed_memory
from penstock.wire.failures import rebuild_failure
from penstock.wire.frames import AskRows, OfferReading, RelayFailed, RelayRows

TellPeer: TypeAlias = Callable[[bytes, AskRows], None]
RelayMessage: TypeAlias = OfferReading | RelayRows | RelayFailed

REPEAT_S = 15.0  # storage that takes longer for a message is asked twice, and its first answer counts
RELAYS_SHARE = 1 / 8  # of a runner's memory, for what trainers read for it
MESSAGES_A_RELAY = 2  # what the engine works on, and what is on its way or waits
LEAST_MESSAGE_BYTES = 64 << 10
MOST_MESSAGE_BYTES = 1 << 20  # large enough that an ask costs little beside it
FEWEST_RELAYS = 8  # one relay alone does not take all of the memory: others may be opened


class Relays:
    """Of all runs of a runner. Any thread may call."""

    def __init__(self, tell: TellPeer, memory_bytes: int) -> None:
        self._tell, self._share_bytes = tell, int(memory_bytes * RELAYS_SHARE)
        self._changed = threading.Condition()
        """Over all that follows."""
        self._asker = RelayAsker()
        self._open: set[Relay] = set()
        keep_freed_memory()

    # In the data socket's thread

    def hear(self, peer: bytes, message: RelayMessage, buffers: Sequence[Any]) -> None:
        with self._changed:
            if isinstance(message, OfferReading):
                self._asker.offer(peer, message.name)
                self._send()
            elif self._asker.receive(peer, message, buffers):
                self._changed.notify_all()

    def lose(self, peer: bytes) -> None:
        with self._changed:
            self._asker.lose(peer)
            self._send()

    def _send(self) -> None:
        for peer, message in self._asker.asks():
            self._tell(peer, message)

    # In the engine's threads

    def open(self, start: RelayStart) -> Relay:
        """Ask for a part of a source. Does not wait."""
        with self._changed:
            share = self._share_bytes // (MESSAGES_A_RELAY * max(FEWEST_RELAYS, len(self._open) + 1))
            relay = self._asker.open(start, max(LEAST_MESSAGE_BYTES, min(MOST_MESSAGE_BYTES, share)))
            self._open.add(relay)
            self._send()
            return relay

    def take(self, relay: Relay) -> ArrivedRows | None:
        """Return the rows that are next, waiting for them; None: there are no more.

        Raises what the trainer's source raised, and `StreamStopped` if the relay is closed meanwhile.
        """
        with self._changed:
            repeat_at = monotonic() + REPEAT_S
            while not relay.closed:
                arrived = self._asker.take(relay)
                self._send()
                if arrived is not None:
                    return arrived
                if relay.failure is not None:
                    raise rebuild_failure(relay.failure)
                if relay.ended:
                    return None
                if not self._changed.wait(max(0.0, repeat_at - monotonic())):
                    repeat_at = monotonic() + REPEAT_S
                    self._asker.repeat(relay)
                    self._send()
        raise StreamStopped

    def close(self, relay: Relay) -> None:
        with self._changed:
            self._asker.close(relay)
            self._open.discard(relay)
            self._changed.notify_all()


class RunRelays:
    """The relays of one run of a stream: they end with it. Any thread may call."""

    def __init__(self, relays: Relays) -> None:
        self._relays = relays
        self._lock = threading.Lock()
        self._open: set[Relay] = set()
        self._stopped = False

    def open(self, start: RelayStart) -> Relay:
        with self._lock:
            if self._stopped:
                raise StreamStopped
            relay = self._relays.open(start)
            self._open.add(relay)
            return relay

    def take(self, relay: Relay) -> ArrivedRows | None:
        return self._relays.take(relay)

    def close(self, relay: Relay) -> None:
        with self._lock:
            self._open.discard(relay)
        self._relays.close(relay)

    def stop(self) -> None:
        """Let go of all of them; who waits for one gets `StreamStopped`."""
        with self._lock:
            self._stopped = True
            relays, self._open = self._open, set()
        for relay in relays:
            self._relays.close(relay)
