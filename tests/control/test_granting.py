from __future__ import annotations

from heapq import heappop, heappush

import pytest

from penstock.wire.jobs import Cut, Named, Position, Ranges, Resume
from penstock.wire.messages import NotKnown, Rebind, Refused
from tests.control.cluster import JOB, Cluster, spec, started


def test_splits_are_granted_in_order_and_to_one_stream_each() -> None:
    cluster = started(workers=2)
    one, other = cluster.view().streams
    got: list[int] = []
    ends: dict[str, int | None] = {one.stream: None, other.stream: None}
    for stream in (one, other, one, one, other, one, other, one, one, one):
        granted = cluster.grant(stream, ends[stream.stream])
        got.extend(granted)
        ends[stream.stream] = granted[-1]
    assert got == list(range(10))
    assert cluster.grant(one, ends[one.stream]) == ()


def test_the_same_question_has_the_same_answer() -> None:
    cluster = started(workers=2)
    one, other = cluster.view().streams
    first = cluster.grant(one)
    cluster.grant(other)
    second = cluster.grant(one, first[-1])
    for _ in range(2):
        assert cluster.grant(one) == (*first, *second)
        assert cluster.grant(one, first[-1]) == second
    assert cluster.decide(cluster.granting(one, first[0])).events == ()


def test_splits_that_a_host_keeps_are_granted_to_it_first() -> None:
    cluster = started(workers=2)
    one, other = cluster.view().streams
    assert cluster.grant(one, preferred=(7, 4, 99, -1), seconds_per_split=0.2) == (7, 4)
    assert cluster.grant(other, preferred=(4,)) == (0,), "what another has is not to be had: the next in order"
    assert cluster.grant(one, 4, preferred=(4, 9)) == (9,)
    assert cluster.grant(one, 4, preferred=(1,)) == (9,), "asked again, the same"
    rest = [cluster.grant(other, 0)[0]]
    while more := cluster.grant(other, rest[-1]):
        rest.extend(more)
    assert rest == [1, 2, 3, 5, 6, 8]
    cluster.restart()
    assert cluster.grant(one) == (7, 4, 9)


def test_a_pass_that_is_through_stays_through() -> None:
    cluster = started(split_counts=(1,))
    (stream,) = cluster.view().streams
    assert cluster.grant(stream) == (0,)
    assert cluster.grant(stream, 0) == cluster.grant(stream, 0) == ()
    assert cluster.grant(stream, pass_=1) == (0,)


@pytest.mark.parametrize(
    ("seconds_per_split", "count", "streams", "granted"),
    [(0.0, 1000, 1, 1), (0.5, 1000, 1, 1), (0.1, 1000, 1, 5), (0.001, 1000, 1, 128), (0.02, 9, 2, 2), (0.001, 1, 2, 1)],
)
def test_short_splits_are_granted_several_at_a_time_and_fewer_toward_the_end(
    seconds_per_split: float, count: int, streams: int, granted: int
) -> None:
    cluster = started(workers=streams, split_counts=(count,))
    stream = cluster.view().streams[0]
    assert len(cluster.grant(stream, seconds_per_split=seconds_per_split)) == granted


@pytest.mark.parametrize(("splits", "split_s"), [(190, 0.316), (500, 0.12), (210, 0.29), (4_000, 0.01)])
def test_eight_streams_end_within_a_split_of_each_other(splits: int, split_s: float) -> None:
    """Each asks ahead as `worker.feeds` does, and an answer takes 20 ms: what is held at the end others lack."""
    streams, answer_s = 8, 0.02
    cluster = started(workers=streams, split_counts=(splits,))
    shown = cluster.view().streams
    held = [0] * streams
    ahead = [False] * streams  # whether what comes next was asked for before it is needed
    last: list[int | None] = [None] * streams
    ended = [0.0] * streams
    waited = 0.0
    turns = [(0.0, number) for number in range(streams)]
    while turns:
        now, number = heappop(turns)
        if not held[number]:
            request = cluster.granting(shown[number], last[number], seconds_per_split=split_s)
            answer = cluster.ask(request)
            if not answer.ordinals:
                ended[number] = now
                continue
            waited += 0.0 if ahead[number] else answer_s
            last[number], held[number] = answer.ordinals[-1], len(answer.ordinals)
            ahead[number] = answer.plenty
        held[number] -= 1
        heappush(turns, (now + split_s, number))
    ideal_s = splits * split_s / streams
    assert max(ended) <= ideal_s + 1.1 * split_s
    assert waited / streams <= 8 * answer_s, "only the last few of each are waited for"


def test_an_older_binding_is_refused() -> None:
    cluster = started(workers=2)
    stale = cluster.view().streams[0]
    cluster.ask(Rebind(job=JOB, attempt="a0-r0", stream=stale.stream, binding=stale.binding, reason="gap"))
    refused = cluster.ask(cluster.granting(stale))
    assert isinstance(refused, Refused)
    assert refused.kind == "stale"
    assert cluster.grant(cluster.view().streams[0]) == (0,)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"after": 3}, "never granted"),
        ({"source": 1}, "no source"),
        ({"stream": "a0-r0.9"}, "no splits are granted"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], answer: str) -> None:
    cluster = started()
    refused = cluster.ask(cluster.granting(cluster.view().streams[0], **changes))
    assert isinstance(refused, Refused)
    assert answer in refused.reason


def test_an_attempt_that_is_no_more_is_not_known() -> None:
    cluster = started()
    stream = cluster.view().streams[0]
    assert isinstance(cluster.ask(cluster.granting(stream, attempt="older")), NotKnown)


def test_after_a_resume_only_what_is_left_is_granted() -> None:
    cluster = Cluster()
    cluster.register("w0")
    cut = Cut(engine=["@", 0, 0, 7, 3], named=(Named(0, 0, (7,)),), share=2)
    ended = Cut(engine=["@", 0, 0, 4, 1], named=(Named(0, 0, (4,)),))
    resume = Resume(
        epoch=0,
        consumers=1,
        streams=(
            Position(number=0, cut=cut, round=5, marks=(5,)),
            Position(number=3, cut=ended, round=2, marks=(2,), ended=True),
        ),
        done=(Ranges(0, 0, ((0, 2), (5, 6))),),
        digest="d",
    )
    cluster.open(resume=resume, spec=spec())
    cluster.ready()
    stream, over = cluster.view().streams
    assert (stream.start, stream.first_round, stream.marks, stream.share) == (cut, 5, (5,), 2)
    assert over.ended
    assert cluster.grant(stream) == (7,)
    got = [7]
    while granted := cluster.grant(stream, got[-1], seconds_per_split=0.001):
        got.extend(granted)
    assert got == [7, 2, 3, 6, 8, 9]
    cluster.restart()


@pytest.mark.parametrize("left", [(Named(0, 0, (0,)), Named(0, 1, (0,))), (Named(0, 0, (0,), ended=True),)])
def test_a_stream_is_granted_nothing_of_a_pass_that_a_rank_has_seen_it_leave(left: tuple[Named, ...]) -> None:
    """Stream 0 is made again from inside pass 0, up to where a rank stands after it, and split 1 went back.

    A split more in pass 0 would move what that rank has received.
    """
    cluster = Cluster()
    cluster.register("w0")
    cluster.register("w1")
    ahead = Cut(engine=["@", 0, 0, 0, 2], named=left)
    resume = Resume(
        epoch=0,
        consumers=2,
        streams=(
            Position(number=0, cut=ahead, round=1, marks=(3, 1)),
            Position(number=1, cut=Cut(named=(Named(0, 0, (2,)),)), round=0, marks=(0, 2)),
        ),
        digest="d",
    )
    described = spec(consumers=2, split_counts=(3,))
    for consumer in (0, 1):
        cluster.open(consumer, resume=resume, spec=described)
    cluster.ready()
    one, other = cluster.view().streams
    assert cluster.grant(one) == (0,)
    assert cluster.grant(one, 0) == ()
    assert cluster.grant(one, pass_=1) == (0,)
    assert cluster.grant(one, 0, pass_=1) == (1,)
    assert cluster.grant(other, 2) == (1,)
    assert cluster.grant(one, 0) == ()
    cluster.restart()


def test_many_short_splits_are_granted_without_looking_at_all_of_them() -> None:
    cluster = started(split_counts=(1_000_000,))
    stream = cluster.view().streams[0]
    decision = cluster.decide(cluster.granting(stream, seconds_per_split=0.001))
    assert len(decision.events) == 1
    assert cluster.state.jobs[JOB].iterations["a0-r0"].ledger.lists == {}
