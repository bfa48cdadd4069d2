"""Opens the engine's run for a stream: what it reads, where it begins, what of the runner it may use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.core.ids import JobName, StreamId, stream_number
from penstock.processes.flight_record import FlightRecord
from penstock.runtime.budget import Budget
from penstock.runtime.contract import State
from penstock.runtime.iterator import Pipeline, Run
from penstock.runtime.streams import Allocate, Left, StreamPart, TornRounds
from penstock.stream.rounds import outputs_received
from penstock.stream.serving import Terms
from penstock.wire.control import ControlClient
from penstock.wire.frames import NO_STORAGE_OPTIONS, OpenStream, StorageOptions
from penstock.wire.jobs import Cut, Leftover
from penstock.wire.slabs import Arena
from penstock.worker.fed import FedFeed, FedUnits
from penstock.worker.feeds import ClosableFeed, GrantedFeed, fixed_feed
from penstock.worker.figures import Figures
from penstock.worker.job import Job, LoadedJob
from penstock.worker.ledger import Ledger
from penstock.worker.pump import OpenedRun, Pump
from penstock.worker.shared import SharedStream
from penstock.worker.streams import DealtStream
from penstock.worker.tails import StreamRun


class RunOpener:
    """A runner's. What readers say sets what the next run gets; runs are opened in their pumps' threads."""

    def __init__(
        self,
        name: JobName,
        job: Job,
        *,
        control: ControlClient,
        arena: Arena,
        flight: FlightRecord,
        figures: Figures,
        budget: Callable[[], Budget],
    ) -> None:
        self._name = name
        self._job = job
        self._control = control
        self._arena = arena
        self._flight = flight
        self._figures = figures
        self._budget = budget
        self._fed: dict[StreamId, FedUnits] = {}
        self._storage: dict[StreamId, dict[tuple[int, int, str], StorageOptions]] = {}
        """What each reader of a stream lent, by (consumer, replica, trainer): a reader replaces nothing but its own."""

    def units_for(self, stream: StreamId) -> FedUnits:
        """Return what readers sent for a stream that they feed; it may come before the stream is open."""
        return self._fed.setdefault(stream, FedUnits())

    def lend(self, message: OpenStream) -> None:
        """Keep what a reader's sources open their storage with; the newest, for keys may be of a day."""
        if message.storage.sources:
            lent = self._storage.setdefault(message.stream, {})
            lent[message.consumer, message.replica, message.trainer] = message.storage

    def _lent_for(self, stream: StreamId) -> StorageOptions:
        """Return what the first of a stream's readers lent: they read the same data."""
        lent = self._storage.get(stream, {})
        return lent[min(lent)] if lent else NO_STORAGE_OPTIONS

    def forget(self, stream: StreamId) -> None:
        self._fed.pop(stream, None)
        self._storage.pop(stream, None)

    def open(self, stream: DealtStream | SharedStream, terms: Terms, start: Cut, pump: Pump) -> OpenedRun:
        job, excluded = self._job.plan(terms.attempt, lambda: pump.abandoned)
        spec, feed_spec = job.spec, terms.feed
        ledger = Ledger(start.named) if feed_spec.kind == "granted" else None
        final = feed_spec.kind in ("tail", "fed") or spec.sharding.off
        feed = self._feed(stream, terms, ledger, spec.split_counts)
        pump.adopt(feed)
        part = StreamPart(
            feed=feed,
            weights=pump.weights,
            rest="give" if final else "keep",
            shuffle_parts=terms.share,
            keep=feed_spec.keep,
            leftovers=tuple(_left(leftover, job) for leftover in feed_spec.leftovers),
            coordinated=spec.ranks.count if spec.ranks.coordinated else 0,
            torn=_torn(start) if job.makes_rounds else None,
            dropped=frozenset(excluded.dropped),
            suspects=frozenset(excluded.suspects),
            allocate=partial(stream.allocate, pump) if isinstance(stream, SharedStream) else self._allocate_for(stream),
            recorder=self._flight.recorder(stream.id),
        )

        def opened(part: StreamPart, state: State) -> Run:
            pipeline = Pipeline(
                graph=job.graph,
                # Streams that each read everything do so in orders of their own, unless the user's shuffle has a seed.
                seed=spec.seed + stream_number(stream.id) if spec.sharding.off else spec.seed,
                epoch=terms.epoch,
                source_of=job.source_opener(self._lent_for(stream.id)),
            )
            run = StreamRun(
                pipeline,
                budget=self._budget(),
                part=part,
                # What nobody received of a round, coordinated reads take back by themselves.
                leftovers=() if job.makes_rounds else feed_spec.leftovers,
                width=spec.ranks.count,
                split_counts=spec.split_counts,
            )
            try:
                run.open(terms.epoch, state)
            except BaseException:
                run.close()
                raise
            self._figures.watch(pump, run)
            return run

        return OpenedRun(
            run=opened(part, start.engine),
            feed=feed,
            ledger=ledger,
            final=final,
            pad=spec.ranks.uneven == "pad",
            reopen=lambda state, weights: opened(replace(part, weights=weights, torn=None), state),
        )

    def _feed(
        self, stream: DealtStream | SharedStream, terms: Terms, ledger: Ledger | None, split_counts: Sequence[int]
    ) -> ClosableFeed:
        if terms.feed.kind == "fed":
            return FedFeed(self.units_for(stream.id), terms.feed)
        if ledger is None:
            return fixed_feed(terms.feed, split_counts)
        return GrantedFeed(
            ledger,
            self._control.post,
            job=self._name,
            attempt=terms.attempt,
            stream=stream.id,
            binding=terms.binding,
        )

    def _allocate_for(self, stream: DealtStream) -> Allocate:
        return lambda shape, dtype: self._arena.array(shape, dtype) if stream.uses_slabs else None


def _left(leftover: Leftover, job: LoadedJob) -> Left:
    cut, keep, consumers = leftover.cut, leftover.feed.keep, job.spec.ranks.count
    if job.makes_rounds:
        return Left(cut.engine, cut.since * consumers, cut.share, keep, _torn(cut))
    return Left(cut.engine, outputs_received(cut, consumers), cut.share, keep)


def _torn(cut: Cut) -> TornRounds | None:
    return None if cut.regroup is None else TornRounds(cut.regroup.width, cut.regroup.given)
