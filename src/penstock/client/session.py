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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.client.board import Board
from penstock.client.fed import Feeder
from penstock.client.link import Patience, ServiceLink
from penstock.client.merge import Checkpoint, mixes_from, resume_from
from penstock.client.options import JobOptions
from penstock.client.ranges import RangeSet
from penstock.client.sharing import trainer_number
from penstock.client.state import EpochState, Progress, Weights
from penstock.client.submit import Submission
from penstock.core.errors import JobFailedError, PenstockError
from penstock.core.ids import AttemptId, ClientId, JobName
from penstock.wire.addresses import host_id
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
class EpochRequest:
    """What is to be opened."""

    job: JobName
    options: JobOptions
    submission: Submission
    epoch: int
    checkpoint: Checkpoint | None = None
    may_rejoin: bool = True
    """False: the pipeline changed, so that streams of the old attempt would give something else."""
    weights: Weights | None = None
    """What to mix by in an epoch that begins."""
    feeder: Feeder | None = None
    """Of a job that its consumer feeds."""


class EpochSession:
    """See the module. `view` and `spec` are the dispatcher's; `progress` is where this consumer begins."""

    spec: JobSpec
    view: JobView
    progress: Progress
    _done: tuple[Ranges, ...]
    """What was done at the checkpoint that the attempt began at."""

    def __init__(self, link: ServiceLink, request: EpochRequest) -> None:
        self.link = link
        self.job, self.epoch = request.job, request.epoch
        self.consumer, self.replica = request.options.consumer, request.options.replica
        self.sharing = request.options.sharing
        if self.sharing is not None:
            self.replica = trainer_number(self.sharing.trainer)
        self.board = Board(ask=self._beat_once)
        self.resumed = False
        """The attempt began at a checkpoint."""
        self.feeder = request.feeder
        self._options, self._submission = request.options, request.submission
        self._client = ClientId(secrets.token_hex(8))
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._beating = False
        self._opened = False
        self._closed = False
        link.boards[self._client] = self.board
        try:
            self._open(request)
        except BaseException:
            del link.boards[self._client]
            self.board.bell.close()
            raise
        self._thread = threading.Thread(target=self._beat_on, name=f"penstock-beat-{self.job}", daemon=True)
        self._thread.start()

    @property
    def in_turn(self) -> bool:
        """Consumers take rounds from the streams in turn."""
        return self.spec.order == "deterministic" or self.spec.coordinated

    @property
    def trainer(self) -> str:
        return "" if self.sharing is None else self.sharing.trainer

    @property
    def storage(self) -> StorageOptions:
        """What whoever runs a stream reads with."""
        return self._submission.storage

    @property
    def connected(self) -> bool:
        return self.link.control.connected

    # Opening

    def _open(self, request: EpochRequest) -> None:
        patience = Patience(self._options.timeout_s, f"epoch {self.epoch} of job {self.job!r}")
        checkpoint = request.checkpoint
        own = None if checkpoint is None else checkpoint.own
        if checkpoint is None:
            self._take(self._ask(patience))
            self.progress = Progress(step=0 if self.feeder is None else self.feeder.begins_at, weights=request.weights)
            return
        if own is not None and request.may_rejoin:
            answer = self._ask(patience, rejoin=own.attempt)
            if isinstance(answer, EpochOpened):
                self._take(answer)
                self.progress = own.progress.copy()
                return
            if self.sharing is not None:  # what it stood in is over: whatever the others read now
                self._take(self._ask(patience))
                self.progress = Progress()
                return
            # Where one state stands for all, each rank's own describes the same place in its own way (what came in one
            # frame here came in two there). All begin where the one that starts the attempt says.
            own = own if self._options.consumers == 1 or not own.alike else None
        resume = resume_from(checkpoint, consumers=self._options.consumers, feeds=self._feeds(checkpoint.first))
        self._start_from(resume, patience)
        self.progress = own.progress.copy() if own is not None else _progress_of(self._done, checkpoint)
        self.progress.mixes = mixes_from(checkpoint, consumers=self._options.consumers)

    def _start_from(self, resume: Resume, patience: Patience) -> None:
        self._take(self._ask(patience, resume=resume))
        self.resumed = True

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
            reader=f"process {self._pid} on {socket.gethostname()}",
        )

    def _take(self, answer: EpochOpened | NotKnown) -> None:
        if isinstance(answer, NotKnown):
            raise JobFailedError(self.job, f"the dispatcher does not know {answer.what}; start the epoch anew")
        self.spec, self.view, self._done = answer.spec, answer.view, answer.done
        self._opened = True
        if self.sharing is not None:
            self.epoch = answer.view.epoch  # the one the others read
        self.board.replace_view(answer.view)

    def _feeds(self, state: EpochState) -> Mapping[int, Feed]:
        """Return the feeds that follow from the job, by the streams' numbers."""
        spec = self._submission.spec
        numbers = state.progress.streams
        if spec.feeds:
            return dict(enumerate(spec.feeds))
        if spec.sharding == "off":
            return dict.fromkeys(numbers, Feed(kind="dealt", number=0, of=1))
        if spec.order == "deterministic":
            return {number: Feed(kind="dealt", number=number, of=spec.streams) for number in range(spec.streams)}
        return dict.fromkeys(numbers, Feed(kind="granted"))

    def rejoin(self) -> bool:
        """Open again in the same attempt; False: the dispatcher does not know it any more."""
        patience = Patience(self._options.timeout_s, f"epoch {self.epoch} of job {self.job!r}")
        answer = self._ask(patience, rejoin=self.view.attempt)
        if isinstance(answer, NotKnown):
            return False
        self._take(answer)
        return True

    def resume(self, progress: Progress) -> None:
        """Start a new attempt from where this consumer stands."""
        if self._options.consumers > 1:
            raise JobFailedError(
                self.job,
                f"the service lost attempt {self.view.attempt}, and one of {self._options.consumers} consumers cannot "
                "start a new one alone; load the last checkpoint on all ranks",
            )
        state = self.state(progress, pipeline=[])
        checkpoint = Checkpoint((state,), state)
        resume = resume_from(checkpoint, consumers=1, feeds=self._feeds(state))
        patience = Patience(self._options.timeout_s, f"epoch {self.epoch} of job {self.job!r}")
        self._start_from(resume, patience)
        self.progress = progress

    def state(self, progress: Progress, *, pipeline: list[list[str]], finished: bool = False) -> EpochState:
        """Return the checkpoint of this consumer at `progress`."""
        spec = self.spec
        if self.feeder is not None:
            return self._fed_state(self.feeder, progress, pipeline, finished=finished)
        return EpochState(
            epoch=self.epoch,
            seed=spec.seed,
            attempt=self.view.attempt,
            consumers=spec.consumers,
            consumer=self.consumer,
            phase="ended" if finished else "reading",
            splits=self._submission.splits_digest,
            streams=len(spec.feeds) or spec.streams,
            order=spec.order,
            uneven=spec.uneven,
            coordinated=spec.coordinated,
            pipeline=pipeline,
            progress=Progress(weights=progress.weights) if finished else progress,
        )

    def _fed_state(
        self, feeder: Feeder, progress: Progress, pipeline: list[list[str]], *, finished: bool
    ) -> EpochState:
        """Return where the sampler stands: streams say nothing more, and another attempt has others."""
        return EpochState(
            epoch=self.epoch,
            seed=self.spec.seed,
            attempt=AttemptId(""),
            consumers=feeder.consumers,
            consumer=feeder.consumer,
            phase="ended" if finished else "reading",
            splits=self._submission.splits_digest,
            streams=0,
            order=self.spec.order,
            uneven=self.spec.uneven,
            pipeline=pipeline,
            progress=Progress(step=0 if finished else progress.step),
            fed=None if finished else progress.fed or feeder.place(progress.step),
        )

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


def _progress_of(ranges: Iterable[Ranges], checkpoint: Checkpoint) -> Progress:
    """Return where a consumer begins that was not there before: its marks come with the view."""
    done = {(one.source, one.pass_): RangeSet(one.ranges) for one in ranges}
    return Progress(done=done, step=checkpoint.first.progress.step, weights=checkpoint.first.progress.weights)
