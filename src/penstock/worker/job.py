"""A job as a runner needs it: what to run, over which splits, what to leave out. Loaded once, on first use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic
from typing import NamedTuple

from penstock.core.errors import DispatcherUnavailableError, ProtocolError
from penstock.core.ids import AttemptId, BlobHash, JobName
from penstock.graph import ops
from penstock.graph.codec import decode_graph
from penstock.graph.node import Node
from penstock.graph.readers import FileSource, SourceNode
from penstock.graph.regrouping import last_regrouping, makes_rounds
from penstock.graph.traverse import walk
from penstock.passes import optimize
from penstock.runtime.streams import StreamStopped
from penstock.sources.base import Source
from penstock.sources.listing_codec import Listing, decode_listings, open_source
from penstock.wire.control import ControlClient
from penstock.wire.frames import SourceStorageOptions
from penstock.wire.jobs import JobSpec
from penstock.wire.messages import BlobPiece, GetBlob, GetSpec, Spec

ASK_S = 5.0  # one try: a piece of a blob needs a while on a slow line
SAY_AFTER_S = 30.0
REFRESH_S = 2.0
KEPT_PLANS = 4  # of attempts: consumers are an epoch apart at most, and a checkpoint may be loaded meanwhile

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedJob:
    spec: JobSpec
    graph: Node
    listings: tuple[Listing, ...]
    caches: bool
    """Whether some elements are kept and given again."""
    makes_rounds: bool = False
    """Coordinated reads of what the engine has to group into rounds itself: buckets, padded batches."""

    def source_opener(self, storage: SourceStorageOptions) -> Callable[[SourceNode], Source]:
        """Return the way from a node to its source. Runs share none: a source reports bad records to one run."""
        nodes = [node for node in walk(self.graph) if isinstance(node, SourceNode)]
        listing_of = dict(zip(nodes, self.listings))
        options_of = dict(zip(nodes, storage.sources))
        opened: dict[SourceNode, Source] = {}

        def source_of(node: SourceNode) -> Source:
            if node not in opened:
                options = tuple(options_of.get(node, {}).items())
                lent = replace(node, storage_options=options) if options and isinstance(node, FileSource) else node
                opened[node] = open_source(lent, listing_of[node])
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

    def load(self, is_stopped: Callable[[], bool]) -> LoadedJob:
        """Return the job. While the dispatcher is away this waits: whoever started this process ends it in time."""
        with self._lock:
            if None not in self._plans:
                spec = self._ask(GetSpec(job=self.name), f"what job {self.name!r} is", is_stopped)
                if not isinstance(spec, Spec):
                    raise ProtocolError(f"the dispatcher answered {type(spec).__name__} to the question what job it is")
                self._plans[None] = AttemptPlan(self._made_of(spec, is_stopped), spec)
            return self._plans[None].job

    def plan(self, attempt: AttemptId, is_stopped: Callable[[], bool]) -> AttemptPlan:
        """Return what an attempt runs, and what to leave out, as fresh as the dispatcher can say now.

        Others may have died since this process began, over elements that are left out from then on.
        """
        self.load(is_stopped)
        known = self._plans.get(attempt) or self._plans[None]
        try:
            request = GetSpec(job=self.name, attempt=attempt)
            answer = self._control.ask(request, timeout_s=REFRESH_S, what="what to run, and what to leave out")
        except DispatcherUnavailableError:
            return known
        if isinstance(answer, Spec):
            with self._lock:
                known = self._plans[attempt] = AttemptPlan(self._made_of(answer, is_stopped), answer)
                for old in [each for each in self._plans if each is not None][:-KEPT_PLANS]:
                    del self._plans[old]
        return known

    def _made_of(self, spec: Spec, is_stopped: Callable[[], bool]) -> LoadedJob:
        """Return the plan of a spec: one that is here already, or made of what the dispatcher has."""
        for plan in self._plans.values():
            if plan.job.spec == spec.spec:
                return plan.job
        graph = optimize(decode_graph(self._blob(spec.spec.graph, "the pipeline", is_stopped)))
        listings = decode_listings(self._blob(spec.spec.splits, "the list of splits", is_stopped))
        return LoadedJob(
            spec=spec.spec,
            graph=graph,
            listings=tuple(listings),
            caches=any(isinstance(node, ops.Cache) for node in walk(graph)),
            makes_rounds=spec.spec.ranks.coordinated and makes_rounds(last_regrouping(graph)),
        )

    def _blob(self, name: BlobHash, what: str, is_stopped: Callable[[], bool]) -> bytes:
        data = bytearray()
        while True:
            answer = self._ask(GetBlob(hash=name, offset=len(data)), f"{what} of {self.name!r}", is_stopped)
            if not isinstance(answer, BlobPiece):
                raise ProtocolError(f"the dispatcher answered {type(answer).__name__} to the question for {what}")
            data += answer.piece
            if len(data) >= answer.size:
                return bytes(data)
            if not answer.piece:
                raise ProtocolError(f"the dispatcher has only {len(data)} of {answer.size} bytes of {what}")

    def _ask(self, request: GetSpec | GetBlob, what: str, is_stopped: Callable[[], bool]) -> object:
        say_at = monotonic() + SAY_AFTER_S
        while True:
            if is_stopped():
                raise StreamStopped
            try:
                return self._control.ask(request, timeout_s=ASK_S, what=what)
            except DispatcherUnavailableError as error:
                if monotonic() > say_at:
                    say_at = monotonic() + SAY_AFTER_S
                    _log.warning("still waiting for the dispatcher: %s", error)
