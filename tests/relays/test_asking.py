"""Relays: whoever dies, and whatever is lost or comes twice, the engine takes every row once and in order."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from penstock.core.ids import RunnerId
from penstock.relays.asking import MOST_INDICES, AskTrainer, Relay, RelayAsker, RelayGiver, RelayStart
from penstock.wire.failures import describe_failure
from penstock.wire.frames import AskRows, RelayFailed, RelayRows

MOST_BYTES = 100
PEER, OTHER = b"trainer", b"another"
RUNNER, SECOND = RunnerId("r0"), RunnerId("r1")


def split_start(index: int = 0, offset: int | None = None) -> RelayStart:
    return RelayStart(source=2, key="k", split=7, index=index, offset=offset)


def offered(*peers: bytes) -> RelayAsker:
    asker = RelayAsker()
    for number, peer in enumerate(peers):
        asker.offer(peer, f"name {number}")
    return asker


def only_ask(asker: RelayAsker) -> AskTrainer:
    (ask,) = asker.asks()
    return ask


def rows(ask: AskTrainer, count: int = 3, *, ended: bool = False, covers: int = 0) -> RelayRows:
    return RelayRows(ask=ask.message.ask, count=count, ended=ended, covers=covers)


def test_an_ask_says_all_that_is_to_be_known() -> None:
    asker = offered(PEER)
    asker.open(split_start(index=5, offset=99), MOST_BYTES)
    expected = AskRows(ask=1, source=2, key="k", most_bytes=MOST_BYTES, split=7, index=5, offset=99)
    assert asker.asks() == [AskTrainer(PEER, expected)]
    assert asker.asks() == [], "it is sent once"


def test_what_follows_is_asked_for_when_rows_are_taken_and_not_before() -> None:
    asker = offered(PEER)
    relay = asker.open(split_start(), MOST_BYTES)
    assert asker.receive(PEER, rows(only_ask(asker)), "payload")
    assert asker.asks() == [], "the engine has not got to them"
    taken = asker.take(relay)
    assert taken is not None and taken.payload == "payload"
    assert only_ask(asker).message.index == 3
    assert asker.take(relay) is None and asker.asks() == []


def test_a_place_is_where_the_last_row_says() -> None:
    asker = offered(PEER)
    relay = asker.open(split_start(), MOST_BYTES)
    ask = only_ask(asker)
    asker.receive(PEER, RelayRows(ask=ask.message.ask, count=2, indices=(4, 9), offsets=(40, 90)))
    asker.take(relay)
    again = only_ask(asker).message
    assert (again.index, again.offset) == (10, 90)


def test_after_the_end_nothing_is_asked_for() -> None:
    asker = offered(PEER)
    relay = asker.open(split_start(), MOST_BYTES)
    asker.receive(PEER, rows(only_ask(asker), ended=True))
    assert asker.take(relay) is not None
    assert asker.asks() == [] and relay.ended and asker.take(relay) is None


def test_without_an_offer_it_waits_for_one() -> None:
    asker = RelayAsker()
    asker.open(split_start(), MOST_BYTES)
    assert asker.asks() == []
    asker.offer(PEER, "name")
    assert only_ask(asker).peer == PEER
    asker.offer(PEER, "name")
    assert asker.asks() == [], "the same one again"


def test_what_is_asked_is_dealt_to_those_who_have_the_fewest_asks() -> None:
    asker = offered(PEER, OTHER)
    for _ in range(6):
        asker.open(split_start(), MOST_BYTES)
    assert [ask.peer for ask in asker.asks()] == [PEER, OTHER] * 3


def test_who_is_lost_is_asked_no_more_and_others_are_asked_for_the_same() -> None:
    asker = offered(PEER, OTHER)
    relay = asker.open(split_start(), MOST_BYTES)
    first = only_ask(asker)
    asker.lose(PEER)
    second = only_ask(asker)
    assert second.peer == OTHER and second.message.index == first.message.index
    assert not asker.receive(PEER, rows(first)), "its answer comes too late"
    assert asker.take(relay) is None
    asker.lose(OTHER)
    assert asker.asks() == []
    asker.offer(PEER, "back again")
    assert only_ask(asker).peer == PEER


def test_a_new_connection_of_the_same_one_takes_the_place_of_the_old() -> None:
    asker = offered(PEER)
    asker.open(split_start(), MOST_BYTES)
    asker.asks()
    asker.offer(OTHER, "name 0")
    assert only_ask(asker).peer == OTHER


def test_of_two_answers_to_a_repeated_ask_the_first_counts() -> None:
    asker = offered(PEER)
    relay = asker.open(split_start(), MOST_BYTES)
    first = only_ask(asker)
    asker.repeat(relay)
    second = only_ask(asker)
    assert first.message.ask != second.message.ask
    assert asker.receive(PEER, rows(first))
    assert not asker.receive(PEER, rows(second))
    asker.take(relay)
    assert only_ask(asker).message.index == 3


def test_nothing_is_repeated_while_rows_wait_for_the_engine() -> None:
    asker = offered(PEER)
    relay = asker.open(split_start(), MOST_BYTES)
    asker.receive(PEER, rows(only_ask(asker)))
    asker.repeat(relay)
    assert asker.asks() == []


def test_a_failure_is_the_end_and_rows_before_it_are_given() -> None:
    asker = offered(PEER)
    relay = asker.open(split_start(), MOST_BYTES)
    asker.receive(PEER, rows(only_ask(asker)))
    assert asker.take(relay) is not None
    ask = only_ask(asker)
    asker.receive(PEER, RelayFailed(ask=ask.message.ask, failure=describe_failure(OSError("gone"))))
    assert asker.take(relay) is None and relay.failure is not None and relay.failure.message == "gone"
    asker.repeat(relay)
    assert asker.asks() == []


def test_a_closed_relay_takes_nothing() -> None:
    asker = offered(PEER)
    relay = asker.open(split_start(), MOST_BYTES)
    ask = only_ask(asker)
    asker.close(relay)
    assert not asker.receive(PEER, rows(ask))
    asker.lose(PEER)
    asker.offer(OTHER, "name")
    assert asker.asks() == []


def test_indices_are_drawn_as_they_are_asked_for() -> None:
    drawn = iter(range(10_000))
    asker = offered(PEER)
    relay = asker.open(RelayStart(source=0, key="k", indices=drawn), MOST_BYTES)
    ask = only_ask(asker)
    assert ask.message.indices == tuple(range(MOST_INDICES))
    asker.receive(PEER, rows(ask, count=9, covers=10))
    taken = asker.take(relay)
    assert taken is not None and taken.indices == tuple(range(10))
    assert only_ask(asker).message.indices == tuple(range(10, 10 + MOST_INDICES))
    assert next(drawn) == 10 + MOST_INDICES


class FewRows:
    """A trainer's source: a split of `count` rows, a few of them an answer."""

    def __init__(self, count: int) -> None:
        self._count = count

    def answer(self, ask: AskRows, few: int) -> RelayRows:
        if ask.split < 0:
            return RelayRows(ask=ask.ask, count=min(few, len(ask.indices)), covers=min(few, len(ask.indices)))
        count = min(few, self._count - ask.index)
        return RelayRows(ask=ask.ask, count=count, ended=ask.index + count >= self._count)


@pytest.mark.parametrize("seed", range(60))
def test_every_row_is_taken_once_and_in_order_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randrange(1, 60)
    permuted = chance.sample(range(count), count)
    by_index = chance.random() < 0.5
    source = FewRows(count)
    asker, peers, born = offered(PEER), [PEER], 0
    indices: Iterable[int] = permuted if by_index else ()
    start = RelayStart(source=0, key="k", split=-1 if by_index else 0, indices=indices)
    relay: Relay = asker.open(start, MOST_BYTES)
    under_way: list[tuple[bytes, RelayRows]] = []
    taken: list[int] = []
    for _ in range(20_000):
        for peer, message in asker.asks():
            if peer in peers:
                under_way.append((peer, source.answer(message, chance.randrange(1, 7))))
        event = chance.choice(["arrive", "arrive", "take", "take", "lose", "offer", "repeat", "double", "drop"])
        if event == "arrive" and under_way:
            peer, answer = under_way.pop(chance.randrange(len(under_way)))
            asker.receive(peer, answer)
        elif event == "double" and under_way:
            under_way.append(chance.choice(under_way))
        elif event == "drop" and under_way:
            under_way.pop()
        elif event == "repeat":
            asker.repeat(relay)
        elif event == "lose" and peers:
            asker.lose(peers.pop(chance.randrange(len(peers))))
        elif event == "offer" and len(peers) < 3:
            born += 1
            peers.append(b"peer %d" % born)
            asker.offer(peers[-1], f"born {born}")
        elif event == "take" and (found := asker.take(relay)) is not None:
            taken += found.indices if by_index else range(len(taken), len(taken) + found.rows.count)
        if relay.ended and len(taken) >= count:
            break
    assert taken == (permuted if by_index else list(range(count)))
    assert asker.take(relay) is None and not relay.is_open


def given(giver: RelayGiver, runner: RunnerId, number: int, most_bytes: int = 40) -> None:
    giver.ask(runner, AskRows(ask=number, source=0, key="k", most_bytes=most_bytes, split=0))


def test_a_trainer_reads_in_turn_while_there_is_room() -> None:
    giver = RelayGiver(100)
    for number in range(3):
        given(giver, RUNNER, number)
    first, second = giver.next({}), giver.next({})
    assert first is not None and second is not None and (first.message.ask, second.message.ask) == (0, 1)
    assert giver.next({}) is None, "with what is being read it would be too much"
    assert giver.read(first) and giver.next({RUNNER: 40}) is None, "and with what is read and not sent"
    assert giver.next({}) is not None


def test_one_answer_is_read_however_large_it_is() -> None:
    giver = RelayGiver(10)
    given(giver, RUNNER, 0)
    assert giver.next({RUNNER: 5}) is None
    assert giver.next({}) is not None


def test_a_runner_that_takes_nothing_in_holds_up_no_other() -> None:
    giver = RelayGiver(10)
    given(giver, RUNNER, 0)
    given(giver, SECOND, 0)
    found = giver.next({RUNNER: 1_000})
    assert found is not None and found.runner == SECOND
    assert giver.next({RUNNER: 1_000}) is None


def test_what_a_lost_runner_asked_for_is_not_read_nor_sent() -> None:
    giver = RelayGiver(100)
    given(giver, RUNNER, 0)
    reading = giver.next({})
    given(giver, RUNNER, 1)
    given(giver, SECOND, 0)
    giver.lose(RUNNER)
    assert reading is not None and not giver.read(reading)
    kept = giver.next({})
    assert kept is not None and kept.runner == SECOND
    assert giver.next({}) is None
