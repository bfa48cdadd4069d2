"""A job as a runner needs it, loaded once, and how the engine's run for a stream is opened.

A run is opened with what it reads, where it begins, and what of the runner it may use.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from time import monotonic
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.cluster_cache.fellows import Fellows
from penstock.cluster_cache.judging import DispatcherJudge
from penstock.core.errors import DispatcherUnavailableError, NotPermittedError, ProtocolError
from penstock.core.ids import AttemptId, BlobHash, JobName, StreamId, stream_number
from penstock.graph import ops
from penstock.graph.codec import decode_graph
from penstock.graph.fingerprint import fingerprint
from penstock.graph.node import Node
from penstock.graph.readers import FileSource, SourceNode
from penstock.graph.regrouping import last_regrouping, makes_rounds
from penstock.graph.traverse import walk
from penstock.relays.relayed_sources import relayed
from penstock.relays.runner_relays import RunRelays
from penstock.runtime.auto_points import worker_plan
from penstock.runtime.budget import Budget
from penstock.runtime.flight_record import FlightRecord
from penstock.runtime.iterator import PipelineArguments, Run
from penstock.runtime.streams import Allocate, Left, StreamPart, StreamStopped, TornRounds
from penstock.sources.base import Source
from penstock.sources.listing_codec import Listing, decode_listings, open_source
from penstock.stream.checkpoint import Weights
from penstock.stream.rounds import StartRun, Terms
from penstock.wire.blobs import blob_pieces, fetch_blob
from penstock.wire.control import ControlClient
from penstock.wire.credentials import user_name
from penstock.wire.frames import NO_STORAGE_OPTIONS, OpenStream, SourceStorageOptions, Units
from penstock.wire.host_blobs import HOST_BLOB_BYTES, SharedBlob, share_blob
from penstock.wire.jobs import Cut, JobSpec, Leftover
from penstock.wire.messages import GetBlob, GetSpec, Spec
from penstock.wire.received import received
from penstock.worker.feeds import (
    MOST_INDICES,
    FedFeed,
    FedUnits,
    GrantedFeed,
    StaleStream,
    StreamFeed,
    StreamLedger,
    fixed_feed,
)
from penstock.worker.figures import Busy, Figures
from penstock.worker.tail_run import TailRun

ASK_S = 5.0  # one try: a piece of a blob needs a while on a slow line
SAY_AFTER_S = 30.0
REFRESH_S = 2.0
KEPT_PLANS = 4  # of attempts: consumers are an epoch apart at most, and a checkpoint may be loaded meanwhile

_log = logging.getLogger(__name__)


class LoadedJob(msgspec.Struct, frozen=True, kw_only=True):
    spec: JobSpec
    graph: Node
    listings: tuple[Listing, ...]
    caches: bool
    """Whether some elements are kept and given again."""
    makes_rounds: bool = False
    """Coordinated reads of what the engine has to group into rounds itself: buckets, padded batches."""

    def source_opener(
        self, storage: SourceStorageOptions, relays: RunRelays | None = None
    ) -> Callable[[SourceNode], Source]:
        """Return the way from a node to its source. Runs share none: a source reports bad records to one run.

        `relays`: a trainer reads for the run, but for what is in the graph itself.
        """
        nodes = [node for node in walk(self.graph) if isinstance(node, SourceNode)]
        listing_of = dict(zip(nodes, self.listings))
        options_of = dict(zip(nodes, storage.sources))
        opened: dict[SourceNode, Source] = {}

        def source_of(node: SourceNode) -> Source:
            if node not in opened:
                options = tuple(options_of.get(node, {}).items())
                lent = replace(node, storage_options=options) if options and isinstance(node, FileSource) else node
                source = open_source(lent, listing_of[node])
                if relays is not None and not node.IN_MEMORY:
                    source = relayed(source, nodes.index(node), fingerprint(node), relays)
                opened[node] = source
            return opened[node]

        return source_of


class AttemptPlan(NamedTuple):
    """What an attempt runs, and what it leaves out."""

    job: LoadedJob
    excluded: Spec


class RunnerJob:
    """Asks the dispatcher for the job; any thread may. Plans are kept by attempt: the next one's may be another."""

    def __init__(self, control: ControlClient, name: JobName) -> None:
        self.name = name
        self._control = control
        self._lock = threading.Lock()
        self._plans: dict[AttemptId | None, AttemptPlan] = {}
        """The plans of the newest attempts, and of the job as it was when this process began (None)."""
        self._shared_blobs: dict[BlobHash, SharedBlob] = {}
        """Graphs with large arrays: as long as the job is run here."""

    def load(self, is_stopped: Callable[[], bool]) -> LoadedJob:
        """Return the job. While the dispatcher is away this waits: whoever started this process ends it in time."""
        with self._lock:
            if None not in self._plans:
                spec = self._ask(GetSpec(job=self.name), "what the job is", is_stopped)
                if not isinstance(spec, Spec):
                    raise ProtocolError(f"the dispatcher answered {type(spec).__name__} to the question what job it is")
                self._plans[None] = AttemptPlan(self._made_of(spec, is_stopped), spec)
            return self._plans[None].job

    def plan(self, attempt: AttemptId, is_stopped: Callable[[], bool]) -> AttemptPlan:
        """Return what an attempt runs, and what to leave out, as fresh as the dispatcher can say now.

        Others may have died since this process began, over elements that are left out from then on. And the job may
        have been made anew, for other ranks: an attempt that is new here has no plan but the one that is asked for.
        """
        self.load(is_stopped)
        request, what = GetSpec(job=self.name, attempt=attempt), "what to run, and what to leave out"
        known = self._plans.get(attempt)
        try:
            answer = self._ask_once(request, REFRESH_S, what) if known else self._ask(request, what, is_stopped)
        except DispatcherUnavailableError:
            answer = None
        if isinstance(answer, Spec):
            with self._lock:
                known = self._plans[attempt] = AttemptPlan(self._made_of(answer, is_stopped), answer)
                for old in [each for each in self._plans if each is not None][:-KEPT_PLANS]:
                    del self._plans[old]
        if known is None:
            raise StaleStream(f"job {self.name!r} has no attempt {attempt!r} any more")
        return known

    def _made_of(self, answer: Spec, is_stopped: Callable[[], bool]) -> LoadedJob:
        """Return the plan of a spec: one that is here already, or made of what the dispatcher has."""
        spec = answer.spec
        for plan in self._plans.values():
            if plan.job.spec == spec:
                return plan.job
        graph, listings = self._loaded(spec, is_stopped)
        return LoadedJob(
            spec=spec,
            graph=graph,
            listings=listings,
            caches=any(isinstance(node, ops.Cache) for node in walk(graph)),
            makes_rounds=spec.ranks.coordinated and makes_rounds(last_regrouping(graph)),
        )

    def _loaded(self, spec: JobSpec, is_stopped: Callable[[], bool]) -> tuple[Node, tuple[Listing, ...]]:
        """Return graph and splits: those of another attempt's ranks, where they are the same."""
        for known in (plan.job for plan in self._plans.values()):
            if (known.spec.graph, known.spec.splits, known.spec.placement) == (spec.graph, spec.splits, spec.placement):
                return known.graph, known.listings
        graph = decode_graph(self._graph(spec.graph, is_stopped))
        ask = partial(self._ask, what="the list of splits", is_stopped=is_stopped)
        return worker_plan(graph, spec.placement.cache), tuple(decode_listings(fetch_blob(spec.splits, ask)))

    def _graph(self, name: BlobHash, is_stopped: Callable[[], bool]) -> bytes | memoryview:
        """Return the graph's bytes; with large arrays behind it, in memory that the runners of this host share."""
        pieces = blob_pieces(name, partial(self._ask, what="the pipeline", is_stopped=is_stopped))
        first = next(pieces)
        if first.size < HOST_BLOB_BYTES:
            return b"".join([first.piece, *(piece.piece for piece in pieces)])
        if name not in self._shared_blobs:
            fetched = (piece.piece for piece in chain([first], pieces))
            self._shared_blobs[name] = share_blob(name, first.size, fetched, lambda: _raise_if(is_stopped))
        return self._shared_blobs[name].memory

    def _ask(self, request: GetSpec | GetBlob, what: str, is_stopped: Callable[[], bool]) -> object:
        say_at = monotonic() + SAY_AFTER_S
        while True:
            _raise_if(is_stopped)
            try:
                return self._ask_once(request, ASK_S, f"{what}, of job {self.name!r}")
            except DispatcherUnavailableError as error:
                if monotonic() > say_at:
                    say_at = monotonic() + SAY_AFTER_S
                    _log.warning("still waiting for the dispatcher: %s", error)

    def _ask_once(self, request: GetSpec | GetBlob, timeout_s: float, what: str) -> object:
        try:
            return self._control.ask(request, timeout_s=timeout_s, what=what)
        except NotPermittedError as refusal:
            # The dispatcher has let this runner go, and its readers read elsewhere: no failure of the job's.
            raise StaleStream(str(refusal)) from refusal


def _raise_if(is_stopped: Callable[[], bool]) -> None:
    if is_stopped():
        raise StreamStopped


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a stream is opened with, and opened again to mix by other weights."""

    stream: StreamId
    terms: Terms
    plan: AttemptPlan
    feed: StreamFeed
    opener: RunOpener
    allocate: Allocate
    budget: Callable[[], Budget]
    relays: RunRelays | None = None
    """What a trainer reads for the run; None: it reads by itself."""

    @property
    def final(self) -> bool:
        """Nothing is left over at its end: a tail, or a stream that reads everything by itself."""
        return self.terms.feed.kind in ("tail", "fed") or self.plan.job.spec.sharding.off

    def open(self, pump: Busy, cut: Cut, weights: Weights | None) -> Run:
        run = self._run(cut, weights)
        try:
            run.open(self.terms.epoch, cut.engine)
        except BaseException:
            run.close()
            raise
        self.opener.figures.watch(pump, run)
        return run

    def stop(self) -> None:
        """Let whoever waits for a split, or for elements of one, go, with `StreamStopped`."""
        self.feed.stop()
        if self.relays is not None:
            self.relays.stop()

    def _run(self, cut: Cut, weights: Weights | None) -> Run:
        job, excluded = self.plan
        spec, feed = job.spec, self.terms.feed
        pipeline = PipelineArguments(
            graph=job.graph,
            # Streams that each read everything do so in orders of their own, unless the user's shuffle has a seed.
            seed=spec.seed + stream_number(self.stream) if spec.sharding.off else spec.seed,
            epoch=self.terms.epoch,
            source_of=job.source_opener(self.opener.lent_for(self.stream), self.relays),
            cache_scope=cache_scope(spec.owner),
            cache_judge=self.opener.judge,
            cache_hosts=self.opener.fellows,
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
            recorder=self.opener.flight.recorder(self.stream),
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

    def __init__(
        self, job: RunnerJob, control: ControlClient, flight: FlightRecord, figures: Figures, fellows: Fellows
    ) -> None:
        self._job, self._control = job, control
        self.flight, self.figures, self.fellows = flight, figures, fellows
        self.judge = DispatcherJudge(control.post, job.name)
        self._fed: defaultdict[StreamId, FedUnits] = defaultdict(FedUnits)
        """What readers sent for streams that they feed; it may come before the stream is open."""
        self._storage: defaultdict[StreamId, dict[tuple[int, int, str], SourceStorageOptions]] = defaultdict(dict)
        """What each reader of a stream lent, by (consumer, replica, trainer): a reader replaces nothing but its own."""
        self._unopened: set[StreamId] = set()
        """Streams that units had come for, and nobody had opened, when that was last looked at."""

    def take_units(self, message: Units) -> None:
        if message.stream in self._fed or len(self._fed) < MOST_STREAMS:
            others = sum(fed.indices for fed in list(self._fed.values()))
            self._fed[message.stream].take(message, MOST_INDICES - others)

    def forget_unopened(self, opened: Collection[StreamId]) -> None:
        """Forget units of streams that nobody has opened since this was last called."""
        unopened = {stream for stream in list(self._fed) if stream not in opened}
        for stream in unopened & self._unopened:
            self.forget(stream)
        self._unopened = unopened

    def lend(self, message: OpenStream) -> None:
        """Keep what a reader's sources open their storage with."""
        lent = self._storage.get(message.stream, {})
        reader = (message.consumer, message.replica, message.trainer)
        if reader in lent or (len(lent) < MOST_READERS and len(self._storage) <= MOST_STREAMS):
            self._storage[message.stream][reader] = message.storage

    def lent_for(self, stream: StreamId) -> SourceStorageOptions:
        """Return what the first of a stream's readers lent last: they read the same data, by keys that may be new."""
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
        relays: RunRelays | None = None,
    ) -> Opening:
        """Ask for what a run needs. This may wait for the dispatcher."""
        plan = self._job.plan(start.terms.attempt, is_stopped)
        return Opening(
            stream=stream,
            terms=start.terms,
            plan=plan,
            feed=self._feed(stream, start, plan.job.spec.split_counts),
            opener=self,
            allocate=allocate,
            budget=budget,
            relays=relays,
        )

    def _feed(self, stream: StreamId, start: StartRun, split_counts: Sequence[int]) -> StreamFeed:
        terms = start.terms
        if terms.feed.kind == "fed":
            return FedFeed(self._fed[stream], terms.feed)
        if terms.feed.kind != "granted":
            return fixed_feed(terms.feed, split_counts)
        return GrantedFeed(
            StreamLedger(start.start.named),
            self._control.post,
            job=self._job.name,
            attempt=terms.attempt,
            stream=stream,
            binding=terms.binding,
        )


def cache_scope(owner: str) -> str:
    """Return whose entries a job finds and makes: its principal's. The user of this host is one, and finds what
    pipelines in processes of his own kept."""
    return "user" if owner in ("", user_name()) else f"principal {owner}"


def _left(leftover: Leftover, job: LoadedJob) -> Left:
    cut, keep, consumers = leftover.cut, leftover.feed.keep, job.spec.ranks.count
    if job.makes_rounds:
        return Left(cut.engine, cut.since * consumers, cut.share, keep, _torn(cut))
    return Left(cut.engine, len(received(cut, consumers)), cut.share, keep)


def _torn(cut: Cut) -> TornRounds | None:
    return None if cut.regroup is None else TornRounds(cut.regroup.width, cut.regroup.given)
