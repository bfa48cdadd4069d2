"""Opens the engine's run for a stream: what it reads, where it begins, what of the runner it may use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.core.ids import StreamId, stream_number
from penstock.processes.flight_record import FlightRecord
from penstock.runtime.budget import Budget
from penstock.runtime.iterator import PipelineArguments, Run
from penstock.runtime.streams import Allocate, FlightRecorder, Left, StreamPart, TornRounds
from penstock.stream.checkpoint import Weights
from penstock.stream.instructions import StartRun, Terms
from penstock.wire.control import ControlClient
from penstock.wire.frames import NO_STORAGE_OPTIONS, OpenStream, SourceStorageOptions, Units
from penstock.wire.jobs import Cut, Leftover
from penstock.wire.received import received
from penstock.worker.feeds import FedFeed, FedUnits, GrantedFeed, StreamFeed, StreamLedger, fixed_feed
from penstock.worker.figures import Busy, Figures
from penstock.worker.job import AttemptPlan, LoadedJob, RunnerJob
from penstock.worker.tails import TailRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What one run of a stream is opened with, and opened again to mix by other weights."""

    stream: StreamId
    terms: Terms
    plan: AttemptPlan
    feed: StreamFeed
    ledger: StreamLedger | None
    """The splits that were granted; None where splits are not granted, so that no cut has to name any."""
    storage: Callable[[], SourceStorageOptions]
    """Gives the newest options that a reader lent, each time it is called: keys may be valid for a day only."""
    allocate: Allocate
    recorder: FlightRecorder
    budget: Callable[[], Budget]
    figures: Figures

    @property
    def final(self) -> bool:
        """Nothing is left over at its end: a tail, or a stream that reads everything by itself."""
        return self.terms.feed.kind in ("tail", "fed") or self.plan.job.spec.sharding.off

    @property
    def pad(self) -> bool:
        return self.plan.job.spec.ranks.uneven == "pad"

    def open(self, pump: Busy, cut: Cut, weights: Weights | None) -> Run:
        run = self._run(cut, weights)
        try:
            run.open(self.terms.epoch, cut.engine)
        except BaseException:
            run.close()
            raise
        self.figures.watch(pump, run)
        return run

    def _run(self, cut: Cut, weights: Weights | None) -> Run:
        job, excluded = self.plan
        spec, feed = job.spec, self.terms.feed
        pipeline = PipelineArguments(
            graph=job.graph,
            # Streams that each read everything do so in orders of their own, unless the user's shuffle has a seed.
            seed=spec.seed + stream_number(self.stream) if spec.sharding.off else spec.seed,
            epoch=self.terms.epoch,
            source_of=job.source_opener(self.storage()),
        )
        part = StreamPart(
            feed=self.feed,
            weights=weights,
            rest="give" if self.final else "keep",
            shuffle_parts=self.terms.share,
            keep=feed.keep,
            leftovers=tuple(_left(leftover, job) for leftover in feed.leftovers),
            coordinated=spec.ranks.count if spec.ranks.coordinated else 0,
            torn=_torn(cut) if job.makes_rounds else None,
            dropped=frozenset(excluded.dropped),
            suspects=frozenset(excluded.suspects),
            allocate=self.allocate,
            recorder=self.recorder,
        )
        # What nobody received of a round, coordinated reads take back by themselves.
        if job.makes_rounds or not feed.leftovers:
            return Run(**pipeline, budget=self.budget(), part=part)
        return TailRun(
            pipeline,
            budget=self.budget(),
            part=part,
            leftovers=feed.leftovers,
            width=spec.ranks.count,
            split_counts=spec.split_counts,
        )


MOST_STREAMS = 4_096  # of one runner, with those that readers have only spoken of
MOST_READERS = 65_536  # of one stream


class RunOpener:
    """A runner's. What readers say sets what the next run gets; runs are opened in their pumps' threads."""

    def __init__(self, job: RunnerJob, control: ControlClient, flight: FlightRecord, figures: Figures) -> None:
        self._job = job
        self._control = control
        self._flight = flight
        self._figures = figures
        self._fed: defaultdict[StreamId, FedUnits] = defaultdict(FedUnits)
        """What readers sent for streams that they feed; it may come before the stream is open."""
        self._storage: defaultdict[StreamId, dict[tuple[int, int, str], SourceStorageOptions]] = defaultdict(dict)
        """What each reader of a stream lent, by (consumer, replica, trainer): a reader replaces nothing but its own."""

    def take_units(self, message: Units) -> None:
        if message.stream in self._fed or len(self._fed) < MOST_STREAMS:
            self._fed[message.stream].take(message)

    def lend(self, message: OpenStream) -> None:
        """Keep what a reader's sources open their storage with."""
        lent = self._storage.get(message.stream, {})
        reader = (message.consumer, message.replica, message.trainer)
        if reader in lent or (len(lent) < MOST_READERS and len(self._storage) <= MOST_STREAMS):
            self._storage[message.stream][reader] = message.storage

    def _lent_for(self, stream: StreamId) -> SourceStorageOptions:
        """Return what the first of a stream's readers lent: they read the same data."""
        lent = self._storage.get(stream)
        return lent[min(lent)] if lent else NO_STORAGE_OPTIONS

    def forget(self, stream: StreamId) -> None:
        self._fed.pop(stream, None)
        self._storage.pop(stream, None)

    def prepare(
        self,
        stream: StreamId,
        start: StartRun,
        *,
        is_stopped: Callable[[], bool],
        allocate: Allocate,
        budget: Callable[[], Budget],
    ) -> Opening:
        """Ask for what a run needs. This may wait for the dispatcher."""
        plan = self._job.plan(start.terms.attempt, is_stopped)
        ledger = StreamLedger(start.start.named) if start.terms.feed.kind == "granted" else None
        return Opening(
            stream=stream,
            terms=start.terms,
            plan=plan,
            feed=self._feed(stream, start.terms, ledger, plan.job.spec.split_counts),
            ledger=ledger,
            storage=partial(self._lent_for, stream),
            allocate=allocate,
            recorder=self._flight.recorder(stream),
            budget=budget,
            figures=self._figures,
        )

    def _feed(
        self, stream: StreamId, terms: Terms, ledger: StreamLedger | None, split_counts: Sequence[int]
    ) -> StreamFeed:
        if terms.feed.kind == "fed":
            return FedFeed(self._fed[stream], terms.feed)
        if ledger is None:
            return fixed_feed(terms.feed, split_counts)
        return GrantedFeed(
            ledger,
            self._control.post,
            job=self._job.name,
            attempt=terms.attempt,
            stream=stream,
            binding=terms.binding,
        )


def _left(leftover: Leftover, job: LoadedJob) -> Left:
    cut, keep, consumers = leftover.cut, leftover.feed.keep, job.spec.ranks.count
    if job.makes_rounds:
        return Left(cut.engine, cut.since * consumers, cut.share, keep, _torn(cut))
    return Left(cut.engine, len(received(cut, consumers)), cut.share, keep)


def _torn(cut: Cut) -> TornRounds | None:
    return None if cut.regroup is None else TornRounds(cut.regroup.width, cut.regroup.given)
