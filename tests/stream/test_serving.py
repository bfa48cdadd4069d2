"""A stream as its runner serves it, where each consumer has its output of every round."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import InvalidArgumentError
from penstock.core.ids import StreamId
from penstock.stream.rounds import End, Send, StartRun, StopRun, Terms, Wanted
from penstock.stream.serving import (
    GATHER_IN_STEP_S,
    GATHER_S,
    LONG_LOG,
    PROBE_ALONE_S,
    PROBE_S,
    UNBOUNDED,
    Dealt,
)
from penstock.wire.failures import rebuild_failure
from penstock.wire.frames import Credit, OpenStream, Rounds, StreamEnded, StreamRefused
from penstock.wire.jobs import Cut, FeedSpec, Named
from tests.stream.records import FAILURE, GRANTED, cut_at, delivery, done, failed, opens


def dealt(consumers: int = 1, **more: Any) -> Dealt:
    return Dealt(StreamId("a.0"), delivery(consumers=consumers), now=0.0, **more)


def open_by(served: Dealt, peer: str, message: OpenStream, now: float = 0.0) -> list[Any]:
    served.open(peer.encode(), message, now)
    return served.instructions()


def running(*rounds: int, consumers: int | None = None, **more: Any) -> Dealt:
    """A stream that runs for consumers a, b, ..., opened at these rounds."""
    served = dealt(len(rounds) if consumers is None else consumers)
    for consumer, round_ in enumerate(rounds):
        served.open(
            b"abc"[consumer : consumer + 1], opens(round_, consumer=consumer, opening=consumer + 1, **more), 0.0
        )
    served.instructions()
    assert served.running
    return served


def headers(*readers: tuple[bytes, int], nbytes: int = 100) -> dict[tuple[bytes, int], Rounds]:
    """What is sent to each (peer, opening), without what the served stream says."""
    return {
        key: Rounds(
            stream=StreamId("a.0"), binding=-1, opening=key[1], seq=0, count=1, cut=Cut(), nbytes=nbytes, layout=b""
        )
        for key in readers
    }


def give(
    served: Dealt, after: int, *, nbytes: int = 100, split: tuple[int, ...] = (), run: int = 0
) -> dict[str, Rounds]:
    """Give rounds up to that one to all who want them, of a run that has come to them; return, by peer, what was."""
    run = run or served.runs
    first = min((reader.due for reader in served.readers.values()), default=0)
    wanted = served.wanted(run, first, after - first)
    sizes = headers(*((each.peer, each.opening) for each in wanted), nbytes=nbytes)
    given = served.give(run, after, cut_at(after), done(*split) if split else (), sizes)
    return {peer.decode(): found for (peer, _), found in given.items()}


def refusals(said: list[Any]) -> list[tuple[str, int, bool]]:
    found = [(each.peer.decode(), each.message) for each in said if isinstance(each, Send)]
    return [(peer, m.opening, m.superseded) for peer, m in found if isinstance(m, StreamRefused)]


def ends(said: list[Any]) -> dict[str, StreamEnded]:
    found = [(each.peer.decode(), each.message) for each in said if isinstance(each, Send)]
    return {peer: message for peer, message in found if isinstance(message, StreamEnded)}


def starts(said: list[Any]) -> list[tuple[int, int]]:
    return [(each.number, each.start_round) for each in said if isinstance(each, StartRun)]


# No run


def test_a_run_starts_for_a_reader_with_what_the_binding_says() -> None:
    served = dealt()
    said = open_by(served, "a", opens(3, binding=4, share=2))
    terms = Terms(attempt=opens().attempt, epoch=2, feed=GRANTED, share=2, binding=4)
    assert said == [StartRun(1, terms, cut_at(3), 3)]
    assert (served.running, served.binding, served.runs) == (True, 4, 1)
    assert served.current(1) is not None and served.current(0) is None


def test_nothing_is_known_of_a_stream_that_nobody_opened() -> None:
    served = dealt()
    assert (served.running, served.binding, served.runs) == (False, -1, 0)
    assert served.current(0) is None and not served.uses_slabs and served.tick(100.0) == []


def test_from_the_beginning_a_run_starts_for_the_first_reader() -> None:
    assert starts(open_by(dealt(2), "a", opens(0))) == [(1, 0)]


@pytest.mark.parametrize(
    "message", [opens(2), opens(0, cut=Cut([0])), opens(2, cut=Cut(), cut_round=0), opens(2, cut=Cut(), cut_round=2)]
)
def test_elsewhere_a_run_waits_until_all_readers_are_there(message: OpenStream) -> None:
    served = dealt(2)
    assert open_by(served, "a", message) == [] and not served.running
    assert starts(open_by(served, "b", opens(7, consumer=1))) == [(1, message.cut_round)]


def test_a_second_opening_of_one_reader_does_not_make_two_of_it() -> None:
    served = dealt(2)
    open_by(served, "a", opens(2, opening=1))
    assert open_by(served, "a", opens(2, opening=2)) == []
    assert starts(open_by(served, "b", opens(2, consumer=1))) == [(1, 2)]


def test_replicas_of_one_consumer_are_one_seat() -> None:
    served = dealt(2)
    assert open_by(served, "a", opens(2)) == open_by(served, "b", opens(2, replica=1)) == []
    assert len(served.readers) == 2


@pytest.mark.parametrize(("makes_rounds", "wait_s"), [(False, GATHER_S), (True, GATHER_IN_STEP_S)])
def test_after_a_moment_a_run_starts_for_those_who_came(makes_rounds: bool, wait_s: float) -> None:
    served = dealt(3, makes_rounds=makes_rounds)
    open_by(served, "a", opens(6), now=5.0)
    open_by(served, "b", opens(4, consumer=1), now=5.0 + wait_s / 2)
    served.tick(5.0 + wait_s - 0.01)
    assert served.instructions() == []
    served.tick(5.0 + wait_s)
    assert starts(served.instructions()) == [(1, 4)]
    served.tick(9.0)
    assert served.instructions() == []


def test_a_moment_is_not_waited_for_those_who_left() -> None:
    served = dealt(2)
    open_by(served, "a", opens(6))
    served.close_reader(b"a", None, 0.5)
    served.tick(5.0)
    assert served.instructions() == []
    open_by(served, "a", opens(6, opening=2), now=5.0)
    served.tick(5.5)
    assert served.instructions() == [], "a moment begins with the first of them"


# Running


def test_a_run_starts_at_the_lowest_cut() -> None:
    served = dealt(3)
    open_by(served, "a", opens(8))
    open_by(served, "b", opens(9, consumer=1, cut=cut_at(5), cut_round=5))
    (start,) = open_by(served, "c", opens(6, consumer=2))
    assert (start.start, start.start_round) == (cut_at(5), 5)


def test_a_reader_that_comes_to_what_is_next_joins() -> None:
    served = running(0, consumers=2)
    give(served, 4)
    assert open_by(served, "b", opens(4, consumer=1)) == []
    assert open_by(served, "b", opens(6, consumer=1, opening=2)) == []
    assert served.runs == 1


def test_a_reader_that_needs_earlier_rounds_makes_the_run_start_lower() -> None:
    served = running(0, consumers=2)
    give(served, 4)
    said = open_by(served, "b", opens(3, consumer=1))
    assert said[0] == StopRun(1) and starts(said) == [(2, 3)]
    assert served.wanted(1, 4, 1) == [] and served.room(1) is None, "what an abandoned run makes is nobody's"


def test_a_reader_with_a_lower_cut_makes_the_run_start_lower() -> None:
    """The run would not know of splits that were done between that cut and its beginning."""
    served = running(5, consumers=1)
    said = open_by(served, "a", opens(7, opening=2, cut=cut_at(4), cut_round=4))
    assert starts(said) == [(2, 4)]
    served = running(5, consumers=1)
    assert open_by(served, "a", opens(5, opening=2)) == []


def test_a_reader_that_is_behind_goes_first_when_the_run_starts_again() -> None:
    served = running(0, 0)
    give(served, 6)
    said = open_by(served, "b", opens(2, consumer=1, opening=9))
    assert starts(said) == [(2, 2)]
    assert [each.peer for each in served.wanted(2, 2, 4)] == [b"b"]
    assert [each.first for each in served.wanted(2, 6, 1)] == [6], "the other waits until the run is there"


def test_the_last_reader_takes_the_run_along() -> None:
    served = running(0, 0)
    served.close_reader(b"a", 1, 0.0)
    assert served.instructions() == [] and served.running
    served.close_reader(b"b", 7, 0.0)
    served.close_reader(b"x", None, 0.0)
    assert served.running, "another opening's, and another's, say nothing"
    served.close_reader(b"b", None, 0.0)
    assert served.instructions() == [StopRun(1)] and not served.running


def test_one_that_is_gone_takes_all_its_openings_along() -> None:
    served = dealt(2)
    open_by(served, "a", opens(0))
    open_by(served, "a", opens(0, consumer=1, opening=2))
    served.close_reader(b"a", None, 0.0)
    assert served.readers == {} and not served.running


# Who needs what


def test_readers_are_given_what_they_need_from_their_own_round_on() -> None:
    served = running(0, 2, 7)
    assert served.wanted(served.runs, 0, 3) == [
        Wanted(b"a", 1, 0, 0, False, True),
        Wanted(b"b", 2, 1, 2, False, True),
    ]
    assert served.wanted(served.runs, 0, 2) == [Wanted(b"a", 1, 0, 0, False, True)]
    assert served.wanted(served.runs, 3, 4) == [], "rounds that nobody needs any more, or yet"


def test_replicas_get_the_same() -> None:
    served = running(0, slab=True)
    open_by(served, "b", opens(0, replica=1))
    wanted = served.wanted(1, 0, 2)
    assert wanted is not None
    assert [(each.peer, each.seat, each.slab, each.alone) for each in wanted] == [
        (b"a", 0, True, False),
        (b"b", 0, False, False),
    ]
    assert served.uses_slabs


def test_what_was_given_is_not_wanted_again() -> None:
    served = running(0, 0)
    assert [*give(served, 3)] == ["a", "b"]
    assert served.wanted(1, 0, 3) == []
    assert [each.first for each in served.wanted(1, 3, 1)] == [3, 3]


def test_a_reader_that_leaves_between_wanting_and_giving_is_given_nothing() -> None:
    served = running(0, 0)
    sizes = headers((b"a", 1), (b"b", 2), nbytes=10)
    served.close_reader(b"b", None, 0.0)
    assert [*served.give(1, 3, cut_at(3), (), sizes)] == [(b"a", 1)]


def test_a_reader_that_comes_between_wanting_and_giving_is_wanting_still() -> None:
    served = running(0, consumers=2)
    open_by(served, "b", opens(0, consumer=1))
    assert [*served.give(1, 0, cut_at(0), (), {})] == []
    assert [each.peer for each in served.wanted(1, 0, 3)] == [b"a", b"b"]


def test_a_newer_opening_of_the_same_peer_is_not_given_the_olders_frame() -> None:
    served = running(0)
    sizes = headers((b"a", 1), nbytes=10)
    open_by(served, "a", opens(0, opening=2))
    assert served.give(1, 3, cut_at(3), (), sizes) == {}
    assert served.readers["0", 0].due == 0


def test_a_frame_says_the_binding_and_counts_as_sent() -> None:
    served = running(0, binding=4)
    header = give(served, 2, nbytes=70)["a"]
    assert (header.binding, header.done, header.mixes) == (4, (), 0)
    reader = served.readers["0", 0]
    assert (reader.due, reader.cut_round, reader.cut, reader.sent_bytes) == (2, 2, cut_at(2), 70)
    give(served, 3, nbytes=70)
    assert reader.sent_bytes == 140


# Credit


def test_a_round_is_made_only_while_every_reader_that_needs_it_has_credit() -> None:
    served = running(0, 0, 5)
    assert served.room(1) == 1000
    served.hear(b"b", Credit(stream=served.id, opening=2, credit=1200), 0.0)
    give(served, 1, nbytes=400)
    assert served.room(1) == 600, "the least that any has"
    give(served, 2, nbytes=600)
    assert served.room(1) is None
    served.hear(b"a", Credit(stream=served.id, opening=9, credit=5000), 0.0)
    assert served.room(1) is None, "another opening's"
    served.hear(b"a", Credit(stream=served.id, opening=1, credit=1001), 0.0)
    assert served.room(1) == 1, "one frame may exceed it"
    served.hear(b"a", Credit(stream=served.id, opening=1, credit=1000), 0.0)
    assert served.room(1) == 1, "credit is a position: an older word takes nothing back"


def test_a_reader_that_is_ahead_of_the_run_holds_nothing_up() -> None:
    served = running(0, 3, credit=100)
    served.hear(b"a", Credit(stream=served.id, opening=1, credit=10_000), 0.0)
    served.readers["0", 1].give_cut(3, cut_at(3), 100)
    assert served.room(1) == 10_000
    give(served, 3, nbytes=10)
    assert served.room(1) is None


def test_where_nobody_waits_for_the_next_rounds_much_is_made() -> None:
    served = running(0, consumers=2)
    served.close_reader(b"a", None, 0.0)
    open_by(served, "b", opens(0, consumer=1))
    open_by(served, "b", opens(9, consumer=1, opening=2))
    assert served.room(served.runs) == UNBOUNDED


def test_a_reader_that_holds_others_up_is_looked_after_now_and_then() -> None:
    served = running(0, 0)
    served.hear(b"b", Credit(stream=served.id, opening=2, credit=5000), 0.0)
    assert served.tick(10.0) == []
    give(served, 1, nbytes=1000)
    assert served.tick(10.0 + PROBE_S - 0.01) == []
    assert served.tick(10.0 + PROBE_S) == [b"a"]
    assert served.tick(10.0 + PROBE_S + 0.1) == []
    alone = running(0)
    give(alone, 1, nbytes=1000)
    assert alone.tick(PROBE_ALONE_S - 0.01) == [] and alone.tick(PROBE_ALONE_S) == [b"a"]


def test_a_reader_that_is_given_nothing_is_looked_after_too() -> None:
    """A run that makes nothing would go on for one that is gone, and an ended stream be kept for it."""
    served = running(0)
    assert served.tick(PROBE_ALONE_S) == []
    give(served, 1, nbytes=10)
    assert served.tick(2 * PROBE_ALONE_S) == []
    assert served.tick(3 * PROBE_ALONE_S) == [b"a"]


def test_a_stream_is_idle_since_its_last_reader() -> None:
    served = running(0)
    served.tick(4.0)
    served.close_reader(b"a", None, 5.0)
    served.tick(6.0)
    assert served.idle_since == 4.0


# Incarnations


def test_a_lower_binding_is_refused() -> None:
    served = running(0, binding=3)
    (refusal,) = open_by(served, "b", opens(0, binding=2, opening=7))
    assert refusal == Send(
        b"b",
        StreamRefused(stream=StreamId("a.0"), opening=7, reason="binding 2 is over, the stream has binding 3 by now"),
    )
    assert served.running


def test_a_binding_below_zero_is_none() -> None:
    served = dealt()
    (refusal,) = open_by(served, "a", opens(0, binding=-1))
    assert refusal.message.reason == "there is no binding -1"
    assert not served.running


def test_a_higher_binding_ends_the_run_and_all_older_readers() -> None:
    served = running(0, 0, binding=3)
    said = open_by(served, "a", opens(4, binding=4, opening=9))
    assert said[0] == StopRun(1) and refusals(said) == [("a", 1, False), ("b", 2, False)]
    assert served.binding == 4 and [reader.opening for reader in served.readers.values()] == [9]
    assert starts(said) == [], "all of the new binding are waited for"
    assert starts(open_by(served, "b", opens(4, consumer=1, binding=4, opening=10))) == [(2, 4)]


def test_of_one_readers_openings_the_highest_counts() -> None:
    served = running(0)
    assert refusals(open_by(served, "a", opens(0, opening=0))) == [("a", 0, False)]
    assert open_by(served, "a", opens(0, opening=1)) == [], "said twice"
    assert open_by(served, "a", opens(0, opening=2)) == [], "its own older opening is not told"
    assert served.readers["0", 0].opening == 2


def test_who_had_the_place_is_told() -> None:
    served = running(0)
    assert refusals(open_by(served, "b", opens(0, opening=2))) == [("a", 1, True)]
    assert refusals(open_by(served, "c", opens(0, opening=2))) == [("b", 2, True)]
    assert [reader.peer for reader in served.readers.values()] == [b"c"]


def test_an_opening_number_of_an_older_binding_says_nothing() -> None:
    served = running(0)
    assert refusals(open_by(served, "a", opens(0, binding=2, opening=0))) == [("a", 1, False)]
    assert served.readers["0", 0].opening == 0


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (opens(0, consumer=2), "there is no consumer 2: the job has 2"),
        (opens(0, consumer=-1), "there is no consumer -1"),
        (opens(3, cut_round=4), "the cut is that of round 4, after round 3"),
    ],
)
def test_what_makes_no_sense_is_refused(message: OpenStream, says: str) -> None:
    (refusal,) = open_by(dealt(2), "a", message)
    assert says in refusal.message.reason


def test_any_consumer_may_read_a_stream_of_one_output_a_round() -> None:
    served = Dealt(StreamId("a.0"), delivery(consumers=4, uneven="allow"), now=0.0)
    assert starts(open_by(served, "a", opens(3, consumer=2))) == [(1, 3)]
    assert [*served.readers] == [("0", 0)]


def test_a_closed_stream_refuses_everybody() -> None:
    served = running(0)
    served.close(0.0)
    assert served.instructions() == [StopRun(1)] and served.readers == {}
    (refusal,) = open_by(served, "b", opens(0))
    assert refusal.message.reason == "this worker is closing"


def test_a_binding_the_dispatcher_does_not_know_refuses_its_readers() -> None:
    served = running(0, 0)
    served.stale(7, "old", 0.0)
    assert served.instructions() == [] and served.running
    served.stale(1, "old", 0.0)
    said = served.instructions()
    assert said[0] == StopRun(1) and refusals(said) == [("a", 1, False), ("b", 2, False)]
    assert served.readers == {} and not served.running


# Ends


def test_an_end_is_told_to_all_with_what_is_done() -> None:
    served = running(0, 0)
    give(served, 2, split=(4,))
    served.ended(7, End(2, cut_at(2), False), ())
    assert served.instructions() == [], "another run's"
    served.ended(1, End(2, cut_at(2, 8), True), done(5))
    found = ends(served.instructions())
    assert [*found] == ["a", "b"]
    assert found["a"] == StreamEnded(
        stream=StreamId("a.0"), binding=1, opening=1, seq=2, cut=cut_at(2, 8), done=done(5), leftover=True
    )
    assert found["b"].opening == 2 and not served.running


def test_one_that_opens_after_the_end_is_told_it() -> None:
    served = running(0)
    give(served, 2)
    served.ended(1, End(2, cut_at(2), False), ())
    served.instructions()
    said = open_by(served, "a", opens(2, opening=2))
    assert ends(said)["a"].opening == 2 and starts(said) == []


def test_one_that_opens_after_the_end_and_needs_rounds_makes_the_run_start_again() -> None:
    served = running(0)
    give(served, 2)
    served.ended(1, End(2, cut_at(2), False), ())
    served.instructions()
    said = open_by(served, "a", opens(1, opening=2))
    assert ends(said) == {} and starts(said) == [(2, 1)] and served.running


def test_an_ended_run_goes_with_its_last_reader() -> None:
    served = running(0)
    served.ended(1, End(0, cut_at(0), False), ())
    served.close_reader(b"a", None, 0.0)
    assert starts(open_by(served, "a", opens(0, opening=2))) == [(2, 0)]


# Failures


def test_a_failure_is_told_to_all_at_the_round_each_waits_for() -> None:
    served = running(0, 2)
    served.failed(7, FAILURE)
    assert served.instructions() == []
    served.failed(1, FAILURE)
    told = [Send(b"a", failed(0, opening=1)), Send(b"b", failed(2, opening=2))]
    assert served.instructions() == told
    assert not served.running


def test_after_a_failure_a_reader_that_opens_again_makes_a_run_start() -> None:
    served = running(0)
    give(served, 2)
    served.failed(1, FAILURE)
    served.instructions()
    assert starts(open_by(served, "a", opens(2, opening=2))) == [(2, 2)]


# What is done


def test_a_reader_is_told_once_what_is_done() -> None:
    served = running(0, consumers=2)
    assert give(served, 2, split=(4, 5))["a"].done == done(4, 5)
    assert give(served, 3)["a"].done == ()
    open_by(served, "b", opens(3, consumer=1))
    found = give(served, 4, split=(6,))
    assert found["a"].done == done(6)
    assert found["b"].done == (*done(4, 5), *done(6)), "it came with an older cut, perhaps"


def test_all_is_told_anew_when_a_run_starts_again() -> None:
    served = running(0)
    give(served, 2, split=(4,))
    open_by(served, "a", opens(1, opening=2))
    assert give(served, 2, split=(4,))["a"].done == done(4)


def entries(*splits: int) -> tuple[Named, ...]:
    """A log of so many entries."""
    return tuple(named for split in splits for named in done(split))


def test_a_log_that_everybody_knows_is_forgotten_when_it_is_long() -> None:
    served = running(0, 0, consumers=3)
    served.give(1, 1, cut_at(1), entries(*range(LONG_LOG - 1)), headers((b"a", 1), (b"b", 2), nbytes=10))
    assert open_by(served, "c", opens(1, consumer=2, cut=cut_at(0), cut_round=0)) == [], "all is known since the start"
    assert give(served, 2, split=(9000,))["c"].done == entries(*range(LONG_LOG - 1), 9000)
    said = open_by(served, "c", opens(2, consumer=2, opening=4, cut=cut_at(1), cut_round=1))
    assert starts(said) == [(2, 1)], "what was done since that cut is forgotten"


def test_after_a_log_was_forgotten_readers_are_told_what_is_new() -> None:
    served = running(0)
    assert len(give(served, 1, split=())["a"].done) == 0
    served.give(1, 2, cut_at(2), entries(*range(LONG_LOG)), headers((b"a", 1), nbytes=10))
    assert [give(served, after, split=(after,))["a"].done for after in (3, 4)] == [done(3), done(4)]


def test_a_log_is_kept_for_one_that_has_not_been_told() -> None:
    served = running(0, 1)
    wanted = headers((b"a", 1), nbytes=10)
    served.give(1, 1, cut_at(1), entries(*range(LONG_LOG)), wanted)
    assert open_by(served, "b", opens(1, consumer=1, opening=4, cut=cut_at(0), cut_round=0)) == []


# Weights

ONE, TWO = (0, (1.0, 1.0)), (4, (1.0, 3.0))


def test_a_run_mixes_by_what_its_readers_say() -> None:
    (start,) = open_by(dealt(), "a", opens(0, mixes=(ONE,)))
    assert start.mixes == (ONE,)


def test_one_consumers_word_about_weights_is_the_last() -> None:
    served = running(0, mixes=(ONE,))
    give(served, 4)
    said = open_by(served, "a", opens(4, opening=2, mixes=(TWO,)))
    assert [each.mixes for each in said if isinstance(each, StartRun)] == [(TWO,)]
    assert open_by(served, "a", opens(4, opening=3, mixes=(TWO,))) == [], "nothing changed"
    assert starts(open_by(served, "a", opens(4, opening=4))) == [(3, 4)], "and none is one too"


def test_a_change_that_one_of_several_knows_starts_the_run_again_with_it() -> None:
    served = dealt(2)
    open_by(served, "a", opens(0, mixes=(ONE,)))
    open_by(served, "b", opens(0, consumer=1, mixes=(ONE,)))
    said = open_by(served, "a", opens(4, opening=3, mixes=(ONE, TWO)))
    assert [(each.mixes, each.start_round) for each in said if isinstance(each, StartRun)] == [((ONE, TWO), 0)]
    assert open_by(served, "b", opens(0, consumer=1, opening=4, mixes=(ONE,))) == [], "one that knows fewer joins"


def test_a_frame_says_how_many_changes_count_before_it() -> None:
    served = running(0, mixes=(ONE, TWO))
    assert [give(served, after)["a"].mixes for after in (3, 4, 5)] == [1, 1, 2]


def test_consumers_that_changed_weights_differently_are_told() -> None:
    served = dealt(2)
    open_by(served, "a", opens(0, mixes=(ONE, TWO)))
    other = (4, (5.0, 1.0))
    (told,) = open_by(served, "b", opens(2, consumer=1, opening=6, mixes=(ONE, other)))
    message = told.message
    assert (told.peer, message.opening, message.binding, message.seq) == (b"b", 6, 1, 2)
    error = rebuild_failure(message.failure)
    assert isinstance(error, InvalidArgumentError)
    assert "to [5.0, 1.0] at round 4 of a stream here, to [1.0, 3.0] at round 4 elsewhere" in str(error)
    assert len(served.readers) == 1


def test_a_run_starts_at_a_cut_that_was_made_with_all_changes_before_it() -> None:
    """One that was not told yet may stand behind the change, at a cut that was made without it."""
    served = dealt(2)
    open_by(served, "a", opens(6, mixes=(ONE,)))
    said = open_by(served, "b", opens(7, consumer=1, mixes=(ONE, TWO), cut=cut_at(7)))
    assert starts(said) == [(1, 7)]
    served = dealt(2)
    open_by(served, "a", opens(6, mixes=(ONE,), cut=cut_at(4, since=2)))
    assert starts(open_by(served, "b", opens(7, consumer=1, mixes=(ONE, TWO)))) == [(1, 6)], "made until round 4"
    served = dealt(2)
    open_by(served, "a", opens(6, mixes=(ONE,), cut=cut_at(5, since=1)))
    assert starts(open_by(served, "b", opens(7, consumer=1, mixes=(ONE, TWO)))) == [(1, 7)]


def test_where_no_cut_was_made_with_all_changes_the_lowest_does() -> None:
    served = dealt(3)
    for number, peer in enumerate("ab"):
        open_by(served, peer, opens(6 + number, consumer=number, mixes=(ONE, TWO)))
    served.close_reader(b"a", None, 0.0)
    open_by(served, "a", opens(6, opening=9, mixes=(ONE,)))
    open_by(served, "b", opens(7, consumer=1, opening=9, mixes=(ONE,)))
    assert starts(open_by(served, "c", opens(8, consumer=2, mixes=(ONE,)))) == [(1, 6)]


def test_changes_are_forgotten_with_the_last_reader() -> None:
    served = running(0, mixes=(ONE,), consumers=2)
    served.close_reader(b"a", None, 0.0)
    said = open_by(served, "a", opens(0, opening=2, mixes=(TWO,)))
    assert [each.mixes for each in said if isinstance(each, StartRun)] == [(TWO,)]


def test_feeds_of_the_binding_reach_the_run() -> None:
    feed = FeedSpec(kind="dealt", number=1, of=3)
    (start,) = open_by(dealt(), "a", opens(0, feed=feed))
    assert start.terms.feed == feed
