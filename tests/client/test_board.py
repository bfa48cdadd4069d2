from __future__ import annotations

from penstock.client.board import Board
from tests.wire.test_views import change, stream, view


def test_news_are_the_streams_that_changed_since_they_were_last_taken() -> None:
    board = Board()
    board.replace_view(view(1, stream(0)))
    assert board.take_news() is None
    board.put_change(change(1, 2, made=(stream(1),)))
    board.put_change(change(2, 3, made=(stream(2),), finished=True))
    news = board.take_news()
    assert news is not None
    assert news.streams == (stream(1), stream(2))
    assert news.view == view(3, stream(0), stream(1), stream(2), finished=True)
    assert board.take_news() is None
    assert board.version == 3
    board.bell.close()


def test_a_missed_change_is_asked_for() -> None:
    asked: list[int] = []
    board = Board(ask=lambda: asked.append(board.version))
    board.replace_view(view(1, stream(0)))
    board.put_change(change(2, 3))
    assert asked == [1]
    assert board.take_news() is None
    board.put_change(change(1, 3, made=(stream(1),)))
    assert asked == [1]
    assert board.take_view() == view(3, stream(0), stream(1))
    board.bell.close()


def test_a_change_that_comes_before_the_view_of_the_opening_is_asked_for_then() -> None:
    asked: list[int] = []
    board = Board(ask=lambda: asked.append(board.version))
    board.put_change(change(1, 2, made=(stream(1),)))
    assert asked == []
    board.replace_view(view(1, stream(0)))
    assert asked == [1]
    board.bell.close()
