from __future__ import annotations

from typing import Any

import pytest

from penstock.control.views import SILENT_AFTER_S
from penstock.wire.jobs import Cut, FeedSpec, Leftover, Named, Position, Ranges, Resume
from penstock.wire.messages import Beat, Done, GetPipeline, ListJobs, ListWorkers, NotKnown, PutPipeline, Refused, Spec
from tests.control.cluster import JOB, Cluster, rebind, spec, started

REST = Cut(engine=["@", 0, 0, 3, 1], named=(Named(0, 0, (3,)),))


def test_a_stream_ends_when_all_its_consumers_say_so() -> None:
    cluster = started(workers=1, consumers=3)
    (stream,) = cluster.view().streams
    for consumer in (0, 2, 2):
        assert cluster.end(stream, consumer) == Done()
        assert not cluster.view().streams[0].ended
    cluster.end(stream, 1)
    assert cluster.view().streams[0].ended
    assert cluster.view().finished


def test_leftovers_become_one_last_stream() -> None:
    cluster = started(workers=3)
    first, second, third = cluster.view().streams
    cluster.end(third, leftover=REST)
    cluster.end(second)
    assert len(cluster.view().streams) == 3
    cluster.end(first, leftover=Cut(engine=[9]))
    view = cluster.view()
    tail = view.streams[3]
    granted = FeedSpec(kind="granted")
    assert tail.feed == FeedSpec(
        kind="tail", leftovers=(Leftover(0, Cut(engine=[9]), granted), Leftover(2, REST, granted))
    )
    assert tail.number == 3
    assert tail.runner is not None
    assert not view.finished
    cluster.end(tail)
    assert cluster.view().finished
    cluster.restart()


def test_the_tail_of_streams_with_owners_is_the_first_consumers() -> None:
    cluster = started(workers=1, consumers=2, uneven="allow")
    one, other = cluster.view().streams
    refused = cluster.end(one, 1)
    assert isinstance(refused, Refused)
    cluster.end(one, 0, leftover=REST)
    cluster.end(other, 1)
    tail = cluster.view().streams[2]
    assert (tail.feed.kind, tail.owner) == ("tail", 0)
    cluster.end(tail, 0)
    assert cluster.view().finished


def test_no_new_stream_is_made_once_there_is_a_tail() -> None:
    cluster = started(workers=1)
    cluster.end(cluster.view().streams[0], leftover=REST)
    cluster.register("w9", agent="B")
    cluster.ready()
    assert len(cluster.view().streams) == 2


def test_consumers_that_counted_differently_are_told() -> None:
    cluster = started(consumers=2)
    (stream,) = cluster.view().streams
    cluster.end(stream, 0, rounds=3)
    refused = cluster.end(stream, 1, rounds=4)
    assert isinstance(refused, Refused)
    assert "same result for the same input" in refused.reason


def test_an_ended_stream_is_opened_again_for_a_consumer_that_came_back() -> None:
    cluster = started(workers=1)
    (stream,) = cluster.view().streams
    cluster.end(stream)
    cluster.die(stream.runner)
    assert cluster.view().streams[0].runner is None
    cluster.open(rejoin="a0-r0")
    assert cluster.view().finished
    cluster.ask(rebind(cluster.view()))
    cluster.ready()
    again = cluster.view().streams[0]
    assert again.runner is not None
    assert again.binding > stream.binding
    cluster.end(again)
    assert not cluster.state.jobs[JOB].iterations["a0-r0"].streams[stream.stream].reopened


@pytest.mark.parametrize("ended", [False, True])
def test_a_checkpoint_inside_the_tail_resumes_inside_the_tail(ended: bool) -> None:
    cluster = Cluster()
    cluster.register("w0")
    feed = FeedSpec(kind="tail", leftovers=(Leftover(0, REST, FeedSpec(kind="granted")),))
    resume = Resume(
        epoch=0,
        consumers=1,
        streams=(
            Position(number=0, cut=REST, round=3, marks=(3,), ended=True),
            Position(number=1, cut=Cut(engine=[5]), round=1, marks=(1,), feed=feed, ended=ended),
        ),
        digest="d",
    )
    view = cluster.open(resume=resume).view
    assert view.finished == ended
    cluster.ready()
    assert len(cluster.view().streams) == 2


def resumed(cluster: Cluster, *streams: Position, epoch: int = 0, done: tuple[Ranges, ...] = (), **job: Any) -> None:
    """Open an epoch at a checkpoint, and have every process serve."""
    described = spec(**job)
    resume = Resume(epoch=epoch, consumers=described.ranks.count, streams=streams, done=done, digest="d")
    for consumer in range(described.ranks.count):
        cluster.open(consumer, epoch=epoch, spec=described, resume=resume)
    cluster.ready()


def test_a_checkpoint_whose_tail_has_ended_goes_on_with_a_stream_that_has_not() -> None:
    """Its owner had seen the end of the stream, so that there was a tail, and came back from before it."""
    cluster = Cluster()
    cluster.register("w0")
    inside = Cut(engine=["@", 0, 0, 1, 4], named=(Named(0, 0, (1,)),))
    tail = FeedSpec(kind="tail", leftovers=(Leftover(1, Cut(named=(Named(0, 0, (0,)),)), FeedSpec(kind="granted")),))
    resumed(
        cluster,
        Position(number=0, cut=inside, round=2),
        Position(number=1, cut=Cut(named=(Named(0, 0, (0,)),)), round=0, ended=True, leftover=True),
        Position(number=2, cut=Cut(engine=[1]), round=1, ended=True, feed=tail),
        uneven="allow",
        split_counts=(2,),
    )
    stream = cluster.view().streams[0]
    assert not cluster.view().finished and stream.runner
    assert cluster.grant(stream, 1) == ()
    cluster.end(stream)
    assert cluster.view().finished
    cluster.restart()


def test_an_epoch_that_goes_on_in_a_later_pass_ends_with_its_streams() -> None:
    cluster = Cluster()
    cluster.register("w0")
    held = Position(number=0, cut=Cut(engine=["@", 0, 1, 2, 5], named=(Named(0, 1, (2,)),)), round=3, marks=(3,))
    resumed(cluster, held, epoch=1, done=(Ranges(0, 1, ((0, 2),)),), split_counts=(3,))
    (stream,) = cluster.view().streams
    assert cluster.grant(stream, 2, pass_=1) == ()
    cluster.end(stream)
    assert cluster.view().finished


def test_an_epoch_may_end_while_a_source_has_splits_that_nothing_asks_for() -> None:
    """As one does that mixes two sources and stops with the first of them."""
    cluster = Cluster()
    cluster.register("w0")
    held = Position(number=0, cut=Cut(named=(Named(0, 0, (1,)), Named(1, 0, (0,)))), round=3, marks=(3,))
    resumed(cluster, held, done=(Ranges(0, 0, ((0, 1),)),), split_counts=(2, 50))
    cluster.end(cluster.view().streams[0])
    assert cluster.view().finished


def test_what_a_stream_had_that_no_owners_state_knows_is_read_before_the_epoch_ends() -> None:
    """Consumer 1 saved its state before it saw its stream, which took all splits until consumer 0 saw its own end."""
    cluster = Cluster()
    cluster.register("w0")
    held = Position(number=0, cut=Cut(), round=0, marks=(), ended=True)
    resumed(cluster, held, consumers=2, uneven="allow", split_counts=(3,))
    _, one, other = cluster.view().streams
    assert {one.owner, other.owner} == {0, 1}
    assert [*cluster.grant(one), *cluster.grant(other), *cluster.grant(one, 0)] == [0, 1, 2]
    cluster.end(one, one.owner)
    assert not cluster.view().finished
    cluster.end(other, other.owner)
    assert cluster.view().streams[-1].feed.kind == "tail"


@pytest.mark.parametrize("uneven", ["allow", "pad"])
def test_it_is_read_too_where_every_process_has_a_stream_that_passed_it_by(uneven: str) -> None:
    """Split 1 of pass 0 is in no state, and the one stream of the checkpoint stands in pass 1."""
    cluster = Cluster()
    cluster.register("w0")
    cut = Cut(engine=["@", 0, 1, 0, 4], named=(Named(0, 1, (0,)),))
    resumed(
        cluster,
        Position(number=0, cut=cut, round=3, marks=(3,) if uneven == "pad" else ()),
        done=(Ranges(0, 0, ((0, 1),)),),
        uneven=uneven,
        split_counts=(2,),
    )
    (stream,) = cluster.view().streams
    assert cluster.grant(stream, 0, pass_=1) == (1,)
    cluster.end(stream)
    assert not cluster.view().finished
    _, again = cluster.view().streams
    assert again.runner == stream.runner
    assert cluster.grant(again) == (1,)
    cluster.end(again)
    assert cluster.view().finished
    cluster.restart()


def test_a_stream_that_is_given_up_after_a_load_leaves_what_it_was_not_granted_to_others() -> None:
    cluster = Cluster()
    cluster.register("w0")
    ended = Position(number=0, cut=Cut(), round=3, marks=(3,), ended=True)
    resumed(
        cluster, ended, Position(number=1, cut=Cut(), round=0, marks=(0,)), guarantee="at_most_once", split_counts=(3,)
    )
    _, open_one = cluster.view().streams
    cluster.grant(open_one)
    cluster.die(open_one.runner)
    cluster.ready()
    assert not cluster.view().finished
    assert cluster.grant(cluster.view().streams[2]) == (1,)
    cluster.end(cluster.view().streams[2])
    assert cluster.view().streams[-1].feed.kind == "tail"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_runs_over_everything_that_a_checkpoint_brought_stand_for_one_worker_each(workers: int) -> None:
    cluster = Cluster()
    cluster.register(*(f"w{i}" for i in range(workers)))
    everything = FeedSpec(kind="dealt", number=0, of=1)
    held = [Position(number, 4, Cut(engine=[4]), marks=(4,), feed=everything) for number in range(2)]
    resumed(cluster, *held, policy="off")
    streams = cluster.view().streams
    assert len(streams) == max(2, workers)
    for stream in streams:
        assert not cluster.view().finished
        cluster.end(stream)
    assert cluster.view().finished


def test_a_pipeline_is_registered_once() -> None:
    cluster = Cluster()
    assert cluster.ask(PutPipeline(id="p", spec=spec())) == Done()
    assert cluster.ask(PutPipeline(id="p", spec=spec(seed=9))) == Done()
    refused = cluster.ask(PutPipeline(id="p", spec=spec(fingerprint="f2")))
    assert isinstance(refused, Refused)
    assert refused.kind == "pipeline_mismatch"
    assert cluster.ask(GetPipeline(id="p")) == Spec(spec=spec(owner="alice"))
    assert isinstance(cluster.ask(GetPipeline(id="q")), NotKnown)
    cluster.restart()


def test_a_line_says_which_consumers_are_silent() -> None:
    cluster = started(consumers=2)
    heard = Beat(job=JOB, client="c1", consumer=1, attempt=cluster.view().attempt, version=0)
    cluster.live(12, beats=[heard])
    (job,) = cluster.ask(ListJobs()).jobs
    assert (job.clients, job.status) == (1, "reading; consumer 0 not heard of for 12 s")


def test_lines_say_what_there_is() -> None:
    cluster = started(workers=2)
    cluster.grant(cluster.view().streams[0])
    (job,) = cluster.ask(ListJobs()).jobs
    assert (job.job, job.owner, job.clients, job.workers, job.streams, job.splits_left, job.status) == (
        JOB,
        "alice",
        1,
        2,
        2,
        9,
        "reading",
    )
    cluster.live(SILENT_AFTER_S + 7)
    (job,) = cluster.ask(ListJobs()).jobs
    assert (job.clients, job.status) == (0, "not heard of for 12 s")
    lines = cluster.ask(ListWorkers()).workers
    assert [(line.worker, line.jobs, line.streams, line.status) for line in lines] == [
        ("w0", (JOB,), 1, "ready"),
        ("w1", (JOB,), 1, "ready"),
    ]
