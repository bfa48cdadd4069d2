from __future__ import annotations

from typing import Any

from penstock.core.ids import AttemptId, JobName, RunnerId, StreamId, WorkerId
from penstock.wire.jobs import FeedSpec, HeldView, JobView, StreamMove, StreamView, ViewChange


def stream(number: int, **changes: Any) -> StreamView:
    fields: dict[str, Any] = {"binding": 1, "feed": FeedSpec(kind="granted"), "share": 3}
    return StreamView(stream=StreamId(f"a.{number}"), number=number, **{**fields, **changes})


def view(version: int, *streams: StreamView, attempt: str = "a", **changes: Any) -> JobView:
    return JobView(job=JobName("j"), attempt=AttemptId(attempt), epoch=0, version=version, streams=streams, **changes)


def change(since: int, version: int, *, attempt: str = "a", **changes: Any) -> ViewChange:
    return ViewChange(job=JobName("j"), attempt=AttemptId(attempt), since=since, version=version, **changes)


def test_a_change_moves_a_stream_and_leaves_the_rest_of_it() -> None:
    held = HeldView(view(4, stream(0), stream(1), dropped=("x",)))
    held.take_news()
    move = StreamMove(1, 2, RunnerId("r"), WorkerId("w"), "tcp://r")
    assert held.take_change(change(4, 5, moved=(move,), made=(stream(2),), waiting_for="coffee")) == "taken"
    moved = stream(1, binding=2, runner="r", worker="w", address="tcp://r")
    assert held.view == view(5, stream(0), moved, stream(2), waiting_for="coffee", dropped=("x",))
    assert set(held.take_news()) == {moved, stream(2)}
    assert held.take_news() == ()


def test_a_change_that_builds_on_what_did_not_come_is_missed_and_one_that_came_is_known() -> None:
    held = HeldView(view(4, stream(0)))
    assert held.take_change(change(5, 6, moved=(StreamMove(0, 3),))) == "missed"
    assert held.take_change(change(3, 4, moved=(StreamMove(0, 3),))) == "known"
    assert held.take_change(change(4, 9, attempt="b")) == "known"
    assert held.take_change(change(4, 5, moved=(StreamMove(7, 3),))) == "missed"
    assert held.view == view(4, stream(0))


def test_a_change_from_further_back_fits_too() -> None:
    held = HeldView(view(4, stream(0), stream(1)))
    assert held.take_change(change(1, 6, made=(stream(1, binding=3),), dropped=("y",))) == "taken"
    assert held.view == view(6, stream(0), stream(1, binding=3), dropped=("y",))


def test_a_whole_view_tells_which_streams_are_different() -> None:
    held = HeldView(view(4, stream(0), stream(1)))
    held.take_news()
    assert held.take_view(view(3, stream(0, binding=9))) == "known"
    assert held.take_view(view(8, stream(0), stream(1, ended=True))) == "taken"
    assert held.take_news() == (stream(1, ended=True),)
