"""The network's side of a reader: from the dispatcher's view to open streams, and what arrives on them.

The view says which streams there are and which runner each is bound to. For each the reader connects (once a runner),
opens the stream at the cut it holds, and grants credit; rounds arrive by themselves. Whatever goes wrong with a stream
(a lost connection, a gap, a refusal) has one answer: tell the dispatcher that this binding does not work, and open it
again where the next one says. Nothing is lost by that, and nothing comes twice, because an opening begins where the
last frame that arrived ended.

All of it runs in the thread that reads.
"""

from __future__ import annotations

import sys
from collections import deque
from time import monotonic, time_ns
from typing import Any

from penstock.client.connection import RunnerConnection
from penstock.client.reading import StreamReading
from penstock.client.resources import Resources
from penstock.client.session import EpochSession
from penstock.client.sharing import MOST_AHEAD_BYTES, USUAL_WINDOW_BYTES, WINDOWS_AHEAD
from penstock.client.state import TRAIL, Progress, StreamMark
from penstock.core.ids import StreamId
from penstock.wire.frames import (
    CloseStream,
    Credit,
    OpenStream,
    Output,
    Rounds,
    StreamEnded,
    StreamFailed,
    StreamRefused,
)
from penstock.wire.jobs import JobView, StreamView
from penstock.wire.messages import EndStream, Rebind

SMALLEST_WINDOW_BYTES = 1 << 20
FEWEST_WINDOWS = 2  # one stream alone does not take the whole memory: another may join
CREDIT_EVERY_S = 1.0
PATIENT_FAILURES = 2  # so many openings in a row may fail before the next is delayed
LONGEST_DELAY_S = 2.0


class Reception:
    """The streams of one consumer's epoch. `arrived` has an entry for each thing that arrived, in order."""

    def __init__(self, session: EpochSession, progress: Progress, *, memory_bytes: int) -> None:
        self.session = session
        self.progress = progress
        self.resources = Resources(session)
        self.readings: dict[StreamId, StreamReading] = {}
        self.arrived: deque[StreamReading] = deque()
        self.reconnects = 0
        self.view: JobView = session.view
        spec = session.spec
        self._feeder = session.feeder
        if self._feeder is not None:
            self._feeder.use_streams(len(spec.feeds))
        self._trails = spec.consumers > 1 and not session.in_turn and spec.uneven != "allow"
        self._memory_bytes = memory_bytes
        self._connections = self.resources.connections
        self._slabs = session.link.slabs
        self._credited_at = monotonic()
        self._opening = time_ns() // 1_000_000  # above those of an earlier life of this consumer

    def buffered_bytes(self) -> int:
        return sum(reading.queued_bytes for reading in self.readings.values())

    def end(self, reading: StreamReading) -> None:
        """All rounds of a stream were taken: say so."""
        end, mark = reading.end, reading.mark
        assert end is not None
        if reading.shared:
            mark.round = reading.due
        mark.reach(end.cut)
        mark.ended, mark.leftover = True, end.leftover
        self.progress.add_done(mark, end.done)
        self.tell_end(reading)
        if reading.connection is not None:
            reading.connection.send(CloseStream(stream=reading.stream, opening=reading.opening))
            reading.connection.streams.discard(reading)
            reading.closed()

    def tell_end(self, reading: StreamReading) -> None:
        reading.told_end = True
        mark = reading.mark
        self.session.post(
            EndStream(
                job=self.session.job,
                attempt=self.view.attempt,
                stream=reading.stream,
                consumer=self.session.consumer,
                rounds=mark.round,
                leftover=mark.cut_here() if mark.leftover else None,
            )
        )

    def pump(self, now: float) -> None:
        """Take in what has arrived, without waiting."""
        for connection in list(self._connections.values()):
            connection.flush()
            for message, buffers in connection.receive():
                self._receive(connection, message, buffers, now)
            reason = connection.lost(now)
            if reason is not None:
                # What is still in the socket's queue came before the loss, and counts.
                for message, buffers in connection.receive():
                    self._receive(connection, message, buffers, now)
                self._lose(connection, reason)
        self._open_due(now)
        self.feed()
        if now - self._credited_at >= CREDIT_EVERY_S:
            self._credited_at = now
            self.session.board.metrics.buffered = self.buffered_bytes()
            for reading in self.readings.values():
                if reading.open and not reading.credited:
                    self._send_credit(reading)
                reading.credited = False
        if not self.arrived:  # else the credit for what is about to be taken says it too
            self._return_memory()

    def feed(self) -> None:
        """Draw and send what streams are to read next, where that is this consumer's affair."""
        if self._feeder is not None:
            self._feeder.refill(self.progress.step, self.readings.values())

    def _receive(self, connection: RunnerConnection, message: Any, buffers: list[Any], now: float) -> None:
        if isinstance(message, Output):
            for line in message.text.splitlines():
                print(f"[worker {message.worker}] {line}", file=sys.stderr)
            return
        reading = self.readings.get(message.stream)
        if reading is None or reading.connection is not connection:
            return
        if isinstance(message, StreamRefused):
            if message.opening == reading.opening:
                self._give_up(reading, f"refused: {message.reason}")
            return
        match message:
            case Rounds():
                verdict = reading.receive(message, buffers)
            case StreamEnded():
                verdict = reading.receive_end(message)
            case StreamFailed():
                verdict = reading.receive_failure(message)
            case _:
                return
        if verdict == "gap":
            self._give_up(reading, f"round {message.seq} came where {reading.due} was due")
        elif verdict == "taken":
            reading.heard_at = now
            if reading.shared:
                self.session.board.metrics.skipped = sum(each.skipped for each in self.readings.values())
            self.arrived.append(reading)

    def _lose(self, connection: RunnerConnection, reason: str) -> None:
        self._connections.pop(connection.runner, None)
        for reading in list(connection.streams):
            if not reading.complete:
                self._give_up(reading, reason)
            reading.closed()
        connection.close()

    def _give_up(self, reading: StreamReading, reason: str) -> None:
        """This binding does not work: ask for another, and open there."""
        if reading.given_up >= reading.binding:
            return
        self.reconnects += 1
        reading.given_up = reading.binding
        reading.failures += 1
        if reading.failures > PATIENT_FAILURES:
            delay_s = min(LONGEST_DELAY_S, 0.1 * 2 ** (reading.failures - PATIENT_FAILURES))
            reading.not_before = monotonic() + delay_s
        if reading.connection is not None:
            if not reading.connection.closed:
                reading.connection.send(CloseStream(stream=reading.stream, opening=reading.opening))
            reading.connection.streams.discard(reading)
            reading.closed()
        self._post_rebind(reading, reading.binding, reason)

    def _post_rebind(self, reading: StreamReading, binding: int, reason: str) -> None:
        self.session.post(
            Rebind(
                job=self.session.job,
                attempt=self.view.attempt,
                stream=reading.stream,
                binding=binding,
                reason=reason,
            )
        )

    def _ask_again(self, reading: StreamReading) -> None:
        """All consumers once had this stream's end, and this one came back with an older state: it is to run again."""
        if reading.given_up < reading.view.binding:
            reading.given_up = reading.view.binding
            self._post_rebind(reading, reading.view.binding, "a consumer came back and needs its rounds again")

    # Streams of the view

    def mine(self, view: StreamView) -> bool:
        return view.owner is None or view.owner == self.session.consumer

    def follow(self, view: JobView) -> None:
        """Take over a view: new streams, new bindings, ends."""
        self.view = view
        for stream in view.streams:
            if not self.mine(stream):
                continue
            reading = self.readings.get(stream.stream)
            if reading is None:
                fresh = stream.number not in self.progress.streams
                reading = self.readings[stream.stream] = StreamReading(stream, self._mark(stream))
                reading.shared = bool(self.session.spec.sharing)
                reading.fresh = reading.shared and fresh
            reading.view = stream
            if reading.mark.ended and not stream.ended and not reading.told_end:
                self.tell_end(reading)
            if stream.ended and not reading.exhausted and not reading.complete and stream.runner is None:
                if reading.fresh and self.session.spec.sharing == "skip":
                    reading.mark.ended = reading.told_end = True  # others have read it, and it is gone
                else:
                    self._ask_again(reading)
        self._open_due(monotonic())

    def _mark(self, stream: StreamView) -> StreamMark:
        mark = self.progress.streams.get(stream.number)
        if mark is None:
            first = (
                stream.marks[self.session.consumer] if self.session.consumer < len(stream.marks) else stream.first_round
            )
            mark = StreamMark(stream.number, first, stream.start, stream.first_round)
            if stream.feed.kind == "tail":
                mark.feed = stream.feed
            self.progress.streams[stream.number] = mark
            if stream.ended and self.session.resumed:
                mark.ended = mark.leftover = True  # the checkpoint was taken after its end
        elif mark.ended and self.session.resumed and not stream.ended:
            # Another consumer had not come to its end: the stream goes on from there, and may be granted more.
            mark.ended = mark.leftover = False
        if self.progress.weights is not None and stream.number not in self.progress.mixes:
            self.progress.mixes[stream.number] = ((mark.round, self.progress.weights),)
        if self._trails and stream.feed.kind == "granted" and mark.trail is None:
            mark.trail = deque(maxlen=TRAIL)
        return mark

    def _open_due(self, now: float) -> None:
        waiting = [reading for reading in self.readings.values() if self._wants_opening(reading, now)]
        if not waiting:
            return
        active = sum(not reading.mark.ended for reading in self.readings.values())
        window = max(SMALLEST_WINDOW_BYTES, self._memory_bytes // max(FEWEST_WINDOWS, active))
        if self.session.sharing is not None:
            window = min(
                window, MOST_AHEAD_BYTES, max(1, self._shared_window_bytes() // WINDOWS_AHEAD // max(1, active))
            )
        for reading in waiting:
            self._open(reading, window)

    def _shared_window_bytes(self) -> int:
        return self.session.spec.window_bytes or USUAL_WINDOW_BYTES

    def _wants_opening(self, reading: StreamReading, now: float) -> bool:
        view = reading.view
        return (
            view.runner is not None
            and bool(view.address)
            and view.binding > max(reading.binding, reading.given_up)
            and not reading.complete
            and not reading.mark.ended
            and not view.lost
            and now >= reading.not_before
            and not (reading.shared and reading.is_tail and self._others_go_on(reading))
        )

    def _others_go_on(self, tail: StreamReading) -> bool:
        """Where trainers read the same they read it in the same order: the tail last, though others are through."""
        return any(not reading.exhausted for reading in self.readings.values() if reading is not tail)

    def _open(self, reading: StreamReading, window: int) -> None:
        view = reading.view
        assert view.runner is not None
        if reading.connection is not None:  # it moved without a word from us
            reading.connection.send(CloseStream(stream=reading.stream, opening=reading.opening))
            reading.connection.streams.discard(reading)
        connection = self._connections.get(view.runner)
        if connection is None:
            link = self.session.link
            slabs = self._slabs.get(view.runner)
            connection = RunnerConnection(
                link.context, link.credentials, view.runner, view.address, slabs, writable=self.session.sharing is None
            )
            self._connections[view.runner] = connection
            if connection.slabs is not None:
                self._slabs[view.runner] = connection.slabs
        self._opening += 1
        fresh = reading.fresh and reading.binding < 0
        credit = reading.opened(connection, self._opening, window)
        reading.heard_at = monotonic()
        connection.streams.add(reading)
        connection.send(
            OpenStream(
                stream=reading.stream,
                binding=view.binding,
                opening=self._opening,
                consumer=self.session.consumer,
                replica=self.session.replica,
                round=reading.due,
                cut=reading.cut,
                cut_round=reading.cut_round,
                feed=view.feed,
                share=view.share,
                attempt=self.view.attempt,
                epoch=self.view.epoch,
                runner=view.runner,
                credit=credit,
                slab=connection.slabs is not None,
                fresh=fresh,
                trainer=self.session.trainer,
                mixes=self.progress.mixes.get(reading.number, ()),
                storage=self.session.storage,
            )
        )
        if self._feeder is not None:
            self._feeder.opened(reading)

    def take_back(self) -> None:
        """Give up what has arrived and was not taken, and open all streams anew where the trainer stands."""
        self.arrived.clear()
        for reading in self.readings.values():
            if reading.exhausted:
                continue
            if reading.connection is not None:
                reading.connection.send(CloseStream(stream=reading.stream, opening=reading.opening))
                reading.connection.streams.discard(reading)
            reading.take_back()
        self._open_due(monotonic())

    def restart(self) -> None:
        """Forget what was not taken: another attempt begins."""
        for reading in self.readings.values():
            reading.closed()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self.readings.clear()
        self.arrived.clear()

    # Credit and memory

    def return_credit(self, reading: StreamReading) -> None:
        reading.follow_pace(monotonic())
        if not reading.open:
            return
        slabs = reading.connection.slabs
        if reading.credit_owed * 8 >= reading.depth or (slabs is not None and slabs.owes_much):
            self._send_credit(reading, () if slabs is None else slabs.returned())

    def _send_credit(self, reading: StreamReading, returned: tuple[int, ...] = ()) -> None:
        connection = reading.connection
        message = Credit(
            stream=reading.stream,
            opening=reading.opening,
            credit=reading.credit,
            returned=returned,
            round=reading.mark.round if reading.shared else -1,
        )
        reading.sent_credit, reading.credited = message.credit, True
        connection.last_credit = message
        connection.send(message)

    def _return_memory(self) -> None:
        for connection in self._connections.values():
            returned = connection.slabs.returned() if connection.slabs is not None else ()
            if not returned:
                continue
            reading = next(iter(connection.streams), None)
            if reading is not None:
                self._send_credit(reading, returned)
            elif connection.last_credit is not None:
                last = connection.last_credit
                connection.send(Credit(stream=last.stream, opening=last.opening, credit=last.credit, returned=returned))
