"""A runner's plans: one an attempt, loaded when a stream of the attempt is opened, shared where they are the same."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.job_specs import job_spec

import penstock as ps
from penstock.core.errors import DispatcherUnavailableError, NotPermittedError
from penstock.core.ids import AttemptId, JobName
from penstock.graph.codec import encode_graph
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.runtime.distributable import for_workers
from penstock.sources.listing_codec import encode_listings, split_counts
from penstock.sources.registry import open_source
from penstock.wire.blobs import blob_hash
from penstock.wire.jobs import JobSpec
from penstock.wire.messages import BlobPiece, GetBlob, GetSpec, NotKnown, Spec
from penstock.worker.feeds import StaleStream
from penstock.worker.opening import KEPT_PLANS, RunnerJob


class Dispatcher:
    """Knows a spec for each attempt, and counts the blobs it was asked for."""

    def __init__(self) -> None:
        self.specs: dict[AttemptId | None, JobSpec] = {}
        self.blobs: dict[str, bytes] = {}
        self.blobs_asked = 0
        self.away = self.has_let_go = False

    def run(self, attempt: str | None, dataset: ps.Dataset) -> None:
        graph = for_workers(dataset.node, "dynamic")
        sources = [open_source(node) for node in walk(graph) if isinstance(node, SourceNode)]
        contents = encode_graph(graph), encode_listings(sources)
        names = [blob_hash(content) for content in contents]
        self.blobs.update(zip(names, contents))
        self.specs[None if attempt is None else AttemptId(attempt)] = job_spec(
            graph=names[0], splits=names[1], split_counts=split_counts(sources), seed=0
        )

    def ask(self, request: Any, *, timeout_s: float, what: str) -> Any:
        if self.away:
            raise DispatcherUnavailableError("tcp://nowhere", what, timeout_s)
        if self.has_let_go:
            raise NotPermittedError("the key of runner/r has been revoked")
        if isinstance(request, GetSpec):
            spec = self.specs.get(request.attempt)
            return NotKnown(what="it") if spec is None else Spec(spec=spec)
        assert isinstance(request, GetBlob)
        self.blobs_asked += 1
        content = self.blobs[request.hash]
        return BlobPiece(size=len(content), piece=content[request.offset :])


def made() -> tuple[Dispatcher, RunnerJob]:
    dispatcher = Dispatcher()
    dispatcher.run(None, ps.range(10).batch(2))
    return dispatcher, RunnerJob(dispatcher, JobName("j"))  # type: ignore[arg-type]


def plan(job: RunnerJob, attempt: str) -> Any:
    return job.plan(AttemptId(attempt), lambda: False)


def test_attempts_that_run_the_same_share_a_plan() -> None:
    dispatcher, job = made()
    for attempt in ("a", "b"):
        dispatcher.run(attempt, ps.range(10).batch(2))
    first = job.load(lambda: False)
    asked = dispatcher.blobs_asked
    assert plan(job, "a").job is plan(job, "b").job is first
    assert dispatcher.blobs_asked == asked


def test_an_attempt_of_other_ranks_fetches_nothing() -> None:
    dispatcher, job = made()
    first = job.load(lambda: False)
    dispatcher.specs[AttemptId("a")] = replace(first.spec, ranks=ps.Ranks(3))
    asked = dispatcher.blobs_asked
    other = plan(job, "a").job
    assert other.spec.ranks.count == 3 and other.graph is first.graph
    assert dispatcher.blobs_asked == asked


def test_the_next_attempt_may_run_another_plan() -> None:
    dispatcher, job = made()
    dispatcher.run("a", ps.range(10).batch(2))
    dispatcher.run("b", ps.range(10).batch(5))
    before, after = plan(job, "a").job, plan(job, "b").job
    assert before.graph != after.graph
    assert plan(job, "a").job is before


def test_while_the_dispatcher_is_away_an_attempt_goes_on_with_its_plan() -> None:
    dispatcher, job = made()
    dispatcher.run("a", ps.range(10).batch(5))
    known = plan(job, "a")
    dispatcher.away = True
    assert plan(job, "a").job is known.job


def test_an_attempt_that_is_new_here_waits_for_the_dispatcher() -> None:
    """The plan that this process began with may be that of other ranks."""
    dispatcher, job = made()
    job.load(lambda: False)
    dispatcher.run("a", ps.range(10).batch(5))
    asked, dispatcher.away = [], True

    def is_stopped() -> bool:
        asked.append(True)
        dispatcher.away = len(asked) < 4
        return False

    spec = dispatcher.specs[AttemptId("a")]
    assert job.plan(AttemptId("a"), is_stopped).job.spec == spec


def test_an_attempt_that_nobody_knows_is_stale() -> None:
    _, job = made()
    with pytest.raises(StaleStream) as stale:
        plan(job, "a")
    assert "no attempt 'a'" in stale.value.reason


def test_old_plans_are_forgotten() -> None:
    dispatcher, job = made()
    for number in range(3 * KEPT_PLANS):
        dispatcher.run(f"a{number}", ps.range(10).batch(1 + number))
        plan(job, f"a{number}")
    assert len(job._plans) == KEPT_PLANS + 1


@pytest.mark.parametrize("loaded", [True, False])
def test_a_runner_that_has_been_let_go_is_stale_and_fails_nobodys_job(loaded: bool) -> None:
    dispatcher, job = made()
    dispatcher.run("a", ps.range(10).batch(2))
    if loaded:
        plan(job, "a")
    dispatcher.has_let_go = True
    with pytest.raises(StaleStream) as stale:
        plan(job, "a")
    assert "revoked" in stale.value.reason
