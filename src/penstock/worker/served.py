"""What every stream has: who may open it, the run that works for it, and how its readers are told things.

`streams.Stream` deals rounds to consumers, `shared.SharedStream` keeps them in a window for trainers; both are the
audience of a pump (`pump.Audience`).

Rules:

1. An incarnation is (binding, opening). A lower binding is refused; a higher one ends the run and all older readers. Of
   one reader's openings the highest counts.
2. What an abandoned pump still says is not heard.
3. A stream whose run ended, or failed, stays answerable: opened again, it is told the end, or run again.

One lock, `_changed`, guards all of a stream.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from penstock.core.ids import AttemptId, StreamId
from penstock.wire.failures import describe_failure
from penstock.wire.frames import (
    Credit,
    FromRunner,
    OpenStream,
    Rounds,
    SlabPlaces,
    StreamEnded,
    StreamFailed,
    StreamRefused,
)
from penstock.wire.jobs import Cut, Feed, Named
from penstock.worker.encoding import Frame
from penstock.worker.grouping import Taken
from penstock.worker.pump import FRAME_BYTES, End, Mixes, OpenedRun, Pump

PROBE_S = 2.0  # how often a reader that keeps others waiting is looked after
SLAB_FROM_BYTES = 32 << 10  # below, a lease costs more than the copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all openings of one binding have in common."""

    attempt: AttemptId
    epoch: int
    feed: Feed
    share: int
    binding: int


@dataclass(slots=True)
class Counts:
    rounds: int = 0
    """Made."""
    nbytes: int = 0
    """Sent, to all readers together."""
    credit_wait_s: float = 0.0
    runs: int = 0


class AnyReader(Protocol):
    peer: bytes
    opening: int
    slab: bool
    due: int
    """The round it takes for the next: all before were sent to it, or skipped."""
    sent_bytes: int


class ServedHost(Protocol):
    """What every stream needs of the process it lives in."""

    def send(
        self, peer: bytes, header: FromRunner, buffers: Sequence[Any] = (), *, unsent: Callable[[], None] | None = None
    ) -> None: ...

    def release(self, lease: int) -> None: ...

    def compress(self, buffers: Sequence[Any]) -> tuple[str, Sequence[Any]]: ...

    def open_run(self, stream: Any, terms: Terms, start: Cut, pump: Pump) -> OpenedRun: ...


Key = TypeVar("Key")
ReaderKind = TypeVar("ReaderKind", bound=AnyReader)


class ServedStream(ABC, Generic[Key, ReaderKind]):
    """What readers say is heard in the data socket's thread, where nothing waits; what the pump says in the pump's."""

    def __init__(self, stream: StreamId, host: ServedHost, readers: dict[Key, ReaderKind]) -> None:
        self.id = stream
        self.counts = Counts()
        self.idle_since = monotonic()
        """When it last had a reader."""
        self.pump: Pump | None = None
        self._host = host
        self._changed = threading.Condition()
        self._terms: Terms | None = None
        self._readers = readers
        self._start_at: float | None = None
        """When to start though not all have come."""
        self._probed_at = 0.0
        self._closed = False

    @property
    def running(self) -> bool:
        """There is a run that has not ended."""
        pump = self.pump
        return pump is not None and pump.end is None and pump.failure is None

    # What readers say

    @abstractmethod
    def open(self, peer: bytes, message: OpenStream, consumers: int) -> None:
        """Take a reader in. `consumers` is how many the job has, or one for a stream with an owner."""

    @abstractmethod
    def take_credit(self, peer: bytes, message: Credit) -> None: ...

    @abstractmethod
    def close_reader(self, peer: bytes, opening: int | None = None, *, leaving: bool = False, taken: int = -1) -> None:
        """Forget a reader that closed the stream, or (no opening given) is gone.

        `leaving`: it does not come back. `taken`: the first round it has not taken, if it says so.
        """

    @abstractmethod
    def tick(self, now: float) -> list[bytes]:
        """Start what has waited long enough. Return peers to be probed: others wait for them."""

    def close(self) -> Pump | None:
        """End the run; return its pump, whose thread may take a moment."""
        with self._changed:
            self._closed = True
            pump = self.pump
            self._drop_pump()
            self._forget_all()
            self._changed.notify_all()
            return pump

    @abstractmethod
    def _key(self, message: OpenStream) -> Key:
        """Return whose opening it is."""

    @abstractmethod
    def _forget_readers(self) -> None:
        """Let go of all readers: those of a newer binding come."""

    def _forget_all(self) -> None:
        """Let go of all readers, and of what is kept for them."""
        self._forget_readers()

    def _accept(self, peer: bytes, message: OpenStream) -> bool:
        """Say whether somebody is to be taken in; the stream has the binding of that opening from then on."""
        refusal = self._refusal(message)
        if refusal:
            self._refuse(peer, message.opening, refusal)
            return False
        if self._terms is None or message.binding > self._terms.binding:
            self._drop_pump()
            self._refuse_all(f"the stream has binding {message.binding} by now")
            self._forget_readers()
            self._terms = Terms(
                attempt=message.attempt,
                epoch=message.epoch,
                feed=message.feed,
                share=message.share,
                binding=message.binding,
            )
        present = self._readers.get(self._key(message))
        said_twice = present is not None and present.opening == message.opening and present.peer == peer
        return not said_twice

    def _refusal(self, message: OpenStream) -> str:
        if self._closed:
            return "this worker is closing"
        terms = self._terms
        if terms is not None and message.binding < terms.binding:
            return f"binding {message.binding} is over, the stream has binding {terms.binding} by now"
        if message.cut_round > message.round:
            return f"the cut is that of round {message.cut_round}, after round {message.round}"
        present = self._readers.get(self._key(message))
        same = terms is not None and message.binding == terms.binding
        if same and present is not None and message.opening < present.opening:
            return f"opening {message.opening} is over, opening {present.opening} has come since"
        return ""

    def _of(self, peer: bytes, opening: int | None = None) -> dict[Key, ReaderKind]:
        """Return the readers of a peer: of this opening, or all."""
        return {
            key: reader
            for key, reader in self._readers.items()
            if reader.peer == peer and (opening is None or reader.opening == opening)
        }

    # The run

    def _run_from(
        self,
        start: Cut,
        start_round: int,
        *,
        width: int = 1,
        coordinated: bool = False,
        mixes: Mixes = (),
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        """Begin to make rounds there; who did so until now is abandoned."""
        terms = self._bound
        self._drop_pump()
        self.pump = Pump(
            self,
            self.id,
            start=start,
            start_round=start_round,
            share=terms.share,
            width=width,
            coordinated=coordinated,
            mixes=mixes,
            open_run=lambda pump: self._host.open_run(self, terms, start, pump),
            frame_bytes=frame_bytes,
        )
        self.counts.runs += 1
        self.pump.start()

    def _drop_pump(self) -> None:
        pump, self.pump, self._start_at = self.pump, None, None
        if pump is not None:
            pump.abandon()
            self._changed.notify_all()

    @property
    def _bound(self) -> Terms:
        assert self._terms is not None, "nobody has opened the stream yet"
        return self._terms

    # What the pump says. Called by its thread.

    def wait_room(self, pump: Pump) -> int | None:
        began = monotonic()
        with self._changed:
            while self.pump is pump:
                room = self._room(pump)
                if room is not None:
                    self.counts.credit_wait_s += monotonic() - began
                    return room
                self._changed.wait(1.0)
        return None

    @abstractmethod
    def _room(self, pump: Pump) -> int | None:
        """Return how many bytes may be made and sent now; None: none yet."""

    @abstractmethod
    def deliver(self, pump: Pump, taken: Taken, cut: Cut) -> None: ...

    @abstractmethod
    def ended(self, pump: Pump, end: End) -> None: ...

    def failed(self, pump: Pump, error: BaseException) -> None:
        failure = describe_failure(error)
        with self._changed:
            if self.pump is not pump:
                return
            pump.failure = error
            for reader in self._readers.values():
                failed = StreamFailed(
                    stream=self.id,
                    binding=self._bound.binding,
                    opening=reader.opening,
                    seq=reader.due,
                    failure=failure,
                )
                self._host.send(reader.peer, failed)

    def stale(self, pump: Pump, reason: str) -> None:
        with self._changed:
            if self.pump is not pump:
                return
            self._drop_pump()
            self._refuse_all(reason)
            self._forget_all()

    # What readers are told

    def _refuse(self, peer: bytes, opening: int, reason: str) -> None:
        self._host.send(peer, StreamRefused(stream=self.id, opening=opening, reason=reason))

    def _refuse_all(self, reason: str) -> None:
        for reader in self._readers.values():
            self._refuse(reader.peer, reader.opening, reason)

    def _send_frame(
        self,
        reader: ReaderKind,
        frame: Frame,
        slab: SlabPlaces | None,
        *,
        done: tuple[Named, ...] = (),
        mixes: int = 0,
        skipped: int = 0,
        shared: bool = False,
        had: int = 0,
    ) -> None:
        """Send rounds: where they lie, or, without a place that this reader sees, their bytes."""
        compression, buffers = "", frame.buffers
        if slab is not None:
            buffers = ()
        elif not reader.slab:
            compression, buffers = self._packed(frame)
        header = Rounds(
            stream=self.id,
            binding=self._bound.binding,
            opening=reader.opening,
            seq=frame.seq,
            count=frame.count,
            cut=frame.cut,
            nbytes=frame.nbytes,
            layout=frame.layout,
            slab=slab,
            compression=compression,
            done=done,
            mixes=mixes,
            skipped=skipped,
            shared=shared,
            had=had,
        )
        unsent = None if slab is None else partial(self._host.release, slab.lease)
        self._host.send(reader.peer, header, buffers, unsent=unsent)

    def _packed(self, frame: Frame) -> tuple[str, Sequence[Any]]:
        """Return a frame's buffers as they go to who is elsewhere, and how they were compressed."""
        return self._host.compress(frame.buffers)

    def _send_end(self, reader: ReaderKind, end: End, *, done: tuple[Named, ...] = (), skipped: int = 0) -> None:
        ended = StreamEnded(
            stream=self.id,
            binding=self._bound.binding,
            opening=reader.opening,
            seq=end.seq,
            cut=end.cut,
            done=done,
            leftover=end.leftover,
            skipped=skipped,
        )
        self._host.send(reader.peer, ended)
