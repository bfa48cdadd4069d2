"""What a reader with a key can say to a runner: nonsense of every kind makes nothing fail, and honest readers go on."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import penstock as ps
from penstock.core.ids import StreamId
from penstock.wire.frames import AskRows, CloseStream, OfferReading, StreamLeft, ToRunner, Units
from penstock.wire.jobs import Cut
from penstock.worker import listening
from penstock.worker.feeds import FedUnits
from tests.security.hostile import Hostile, kinds_of, mutated
from tests.waiting import wait_until
from tests.worker.runner_harness import ATTEMPT, GRANTED, PLENTY, RUNNER, Harness, OpenStream, harness

MESSAGES = 1_000


@pytest.fixture
def service() -> Iterator[Harness]:
    with harness() as made:
        yield made


HONEST = OpenStream(
    stream=f"{ATTEMPT}.1",
    binding=1,
    opening=1,
    consumer=0,
    round=0,
    cut=Cut(),
    cut_round=0,
    feed=GRANTED,
    share=1,
    attempt=ATTEMPT,
    epoch=0,
    runner=RUNNER,
    credit=PLENTY,
)


@pytest.mark.parametrize("seed", range(2))
def test_hostile_messages_of_every_type_make_nothing_fail(
    service: Harness, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    runner = service.serve(ps.range(1_000).map(abs).batch(10))
    hostile_reader, honest_reader = service.reader(), service.reader()
    rng = random.Random(seed)
    names = [f"{ATTEMPT}.{number}" for number in (1, 2)] + [ATTEMPT, RUNNER, "nobody"]
    hostile = Hostile(rng, names, [HONEST])
    kinds = list(kinds_of(ToRunner).values())
    with caplog.at_level(logging.ERROR):
        for number in range(MESSAGES):
            message = hostile.message(rng.choice(kinds))
            hostile_reader._socket.send(mutated(rng, message) if number % 3 == 0 else message)
        received = honest_reader.open(0)
        honest_reader.read_until(lambda: received.over, "the end of an honest reading")
    assert received.end is not None, received
    assert runner.streams.data.serving
    failed = [record for record in caplog.records if record.exc_info]
    assert not failed, [(record.getMessage(), record.exc_text) for record in failed[:3]]


def test_units_of_streams_that_nobody_opens_are_not_kept(service: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message added some to a process for as long as it lived."""
    runner = service.serve(ps.range(1_000).map(abs).batch(10))
    wait_until(lambda: runner.streams._host, "the job to be loaded")
    reader = service.reader()
    for number in range(100):
        units = Units(stream=StreamId(f"{ATTEMPT}.{number}"), opening=1, first=number, units=((1, 2), (3,)))
        reader._socket.send(msgspec.msgpack.encode(units))
    fed = runner.streams._opener._fed
    wait_until(lambda: len(fed) == 100, "what was said to be heard")
    monkeypatch.setattr(listening, "FORGET_S", 0.1)
    wait_until(lambda: not fed, "what was said to be forgotten")


def test_units_of_all_streams_together_have_a_bound() -> None:
    fed = FedUnits()
    fed.take(Units(stream=StreamId("a"), opening=1, first=0, units=((1, 2, 3), (4, 5))), room=5)
    fed.take(Units(stream=StreamId("a"), opening=1, first=1, units=((6, 7),)), room=1)
    assert fed.indices == 5 and fed.get(1) == (4, 5)
    fed.take(Units(stream=StreamId("a"), opening=1, first=1, units=((6,),), taken=1), room=1)
    assert fed.indices == 1 and fed.get(1) == (6,)


@pytest.mark.parametrize(("owner", "asked"), [("test", True), ("somebody else", False)])
def test_only_a_jobs_owner_reads_for_its_workers(service: Harness, tmp_path: Path, owner: str, asked: bool) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n' * 20)
    runner = service.serve(ps.read_jsonl(f"{tmp_path}/*.jsonl"), read_by="trainer", owner=owner)
    wait_until(lambda: runner.streams._host, "the job to be loaded")
    reader = service.reader()
    reader.open(0)
    for message in (OfferReading(name="mine"), CloseStream(stream="none", opening=1, leaving=True)):
        reader._socket.send(msgspec.msgpack.encode(message))
    heard: list[object] = []

    def hear() -> bool:
        heard.append(msgspec.msgpack.decode(reader._socket.recv(), type=AskRows | StreamLeft))
        return {type(each) for each in heard} >= ({AskRows, StreamLeft} if asked else {StreamLeft})

    wait_until(hear, "what the runner says")
    assert any(isinstance(each, AskRows) for each in heard) == asked
