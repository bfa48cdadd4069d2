"""The hands of a served stream: a lock, a thread that pulls the engine, encoding, memory and the socket.

What is done is decided in `stream/`. What readers say is heard in the data socket's thread, where nothing waits; what
the pump says in the pump's. Both hold the stream's lock while the protocol decides and while its instructions are
carried out, so that they are in order; sending is putting a frame into the socket's queue. Encoding, and copying into
shared memory, happen without it.

A pump is one run of a stream: it pulls the engine, and sends what it made as rounds. A pull may take for ever (a slow
function, a split nobody grants), so whatever is whole is sent before the next one, and a pull asks for no more than
fits into a moment and a frame. A thread of its own for sending would only add a hand-over to every frame: where making
and sending should overlap, the engine's prefetch sees that its reader is away.

A pump never goes back. A stream that must begin lower abandons its pump and starts another, whose thread does not wait
for the old one: that may be in the middle of a user's function, and what it still makes is given to nobody.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.core.element import Element, element_bytes
from penstock.core.ids import AttemptId, StreamId
from penstock.relays.runner_relays import RunRelays
from penstock.runtime.iterator import Run
from penstock.runtime.streams import SplitPlace, StreamStopped, places
from penstock.stream.rounds import MAX_ROUNDS, End, PullSizer, RoundMaker, Send, StartRun, StopRun, Taken, Wanted
from penstock.stream.serving import Dealt, ReaderSays, Served
from penstock.wire.elements import flatten
from penstock.wire.failures import describe_failure
from penstock.wire.frames import Rounds
from penstock.wire.jobs import Cut, Named, delivery_of
from penstock.wire.runs import FrameMemory, encode_run
from penstock.worker.feeds import StaleStream
from penstock.worker.figures import Counts
from penstock.worker.host import Host
from penstock.worker.opening import Opening

DISCARD_CHUNK = 1_024
SLAB_FROM_BYTES = 32 << 10  # below, a lease costs more than the copy
LOOK_AGAIN_S = 1.0  # of a pump that waits for room: not a deadline, it is woken
FORGET_S = 10.0  # a stream nobody reads: of an earlier epoch, or bound elsewhere. It opens anew where a reader stands


class Pump:
    def __init__(self, hosted: HostedStream[Served[Any]], start: StartRun, *, width: int, makes_rounds: bool) -> None:
        """`makes_rounds`: the engine itself groups outputs into rounds. Frames are about `start.frame_bytes`."""
        self.start, self.number = start, start.number
        self.abandoned = False
        self.busy_s = 0.0
        self._hosted = hosted
        first = start.start_round - start.start.since
        self._weights = next((weights for at, weights in reversed(start.mixes) if at <= first), None)
        """What the run mixes by when it opens; None: the pipeline's own."""
        self._changes = deque({(at - first) * width: weights for at, weights in start.mixes if at > first}.items())
        """Changes of the weights: after how many outputs of rounds, and to which."""
        self._lock = threading.Lock()
        self._opening: Opening | None = None
        self._run: Run | None = None
        """What is to be closed, should the pump be abandoned."""
        self._maker = RoundMaker(width=width, cut=start.start, next_round=start.start_round, coordinated=makes_rounds)
        self._sizer = PullSizer(width, start.frame_bytes)
        self._stands: tuple[int, list[SplitPlace]] | None = None
        """The feed's changes and the engine's places at the last cut."""
        self._named: tuple[Named, ...] = ()
        """The splits that it needs."""
        self._thread = threading.Thread(target=self._work, name=f"penstock stream {hosted.served.id}", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Stop as soon as possible, without waiting for it."""
        with self._lock:
            self.abandoned = True
            opening, run = self._opening, self._run
        if opening is not None:
            opening.stop()
        if run is not None and not run.closed:
            # Closing waits a moment for threads in user code, and nobody here has that moment.
            threading.Thread(target=run.close, name="penstock close", daemon=True).start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # Its thread

    def _work(self) -> None:
        hosted = self._hosted
        try:
            opening = hosted.prepare(self)
            with self._lock:
                self._opening = opening
            if not self.abandoned and self._make(opening):
                self._finish(opening)
        except StaleStream as stale:
            hosted.decide(hosted.served.stale, self.number, stale.reason, monotonic())
        except StreamStopped:
            pass
        except BaseException as error:
            hosted.decide(hosted.served.failed, self.number, describe_failure(error))
        finally:
            with self._lock:
                self._opening = self._run = None  # they may refer back to this

    def _make(self, opening: Opening) -> bool:
        """Make and send all there is; False if the pump was abandoned."""
        try:
            return self._pull_all(opening, self._open(opening, self.start.start))
        finally:
            opening.stop()
            if self._run is not None:
                self._run.close()

    def _open(self, opening: Opening, cut: Cut) -> Run:
        run = opening.open(self, cut, self._weights)
        with self._lock:
            self._run = run
        return run

    def _pull_all(self, opening: Opening, run: Run) -> bool:
        while not self.abandoned:
            to_drop = min(self._maker.to_drop, DISCARD_CHUNK)
            want = to_drop or self._sizer.want()
            if self._changes:
                want = min(want, self._changes[0][0] - self._maker.counted)
            began = perf_counter()
            chunk = run.pull(want)
            took = perf_counter() - began
            count = len(chunk.elements)
            self.busy_s += took
            if not count:
                return True
            if not to_drop:
                self._sizer.made(count, took, element_bytes(chunk.elements[0]))
            self._maker.add(chunk)
            changes = bool(self._changes) and self._maker.counted == self._changes[0][0]
            cut = Cut(chunk.marks.at(count) if changes else None)
            del chunk  # its memory is to be free for the next as soon as the reader is through with it
            while self._maker.ready:
                if not self._send(opening):
                    return False
            if changes:  # go on from here with other weights: what the old run had made beyond is made anew
                _, self._weights = self._changes.popleft()
                run.close()
                run = self._open(opening, cut)
        return False

    def _send(self, opening: Opening) -> bool:
        """Send a frame of the rounds that are ready, when there is room; False if the pump was abandoned."""
        room = self._hosted.wait_room(self)
        if room is None:
            return False
        most = max(1, int(min(room, self.start.frame_bytes) / max(self._sizer.bytes_each, 1.0)))
        taken = self._maker.take(min(most, MAX_ROUNDS))
        assert taken is not None
        self._hosted.deliver(self, taken, *self._cut(opening, taken.after))
        return True

    def _cut(self, opening: Opening, after: Cut) -> tuple[Cut, tuple[Named, ...]]:
        """Return the cut with the splits it needs, and those that are done by it.

        While the engine stands in the same splits, and has been given no more, they are the same, and none is done.
        """
        feed = opening.feed
        done: tuple[Named, ...] = ()
        stands = (feed.changes, places(after.engine)) if feed.changes else None
        if stands is not None and stands != self._stands:
            self._stands, (self._named, done) = stands, feed.settle(stands[1])
        return Cut(after.engine, after.since, self._named, self.start.terms.share, after.regroup), done

    def _finish(self, opening: Opening) -> None:
        """Everything made was sent: tell the end."""
        hosted, maker = self._hosted, self._maker
        leftover = False
        if opening.final:
            last = maker.take_rest(pad=opening.plan.job.spec.ranks.uneven == "pad")
            if last is not None:
                if hosted.wait_room(self) is None:
                    return
                hosted.deliver(self, last, *self._cut(opening, last.after))
        else:
            assert self._run is not None
            leftover = maker.incomplete > 0 or self._run.has_rest
        cut, done = self._cut(opening, maker.standing)
        if not leftover:
            settled = opening.feed.settle(None)
            cut, done = replace(cut, named=settled.named), done + settled.done
        hosted.decide(hosted.served.ended, self.number, End(maker.next_round, cut, leftover), done)


class Frame(msgspec.Struct, frozen=True, eq=False):
    """`count` rounds from `seq` on, encoded."""

    seq: int
    count: int
    layout: bytes
    buffers: Sequence[Any]
    nbytes: int


def encode_frame(seq: int, elements: Sequence[Element], allocate: FrameMemory | None = None) -> Frame:
    """Encode one element a round. The buffers are the elements' own memory, or taken where readers see it."""
    layout, buffers = flatten(elements[0]) if len(elements) == 1 else encode_run(elements, allocate)
    nbytes = len(layout) + sum(memoryview(buffer).nbytes for buffer in buffers)
    return Frame(seq, len(elements), layout, buffers, nbytes)


ServedKind = TypeVar("ServedKind", bound=Served[Any], covariant=True)
Said = ParamSpec("Said")
Decided = TypeVar("Decided")


class HostedStream(ABC, Generic[ServedKind]):
    """One stream of a runner."""

    forget_after_s = FORGET_S
    """How long a stream is kept that has no reader."""

    def __init__(self, served: ServedKind, host: Host) -> None:
        self.served, self._host = served, host
        self._changed = threading.Condition()
        self._waiting = False
        """Whether the pump waits for room."""
        self._pump: Pump | None = None
        self._rounds = self._sent_bytes = 0
        self._credit_wait_s = 0.0

    @property
    def counts(self) -> Counts:
        served = self.served
        return Counts(self._rounds, self._sent_bytes, self._credit_wait_s, served.runs, served.running)

    # What readers say

    def hear(self, peer: bytes, message: ReaderSays) -> None:
        with self._changed:
            self.served.hear(peer, message, monotonic())
            self._carry_out()

    def decide(self, rule: Callable[Said, Decided], *args: Said.args, **named: Said.kwargs) -> Decided:
        """Have the protocol decide something, and do what it says."""
        with self._changed:
            decided = rule(*args, **named)
            self._carry_out()
            return decided

    def tick(self, now: float) -> list[bytes]:
        """Start what has waited long enough. Return peers to be probed: see `Served.tick`."""
        return self.decide(self.served.tick, now)

    def retire(self, attempt: AttemptId) -> None:
        """A stream of that attempt begins: let go of memory that only older ones need, if nobody reads them."""

    def trim(self) -> None:
        """There are more streams now: let go of what is beyond this one's share of memory."""

    def close(self) -> Pump | None:
        """End the run; return its pump, whose thread may take a moment."""
        with self._changed:
            pump = self._pump
            self.served.close(monotonic())
            self._carry_out()
            return pump

    # Carrying out

    def _carry_out(self) -> None:
        self._obey()
        self._follow()
        self._obey()
        self._wake()

    def _wake(self) -> None:
        """Let the pump go on, if it waits and there is room."""
        if self._waiting and (self._pump is None or self._room(self._pump) is not None):
            self._changed.notify_all()

    def _obey(self) -> None:
        for instruction in self.served.instructions():
            match instruction:
                case Send(peer, message):
                    self._host.data.send(peer, message)
                case StopRun():
                    self._stop_pump()
                case StartRun():
                    self._start_pump(instruction)

    def _follow(self) -> None:
        """See to what follows from a change, where the protocol asks for more than instructions."""

    def _start_pump(self, start: StartRun) -> None:
        width, makes_rounds = self.served.delivery.width, self._host.job.makes_rounds
        self._pump = Pump(self, start, width=width, makes_rounds=makes_rounds)

    def _stop_pump(self) -> None:
        if self._pump is not None:
            self._pump.abandon()
            self._pump = None
            self._changed.notify_all()

    # What the pump says. Called by its thread.

    def prepare(self, pump: Pump) -> Opening:
        """Return what the pump's run is opened with. It may take a while."""
        return self._host.opener.prepare(
            self.served.id,
            pump.start,
            is_stopped=lambda: pump.abandoned,
            allocate=partial(self._allocate, pump),
            budget=self._host.budget,
            relays=None if self._host.relays is None else RunRelays(self._host.relays),
        )

    @abstractmethod
    def _allocate(self, pump: Pump, shape: Sequence[int], dtype: Any) -> Any:
        """Return memory for a batch in the making that readers on this host can see; None: there is none."""

    def wait_room(self, pump: Pump) -> int | None:
        """Wait until the next round may be sent; return how many bytes may be, None if the pump was abandoned."""
        with self._changed:
            while self._pump is pump:
                room = self._room(pump)
                if room is not None:
                    return room
                self._waiting, began = True, monotonic()
                self._changed.wait(LOOK_AGAIN_S)
                self._waiting = False
                self._credit_wait_s += monotonic() - began
        return None

    @abstractmethod
    def _room(self, pump: Pump) -> int | None:
        """Return how many bytes may be made and sent now; None: none yet."""

    @abstractmethod
    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None:
        """Take rounds over; `cut` is the state after them, and `done` are splits that it does not need any more."""

    def _send_frame(self, peer: bytes, header: Rounds, buffers: Sequence[Any]) -> None:
        """Send rounds: where they lie, or, without a place that this reader sees, their bytes."""
        slab = header.slab
        unsent = None if slab is None else partial(self._host.lending.arena.leases.remove, (slab.lease,))
        self._host.data.send(peer, header, buffers if slab is None else (), unsent=unsent)
        self._sent_bytes += header.nbytes


class DealtStream(HostedStream[Dealt]):
    """Rounds go to those who want them as they are made, and are kept for nobody."""

    def __init__(self, stream: StreamId, host: Host) -> None:
        job = host.job
        super().__init__(Dealt(stream, delivery_of(job.spec), now=monotonic(), makes_rounds=job.makes_rounds), host)

    def _allocate(self, pump: Pump, shape: Sequence[int], dtype: Any) -> Any:
        return self._host.lending.arena.array(shape, dtype) if self.served.uses_slabs else None

    def _room(self, pump: Pump) -> int | None:
        return self.served.room(pump.number)

    def deliver(self, pump: Pump, taken: Taken, cut: Cut, done: tuple[Named, ...]) -> None:
        """Send frames once all that are wanted are made: they are made without the lock, and meanwhile more may be."""
        arena = self._host.lending.arena
        frames: dict[tuple[int, int], Frame] = {}
        headers: dict[tuple[bytes, int], Rounds] = {}
        buffers: dict[tuple[bytes, int], Sequence[Any]] = {}
        while True:
            with self._changed:
                wanted = self.served.wanted(pump.number, taken.seq, taken.count)
                missing = [each for each in wanted if (each.peer, each.opening) not in headers]
                if not missing:
                    self._rounds += taken.count if self._pump is pump else 0
                    given = self.served.give(pump.number, taken.seq + taken.count, cut, done, headers)
                    for key, header in headers.items():
                        if key in given:
                            self._send_frame(key[0], given[key], buffers[key])
                        elif header.slab is not None:
                            arena.leases.remove((header.slab.lease,))  # its reader went away meanwhile
                    return
            for each in missing:
                # What a cache holds will be sent again: nobody may write to it.
                exclusive = each.alone and not taken.repeated and not self._host.job.caches
                seen = (each.seat, each.first)
                if seen not in frames:  # replicas of a consumer get the same
                    elements = taken.of(each.seat, skip=each.first - taken.seq)
                    frames[seen] = encode_frame(each.first, elements, arena.array if each.slab and exclusive else None)
                key = each.peer, each.opening
                headers[key], buffers[key] = self._prepare(each, frames[seen], cut, exclusive=exclusive)

    def _prepare(self, wanted: Wanted, frame: Frame, cut: Cut, *, exclusive: bool) -> tuple[Rounds, Sequence[Any]]:
        """Return the header of a reader's frame and what goes with it, put where the reader sees it if it can."""
        slab, compression, buffers = None, "", frame.buffers
        if not wanted.slab:
            compression, buffers = self._host.compress(frame.buffers)
        elif frame.nbytes >= SLAB_FROM_BYTES:
            slab = self._host.lending.place(wanted.peer, frame.buffers, exclusive=exclusive)
        header = Rounds(
            stream=self.served.id,
            binding=self.served.binding,
            opening=wanted.opening,
            seq=frame.seq,
            count=frame.count,
            cut=cut,
            nbytes=frame.nbytes,
            layout=frame.layout,
            slab=slab,
            compression=compression,
        )
        return header, buffers
