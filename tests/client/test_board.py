from __future__ import annotations

from penstock.client.link import Board
from tests.wire.test_views import change, stream, view


def test_news_are_the_streams_that_changed_since_they_were_last_taken() -> None:
    board = Board(ask=lambda: None)
    board.replace_view(view(1, stream(0)))
    assert not board.unread
    board.put(change(1, 2, made=(stream(1),)))
    board.put(change(2, 3, made=(stream(2),), finished=True))
    assert board.unread
    news = board.take()
    assert news.streams == (stream(1), stream(2))
    assert news.view == view(3, stream(0), stream(1), stream(2), finished=True)
    assert not board.unread and board.take().streams == ()
    assert board.version == 3
    board.bell.close()


def test_a_missed_change_is_asked_for() -> None:
    asked: list[int] = []
    board = Board(ask=lambda: asked.append(board.version))
    board.replace_view(view(1, stream(0)))
    board.put(change(2, 3))
    assert asked == [1]
    assert not board.unread
    board.put(change(1, 3, made=(stream(1),)))
    assert asked == [1]
    assert board.take().view == view(3, stream(0), stream(1))
    board.bell.close()


def test_a_change_that_comes_before_the_view_of_the_opening_is_asked_for_then() -> None:
    asked: list[int] = []
    board = Board(ask=lambda: asked.append(board.version))
    board.put(change(1, 2, made=(stream(1),)))
    assert asked == []
    board.replace_view(view(1, stream(0)))
    assert asked == [1]
    board.bell.close()


def test_a_refusal_stays_and_what_was_forgotten_is_said_once() -> None:
    board = Board(ask=lambda: None)
    refusal = ValueError("another reader took the place")
    board.put_refusal(refusal)
    board.replace_view(view(1, stream(0)))
    assert board.unread, "an opening does not undo a refusal"
    board.put_forgotten("a new dispatcher")
    assert board.take()[2:] == ("a new dispatcher", refusal)
    assert board.take()[2:] == ("", refusal) and not board.unread
    board.bell.close()
