"""A stream that trainers share: one run, a window, and a place for each of them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.ids import AttemptId, StreamId
from penstock.stream.rounds import FRAME_BYTES, End, Send, StartRun, StopRun
from penstock.stream.serving import PROBE_S
from penstock.stream.sharing import FRAMES_A_WINDOW, GATHER_SHARED_S, Shared
from penstock.stream.window import GATHER_RANKS_S, Entry, RankReader
from penstock.wire.frames import Credit, StreamEnded, StreamRefused
from penstock.wire.jobs import Cut
from tests.stream.records import FAILURE, cut_at, delivery, opens

ROUND_BYTES = 100
SHARE = FRAMES_A_WINDOW * ROUND_BYTES
TIMEOUT_S = 30.0
NEXT = AttemptId("another epoch's")


class Stream:
    """A shared stream with hands: a run that makes a round when it may, and peers that are sent what they are offered.

    A trainer's rank is opened by a peer of its own, "a" for trainer 1, "b" for trainer 2; rank 1 of those is "A", "B".
    """

    def __init__(self, *, waits: bool = False, trainers: int = 0, consumers: int = 1) -> None:
        kind = "wait" if waits else "skip"
        sharing = delivery(sharing=kind, trainers=trainers or None, trainer_timeout_s=TIMEOUT_S, consumers=consumers)
        self.served = Shared(StreamId("a.0"), sharing, now=0.0)
        self.starts: list[int] = []
        self.ended: dict[str, StreamEnded] = {}
        self.refused: list[str] = []
        self._openings = 0
        self._next = 0

    def open(self, peer: str, round_: int = 0, *, fresh: bool | None = None, now: float = 0.0, **more: Any) -> None:
        self._openings += 1
        message = opens(
            round_,
            opening=self._openings,
            consumer=int(peer.isupper()),
            fresh=round_ == 0 if fresh is None else fresh,
            trainer=f"trainer {peer.lower()}",
            **more,
        )
        self.served.open(peer.encode(), message, now)
        self._obey()

    def reader(self, peer: str) -> RankReader:
        return next(reader for reader in self.served.readers.values() if reader.peer == peer.encode())

    def heard(self, peer: str, taken: int = -1, credit: int = 0, now: float = 0.0) -> None:
        said = Credit(stream=self.served.id, opening=self.reader(peer).opening, credit=credit, round=taken)
        self.served.hear(peer.encode(), said, now)

    def lose(self, peer: str, now: float = 0.0, **more: Any) -> None:
        self.served.close_reader(peer.encode(), None, now, **more)
        self._obey()

    def tick(self, now: float) -> list[bytes]:
        found = self.served.tick(now)
        self._obey()
        return found

    def _obey(self) -> None:
        for each in self.served.instructions():
            if isinstance(each, StartRun):
                self.starts.append(each.start_round)
                self._next = each.start_round
            elif isinstance(each, Send) and isinstance(each.message, StreamEnded):
                self.ended[each.peer.decode()] = each.message
            elif isinstance(each, Send) and isinstance(each.message, StreamRefused):
                self.refused.append(each.peer.decode())

    def make(self, most: int = 1, *, size: int = 1) -> int:
        """Let the run make rounds as long as it may; return how many."""
        run, made = self.served.runs, 0
        while made < most and self.served.room(run, SHARE) is not None:
            entry = Entry(self._next, size, cut_at(self._next + size), size * ROUND_BYTES)
            self.served.make_room(entry.nbytes, SHARE)
            assert self.served.add(run, entry)
            self._next += size
            made += size
        return made

    def sends(self, peer: str, most: int = 100) -> list[int]:
        """Send a reader what it is offered; return the rounds that its trainer has not had."""
        reader = self.reader(peer)
        found: list[int] = []
        while most and (offer := self.served.offer(reader)) is not None:
            entry = offer.entry
            assert entry.seq - offer.skipped <= reader.due < entry.after, "rounds without a word would be a loss"
            found += range(max(reader.due, entry.seq + offer.had), entry.after)
            self.served.sent(reader, offer, entry.nbytes)
            most -= 1
        return found

    def reads(self, peer: str, rounds: int, **more: Any) -> list[int]:
        """Have rounds made and sent to a trainer's rank, which takes them."""
        found: list[int] = []
        for _ in range(rounds):
            self.make()
            found += self.sends(peer, 1)
            self.heard(peer, self.reader(peer).due, self.reader(peer).sent_bytes + 1000, **more)
        return found

    def read_together(self, peers: str, rounds: int) -> None:
        """Have each round made, and sent to all of these, who take it."""
        for _ in range(rounds):
            self.make()
            for peer in peers:
                self.sends(peer, 1)
                self.heard(peer, self.reader(peer).due, self.reader(peer).sent_bytes + 1000)

    def end(self) -> None:
        at = self._next
        self.served.ended(self.served.runs, End(at, cut_at(at), False), ())
        self._obey()

    def told(self) -> dict[str, StreamEnded]:
        self.served.tell_ends()
        self._obey()
        return self.ended


# Making


def test_a_run_starts_at_the_beginning_for_the_first_that_comes() -> None:
    stream = Stream()
    stream.open("a")
    assert stream.starts == [0] and stream.served.running


def test_a_round_is_made_only_for_a_trainer_that_is_through_and_has_credit() -> None:
    stream = Stream()
    stream.open("a", credit=2 * ROUND_BYTES)
    assert stream.make() == 1 and stream.sends("a", 0) == []
    assert stream.served.offer(stream.reader("a")) is not None and stream.make() == 0, "it is not through"
    assert stream.sends("a") == [0]
    assert stream.make() == 1 and stream.sends("a") == [1]
    assert stream.make() == 0, "no credit"
    stream.heard("a", 1, 2 * ROUND_BYTES + 1)
    assert stream.make() == 1


def test_a_frame_is_an_eighth_of_the_window_and_never_too_large() -> None:
    served = Stream().served
    assert [served.frame_bytes(share) for share in (SHARE, 1, 1 << 30)] == [ROUND_BYTES, 1, FRAME_BYTES]
    stream = Stream()
    stream.open("a")
    assert stream.served.room(1, SHARE) == ROUND_BYTES
    assert stream.served.room(2, SHARE) is None and not stream.served.add(2, Entry(0, 1, cut_at(1), 1))


def test_rounds_are_made_once_for_all() -> None:
    stream = Stream()
    stream.open("a")
    stream.open("b")
    assert stream.reads("a", 3) == [0, 1, 2]
    offer = stream.served.offer(stream.reader("b"))
    assert offer is not None and offer.shared and offer.entry.made_for == "trainer a"
    assert stream.sends("b") == [0, 1, 2] and stream.starts == [0]
    stream.make()
    offer = stream.served.offer(stream.reader("a"))
    assert offer is not None and not offer.shared, "it came first"


# Skip


def test_the_oldest_rounds_go_whoever_has_not_read_them() -> None:
    stream = Stream()
    stream.open("a")
    stream.open("b")
    stream.sends("b")
    assert stream.reads("a", 12) == [*range(12)]
    assert stream.served.window.nbytes == SHARE
    assert len(stream.served.evicted()) == 4 and stream.served.evicted() == []
    offer = stream.served.offer(stream.reader("b"))
    assert offer is not None and (offer.entry.seq, offer.skipped, offer.had) == (4, 4, 0)
    assert stream.sends("b") == [*range(4, 12)]


def test_a_trainer_that_comes_late_begins_at_the_oldest_round_there_is() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 12)
    stream.open("b")
    assert stream.sends("b", 2) == [4, 5]
    stream.reads("a", 1)
    assert stream.sends("b", 1) == [6]


def test_a_trainer_that_comes_back_with_nothing_begins_after_what_it_was_sent() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 3)
    stream.open("b")
    stream.sends("b", 2)
    stream.lose("b")
    stream.open("b", life=1)
    assert stream.sends("b") == [2]


def test_a_trainer_that_says_what_it_took_is_given_the_rest_again() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 4)
    stream.open("b")
    stream.sends("b")
    stream.lose("b", taken=1, leaving=True)
    stream.open("b", life=1)
    assert stream.sends("b") == [1, 2, 3]


def test_a_trainer_with_a_state_of_nothing_begins_where_it_first_began() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 10)
    stream.open("b")
    assert stream.sends("b", 2) == [2, 3]
    stream.lose("b")
    stream.open("b")
    assert stream.sends("b", 3) == [2, 3, 4]


def test_part_of_a_frame_may_have_been_had() -> None:
    stream = Stream()
    stream.open("a")
    stream.make(size=3)
    stream.sends("a")
    stream.lose("a", taken=2)
    stream.open("b")
    stream.open("a", life=1)
    offer = stream.served.offer(stream.reader("a"))
    assert offer is not None and (offer.entry.seq, offer.had) == (0, 2)
    assert stream.sends("a") == [2]


def test_a_trainer_with_a_state_goes_on_where_it_stands() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 6)
    stream.open("b", 4)
    assert stream.sends("b") == [4, 5]


def test_the_window_outlives_its_readers_and_bindings() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 4)
    stream.open("b", 2, binding=2)
    assert stream.refused == ["a"] and stream.starts == [0, 4], "the run goes on where it was"
    assert stream.sends("b") == [2, 3]
    assert stream.reads("b", 1) == [4]


def test_one_that_is_ahead_of_the_window_is_followed() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 4)
    stream.open("b", 9)
    assert stream.starts == [0, 9], "what was made goes"
    assert len(stream.served.evicted()) == 4
    assert stream.reads("b", 1) == [9]
    offer = stream.served.offer(stream.reader("a"))
    assert offer is not None and (offer.skipped, offer.entry.seq) == (5, 9)


def test_one_that_comes_to_the_end_of_the_window_joins() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 4)
    stream.open("b", 4)
    assert stream.starts == [0]
    assert stream.reads("b", 1) == [4]


# After a loss


@pytest.mark.parametrize(("waits", "start"), [(False, 8), (True, 5)])
def test_after_a_loss_a_run_starts_at_the_newest_cut_or_where_trainers_are_waited_for_the_oldest(
    waits: bool, start: int
) -> None:
    stream = Stream(waits=waits)
    stream.open("a", 5, now=1.0)
    assert stream.starts == []
    stream.open("b", 8, now=1.1)
    stream.tick(1.0 + GATHER_SHARED_S - 0.01)
    assert stream.starts == [] and stream.served.offer(stream.reader("a")) is None
    stream.tick(1.0 + GATHER_SHARED_S)
    assert stream.starts == [start]
    stream.tick(9.0)
    assert stream.starts == [start]


def test_after_a_loss_those_who_hold_something_say_where() -> None:
    stream = Stream(waits=True)
    stream.open("a", 5)
    stream.open("b")
    stream.tick(1.0)
    assert stream.starts == [5]
    assert stream.reads("b", 1) == [5]


def test_a_moment_passes_for_nobody() -> None:
    stream = Stream()
    stream.open("a", 5)
    stream.lose("a")
    stream.tick(1.0)
    assert stream.starts == []
    stream.open("b", 6, now=2.0)
    stream.tick(2.0)
    assert stream.starts == [6]


def test_those_ahead_of_the_run_wait_until_it_gets_there() -> None:
    stream = Stream(waits=True)
    stream.open("a", 5)
    stream.open("b", 7)
    stream.tick(1.0)
    assert stream.reads("a", 3) == [5, 6, 7]
    assert stream.sends("b") == [7]


def test_a_failed_run_goes_on_where_it_failed() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 2)
    stream.served.failed(1, FAILURE)
    stream.served.instructions()
    stream.open("a", 2)
    assert stream.starts == [0, 2] and stream.reads("a", 1) == [2]


# Wait


def test_a_round_is_kept_until_every_trainer_has_taken_it() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.open("b")
    stream.sends("b")
    assert stream.reads("a", 20) == [*range(8)], "the front-runner waits"
    assert stream.sends("b") == [*range(8)] and stream.make() == 0, "sent is not taken"
    stream.heard("b", 2)
    assert stream.make(9) == 1 and stream.sends("a") == [8] and stream.make(9) == 1
    assert len(stream.served.evicted()) == 2


def test_nothing_is_kept_for_one_that_takes_its_leave() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.open("b")
    stream.sends("b")
    stream.reads("a", 8)
    stream.lose("b", leaving=True)
    assert stream.reads("a", 4) == [8, 9, 10, 11]


def test_a_trainer_whose_connection_was_lost_is_expected() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.open("b")
    stream.make()
    stream.sends("b")
    stream.heard("b", 1)
    stream.sends("a")
    stream.lose("b")
    assert stream.reads("a", 20) == [*range(1, 9)], "from where it has taken"
    stream.open("b", 1)
    assert stream.sends("b") == [*range(1, 9)]


def test_one_that_joins_later_holds_up_what_comes_after_it() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.reads("a", 10)
    stream.open("b")
    assert stream.sends("b", 1) == [2]
    assert stream.reads("a", 9) == [], "it holds on to the oldest"
    stream.heard("b", 3)
    assert stream.reads("a", 9) == [10]


def test_rounds_that_are_gone_are_made_again_for_one_that_is_waited_for() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.reads("a", 12)
    stream.open("b", 2)
    assert stream.starts == [0, 2]
    assert stream.reads("b", 2) == [2, 3]
    assert stream.served.offer(stream.reader("a")) is None, "it waits until the run gets there"
    stream.open("a", 4, now=1.0)
    assert stream.starts == [0, 2], "those are in the window"


def test_one_that_is_ahead_of_a_window_without_a_run_makes_it_go_on() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.reads("a", 3)
    stream.open("b", 9, binding=2)
    assert stream.starts == [0, 3]


def test_with_a_number_of_trainers_all_begin_at_the_beginning() -> None:
    stream = Stream(waits=True, trainers=2)
    stream.open("a")
    assert stream.reads("a", 20) == [*range(8)]
    stream.open("b", now=3.0)
    assert stream.sends("b") == [*range(8)]
    stream.heard("b", 1)
    assert stream.reads("a", 9) == [8]


def test_a_trainer_of_the_number_that_comes_back_with_nothing_has_not_come_twice() -> None:
    stream = Stream(waits=True, trainers=2)
    stream.open("a")
    stream.reads("a", 1)
    stream.lose("a", leaving=True)
    stream.open("a", life=1)
    assert stream.reads("a", 20) == [*range(1, 8)], "the other one is still to come"


# Passing over


def full(**more: Any) -> Stream:
    """A stream whose window is full of rounds that trainer b has not taken, heard of at 1 s."""
    stream = Stream(waits=True, **more)
    stream.open("a")
    stream.open("b")
    stream.sends("b")
    stream.heard("b", now=1.0)
    stream.reads("a", 8)
    return stream


def test_a_silent_trainer_is_passed_over_when_others_wait_for_it() -> None:
    stream = full()
    assert stream.served.pass_over(SHARE, 1.0 + TIMEOUT_S) == []
    assert stream.served.pass_over(SHARE, 1.1 + TIMEOUT_S) == ["trainer 'trainer b' is silent"]
    assert stream.served.pass_over(SHARE, 1.2 + TIMEOUT_S) == []
    assert stream.reads("a", 3) == [8, 9, 10]
    assert stream.served.offer(stream.reader("b")) is None
    stream.heard("b")
    assert stream.sends("b") == [*range(3, 11)], "it goes on with what is left, and is told"


@pytest.mark.parametrize("gone", [False, True])
def test_only_those_who_need_the_oldest_rounds_are_passed_over(gone: bool) -> None:
    stream = Stream(waits=True)
    for peer in "abc":
        stream.open(peer)
    stream.reads("a", 8)
    for peer, taken in (("b", 0), ("c", 1)):
        stream.sends(peer)
        stream.heard(peer, taken)
        if gone:
            stream.lose(peer)
    how = "gone" if gone else "silent"
    assert stream.served.pass_over(SHARE, 100.0) == [f"trainer 'trainer b' is {how}"]
    assert stream.make(9) == 1, "round 0 goes, round 1 is kept for trainer c"


def test_a_trainer_is_waited_for_as_long_as_there_is_room() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.open("b")
    stream.sends("b")
    stream.reads("a", 7)
    assert stream.served.pass_over(SHARE, 100.0) == []
    stream.reads("a", 1)
    assert stream.served.pass_over(SHARE, 100.0) != []


def test_a_silent_trainer_is_not_passed_over_where_nobody_wants_more() -> None:
    stream = full()
    stream.lose("a")
    assert stream.served.pass_over(SHARE, 100.0) == []


def test_a_trainer_that_has_taken_the_oldest_is_not_in_the_way() -> None:
    stream = full()
    stream.heard("b", 1, now=1.0)
    assert stream.served.pass_over(SHARE, 100.0) == [], "there is something to let go of"


def test_a_trainer_that_is_gone_is_passed_over() -> None:
    stream = full()
    stream.lose("b", now=2.0)
    assert stream.served.pass_over(SHARE, 2.0 + TIMEOUT_S) == []
    assert stream.served.pass_over(SHARE, 2.1 + TIMEOUT_S) == ["trainer 'trainer b' is gone"]
    assert stream.reads("a", 3) == [8, 9, 10]
    starts = list(stream.starts)
    stream.open("b", 1, now=40.0)
    assert stream.starts == starts, "nobody makes rounds again for it"
    assert stream.sends("b") == [*range(3, 11)]


def test_trainers_that_never_come_are_given_up() -> None:
    stream = Stream(waits=True, trainers=2)
    stream.open("a", now=1.0)
    stream.reads("a", 8, now=1.0)
    assert stream.served.pass_over(SHARE, 1.0 + TIMEOUT_S) == []
    stream.heard("a", 8, now=30.0)
    assert stream.served.pass_over(SHARE, 1.1 + TIMEOUT_S) == ["1 of 2 trainers have come"]
    assert stream.reads("a", 2) == [8, 9]


def test_one_that_was_passed_over_and_is_given_rounds_again_is_a_reader_like_others() -> None:
    stream = full()
    stream.lose("b", now=2.0)
    stream.served.pass_over(SHARE, 100.0)
    stream.reads("a", 3)
    stream.open("b", 1, now=100.0)
    assert stream.sends("b", 1) == [3] and stream.starts == [0]
    stream.open("b", 1, now=101.0)
    assert stream.starts == [0, 1], "it came back from an older state, and is waited for"


def test_an_older_word_about_what_was_taken_takes_nothing_back() -> None:
    stream = full()
    stream.sends("b")
    stream.heard("b", 4)
    stream.heard("b", 1)
    assert stream.make(1) == 1 and len(stream.served.evicted()) == 1
    assert stream.reader("b").taken == 4


# Trainers of several ranks


def pair(peers: str = "aA", **more: Any) -> Stream:
    """Trainers of two ranks, all of which are there."""
    stream = Stream(consumers=2, **more)
    for peer in peers:
        stream.open(peer)
    return stream


def test_ranks_of_a_trainer_are_given_nothing_before_all_are_there() -> None:
    stream = pair()
    stream.read_together("aA", 10)
    stream.open("b")
    assert stream.sends("b") == []
    stream.read_together("aA", 3)
    stream.open("B")
    assert stream.sends("b", 1) == [5] and stream.sends("B", 2) == [5, 6]


def test_a_rank_that_never_comes_is_not_waited_for_for_ever() -> None:
    stream = Stream(consumers=2)
    stream.open("a", now=1.0)
    stream.tick(0.9 + GATHER_RANKS_S)
    assert stream.make() == 0 and stream.sends("a") == []
    stream.tick(1.0 + GATHER_RANKS_S)
    assert stream.make() == 1 and stream.sends("a") == [0]
    stream.open("A", now=9.0)
    assert stream.sends("A") == [0] and stream.served.readers
    stream.lose("A", now=10.0)
    stream.tick(10.1)
    assert stream.make() == 0, "it was there, and is waited for again"


def test_a_round_is_given_when_all_ranks_have_credit_for_it() -> None:
    stream = Stream(consumers=2)
    stream.open("a")
    stream.open("A", credit=2 * ROUND_BYTES)
    found: dict[str, list[int]] = {"a": [], "A": []}
    for _ in range(8):
        stream.make()
        for peer, given in found.items():
            given += stream.sends(peer, 1)
    assert found == {"a": [0, 1], "A": [0, 1]}
    stream.heard("A", 2, 1000)
    stream.make(2)
    assert stream.sends("a", 1) == [2] and stream.sends("a", 1) == [], "the other one has not been given it"
    assert stream.sends("A", 1) == [2]


def test_what_one_rank_was_given_is_kept_for_the_other() -> None:
    stream = pair("aAbB")
    stream.make()
    assert stream.sends("b", 1) == [0]
    stream.heard("b", 1, 5000)
    stream.read_together("aA", 20)
    assert stream.served.window.nbytes == SHARE and stream.reader("a").due == 8, "B has not been given the first"
    assert stream.sends("B", 1) == [0]
    stream.read_together("aA", 20)
    assert stream.reader("a").due == 28


def test_what_no_rank_was_given_is_skipped_by_the_whole_trainer() -> None:
    stream = pair("aAbB")
    stream.make()
    for peer in "aAbB":
        stream.sends(peer, 1)
        stream.heard(peer, 1, 5000)
    stream.read_together("aA", 10)
    assert stream.sends("b", 1) == [3] and stream.sends("B", 1) == [3]


def test_what_a_trainer_skipped_is_skipped_by_a_rank_that_goes_back() -> None:
    stream = pair("aAbB")
    stream.make()
    for peer in "aAbB":
        stream.sends(peer, 1)
        stream.heard(peer, 1, 5000)
    stream.read_together("aA", 10)
    stream.read_together("bB", 2)
    stream.open("B", fresh=False)
    assert stream.starts == [0, 0], "its first round is made once more"
    assert stream.reads("B", 6) == [0, 4, 5], "and others that it skipped are not its to have"


def test_what_a_trainer_skips_may_lie_inside_of_a_frame() -> None:
    stream = Stream(consumers=2)
    stream.open("a", 8, gaps=((2, 3), (5, 6), (7, 9)))
    stream.open("A")
    stream.tick(1.0)
    stream.make(size=8)
    offer = stream.served.offer(stream.reader("A"))
    assert offer is not None and offer.holes == ((2, 3), (5, 6), (7, 8))


def test_ranks_of_a_new_life_begin_after_what_any_of_them_was_sent() -> None:
    stream = pair()
    stream.read_together("aA", 3)
    stream.make()
    stream.sends("a")
    stream.open("A", life=1)
    assert stream.sends("A") == []
    stream.open("a", life=1)
    assert stream.reads("a", 1) == [4] and stream.reads("A", 1) == [4]


def test_a_reader_of_an_older_life_is_refused() -> None:
    stream = pair()
    stream.open("A", life=1)
    stream.open("a")
    assert stream.refused == ["a"]


def test_ranks_start_again_at_the_oldest_cut() -> None:
    stream = Stream(consumers=2)
    stream.open("a", 8)
    stream.open("A", 5)
    stream.tick(1.0)
    assert stream.starts == [5]
    assert stream.reads("A", 4) == [5, 6, 7, 8] and stream.sends("a") == [8]


def test_rounds_are_made_again_for_a_rank_whose_trainer_had_them() -> None:
    stream = Stream(consumers=2)
    stream.open("a", 8)
    stream.tick(1.0)
    stream.open("A", 5, now=1.1)
    assert stream.starts == [8, 5]
    assert stream.reads("A", 4) == [5, 6, 7, 8] and stream.sends("a") == [8]


def test_rounds_are_made_again_for_a_rank_after_all_others_have_had_the_end() -> None:
    stream = pair()
    stream.read_together("aA", 10)
    stream.end()
    assert stream.told().keys() == {"a", "A"}
    for peer in "aA":
        stream.lose(peer)
    stream.open("A", fresh=False)
    assert stream.starts == [0, 0] and stream.reads("A", 10) == [*range(10)]


def test_rounds_are_not_made_again_for_a_trainer_that_can_skip_them_as_a_whole() -> None:
    stream = Stream(consumers=2)
    for peer in "aA":
        stream.open(peer, 8)
    stream.tick(1.0)
    for peer in "bB":
        stream.open(peer, 3, now=1.1)
    assert stream.starts == [8]
    stream.reads("a", 1)
    assert stream.sends("b") == stream.sends("B") == [8]


def test_nothing_is_kept_for_long_for_a_rank_that_is_gone() -> None:
    stream = pair("aAbB")
    stream.make()
    for peer in "aAb":
        stream.sends(peer, 1)
        stream.heard(peer, 1, 5000)
    stream.lose("B", now=1.0)
    stream.read_together("aA", 20)
    assert stream.served.pass_over(SHARE, 1.0 + GATHER_RANKS_S) == []
    assert stream.served.pass_over(SHARE, 1.1 + GATHER_RANKS_S) == ["trainer 'trainer b' is gone"]
    stream.read_together("aA", 20)
    assert stream.reader("a").due == 28


def test_what_a_trainer_had_before_it_left_is_not_made_again_for_it() -> None:
    stream = Stream(consumers=2)
    for peer in "aA":
        stream.open(peer)
    stream.read_together("aA", 10)
    for peer in "aA":
        stream.lose(peer, leaving=True)
    for peer in "aA":
        stream.open(peer, 1)
    assert stream.starts == [0], "with an older state it skips as a whole"
    assert stream.sends("a", 1) == stream.sends("A", 1) == [2]


def test_a_rank_does_not_skip_alone_what_others_had_while_they_are_on_their_way() -> None:
    stream = pair()
    stream.read_together("aA", 10)
    stream.end()
    stream.open("A", 1, binding=2)
    stream.ended.clear()
    assert stream.sends("A") == [] and stream.told() == {}
    stream.open("a", 8, binding=2)
    assert stream.starts == [0, 1], "the other one stands where it stood, so what this one lacks is made again"


@pytest.mark.parametrize("had", [0, 1])
def test_a_rank_skips_nothing_alone_that_another_may_have_from_elsewhere(had: int) -> None:
    stream = pair_that_ended_at(3)
    stream.open("A", had, now=1.0)
    stream.tick(1.0 + GATHER_RANKS_S)
    assert stream.sends("A") == [] and "A" not in stream.told(), "the other one may still read what is gone here"
    stream.open("a", 3, now=2.0 + GATHER_RANKS_S)
    assert stream.starts == [3, had] and stream.reads("A", 3 - had) == [*range(had, 3)]


@pytest.mark.parametrize("had", [0, 1])
def test_a_rank_whose_mates_are_silent_for_long_skips_alone(had: int) -> None:
    stream = pair_that_ended_at(3)
    stream.open("A", had, now=1.0)
    stream.tick(0.9 + TIMEOUT_S)
    assert "A" not in stream.told()
    stream.tick(1.0 + TIMEOUT_S)
    assert stream.told()["A"].skipped == 3 - had


def pair_that_ended_at(round_: int) -> Stream:
    """A stream in a new binding: one trainer has read it elsewhere, and says so."""
    stream = Stream(consumers=2)
    for peer in "bB":
        stream.open(peer, round_)
    stream.tick(1.0)
    stream.end()
    return stream


def test_a_new_life_begun_by_one_rank_alone_gives_nothing_twice() -> None:
    stream = pair()
    stream.read_together("aA", 3)
    stream.open("A", life=1, now=1.0)
    stream.tick(1.0 + GATHER_RANKS_S)
    assert stream.sends("A") == []
    stream.tick(1.0 + TIMEOUT_S)
    assert stream.reads("A", 1) == [3]


def test_where_one_rank_leaves_the_trainer_stands_where_the_furthest_of_it_does() -> None:
    stream = pair()
    stream.read_together("aA", 5)
    stream.lose("a", taken=3, leaving=True)
    stream.lose("A", taken=2, leaving=True)
    for peer in "aA":
        stream.open(peer, life=1)
    assert stream.reads("a", 1) == stream.reads("A", 1) == [5]


def test_ranks_skip_what_one_of_them_skipped_elsewhere() -> None:
    stream = Stream(consumers=2)
    stream.open("A")
    assert stream.make() == 0 and stream.sends("A") == [], "the other one may know more"
    stream.open("a", 6, gaps=((0, 4), (5, 6)))
    assert stream.reads("A", 7) == [4, 6] and stream.sends("a") == [6]


# Ends


def test_an_end_outlives_its_binding() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 3)
    stream.end()
    stream.open("b", 1, binding=2)
    assert stream.starts == [0] and not stream.served.running
    assert stream.sends("b") == [1, 2]
    found = stream.told()["b"]
    assert (found.seq, found.binding) == (3, 2)


def test_an_end_is_told_to_who_has_had_all_rounds() -> None:
    stream = Stream()
    stream.open("a")
    stream.open("b")
    stream.reads("a", 3)
    stream.end()
    assert [*stream.ended] == ["a"]
    assert (stream.ended["a"].seq, stream.ended["a"].skipped) == (3, 0)
    assert stream.sends("b") == [0, 1, 2]
    assert [*stream.told()] == ["a", "b"]
    stream.ended.clear()
    assert stream.told() == {}, "once"


def test_a_trainer_that_comes_after_the_end_reads_what_is_left() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 10)
    stream.end()
    stream.open("b")
    assert stream.starts == [0] and stream.sends("b") == [*range(2, 10)]
    assert stream.told()["b"].seq == 10


def test_a_trainer_that_comes_when_nothing_is_left_is_told_what_it_missed() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 3)
    stream.end()
    while stream.served.evict():
        pass
    stream.open("b", 1)
    assert stream.told()["b"].skipped == 2


def test_a_stream_keeps_its_window_while_others_of_its_attempt_begin() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 3)
    stream.end()
    stream.lose("a")
    stream.served.retire(opens().attempt)
    assert stream.served.holds_memory


def test_nobody_waits_for_one_that_was_told_the_end() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.reads("a", 3)
    stream.end()
    stream.lose("a")
    stream.served.retire(NEXT)
    assert not stream.served.holds_memory


def test_a_trainer_ahead_of_the_end_is_told_that_it_ended_there() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 3)
    stream.end()
    stream.open("b", 3)
    found = stream.told()["b"]
    assert (found.seq, found.skipped) == (3, 0)


def test_who_is_heard_of_is_served_with_the_other_ranks_of_its_trainer() -> None:
    stream = pair("aAbB")
    served = stream.served
    assert served.with_mates([stream.reader("A")]) == [stream.reader("a"), stream.reader("A")]
    assert served.with_mates([stream.reader(peer) for peer in "bA"]) == [stream.reader(peer) for peer in "aAbB"]
    assert served.with_mates([]) == []
    alone = Stream()
    alone.open("a")
    alone.open("b")
    assert alone.served.with_mates([alone.reader("b")]) == [alone.reader("b")]


# Letting go


def test_memory_is_let_go_when_another_epoch_needs_it_and_nobody_reads_this_one() -> None:
    stream = Stream()
    assert not stream.served.holds_memory
    stream.open("a")
    stream.reads("a", 3)
    stream.served.retire(NEXT)
    assert stream.served.holds_memory and stream.served.window.nbytes == 300
    stream.lose("a")
    assert stream.served.running, "the window goes on without readers"
    stream.served.retire(NEXT)
    assert stream.served.instructions() == [StopRun(1)]
    assert not stream.served.holds_memory and len(stream.served.evicted()) == 3
    assert (stream.served.window.first, stream.served.window.end) == (0, 0)


def test_memory_is_kept_for_those_who_are_expected() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.reads("a", 3)
    stream.lose("a")
    stream.served.retire(NEXT)
    assert stream.served.holds_memory
    stream = Stream(waits=True, trainers=2)
    stream.open("a")
    stream.reads("a", 3)
    stream.lose("a", leaving=True)
    stream.served.retire(NEXT)
    assert stream.served.holds_memory


def test_the_end_goes_with_the_window() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 3)
    stream.end()
    stream.lose("a")
    stream.served.retire(NEXT)
    stream.open("b")
    assert stream.starts == [0, 0] and [*stream.told()] == ["a"] and stream.reads("b", 1) == [0]


def test_rounds_larger_than_the_window_have_it_for_themselves() -> None:
    stream = Stream()
    stream.open("a", credit=10_000)
    stream.reads("a", 2)
    stream.make(size=20)
    assert len(stream.served.evicted()) == 2 and stream.served.window.nbytes == 2000
    assert stream.sends("a") == [*range(2, 22)]


def test_what_was_let_go_can_be_made_again() -> None:
    stream = Stream()
    stream.open("a")
    stream.reads("a", 3)
    stream.lose("a")
    stream.served.retire(NEXT)
    stream.open("b")
    assert stream.starts == [0, 0] and stream.reads("b", 1) == [0]


def test_a_closed_stream_lets_go_of_everything() -> None:
    stream = Stream(waits=True)
    stream.open("a")
    stream.reads("a", 3)
    stream.served.close(0.0)
    assert stream.served.readers == {} and not stream.served.holds_memory and len(stream.served.evicted()) == 3
    stream.open("a")
    assert stream.refused == ["a"]


def test_an_entry_may_grow() -> None:
    stream = Stream()
    stream.open("a")
    stream.make()
    offer = stream.served.offer(stream.reader("a"))
    assert offer is not None
    stream.served.window.grow(offer.entry, 50)
    assert stream.served.window.nbytes == 150


def test_those_without_credit_or_without_rounds_are_looked_after_now_and_then() -> None:
    stream = Stream()
    stream.open("a", credit=ROUND_BYTES)
    stream.open("b")
    assert stream.tick(PROBE_S) == []
    stream.make()
    stream.sends("a")
    assert stream.tick(2 * PROBE_S - 0.1) == []
    assert stream.tick(2 * PROBE_S) == [b"a", b"b"], "the one is out of credit, the other was sent nothing"
    assert stream.served.idle_since == 2 * PROBE_S
    for peer in "ab":
        stream.lose(peer)
    stream.tick(9.0)
    assert stream.served.idle_since == 2 * PROBE_S


def test_a_stream_begins_only_where_its_first_reader_does() -> None:
    stream = Stream()
    stream.open("a", 0, fresh=False, cut=Cut([3]), cut_round=0)
    assert stream.starts == [], "an engine's state is none of the beginning"
    stream.tick(1.0)
    assert stream.starts == [0]
