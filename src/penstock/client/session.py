"""One consumer's registration for one epoch: opened, kept alive with a beat a second, closed.

A state of an attempt the service still knows is simply rejoined at its own marks. Otherwise a new attempt starts from
the merged states. A dispatcher that restarted knows the attempt from its journal and not who reads it: the beat learns
that and opens again by itself; only an attempt that is lost takes the trainer's thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from time import CLOCK_BOOTTIME, clock_gettime_ns, perf_counter, time_ns
from weakref import WeakMethod

import msgspec
from msgspec.structs import replace

from penstock.client.connection import Connections, MemoryAccess, RunnerMet
from penstock.client.link import Board, Patience, ServiceLink
from penstock.core.errors import JobFailedError, PenstockError
from penstock.core.ids import AttemptId, ClientId, JobName
from penstock.runtime.stats import ReaderClock
from penstock.samplers.drawing import SamplerPlace
from penstock.samplers.feeder import Feeder
from penstock.stream.checkpoint import Checkpoint, ConsumerState, Progress, Weights, begin_at, resume_from
from penstock.stream.consuming import Consumer, Memory, Seat
from penstock.stream.reading import StreamReader
from penstock.submission.jobs import Submission
from penstock.submission.options import JobOptions
from penstock.wire.addresses import host_id
from penstock.wire.framing import refusal
from penstock.wire.jobs import Delivery, FeedSpec, Resume, delivery_of
from penstock.wire.messages import (
    Answer,
    Beat,
    Changes,
    CloseClient,
    EpochOpened,
    NotKnown,
    OpenEpoch,
    Refused,
    Request,
    View,
)

USUAL_WINDOW_BYTES = 256 << 20  # of a shared job, where nobody says: what a worker gives it is not known here
BEAT_S = 1.0  # views are pushed, and leases last long: it is for figures, which decide how many workers there are


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """Where an epoch is opened."""

    epoch: int
    seed: int | None = None
    """None: the pipeline's."""
    checkpoint: Checkpoint | None = None
    rejoin: AttemptId | None = None
    """Without a checkpoint: the attempt to begin anew in, of which nothing was received; another if it is over."""
    may_rejoin: bool = True
    """False: the pipeline changed, so that streams of the old attempt would give something else."""
    weights: Weights | None = None
    """What to mix by in an epoch that begins; None: the pipeline's own, or what the checkpoint says."""
    ahead: bool = False
    """The epoch before is still read: see `client.ahead`."""


class EpochSession:
    """See the module. `opened` is what the dispatcher said: the job's record, and the view to begin with."""

    opened: EpochOpened
    delivery: Delivery

    def __init__(
        self,
        link: ServiceLink,
        job: JobName,
        options: JobOptions,
        submission: Submission,
        beginning: Beginning,
        feeder: Feeder | None = None,
        clock: ReaderClock | None = None,
        patience: Patience | None = None,
        met: RunnerMet = lambda runner, address: None,
    ) -> None:
        """`feeder`: of a job that its consumer feeds. `clock`: the trainer's, if it does not read this epoch itself.
        `patience`: with how much it is opened; None: with as much as the job's limits say. `met`: is told of runners.
        """
        self.link, self.feeder, self._met = link, feeder, met
        self.epoch = beginning.epoch
        self.ahead = beginning.ahead
        """The epoch before is still read, and the trainer has not come to this one."""
        self.seat = Seat(job, options.rank, options.replica, options.trainer or "")
        self.board, self.clock = Board(ask=self._beat), clock or ReaderClock()
        self._consumer: Consumer | None = None
        """Who reads it; None: nobody yet."""
        self._given: Callable[[], Callable[[], int] | None] = lambda: None
        self._said = 0
        """How many elements the trainer has had, as beats say: who reads may be gone before what it took is settled."""
        self._resumed = False
        """The attempt began at a checkpoint."""
        self._options, self._submission = options, submission
        self._client = ClientId(secrets.token_hex(8))
        self._began_ns = clock_gettime_ns(CLOCK_BOOTTIME)
        self._stop = threading.Event()
        self._beating = True
        """No beat is to be sent: one is under way, or there is nothing to beat for yet."""
        link.boards[self._client] = self.board
        try:
            self._progress = self._open(beginning, patience or self._patience())
        except BaseException:
            del link.boards[self._client]
            self.board.bell.close()
            raise
        threading.Thread(target=self._beat_on, name=f"penstock-beat-{job}", daemon=True).start()

    @property
    def attempt(self) -> AttemptId:
        return self.opened.view.attempt

    def connections(self) -> Connections:
        """Return the ways to runners, none of them gone yet."""
        options = self._options
        access: MemoryAccess = "own" if options.sharing is None else "copied" if options.writable else "read-only"
        return Connections(self.link, self._submission.storage, access, options.transport, self._met)

    def consumer(self, memory_bytes: int, *, now: float) -> Consumer:
        """Return the protocol of this consumer's reading, at its beginning."""
        spec = self.opened.spec
        if self.feeder is not None:
            self.feeder.deal_to(len(spec.feeds))
        return Consumer(
            self.seat._replace(life=self.opened.life),
            self.delivery,
            self._progress,
            self.opened.view,
            memory=Memory(memory_bytes, self.delivery.window_bytes or USUAL_WINDOW_BYTES),
            first_opening=time_ns() // 1_000_000,
            resumed=self._resumed,
            ahead=self.ahead,
            now=now,
        )

    # Opening

    def _patience(self) -> Patience:
        return Patience(self._options.limits.timeout_s, f"epoch {self.epoch} of job {self.seat.job!r}")

    def _open(self, beginning: Beginning, patience: Patience) -> Progress:
        """Open the epoch, and return where this consumer begins in it."""
        checkpoint = beginning.checkpoint
        if self.feeder is not None:
            self._ask(patience)
            return Progress(step=self.feeder.begins_at, weights=beginning.weights)
        if checkpoint is None:
            if beginning.rejoin is None or not self._ask(patience, rejoin=beginning.rejoin):
                self._ask(patience)
            return Progress(weights=beginning.weights)
        own = checkpoint.own
        if own is not None and beginning.may_rejoin:
            if self._ask(patience, rejoin=own.attempt):
                return own.progress
            if self._options.sharing is not None:  # what it stood in is over: whatever the others read now
                self._ask(patience)
                return Progress()
        self._start_from(checkpoint, patience)
        return begin_at(checkpoint, consumers=self._options.ranks.count, done=self.opened.done)

    def _start_from(self, checkpoint: Checkpoint, patience: Patience) -> None:
        feeds = self._feeds(checkpoint.first)
        resume = resume_from(checkpoint, epoch=self.epoch, consumers=self._options.ranks.count, feeds=feeds)
        self._ask(patience, resume=resume)
        self._resumed = True

    def _ask(self, patience: Patience, *, rejoin: AttemptId | None = None, resume: Resume | None = None) -> bool:
        """Open, and take over what the dispatcher says; False: it does not know the attempt to rejoin."""
        answer = self.link.open_epoch(self._request(rejoin, resume), self._submission.blobs, patience)
        if isinstance(answer, NotKnown):
            if rejoin is None:
                raise JobFailedError(self.seat.job, f"the dispatcher does not know {answer.what}; start the epoch anew")
            return False
        self.opened, self.delivery = answer, delivery_of(answer.spec)
        self._submission = replace(self._submission, spec=replace(self._submission.spec, seed=answer.spec.seed))
        if self.delivery.shared:
            self.epoch = answer.view.epoch  # the one the others read
        self._beating = False
        self.board.replace_view(answer.view)
        return True

    def _request(self, rejoin: AttemptId | None = None, resume: Resume | None = None) -> OpenEpoch:
        seat = self.seat
        return OpenEpoch(
            job=seat.job,
            client=self._client,
            consumer=seat.consumer,
            replica=seat.replica,
            epoch=self.epoch,
            spec=self._submission.spec,
            attempt=AttemptId(secrets.token_hex(6)),
            host=host_id(),
            rejoin=rejoin,
            resume=resume,
            trainer=seat.trainer,
            after=self.link.finished.get(seat.job),
            reader=f"process {self.link.pid} on {socket.gethostname()}",
            began_ns=self._began_ns,
            trust=self._options.access.trust,
            reading=self.link.reading_key.public,
            ahead=self.ahead,
        )

    def _feeds(self, state: ConsumerState) -> Mapping[int, FeedSpec]:
        """Return the feeds that follow from the job, by the streams' numbers."""
        spec = self._submission.spec
        numbers = [position.number for position in state.progress.streams]
        if spec.feeds:
            return dict(enumerate(spec.feeds))
        if spec.sharding.off:
            return dict.fromkeys(numbers, FeedSpec(kind="dealt", number=0, of=1))
        if spec.order == "deterministic":
            return {number: FeedSpec(kind="dealt", number=number, of=state.width) for number in range(state.width)}
        return dict.fromkeys(numbers, FeedSpec(kind="granted"))

    def arrive(self, clock: ReaderClock | None) -> None:
        """The trainer has come to this epoch, which was opened ahead: from now on it is read, by that clock."""
        self.ahead = False
        self.clock = clock or self.clock
        self.post(self._request(rejoin=self.attempt))

    def rejoin(self) -> bool:
        """Open again in the same attempt; False: the dispatcher does not know it any more."""
        return self._ask(self._patience(), rejoin=self.attempt)

    def resume(self, state: ConsumerState) -> None:
        """Start a new attempt from where this consumer stands."""
        if self._options.ranks.count > 1:
            raise JobFailedError(
                self.seat.job,
                f"the service lost attempt {self.attempt}, and one of {self._options.ranks.count} consumers cannot "
                "start a new one alone; load the last checkpoint on all ranks",
            )
        self._start_from(Checkpoint((state,), state), self._patience())

    def state(
        self, progress: Progress, *, sampler: SamplerPlace | None = None, attempt: AttemptId | None = None
    ) -> ConsumerState:
        """Return what is saved of this consumer at `progress`, its sampler and attempt as they were then."""
        spec, feeder = self.opened.spec, self.feeder
        state = ConsumerState(
            attempt=self.attempt if attempt is None else attempt,
            splits=self._submission.splits_digest,
            width=len(spec.feeds) or spec.sharding.streams or 0,
            order=spec.order,
            uneven=spec.ranks.uneven,
            coordinated=spec.ranks.coordinated,
            consumers=self._options.ranks.count,
            consumer=self.seat.consumer,
            progress=progress,
        )
        if feeder is None:
            return state
        # Where the sampler stands is all there is: streams say nothing more, and another attempt has others.
        return replace(
            state,
            attempt=AttemptId(""),
            width=0,
            consumers=feeder.consumers,
            consumer=feeder.consumer,
            progress=Progress(step=progress.step),
            sampler=(sampler or feeder.place(progress.step)).plain(),
        )

    # Staying

    def post(self, body: Request) -> None:
        """Send without waiting; a refusal ends the reading, a link that is being closed swallows it."""
        try:
            self.link.control.post(body, self._answered)
        except PenstockError:
            if not self._stop.is_set():
                raise

    def _answered(self, answer: Answer) -> None:
        match answer:
            case View() | EpochOpened():
                self.board.put(answer.view)
            case Changes():
                self.board.put(answer.change)
            case Refused():
                self.board.put_refusal(refusal(answer))

    def _beat_on(self) -> None:
        with contextlib.suppress(PenstockError):
            while not self._stop.wait(BEAT_S):
                self._beat()

    def read_by(self, consumer: Consumer, given: WeakMethod[Callable[[], int]]) -> None:
        """Beat for who reads; `given`: how many elements the trainer has that are not settled."""
        self._consumer, self._given = consumer, given

    def _beat(self) -> None:
        """Beat, unless one is under way: while the dispatcher is away they would pile up."""
        if self._beating:
            return
        self._beating = True
        self.link.control.post(self.figures(), self._heard)

    def figures(self) -> Beat:
        """Return how the trainer fares. Any thread may ask."""
        now = perf_counter()
        wait_s, run_s = (0.0, 0.0) if self.ahead else self.clock.times(now)
        beat = Beat(
            job=self.seat.job,
            client=self._client,
            consumer=self.seat.consumer,
            attempt=self.attempt,
            version=self.board.version,
            wait_s=wait_s,
            run_s=run_s,
            at_s=now,
            trainer=self.seat.trainer,
        )
        consumer, count_given = self._consumer, self._given()
        if consumer is None:
            return beat
        taken = consumer.step - consumer.began_at  # asked first: what is settled meanwhile is not counted twice
        given = 0 if count_given is None else count_given()
        self._said = max(self._said, taken + given)
        elements, nbytes = consumer.buffered
        return replace(
            beat,
            batches=self._said,
            nbytes=consumer.taken_bytes,
            buffered_elements=elements - given,
            buffered_bytes=nbytes,
            skipped=consumer.skipped,
            shared=consumer.made_for_others,
        )

    def _heard(self, answer: Answer, *, rejoined: bool = False) -> None:
        """In the control thread: look at what a beat was answered with, or what was asked because of that."""
        if isinstance(answer, NotKnown) and not rejoined and not self._stop.is_set():
            self.link.control.post(self._request(rejoin=self.attempt), partial(self._heard, rejoined=True))
            return
        self._beating = False
        if isinstance(answer, NotKnown) and rejoined:
            self.board.put_forgotten(f"the dispatcher does not know {answer.what}")
        self._answered(answer)

    def stream_in_vain(self, consumer: Consumer) -> StreamReader | None:
        """Return a stream over which more processes were lost in a row than limits allow; None: there is none."""
        most = self._options.limits.lost_workers
        if most is None:
            return None
        return next((reader for reader in consumer.readers.values() if reader.failures > most), None)

    def close(self, *, finished: bool) -> None:
        """Let go of the epoch. Never waits for long: whoever does not hear of it learns by the missing beat."""
        if self._stop.is_set() or os.getpid() != self.link.pid:
            return
        self._stop.set()
        if finished:
            self.link.finished[self.seat.job] = self.attempt
        self.link.boards.pop(self._client, None)
        with contextlib.suppress(PenstockError):  # the link went first
            self.link.control.post(self.figures(), lambda answer: None)
        self.post(
            CloseClient(
                job=self.seat.job,
                client=self._client,
                consumer=self.seat.consumer,
                attempt=self.attempt,
                finished=finished,
            )
        )
        self.board.bell.close()
