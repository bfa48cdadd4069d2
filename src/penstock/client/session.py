"""One consumer's registration for one epoch: opened, kept alive with a beat a second, closed.

A state of an attempt the service still knows is simply rejoined at its own marks. Otherwise a new attempt starts from
the merged states. A dispatcher that restarted knows the attempt from its journal and not who reads it: the beat learns
that and opens again by itself; only an attempt that is lost takes the trainer's thread.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from time import time_ns

from penstock.client.board import Board
from penstock.client.connection import Access
from penstock.client.fed import Feeder
from penstock.client.link import Patience, ServiceLink
from penstock.client.options import JobOptions
from penstock.client.sampling import Place as SamplerPlace
from penstock.client.sharing import USUAL_WINDOW_BYTES
from penstock.client.submit import Submission
from penstock.core.errors import JobFailedError, PenstockError
from penstock.core.ids import AttemptId, ClientId, JobName
from penstock.stream.checkpoint import Checkpoint, ConsumerState, Progress, Weights, begin_at, resume_from
from penstock.stream.consuming import Consumer, Seat
from penstock.wire.addresses import host_id
from penstock.wire.delivery import Delivery, delivery_of
from penstock.wire.envelopes import refusal
from penstock.wire.frames import StorageOptions
from penstock.wire.jobs import Feed, JobSpec, JobView, Ranges, Resume
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

BEAT_S = 2.0  # views are pushed, and leases last long: it is for figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
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


class EpochSession:
    """See the module. `view` and `spec` are the dispatcher's."""

    spec: JobSpec
    view: JobView
    delivery: Delivery
    _progress: Progress
    _done: tuple[Ranges, ...]
    """What was done at the checkpoint that the attempt began at."""

    def __init__(
        self,
        link: ServiceLink,
        job: JobName,
        options: JobOptions,
        submission: Submission,
        beginning: Beginning,
        feeder: Feeder | None = None,
    ) -> None:
        """`feeder`: of a job that its consumer feeds."""
        self.link = link
        self.job, self.epoch = job, beginning.epoch
        self.consumer, self.replica = options.rank, options.replica
        self.board = Board(ask=self._beat_once)
        self.feeder = feeder
        self._resumed = False
        """The attempt began at a checkpoint."""
        self._options, self._submission = options, submission
        self._client = ClientId(secrets.token_hex(8))
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._beating = False
        self._opened = False
        self._closed = False
        link.boards[self._client] = self.board
        try:
            self._open(beginning)
        except BaseException:
            del link.boards[self._client]
            self.board.bell.close()
            raise
        self._thread = threading.Thread(target=self._beat_on, name=f"penstock-beat-{self.job}", daemon=True)
        self._thread.start()

    @property
    def trainer(self) -> str:
        return self._options.trainer or ""

    @property
    def storage(self) -> StorageOptions:
        """What whoever runs a stream reads with."""
        return self._submission.storage

    @property
    def access(self) -> Access:
        """What the trainer may do with the arrays it is given."""
        options = self._options
        return "own" if options.sharing is None else "copied" if options.writable else "read-only"

    @property
    def connected(self) -> bool:
        return self.link.control.connected

    def consumer_of(self, memory_bytes: int, *, now: float) -> Consumer:
        """Return the protocol of this consumer's reading, at its beginning."""
        if self.feeder is not None:
            self.feeder.deal_to(len(self.spec.feeds))
        return Consumer(
            Seat(self.job, self.consumer, self.replica, self.trainer),
            self.delivery,
            self._progress,
            self.view,
            memory_bytes=memory_bytes,
            shared_window_bytes=self.delivery.window_bytes or USUAL_WINDOW_BYTES,
            first_opening=time_ns() // 1_000_000,
            resumed=self._resumed,
            life=self._life,
            now=now,
        )

    # Opening

    def _patience(self) -> Patience:
        return Patience(self._options.limits.timeout_s, f"epoch {self.epoch} of job {self.job!r}")

    def _open(self, beginning: Beginning) -> None:
        patience, checkpoint = self._patience(), beginning.checkpoint
        own = None if checkpoint is None else checkpoint.own
        if checkpoint is None or self.feeder is not None:
            self._begin(beginning, patience)
            return
        if own is not None and beginning.may_rejoin:
            answer = self._ask(patience, rejoin=own.attempt)
            if isinstance(answer, EpochOpened):
                self._take(answer)
                self._progress = own.progress
                return
            if self._options.sharing is not None:  # what it stood in is over: whatever the others read now
                self._take(self._ask(patience))
                self._progress = Progress()
                return
        self._start_from(checkpoint, patience)
        self._progress = begin_at(checkpoint, consumers=self._options.ranks.count, done=self._done)

    def _begin(self, beginning: Beginning, patience: Patience) -> None:
        answer: EpochOpened | NotKnown | None = None
        if beginning.rejoin is not None and self.feeder is None:
            answer = self._ask(patience, rejoin=beginning.rejoin)
            self._returning = isinstance(answer, EpochOpened)
        self._take(answer if isinstance(answer, EpochOpened) else self._ask(patience))
        step = 0 if self.feeder is None else self.feeder.begins_at
        self._progress = Progress(step=step, weights=beginning.weights)

    def _start_from(self, checkpoint: Checkpoint, patience: Patience) -> None:
        feeds = self._feeds(checkpoint.first)
        resume = resume_from(checkpoint, epoch=self.epoch, consumers=self._options.ranks.count, feeds=feeds)
        self._take(self._ask(patience, resume=resume))
        self._resumed = True

    def _ask(
        self, patience: Patience, *, rejoin: AttemptId | None = None, resume: Resume | None = None
    ) -> EpochOpened | NotKnown:
        request = self._request(rejoin=rejoin, resume=resume)
        return self.link.open_epoch(request, self._submission.blobs, patience)

    def _request(self, *, rejoin: AttemptId | None = None, resume: Resume | None = None) -> OpenEpoch:
        return OpenEpoch(
            job=self.job,
            client=self._client,
            consumer=self.consumer,
            replica=self.replica,
            epoch=self.epoch,
            spec=self._submission.spec,
            attempt=AttemptId(secrets.token_hex(6)),
            host=host_id(),
            rejoin=rejoin,
            resume=resume,
            trainer=self.trainer,
            after=self.link.finished.get(self.job),
            reader=f"process {self._pid} on {socket.gethostname()}",
        )

    def _take(self, answer: EpochOpened | NotKnown) -> None:
        if isinstance(answer, NotKnown):
            raise JobFailedError(self.job, f"the dispatcher does not know {answer.what}; start the epoch anew")
        self.spec, self.view, self._done, self._life = answer.spec, answer.view, answer.done, answer.life
        self._opened = True
        self.delivery = delivery_of(answer.spec)
        if self.delivery.shared:
            self.epoch = answer.view.epoch  # the one the others read
        self.board.replace_view(answer.view)

    def _feeds(self, state: ConsumerState) -> Mapping[int, Feed]:
        """Return the feeds that follow from the job, by the streams' numbers."""
        spec = self._submission.spec
        numbers = [position.number for position in state.progress.streams]
        if spec.feeds:
            return dict(enumerate(spec.feeds))
        if spec.sharding.off:
            return dict.fromkeys(numbers, Feed(kind="dealt", number=0, of=1))
        if spec.order == "deterministic":
            return {number: Feed(kind="dealt", number=number, of=state.width) for number in range(state.width)}
        return dict.fromkeys(numbers, Feed(kind="granted"))

    def rejoin(self) -> bool:
        """Open again in the same attempt; False: the dispatcher does not know it any more."""
        answer = self._ask(self._patience(), rejoin=self.view.attempt)
        if isinstance(answer, NotKnown):
            return False
        self._take(answer)
        return True

    def resume(self, state: ConsumerState) -> None:
        """Start a new attempt from where this consumer stands."""
        if self._options.ranks.count > 1:
            raise JobFailedError(
                self.job,
                f"the service lost attempt {self.view.attempt}, and one of {self._options.ranks.count} consumers "
                "cannot start a new one alone; load the last checkpoint on all ranks",
            )
        self._start_from(Checkpoint((state,), state), self._patience())

    # State

    def state(self, progress: Progress, *, sampler: SamplerPlace | None = None) -> ConsumerState:
        """Return what is saved of this consumer at `progress`, and with its sampler where it stood then, if given."""
        spec, options, feeder = self.spec, self._options, self.feeder
        if feeder is not None:
            # Where the sampler stands is all there is: streams say nothing more, and another attempt has others.
            sampler = sampler or feeder.place(progress.step)
            progress = Progress(step=progress.step)
        return ConsumerState(
            attempt=self.view.attempt if feeder is None else AttemptId(""),
            splits=self._submission.splits_digest,
            width=(len(spec.feeds) or spec.sharding.streams or 0) if feeder is None else 0,
            order=spec.order,
            uneven=spec.ranks.uneven,
            coordinated=spec.ranks.coordinated,
            consumers=options.ranks.count if feeder is None else feeder.consumers,
            consumer=self.consumer if feeder is None else feeder.consumer,
            progress=progress,
            sampler=None if sampler is None else sampler.plain(),
        )

    def sampler_places(self, step: int, count: int) -> list[SamplerPlace]:
        """Return where the sampler stood before each of `count` elements from a step on, and after the last of them."""
        return [] if self.feeder is None else self.feeder.places(step, count)

    # Staying

    def post(self, body: Request) -> None:
        """Send without waiting; a refusal ends the reading, a link that is being closed swallows it."""
        try:
            self.link.control.post(body, self._answered)
        except PenstockError:
            if not self._closed:
                raise

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Refused):
            self.board.put_refusal(refusal(answer))

    def _beat_on(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self._beat_once()
            except PenstockError:
                return

    def _beat_once(self) -> None:
        """Beat, unless one is under way: while the dispatcher is away they would pile up."""
        if self._opened and not self._beating:
            self._beating = True
            self.link.control.post(self._beat(), self._heard)

    def _beat(self) -> Beat:
        metrics = self.board.metrics
        return Beat(
            job=self.job,
            client=self._client,
            consumer=self.consumer,
            attempt=self.view.attempt,
            version=self.board.version,
            batches=metrics.batches,
            nbytes=metrics.nbytes,
            wait_s=metrics.wait_s,
            run_s=metrics.run_s,
            buffered=metrics.buffered,
            trainer=self.trainer,
            skipped=metrics.skipped,
            shared=metrics.shared,
        )

    def _heard(self, answer: Answer) -> None:
        """In the control thread: look at what a beat was answered with."""
        if isinstance(answer, NotKnown) and not self._closed:
            self.link.control.post(self._request(rejoin=self.view.attempt), self._rejoined)
            return
        self._beating = False
        match answer:
            case View():
                self.board.put_view(answer.view)
            case Changes():
                self.board.put_change(answer.change)
            case Refused():
                self.board.put_refusal(refusal(answer))

    def _rejoined(self, answer: Answer) -> None:
        self._beating = False
        match answer:
            case EpochOpened():
                self.board.put_view(answer.view)
            case NotKnown():
                self.board.put_forgotten(f"the dispatcher does not know {answer.what}")
            case Refused():
                self.board.put_refusal(refusal(answer))

    def close(self, *, finished: bool) -> None:
        """Let go of the epoch. Never waits for long: whoever does not hear of it learns by the missing beat."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._stop.set()
        if finished:
            self.link.finished[self.job] = self.view.attempt
        self.link.boards.pop(self._client, None)
        self.post(
            CloseClient(
                job=self.job,
                client=self._client,
                consumer=self.consumer,
                attempt=self.view.attempt,
                finished=finished,
            )
        )
        self.board.bell.close()
