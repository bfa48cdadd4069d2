from __future__ import annotations

import typing

import msgspec
import pytest

from penstock.control import events as e
from penstock.control.snapshot import restore, snapshot
from penstock.control.state import ClusterState, InvalidTransitionError
from penstock.wire.jobs import Cut, Slot
from penstock.wire.messages import PutBlob, Rebind, SteerJob
from tests.control.cluster import JOB, Cluster, started
from tests.control.test_opening import beat, close


def eventful() -> Cluster:
    """Return a cluster to which most things have happened."""
    cluster = started(workers=2, consumers=2, split_counts=(40, 3))
    one, other = cluster.view().streams
    for source in (0, 1):
        got = cluster.grant(one, source=source)
        cluster.grant(one, got[-1], source=source, seconds_per_split=0.01)
        cluster.grant(other, source=source, pass_=2)
    cluster.die(one.runner, in_flight=((one.stream, 0, 1, 2, 1),))
    cluster.ready()
    cluster.end(one, 0, leftover=Cut(engine=[1], since=2))
    cluster.end(one, 1)
    cluster.ask(SteerJob(job=JOB, action="pause"))
    cluster.ask(SteerJob(job=JOB, action="resume"))
    cluster.ask(close("c0", "a0-r0", finished=False))
    return cluster


def test_replayed_journal_gives_the_same_state() -> None:
    cluster = eventful()
    replayed = ClusterState()
    for event in cluster.events():
        replayed.apply(event)
    assert snapshot(replayed) == snapshot(cluster.state)
    assert replayed.jobs == cluster.state.jobs


def test_a_restored_snapshot_is_the_same_state_without_leases() -> None:
    cluster = eventful()
    restored = restore(snapshot(cluster.state))
    assert restored.jobs == cluster.state.jobs
    assert (restored.generation, restored.drained) == (cluster.state.generation, cluster.state.drained)
    assert (len(restored.agents), restored.clients, restored.began_at) == (0, {}, None)


def test_a_snapshot_can_stand_in_the_middle_of_a_journal() -> None:
    cluster = eventful()
    events = cluster.events()
    for place in range(len(events)):
        state = ClusterState()
        for event in events[:place]:
            state.apply(event)
        state = restore(snapshot(state))
        for event in events[place:]:
            state.apply(event)
        assert snapshot(state) == snapshot(cluster.state)


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x80"])
def test_bytes_that_are_no_snapshot_are_refused(damage: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        restore(damage)


def test_deciding_changes_nothing() -> None:
    cluster = eventful()
    before = snapshot(cluster.state)
    soft = (dict(cluster.state.agents), dict(cluster.state.runners), dict(cluster.state.clients))
    stream = cluster.view().streams[1]
    for request in (
        Rebind(job=JOB, attempt="a0-r0", stream=stream.stream, binding=stream.binding, reason="gap"),
        cluster.opening(epoch=1, spec=cluster.state.jobs[JOB].spec),
        SteerJob(job=JOB, action="cancel"),
        beat("c1", consumer=1),
    ):
        assert cluster.decide(request).events
    assert snapshot(cluster.state) == before
    assert (dict(cluster.state.agents), cluster.state.runners, cluster.state.clients) == soft


def test_journaled_events_alone_make_the_hard_state() -> None:
    """What is not journaled must not leak into what is: replay skips it."""
    cluster = Cluster()
    cluster.register("w0")
    empty = snapshot(cluster.state)
    cluster.register("w1", agent="B")
    cluster.tick(10)
    assert snapshot(cluster.state) == empty


def test_an_event_that_does_not_fit_raises_with_the_story() -> None:
    cluster = started()
    with pytest.raises(InvalidTransitionError, match=r"binding 1 of stream 'a0-r0\.0' after 1") as raised:
        cluster.state.apply(e.StreamsBound(JOB, "a0-r0", (e.NewBinding("a0-r0.0", 1),)))
    assert "JobCreated" in str(raised.value)
    assert any(isinstance(event, e.JobCreated) for event in raised.value.story)


@pytest.mark.parametrize(
    "event",
    [
        e.DispatcherBegan(1),
        e.SplitsGranted(JOB, "a0-r0", "a0-r0.0", 0, 0, (10,)),
        e.SplitsGranted(JOB, "a0-r0", "a0-r0.5", 0, 0, (0,)),
        e.JobCreated(JOB, started().state.jobs[JOB].spec),
        e.IterationStarted(JOB, "a0-r0", 0),
        e.ConsumerClosed(JOB, "a0-r0", Slot(0), "somebody else", True),
        e.StreamReopened(JOB, "a0-r0", "a0-r0.0"),
        e.StreamsCreated(JOB, "a0-r0", (e.NewStream(0, started().view().streams[0].feed, 1),)),
        e.IterationDropped(JOB, "older", ""),
    ],
)
def test_no_event_is_applied_that_makes_no_sense(event: e.AnyEvent) -> None:
    cluster = started()
    before = snapshot(cluster.state)
    with pytest.raises(InvalidTransitionError):
        cluster.state.apply(event)
    assert snapshot(cluster.state) == before


def test_every_event_says_whether_it_is_journaled_and_survives_the_journal() -> None:
    for kind in typing.get_args(e.AnyEvent):
        assert issubclass(kind, e.Journaled) != issubclass(kind, e.Soft)
        assert issubclass(kind, e.Journaled) == kind.JOURNALED
        assert kind.__struct_config__.frozen
    cluster = eventful()
    assert e.decode(e.encode(cluster.events())) == cluster.events()


def test_blobs_are_not_the_cores() -> None:
    with pytest.raises(TypeError, match="beside the core"):
        started().decide(PutBlob(hash="h", offset=0, size=1, piece=b"x"))
