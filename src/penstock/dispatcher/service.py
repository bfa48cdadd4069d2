"""The dispatcher's loop: one thread, one ROUTER socket, one commit for all that has come in.

A turn: take what is waiting, decide and apply each request, commit once, then send answers and pushes. When the commit
fails, everybody in that turn is told to try again. A request that makes our own code fail is refused, and neither ends
the dispatcher nor harms its neighbours: if it broke the state, memory is read again and the others are decided anew.

Time passes in ticks: a few a second, and sooner after something happened, as long as that costs little.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import zmq

from penstock.control.draft import Decision
from penstock.control.events import ClientSeen
from penstock.control.figures import ReadingClient, ServingRunner, reading_clients, serving_runners
from penstock.core.errors import JournalWriteError, ProtocolError
from penstock.dispatcher.asks import Refusable, Unanswerable, decode_ask, encode_tell
from penstock.dispatcher.doors import Doors
from penstock.dispatcher.journaled_state import JournaledState, StateBrokenError, refusal_of
from penstock.wire.framing import RequestAssembler, key_of, sender_of
from penstock.wire.guard import Socket
from penstock.wire.messages import PROTOCOL, Answer, Ask, Push, Refused, Request, TryAgain
from penstock.wire.principals import Principal

TURN_REQUESTS = 2_000
TURN_BYTES = 32 << 20  # a turn is one commit: everybody in it waits for the largest
TICK_S = 0.2
SOONEST_TICK_S = 0.005
SLOWEST_TICK_S = 1.0
TICK_SHARE = 20  # of the time, ticks take one part in so many at most, down to one a second
BLOB_SWEEP_S = 60.0
STATISTICS_S = 1.0


class DispatcherStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The dispatcher as others may see it: replaced, never changed, so that any thread can read it."""

    position: int = 0
    generation: int = 0
    jobs: int = 0
    clients: int = 0
    agents: int = 0
    workers: int = 0
    runners: int = 0
    streams: int = 0
    blobs: int = 0
    broken: str = ""
    turns: int = 0
    commits: int = 0
    events: int = 0
    commit_s: float = 0.0
    write_failures: int = 0
    tails_lost: int = 0
    unreachable: int = 0
    """How many answers and pushes were for peers that were gone."""
    garbage: int = 0
    failures: int = 0
    """How many requests and ticks made our own code fail."""
    requests: dict[str, int] = {}
    workers_said: tuple[ServingRunner, ...] = ()
    clients_said: tuple[ReadingClient, ...] = ()


class ReceivedAsk(NamedTuple):
    principal: Principal
    key: str
    """The verifier of the key that was shown."""
    peer: bytes
    ask: Ask


class Service:
    """Serves one socket until told to stop. All of it runs in the thread that calls `serve`."""

    def __init__(
        self, socket: Socket, journaled: JournaledState, doors: Doors, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket, self._journaled, self._doors, self._clock = socket, journaled, doors, clock
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._outbox: list[tuple[bytes, int, int, Answer | Push]] = []
        self._assembler = RequestAssembler()
        now = clock()
        self.turned_at = now
        """When the loop last came around: a loop that hangs is not alive."""
        self._ticked_at, self._tick_cost_s, self._tick_wanted = float("-inf"), 0.0, True
        self._swept_at, self._published_at = now, float("-inf")
        self._turns = self._unreachable = self._garbage = 0
        self._commit_s = 0.0
        self._requests: Counter[str] = Counter()
        self.detailed = False
        """Whether somebody wants to know what each worker and client said."""
        self.statistics = DispatcherStatistics()

    def serve(self, stopped: Callable[[], bool]) -> None:
        while not stopped():
            self.turn(self._next_tick_s())

    def turn(self, wait_s: float) -> None:
        """Serve what there is, or comes within `wait_s`."""
        self._look_at_keys()
        if self._poller.poll(max(0, int(wait_s * 1000 + 0.999))):
            self._serve(self._receive())
        now = self.turned_at = self._clock()
        if now >= self._tick_due_at():
            self._tick(now)
        self._journaled.snapshot_if_due(now)
        if now - self._swept_at >= BLOB_SWEEP_S:
            self._swept_at = now
            self._journaled.drop_unused_blobs(now)
        if now - self._published_at >= STATISTICS_S:
            self._published_at = now
            self.publish()

    def _tick_due_at(self) -> float:
        every_s = SOONEST_TICK_S if self._tick_wanted else TICK_S
        return self._ticked_at + max(every_s, min(TICK_SHARE * self._tick_cost_s, SLOWEST_TICK_S))

    def _next_tick_s(self) -> float:
        return max(0.0, self._tick_due_at() - self._clock())

    def _look_at_keys(self) -> None:
        now = self._clock()
        changes = self._doors.look(now)
        if not changes.revoked:
            return
        try:
            self._follow(self._journaled.revoke(changes, now))
            self._commit()
        except (JournalWriteError, StateBrokenError):
            self._outbox.clear()  # what they held is dropped with memory, and they are let in nowhere
        self._flush()

    def _receive(self) -> list[tuple[Principal, str, list[bytes]]]:
        received: list[tuple[Principal, str, list[bytes]]] = []
        size = 0
        while len(received) < TURN_REQUESTS and size < TURN_BYTES:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            last = frames[-1]
            received.append((sender_of(last), key_of(last), [frame.bytes for frame in frames]))
            size += len(frames[-1])
        return received

    def _serve(self, received: Iterable[tuple[Principal, str, list[bytes]]]) -> None:
        asks: list[ReceivedAsk] = []
        now = self._clock()
        for principal, key, frames in received:
            try:
                if len(frames) != 2:
                    raise Unanswerable(f"a message of {len(frames)} frames; dropped")
                request = self._assembler.add(frames[0], frames[1], principal=principal, now=now)
                if request is None:
                    continue
                ask = decode_ask(request)
                turned_away = self._doors.turned_away(principal, key, ask.body, now)
                if turned_away is not None:
                    self._outbox.append((frames[0], ask.protocol, ask.number, turned_away))
                else:
                    asks.append(ReceivedAsk(principal, key, frames[0], ask))
            except Refusable as error:
                self._garbage += 1
                self._outbox.append((frames[0], error.protocol, error.number, error.refusal))
            except ProtocolError:
                self._garbage += 1
        refused: dict[int, Refused] = {}
        answered = len(self._outbox)
        try:
            while not self._answer_all(asks, refused):
                del self._outbox[answered:]
                self._doors.audit.drop()
            self._commit()
        except JournalWriteError as error:
            del self._outbox[answered:]
            again = TryAgain(reason=str(error))
            self._outbox += [(peer, ask.protocol, ask.number, again) for _, _, peer, ask in asks]
            self._doors.audit.drop()
        self._turns += 1
        self._flush()

    def _answer_all(self, asks: list[ReceivedAsk], refused: dict[int, Refused]) -> bool:
        """Decide every request; return False if one broke the state: then it is in `refused`, and all begins anew."""
        now = self._clock()
        # Nobody but this service has signed a position: what is only claimed is not looked at.
        position, verifies = self._journaled.position, self._doors.signer.verifies
        highest = max(
            (each.seen for *_, each in asks if each.seen > position and verifies(each.seen, each.proof)), default=0
        )
        if highest > position:
            self._journaled.reconcile(highest, now)
        for number, (principal, key, peer, ask) in enumerate(asks):
            answer: Answer | None = refused.get(number)
            if answer is None:
                self._requests[type(ask.body).__name__] += 1
                try:
                    decision = self._decide(principal, key, peer, ask.body, now)
                except StateBrokenError as error:
                    refused[number] = refusal_of(error)
                    return False
                answer = decision.answer
                self._follow(decision)
                self._doors.audit.decided(principal, ask.body, decision, now)
                # A beat that changed nothing is nothing to act on, and most of what a quiet service hears.
                self._tick_wanted |= any(not isinstance(event, ClientSeen) for event in decision.events)
            if answer is not None:
                self._outbox.append((peer, ask.protocol, ask.number, answer))
        return True

    def _decide(self, principal: Principal, key: str, peer: bytes, request: Request, now: float) -> Decision:
        refused = self._doors.meter.refusal(
            principal, request, self._journaled.state, lambda: self._journaled.blob_bytes(principal.name)
        )
        if refused is not None:
            return Decision((), refused)
        return self._journaled.answer(request, principal=principal, key=key, peer=peer.decode("latin-1"), now=now)

    def _follow(self, decision: Decision) -> None:
        """Send what a decision pushes, and know the runners that it expects."""
        self._push(decision.pushes)
        self._doors.follow(decision.events)

    def _tick(self, now: float) -> None:
        self._ticked_at, self._tick_wanted = now, False
        self._assembler.drop_idle(now)
        try:
            self._follow(self._journaled.tick(now))
            self._commit()
        except (JournalWriteError, StateBrokenError):
            self._outbox.clear()  # memory has been read again: what the tick found is found by a later one
        took = self._clock() - now
        self._tick_cost_s = took if self._tick_cost_s == 0.0 else 0.8 * self._tick_cost_s + 0.2 * took
        self._flush()

    def _push(self, pushes: Iterable[tuple[str, Push]]) -> None:
        for name, push in pushes:
            self._outbox.append((name.encode("latin-1"), PROTOCOL, 0, push))

    def _commit(self) -> None:
        begin = self._clock()
        self._journaled.commit(begin)
        self._commit_s += self._clock() - begin

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        position = self._journaled.position
        proof = self._doors.signer.proof(position)
        self._doors.audit.write()
        last: tuple[int, int, Answer | Push] | None = None
        for peer, protocol, number, body in outbox:
            if last is None or number or (protocol, 0) != last[:2] or body is not last[2]:
                frame = encode_tell(protocol, number, position, body, proof)
                last = (protocol, number, body)  # a change of a view is pushed to many in a row
            try:
                self._socket.send_multipart((peer, frame), zmq.NOBLOCK, copy=len(frame) < 65536)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self._unreachable += 1

    def publish(self) -> None:
        """Make the statistics anew, for other threads to read."""
        state, journaled = self._journaled.state, self._journaled
        self.statistics = DispatcherStatistics(
            position=journaled.position,
            generation=state.generation,
            jobs=len(state.jobs),
            clients=sum(map(len, state.clients.values())),
            agents=len(state.agents),
            workers=len(state.workers),
            runners=sum(map(len, state.runners.values())),
            streams=sum(len(iteration.streams) for job in state.jobs.values() for iteration in job.iterations.values()),
            blobs=journaled.blobs,
            broken=journaled.broken,
            turns=self._turns,
            commits=journaled.commits,
            events=journaled.events,
            commit_s=self._commit_s,
            write_failures=journaled.write_failures,
            tails_lost=journaled.tails_lost,
            unreachable=self._unreachable,
            garbage=self._garbage,
            failures=journaled.failures,
            requests=dict(self._requests),
            workers_said=serving_runners(state) if self.detailed else (),
            clients_said=reading_clients(state) if self.detailed else (),
        )
