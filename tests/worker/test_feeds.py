from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from penstock.core.ids import AttemptId, JobName, StreamId
from penstock.runtime.streams import PASS_ENDED, SplitPlace, StreamStopped
from penstock.wire.jobs import Cut, FeedSpec, Leftover, Named
from penstock.wire.messages import Answer, Granted, GrantSplits, Refused, TryAgain
from penstock.worker.feeds import UNKNOWN, GrantedFeed, StaleStream, StreamLedger, fixed_feed


class Grants:
    """Answers at once, from a list, as many at a time as it is told."""

    def __init__(self, ordinals: tuple[int, ...], at_once: int = 1) -> None:
        self.ordinals, self.at_once = ordinals, at_once
        self.asked: list[GrantSplits] = []
        self.answers: list[Answer] = []
        """Said first, before any split is granted."""
        self.plenty = False

    def __call__(self, request: GrantSplits, then: Callable[[Answer], None]) -> None:
        self.asked.append(request)
        if self.answers:
            answer = self.answers.pop(0)
        else:
            at = 0 if request.after is None else self.ordinals.index(request.after) + 1
            answer = Granted(ordinals=self.ordinals[at : at + self.at_once], plenty=self.plenty)
        threading.Thread(target=then, args=(answer,)).start()


def granted(grants: Grants, ledger: StreamLedger | None = None) -> GrantedFeed:
    return GrantedFeed(
        ledger or StreamLedger(), grants, job=JobName("j"), attempt=AttemptId("a"), stream=StreamId("a.0"), binding=3
    )


def read_all(feed: object, after: int | None = None, source: int = 0, pass_: int = 0) -> list[int]:
    read: list[int] = []
    while (after := feed.next_split(source, pass_, after)) is not None:  # type: ignore[attr-defined]
        read.append(after)
    return read


@pytest.mark.parametrize("at_once", [1, 2, 10])
def test_a_granted_feed_gives_the_dispatchers_list(at_once: int) -> None:
    grants = Grants((4, 7, 9, 12), at_once)
    assert read_all(granted(grants)) == [4, 7, 9, 12]
    assert all(request.binding == 3 for request in grants.asked)


@pytest.mark.parametrize("plenty", [True, False])
def test_a_granted_feed_asks_ahead_while_there_are_plenty(plenty: bool) -> None:
    grants = Grants((4, 7, 9))
    grants.plenty = plenty
    feed = granted(grants)
    assert feed.next_split(0, 0, None) == 4
    assert [request.after for request in grants.asked] == ([None, 4] if plenty else [None])


def test_a_granted_feed_asks_for_more_when_half_of_a_grant_is_taken() -> None:
    """Short splits come sixteen at a time: asked with the last of them, the answer would always come too late."""
    grants = Grants(tuple(range(20)), at_once=8)
    grants.plenty = True
    feed = granted(grants)
    asked = []
    after = None
    for _ in range(8):
        after = feed.next_split(0, 0, after)
        asked.append([request.after for request in grants.asked])
    assert asked[:3] == [[None]] * 3 and asked[3] == [None, 7]


def test_a_granted_feed_goes_on_after_the_splits_a_cut_named() -> None:
    grants = Grants((4, 7, 9, 12))
    feed = granted(grants, StreamLedger([Named(0, 0, (7, 9))]))
    assert feed.next_split(0, 0, 7) == 9
    assert feed.next_split(0, 0, 9) == 12
    assert grants.asked[0].after == 9


def test_a_feed_says_when_a_cut_at_the_same_places_may_need_others() -> None:
    grants = Grants((4, 7), at_once=2)
    feed = granted(grants)
    here = [SplitPlace(0, 0, 4)]
    after, seen = None, [(feed.changes, feed.settle([]).named)]
    for _ in range(3):
        after = feed.next_split(0, 0, after)
        seen.append((feed.changes, feed.settle(here).named))
    assert [named for _, named in seen] == [
        (),
        (Named(0, 0, (4,)),),
        (Named(0, 0, (4, 7)),),
        (Named(0, 0, (4, 7), ended=True),),
    ]
    assert sorted({changes for changes, _ in seen}) == [changes for changes, _ in seen]
    assert fixed_feed(FeedSpec("dealt"), [3]).changes == 0


def test_a_list_that_a_cut_names_as_ended_has_no_more() -> None:
    ledger = StreamLedger((Named(1, 0, (), True), Named(0, 0, (5,), True), Named(2, 0, (3,), False)))
    assert ledger.of((1, 0)).following(4) is None
    assert ledger.of((0, 0)).following(None) == 5 and ledger.of((0, 0)).following(5) is None
    assert ledger.of((2, 0)).following(3) == UNKNOWN
    assert ledger.settle([SplitPlace(1, 0, PASS_ENDED)]).named[1] == Named(1, 0, (), True)


def test_a_granted_feed_waits_for_an_answer_that_is_one() -> None:
    grants = Grants((4,))
    grants.answers = [TryAgain(reason="not now")]
    assert granted(grants).next_split(0, 0, None) == 4


def test_a_refused_grant_stops_the_stream() -> None:
    grants = Grants((4,))
    grants.answers = [Refused(reason="binding 3 is over")]
    with pytest.raises(StaleStream) as caught:
        granted(grants).next_split(0, 0, None)
    assert caught.value.reason == "binding 3 is over"


def test_whoever_waits_for_a_split_is_let_go_when_the_stream_is_closed() -> None:
    feed = granted(lambda request, then: None)  # type: ignore[arg-type]
    threading.Timer(0.05, feed.stop).start()
    with pytest.raises(StreamStopped):
        feed.next_split(0, 0, None)


def test_dealt_streams_share_out_every_pass() -> None:
    feeds = [fixed_feed(FeedSpec("dealt", number=j, of=3), (7, 2)) for j in range(3)]
    assert [read_all(feed) for feed in feeds] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [read_all(feed, source=1, pass_=4) for feed in feeds] == [[0], [1], []]


def test_streams_that_read_everything_begin_at_the_first_split() -> None:
    assert read_all(fixed_feed(FeedSpec("dealt", number=2, of=1), (3,))) == [0, 1, 2]


def test_a_listed_stream_reads_its_list() -> None:
    feed = fixed_feed(FeedSpec("listed", listed=((5, 1), (0,))), (6, 1))
    assert (read_all(feed), read_all(feed, source=1)) == ([5, 1], [0])


def test_a_tail_answers_for_one_leftover_after_the_other() -> None:
    leftovers = (
        Leftover(0, Cut(named=(Named(0, 0, (4, 9)),)), FeedSpec("granted")),
        Leftover(1, Cut(), FeedSpec("dealt", number=1, of=2)),
    )
    feed = fixed_feed(FeedSpec("tail", leftovers=leftovers), (6,))
    feed.select(0)
    assert (read_all(feed, after=4), read_all(feed, pass_=1)) == ([9], [])
    feed.select(1)
    assert read_all(feed, after=1) == [3, 5]


def test_what_lies_before_the_lowest_place_is_done() -> None:
    ledger = StreamLedger()
    ledger.of((0, 0)).granted(None, [4, 7, 9, 12])
    for after in (None, 4, 7):
        ledger.of((0, 0)).following(after)
    assert ledger.settle([SplitPlace(0, 0, 9), SplitPlace(0, 0, 7)]) == ((Named(0, 0, (7, 9)),), (Named(0, 0, (4,)),))
    assert ledger.settle([SplitPlace(0, 0, 9)]) == ((Named(0, 0, (9,)),), (Named(0, 0, (7,)),))


def test_a_source_without_a_place_stands_at_its_beginning() -> None:
    ledger = StreamLedger()
    ledger.of((0, 0)).granted(None, [4, 7])
    ledger.of((1, 0)).granted(None, [2])
    for key, after in (((0, 0), None), ((0, 0), 4), ((1, 0), None)):
        ledger.of(key).following(after)
    assert ledger.settle([SplitPlace(0, 0, 7)]).named == (Named(0, 0, (7,)), Named(1, 0, (2,)))
    assert ledger.settle([]).named == (Named(0, 0, (7,)), Named(1, 0, (2,)))


def test_a_pass_before_one_that_has_a_place_is_done_and_one_after_it_is_needed() -> None:
    ledger = StreamLedger()
    for pass_ in range(3):
        ledger.of((0, pass_)).granted(None, [pass_ * 10])
        ledger.of((0, pass_)).following(None)
    assert ledger.settle([SplitPlace(0, 1, 10)]) == ((Named(0, 1, (10,)), Named(0, 2, (20,))), (Named(0, 0, (0,)),))
    assert ledger.settle([SplitPlace(0, 1, PASS_ENDED)]).named == (Named(0, 2, (20,)),)


def test_a_cut_says_which_lists_have_ended() -> None:
    """Opened there, the stream must not be granted more: what was received after their ends would move."""
    ledger = StreamLedger()
    ledger.of((0, 0)).granted(None, [4])
    ledger.of((0, 0)).following(None)
    ledger.of((0, 0)).granted(4, [])
    ledger.of((1, 0)).granted(None, [2, 3])
    ledger.of((1, 0)).following(None)
    assert ledger.settle([SplitPlace(0, 0, 4)]).named == (Named(0, 0, (4,), ended=True), Named(1, 0, (2,)))
    there = [SplitPlace(0, 0, PASS_ENDED), SplitPlace(1, 0, 2)]
    assert ledger.settle(there) == ((Named(0, 0, (), ended=True), Named(1, 0, (2,))), (Named(0, 0, (4,)),))
    ledger.of((1, 0)).following(2)
    ledger.of((1, 0)).granted(3, [])
    named, done = ledger.settle(None)
    assert (named, done) == ((Named(0, 0, (), ended=True), Named(1, 0, (), ended=True)), (Named(1, 0, (2, 3)),))


def test_the_same_grant_twice_changes_nothing() -> None:
    ledger = StreamLedger()
    ledger.of((0, 0)).granted(None, [4])
    ledger.of((0, 0)).granted(None, [4])
    assert ledger.of((0, 0)).following(None) == 4
    ledger.of((0, 0)).granted(4, [])
    assert ledger.of((0, 0)).following(4) is None
