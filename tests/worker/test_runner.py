"""A real runner, real sockets; only the dispatcher is a stand-in."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_harness import GRANTED, PLENTY, RUNNER, Harness, Received, harness, ordinals
from tests.waiting import wait_until

import penstock as ps
from penstock.core.ids import RunnerId
from penstock.wire.failures import rebuild_failure
from penstock.wire.frames import Rounds, SourceStorageOptions
from penstock.wire.jobs import Cut, FeedSpec, Leftover, Named, Regroup
from penstock.wire.neighbours import _named


@pytest.fixture
def service() -> Iterator[Harness]:
    with harness() as made:
        yield made


def items(count: int) -> ps.Dataset:
    """A source with many splits: one for 16 elements or more."""
    return ps.from_items(list(range(count)))


def numbers(received: Received) -> list[int]:
    return [int(x) for element in received.elements for x in np.atleast_1d(element)]


def check_accounts(frames: list[Rounds]) -> None:
    """At every cut, what is done and what is named are all splits granted so far, with no gap between them."""
    done: set[tuple[int, int, int]] = set()
    for frame in frames:
        done |= ordinals(frame.done)
        accounted = sorted(done | ordinals(frame.cut.named))
        assert accounted == [(0, 0, ordinal) for ordinal in range(len(accounted))]


def read_whole(service: Harness, number: int = 0, **opening: Any) -> Received:
    reader = service.reader()
    received = reader.open(number, **opening)
    reader.read_until(lambda: received.over, "the end")
    assert received.end is not None, received
    return received


def test_one_stream_gives_everything_in_order(service: Harness) -> None:
    service.serve(items(1000).map(lambda x: x * 2))
    received = read_whole(service)
    assert received.elements == [x * 2 for x in range(1000)]
    assert received.end is not None
    assert (received.end.seq, received.end.leftover) == (1000, False)
    assert received.end.cut.named == (Named(0, 0, (), ended=True),)
    splits = service.dispatcher.spec.split_counts[0]  # type: ignore[union-attr]
    assert received.done == {(0, 0, ordinal) for ordinal in range(splits)}


def test_small_elements_share_frames_and_batches_do_not(service: Harness) -> None:
    service.serve(ps.range(20_000))
    assert len(read_whole(service).frames) < 2_000
    service.serve(items(40).map(lambda x: np.full(100_000, x)).batch(4))
    assert [frame.count for frame in read_whole(service).frames] == [1] * 10


def test_files_are_read_where_the_listing_says(service: Harness, tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i:02}.txt").write_text("".join(f"{i * 100 + k}\n" for k in range(30)))
    dataset = ps.read_text(str(tmp_path / "*.txt")).map(lambda line: int(line))
    service.serve(dataset)
    assert read_whole(service).elements == list(dataset)


@pytest.mark.parametrize(
    "make",
    [
        lambda: items(400).map(lambda x: x + 1),
        lambda: items(400).shuffle(50).map(lambda x: x + 1).batch(7),
        lambda: items(100).repeat(3).batch(8),
        lambda: items(300).filter(lambda x: x % 3 == 0).flat_map(lambda x: [x, -x]).batch(5),
        lambda: items(100).concatenate(items(100).map(lambda x: -x)).batch(6),
    ],
    ids=["map", "shuffle", "repeat", "flat_map", "concatenate"],
)
def test_opened_at_any_cut_a_stream_goes_on_with_what_followed(service: Harness, make: Any) -> None:
    service.serve(make())
    whole = read_whole(service)
    assert whole.end is not None
    frames = whole.frames[:: max(1, len(whole.frames) // 6)] + whole.frames[-1:]
    for frame in frames:
        after = frame.seq + frame.count
        for ahead in {0, min(2, whole.end.seq - after)}:
            rest = read_whole(service, round=after + ahead, cut=frame.cut, cut_round=after)
            assert rest.end is not None
            assert numbers(rest) == [
                int(x) for element in whole.elements[after + ahead :] for x in np.atleast_1d(element)
            ]
            assert (rest.end.seq, rest.end.leftover) == (whole.end.seq, whole.end.leftover)
            assert rest.done | (ordinals(rest.end.cut.named)) >= ordinals(frame.cut.named)
    service.another_runner()
    rest = read_whole(service, round=frames[1].seq, cut=frames[0].cut, cut_round=frames[0].seq + frames[0].count)
    assert numbers(rest) == [int(x) for e in whole.elements[frames[1].seq :] for x in np.atleast_1d(e)]


def test_done_and_named_are_all_that_was_granted_at_every_cut(service: Harness) -> None:
    service.serve(items(2_000).shuffle(100).batch(10))
    received = read_whole(service, credit=1 << 30)
    done: set[tuple[int, int, int]] = set()
    for frame in received.frames:
        done |= ordinals(frame.done)
        named = ordinals(frame.cut.named)
        assert not done & named
        # In the order in which they were granted, so that nothing is missing in between.
        assert sorted(done | named) == [(0, 0, ordinal) for ordinal in range(len(done | named))]


def test_rounds_are_dealt_to_consumers(service: Harness) -> None:
    service.serve(items(1000), consumers=3)
    reader = service.reader()
    received = [reader.open(consumer=c) for c in range(3)]
    reader.read_until(lambda: all(r.over for r in received))
    for c in range(3):
        assert received[c].elements == list(range(c, 999, 3))
        assert received[c].end is not None
        assert (received[c].end.seq, received[c].end.leftover) == (333, True)


def test_a_stream_starts_at_the_lowest_of_its_consumers(service: Harness) -> None:
    service.serve(items(1000), consumers=2)
    reader = service.reader()
    first = [reader.open(consumer=c) for c in range(2)]
    reader.read_until(lambda: all(r.over for r in first))
    service.another_runner()
    reader = service.reader()
    frame = first[0].frames[len(first[0].frames) // 2]
    after = frame.seq + frame.count
    ahead = reader.open(consumer=1, round=after + 5, cut=frame.cut, cut_round=after)
    behind = reader.open(consumer=0, round=3, cut_round=0)
    reader.read_until(lambda: ahead.over and behind.over)
    assert behind.elements == list(range(6, 1000, 2))
    assert ahead.elements == list(range(2 * (after + 5) + 1, 1000, 2))


def test_a_consumer_that_opens_later_and_lower_makes_the_stream_start_again(service: Harness) -> None:
    service.serve(items(1000), consumers=2)
    reader = service.reader()
    first = reader.open(consumer=0, credit=2_000)
    reader.read_until(lambda: len(first.elements) > 10)
    late = reader.open(consumer=1, opening=7)
    reader.read_until(lambda: len(late.elements) >= len(first.elements))
    reader.credit(0, 1)  # of the newest opening; it changes nothing
    assert late.elements[:10] == list(range(1, 20, 2))
    assert first.elements == list(range(0, 2 * len(first.elements), 2))


def test_whoever_comes_back_with_an_older_cut_learns_of_every_split(service: Harness) -> None:
    # Large enough that a frame holds a few rounds at most, whatever the timing.
    service.serve(items(600).map(lambda x: np.full(5_000, x)).batch(4), consumers=2)
    reader = service.reader()
    first = [reader.open(consumer=c) for c in range(2)]
    reader.read_until(lambda: all(r.over for r in first))
    service.another_runner()
    reader = service.reader()
    # The cuts and positions of the two differ, and the one further ahead has the older cut.
    frames = first[0].frames
    early, late = frames[len(frames) // 4], frames[len(frames) // 2]
    early_round, late_round = early.seq + early.count, late.seq + late.count
    opened = [
        reader.open(consumer=0, round=late_round, cut=late.cut, cut_round=late_round),
        reader.open(consumer=1, round=late_round + 3, cut=early.cut, cut_round=early_round),
    ]
    reader.read_until(lambda: all(r.over for r in opened))
    for consumer, since in ((0, late), (1, early)):
        before = [frame for frame in first[consumer].frames if frame.seq <= since.seq]
        check_accounts([*before, *opened[consumer].frames])
    assert [batch[0, 0] for batch in opened[1].elements] == [
        batch[0, 0] for batch in first[1].elements[late_round + 3 :]
    ]


def test_a_run_that_began_after_somebodys_cut_begins_again(service: Harness) -> None:
    service.serve(items(600).map(lambda x: np.full(5_000, x)).batch(4), consumers=2)
    reader = service.reader()
    first = [reader.open(consumer=c) for c in range(2)]
    reader.read_until(lambda: all(r.over for r in first))
    service.another_runner()
    reader = service.reader()
    frames = first[0].frames
    early, late = frames[len(frames) // 4], frames[len(frames) // 2]
    early_round, late_round = early.seq + early.count, late.seq + late.count
    alone = reader.open(consumer=0, round=late_round, cut=late.cut, cut_round=late_round, credit=1)
    reader.read_until(lambda: len(alone.frames) > 0, "the first round, though the other consumer is not there")
    opening = reader.opening
    ahead = reader.open(consumer=1, round=late_round + 20, cut=early.cut, cut_round=early_round)
    reader.credit(0, PLENTY, opening=opening)
    reader.read_until(lambda: alone.over and ahead.over)
    for consumer, since, received in ((0, late, alone), (1, early, ahead)):
        assert received.frames
        before = [frame for frame in first[consumer].frames if frame.seq <= since.seq]
        check_accounts([*before, *received.frames])


def test_a_reader_that_stays_learns_of_every_split_when_another_comes_back(service: Harness) -> None:
    service.serve(items(600).map(lambda x: np.full(5_000, x)).batch(4), consumers=2)
    reader = service.reader()
    stays = reader.open(consumer=0, credit=9 << 20)
    opening = reader.opening
    leaves = reader.open(consumer=1)
    reader.read_until(lambda: stays.frames[-1:] != [] and sum(f.nbytes for f in stays.frames) >= 9 << 20)
    reader.read_until(lambda: len(leaves.elements) == len(stays.elements))
    assert sum(len(entry.ordinals) for frame in stays.frames for entry in frame.done) >= 4
    frame = leaves.frames[-2]
    after = frame.seq + frame.count
    back = reader.open(consumer=1, round=after, cut=frame.cut, cut_round=after)
    reader.credit(0, PLENTY, opening=opening)
    reader.read_until(lambda: stays.over and back.over)
    check_accounts(stays.frames)
    assert [batch[0, 0] for batch in stays.elements] == list(range(0, 600, 8))
    assert [batch[0, 0] for batch in [*leaves.elements[:after], *back.elements]] == list(range(4, 600, 8))


def test_bytes_beyond_the_credit_are_not_sent(service: Harness) -> None:
    service.serve(items(64).map(lambda x: np.full(1000, x)))
    reader = service.reader()
    received = reader.open(credit=20_000)
    reader.read_until(lambda: sum(frame.nbytes for frame in received.frames) >= 20_000)
    reader.read_for(0.3)
    first = sum(frame.nbytes for frame in received.frames)
    assert 20_000 <= first < 20_000 + received.frames[-1].nbytes
    reader.credit(0, 10_000)  # an older position: it means nothing
    reader.read_for(0.2)
    assert sum(frame.nbytes for frame in received.frames) == first
    for _ in range(3):  # said three times, it means the same
        reader.credit(0, 100_000)
    reader.read_until(lambda: sum(frame.nbytes for frame in received.frames) >= 100_000)
    reader.read_for(0.3)
    assert sum(frame.nbytes for frame in received.frames) < 100_000 + received.frames[-1].nbytes
    reader.credit(0, 1 << 30)
    reader.read_until(lambda: received.over)
    assert [int(element[0]) for element in received.elements] == list(range(64))


def test_an_older_binding_is_refused_and_a_newer_one_takes_over(service: Harness) -> None:
    service.serve(items(100))
    reader = service.reader()
    old = reader.open(binding=4, credit=1)
    reader.read_until(lambda: len(old.elements) > 0)
    older = reader.open(binding=3)
    reader.read_until(lambda: older.over)
    assert older.refusal is not None and "binding" in older.refusal.reason
    new = reader.open(binding=5)
    reader.read_until(lambda: new.over and old.over)
    assert old.refusal is not None
    assert new.elements == list(range(100))


def test_an_opening_for_another_runner_is_refused(service: Harness) -> None:
    service.serve(items(100))
    reader = service.reader()
    received = reader.open(runner=RunnerId("its predecessor"))
    reader.read_until(lambda: received.over)
    assert received.refusal is not None and RUNNER in received.refusal.reason


def test_a_dispatcher_that_refuses_to_grant_ends_the_stream(service: Harness) -> None:
    service.serve(items(100))
    service.dispatcher.refuse = "binding 1 is over"
    reader = service.reader()
    received = reader.open()
    reader.read_until(lambda: received.over)
    assert received.refusal is not None and "binding 1 is over" in received.refusal.reason


def test_a_users_exception_comes_out_as_it_was_raised(service: Harness) -> None:
    def fail_at_50(x: int) -> int:
        if x == 50:
            raise KeyError("fifty")
        return x

    service.serve(items(100).map(fail_at_50))
    for _ in range(2):  # the process stays, and says it again
        reader = service.reader()
        received = reader.open()
        reader.read_until(lambda received=received: received.over)
        assert received.elements == list(range(50))
        assert received.failure is not None
        error = rebuild_failure(received.failure.failure)
        assert isinstance(error, KeyError) and error.args == ("fifty",)
        assert any("element" in note for note in error.__notes__)


def test_what_cannot_be_sent_fails_with_its_path(service: Harness) -> None:
    service.serve(items(10).map(lambda x: {"a": {x}}))
    reader = service.reader()
    received = reader.open()
    reader.read_until(lambda: received.over)
    assert received.failure is not None and "['a']" in received.failure.failure.message


def test_batches_reach_a_reader_on_this_host_through_memory(service: Harness) -> None:
    service.serve(items(64).map(lambda x: np.full(50_000, x)).batch(4))
    reader = service.reader(slab=True)
    received = reader.open()
    reader.read_until(lambda: received.over)
    assert reader.slabs is not None
    through_memory = [frame for frame in received.frames if frame.slab is not None]
    assert len(through_memory) == len(received.frames) == 16
    assert [int(batch[row, 7]) for batch in received.elements for row in range(4)] == list(range(64))
    received.elements.clear()
    reader.credit(0, 1 << 50, returned=reader.slabs.returned())
    arena = service.runners[-1]._arena
    reader.read_until(lambda: len(arena.leases) == 0, "the leases to be given back")


def test_memory_of_a_reader_comes_back_when_its_process_has_ended_and_not_before(service: Harness) -> None:
    child = subprocess.Popen(["sleep", "600"])
    name = _named(child.pid)
    service.serve(items(64).map(lambda x: np.full(50_000, x)).batch(4))
    reader = service.reader(slab=True, process=name)
    received = reader.open()
    reader.read_until(lambda: received.over)
    arena = service.runners[-1]._arena
    service.readers.remove(reader)
    reader.close()
    stays = service.reader()
    stays.read_for(1.5)
    assert len(arena.leases) == 16
    child.kill()
    child.wait()
    stays.read_until(lambda: len(arena.leases) == 0, "the leases of the ended process")


def test_nobody_gives_back_what_another_reader_holds(service: Harness) -> None:
    service.serve(items(64).map(lambda x: np.full(50_000, x)).batch(4))
    reader, other, stranger = service.reader(slab=True), service.reader(slab=True), service.reader()
    received = reader.open()
    reader.read_until(lambda: received.over)
    arena = service.runners[-1]._arena
    leases = tuple(frame.slab.lease for frame in received.frames if frame.slab is not None)
    assert len(leases) == len(arena.leases) == 16
    for somebody in (other, stranger):
        read = somebody.open(1)
        somebody.credit(1, 1 << 50, returned=leases)
        somebody.read_until(lambda read=read: read.over)  # type: ignore[misc]
    assert len(arena.leases) == 16
    assert [int(batch[row, 7]) for batch in received.elements for row in range(4)] == list(range(64))


def test_what_was_under_way_when_a_connection_was_closed_is_free_with_the_next(service: Harness) -> None:
    service.serve(items(64).map(lambda x: np.full(50_000, x)).batch(4))
    reader = service.reader(slab=True)
    received = reader.open()
    reader.read_until(lambda: len(received.frames) > 2)
    arena = service.runners[-1]._arena
    wait_until(lambda: len(arena.leases) == 16, "all batches to be on their way")
    held = len(received.frames)
    reader.reconnect()
    wait_until(lambda: len(arena.leases) == held, "the rest to be free")
    assert all((batch == batch[:, :1]).all() for batch in received.elements)
    received.elements.clear()
    again = reader.open(binding=2)
    reader.read_until(lambda: again.over)
    assert reader.slabs is not None
    reader.credit(0, 1 << 50, returned=reader.slabs.returned())
    again.elements.clear()
    reader.credit(0, 1 << 50, returned=reader.slabs.returned())
    wait_until(lambda: len(arena.leases) == 0, "all of it to be free")


def test_what_was_under_way_is_free_when_its_reader_says_the_last_word(service: Harness) -> None:
    service.serve(items(64).map(lambda x: np.full(50_000, x)).batch(4))
    reader = service.reader(slab=True)
    received = reader.open()
    reader.read_until(lambda: len(received.frames) > 2)
    arena = service.runners[-1]._arena
    wait_until(lambda: len(arena.leases) == 16, "all batches to be on their way")
    assert reader.slabs is not None
    reader.say(reader.slabs.close_connection(1))
    wait_until(lambda: len(arena.leases) == len(received.frames), "the rest to be free")
    assert [int(batch[0, 7]) for batch in received.elements] == [4 * n for n in range(len(received.elements))]


def test_without_room_in_memory_batches_go_through_the_socket(service: Harness) -> None:
    service.serve(items(64).map(lambda x: np.full(50_000, x)).batch(4), memory_bytes=8 << 20)
    reader = service.reader(slab=True)
    received = reader.open()
    reader.read_until(lambda: received.over)
    assert {frame.slab is None for frame in received.frames} == {True, False}
    assert [int(batch[row, 7]) for batch in received.elements for row in range(4)] == list(range(64))


@pytest.mark.parametrize("feed", ["granted", "dealt", "listed"])
def test_leftovers_and_their_tail_are_every_element_once(service: Harness, feed: str) -> None:
    service.serve(items(997).shuffle(40).batch(8), consumers=2, uneven="drop")
    feeds = {
        "granted": [GRANTED] * 3,
        "dealt": [FeedSpec("dealt", number=j, of=3) for j in range(3)],
        "listed": [FeedSpec("listed", listed=(tuple(range(j, 15, 3)),)) for j in range(3)],
    }[feed]
    if feed == "listed":
        assert service.dispatcher.spec is not None and service.dispatcher.spec.split_counts == (15,)
    reader = service.reader()
    streams = [[reader.open(j, consumer=c, feed=feeds[j], share=3) for c in range(2)] for j in range(3)]
    reader.read_until(lambda: all(r.over for stream in streams for r in stream))
    leftovers = tuple(
        Leftover(j, stream[0].end.cut, feeds[j])
        for j, stream in enumerate(streams)
        if stream[0].end is not None and stream[0].end.leftover
    )
    assert leftovers
    tail_feed = FeedSpec("tail", leftovers=leftovers)
    tail = [reader.open(3, consumer=c, feed=tail_feed, share=3) for c in range(2)]
    reader.read_until(lambda: all(r.over for r in tail))
    everything = sorted(x for stream in [*streams, tail] for r in stream for x in numbers(r))
    lost = set(range(997)) - set(everything)
    assert len(everything) == len(set(everything))
    assert len(lost) < 2 * 8, "no more than the last round of the tail is dropped"
    assert tail[0].end is not None and not tail[0].end.leftover
    sizes = [len(element) for stream in streams for r in stream for element in r.elements]
    assert set(sizes) == {8}


@pytest.mark.parametrize("uneven", ["pad", "allow"])
def test_a_tail_that_drops_nothing_gives_every_element(service: Harness, uneven: str) -> None:
    consumers = 3
    service.serve(items(500).batch(8), consumers=consumers, uneven=uneven)
    width = 1 if uneven == "allow" else consumers
    reader = service.reader()
    streams = [[reader.open(j, consumer=c) for c in range(width)] for j in range(2)]
    reader.read_until(lambda: all(r.over for stream in streams for r in stream))
    leftovers = tuple(
        Leftover(j, stream[0].end.cut, GRANTED)
        for j, stream in enumerate(streams)
        if stream[0].end is not None and stream[0].end.leftover
    )
    tail = [reader.open(2, consumer=c, feed=FeedSpec("tail", leftovers=leftovers)) for c in range(width)]
    reader.read_until(lambda: all(r.over for r in tail))
    everything = [x for stream in [*streams, tail] for r in stream for x in numbers(r)]
    assert set(everything) == set(range(500))
    if uneven == "allow":
        assert len(everything) == 500
    else:
        assert len({len(r.elements) for r in tail}) == 1


def test_from_two_consumers_to_three_nothing_is_lost_or_repeated(service: Harness) -> None:
    service.serve(items(700), consumers=2)
    reader = service.reader()
    before = [reader.open(consumer=c) for c in range(2)]
    reader.read_until(lambda: all(r.over for r in before))
    frame = before[0].frames[0]
    base = frame.seq + frame.count  # both had received what is before it
    given = (4, 9)  # and of what is after it
    had = [element for c in range(2) for element in before[c].elements[: base + given[c]]]
    assert service.dispatcher.spec is not None
    service.serve(items(700), consumers=3, keep_grants=True)
    reader = service.reader()
    cut = Cut(frame.cut.engine, 0, frame.cut.named, 1, Regroup(2, given))
    after = [reader.open(consumer=c, round=100, cut=cut) for c in range(3)]
    reader.read_until(lambda: all(r.over for r in after))
    got = had + [element for r in after for element in r.elements]
    assert len(got) == len(set(got)) == 700 - (700 - len(had)) % 3
    middle = next(f for f in after[0].frames if f.seq + f.count > 101)
    again = service.reader()
    rest = [again.open(consumer=c, round=middle.seq + middle.count, cut=middle.cut) for c in range(3)]
    again.read_until(lambda: all(r.over for r in rest))
    for c in range(3):
        assert rest[c].elements == after[c].elements[middle.seq + middle.count - 100 :]


def test_streams_that_read_everything_have_orders_of_their_own(service: Harness) -> None:
    service.serve(items(200).shuffle(200), policy="off")
    reader = service.reader()
    received = [reader.open(j, feed=FeedSpec("dealt", number=j, of=1)) for j in range(2)]
    reader.read_until(lambda: all(r.over for r in received))
    assert sorted(received[0].elements) == sorted(received[1].elements) == list(range(200))
    assert received[0].elements != received[1].elements


def test_reading_goes_on_while_the_dispatcher_is_away(service: Harness) -> None:
    service.dispatcher.at_once = 4
    service.serve(items(400))
    reader = service.reader()
    received = reader.open(credit=200)
    reader.read_until(lambda: len(received.elements) > 0)
    service.dispatcher.silent = True
    reader.credit(0, 1 << 30)
    reader.read_until(lambda: len(received.elements) >= 160, "the splits granted before")
    assert not received.over
    service.dispatcher.silent = False
    reader.read_until(lambda: received.over)
    assert received.elements == list(range(400))


def test_dropped_elements_are_left_out(service: Harness) -> None:
    service.dispatcher.dropped = ((0, 3, 2),)
    service.serve(items(400))
    received = read_whole(service)
    assert received.elements == [x for x in range(400) if x != 122]


def test_replicas_of_a_consumer_receive_the_same(service: Harness) -> None:
    service.serve(items(300).shuffle(300))
    reader = service.reader()
    received = [reader.open(replica=replica) for replica in range(2)]
    reader.read_until(lambda: all(r.over for r in received))
    assert received[0].elements == received[1].elements
    assert sorted(received[0].elements) == list(range(300))


def test_a_reader_that_is_gone_does_not_keep_the_others_waiting(service: Harness) -> None:
    service.serve(items(400), consumers=2)
    gone, stays = service.reader(), service.reader()
    other = gone.open(consumer=0, credit=100)
    received = stays.open(consumer=1)
    gone.read_until(lambda: len(other.elements) > 0)
    service.readers.remove(gone)
    gone.close()
    stays.read_until(lambda: received.over)
    assert received.elements == list(range(1, 400, 2))


def test_storage_is_opened_with_what_the_reader_says(service: Harness, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n3\n")
    options = {"path": str(tmp_path), "target_protocol": "file"}
    service.serve(ps.read_text("dir://*.txt", storage_options=options))
    received = read_whole(service, storage=SourceStorageOptions((options,)))
    assert received.elements == ["1", "2", "3"]
    assert str(tmp_path) not in repr(SourceStorageOptions((options,)))
    service.another_runner()
    reader = service.reader()
    without = reader.open()
    reader.read_until(lambda: without.over, "an error, or the end")
    assert without.failure is not None
