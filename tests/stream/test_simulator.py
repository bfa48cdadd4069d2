"""The simulator: its schedules, its checks, and that it finds what is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest

from penstock.control import completing, permissions
from penstock.core.ids import RunnerId
from penstock.stream.consuming import Consumer
from penstock.stream.serving import ServedReader
from penstock.testing.simulator.__main__ import main
from penstock.testing.simulator.dispatcher import Disk, FakeDispatcher, TakenRequests
from penstock.testing.simulator.engine import (
    NOWHERE,
    PASS,
    RankStep,
    Read,
    RoundPlace,
    Shape,
    check,
    deterministic_histories,
)
from penstock.testing.simulator.schedule import (
    Fault,
    FaultKind,
    Schedule,
    Simulation,
    SimulationFailed,
    fails,
    make_schedule,
    shrink,
)
from penstock.testing.simulator.workers import FakeSharedStream
from penstock.testing.simulator.world import Failed, Mail
from penstock.wire.frames import OpenStream
from penstock.wire.jobs import delivery_of
from penstock.wire.messages import StartRunner
from penstock.wire.modes import ShareKind, Uneven
from penstock.wire.positions import PositionSigner
from penstock.worker.feeds import Settled, StreamLedger

SCHEDULES = 250


def simulate(seed: int) -> Simulation:
    simulation = Simulation(make_schedule(seed, scaled=False))
    simulation.run()
    return simulation


def test_promises_are_kept_under_hundreds_of_seeded_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"0-{SCHEDULES - 1}", "--log"]) == 0, capsys.readouterr().out
    assert f"{SCHEDULES} of {SCHEDULES} cases passed" in capsys.readouterr().out


def test_ranks_that_read_from_a_part_of_forty_workers_are_given_everything_once() -> None:
    ids = iter(range(1_000))
    splits = tuple(tuple(next(ids) for _ in range(1 + number % 3)) for number in range(200))
    shape = Shape(splits=splits, batch=2, consumers=6, streams=0, uneven="allow", reach=4)
    faults = tuple(
        Fault(at_s=at_s, kind="kill runner", which=which) for at_s, which in ((0.6, 3), (1.1, 17), (2.0, 31))
    )
    simulation = Simulation(Schedule(seed=5, shape=shape, workers=40, faults=faults))
    simulation.run()
    (trainer,) = simulation.trainers
    assert all(len(client.links) <= 12 for client in trainer.clients), "about four, and those of lost workers"


# Bugs that are planted: what each does instead


def not_synced(disk: Disk) -> None:
    """Nothing reaches the disk for good."""


def said_at_once(dispatcher: FakeDispatcher, taken: TakenRequests) -> None:
    hard = [event for decision, _, _ in taken for event in decision.events if event.JOURNALED]
    dispatcher._say(taken, dispatcher.disk.write(hard))


def settled_ahead(settle: Any) -> Any:
    """The state counts what was prefetched as received."""
    return lambda consumer, taken: settle(consumer, consumer.serving.size)


def summed_credits(hear: Any) -> Any:
    """A sum of differences does not survive being said again."""
    return lambda reader, credit, taken, now: hear(reader, reader.credit + credit, taken, now)


def without_boundary(settle: Any) -> Any:
    """A cut does not name the split it lies in."""

    def settled(ledger: StreamLedger, places: Any) -> Settled:
        named, done = settle(ledger, places)
        return Settled(named[1:], done)

    return settled


def torn(hear: Any) -> Any:
    """Ranks with a place each skip each for itself."""

    def heard(stream: FakeSharedStream, peer: bytes, message: Any) -> None:
        if isinstance(message, OpenStream):
            message = msgspec.structs.replace(message, trainer=f"{message.trainer}.{message.consumer}")
        hear(stream, peer, message)

    return heard


def anybody(state: Any, principal: Any, request: Any) -> bool:
    """Whoever has the role has the right."""
    return True


def vouched_by_any(job: Any, iteration: Any) -> bool:
    fixed = delivery_of(job.spec).streams is not None or iteration.tail is not None
    return fixed or any(stream.ended and not stream.lost for stream in iteration.streams.values())


BUGS: dict[str, tuple[Any, str, Any]] = {
    "no sync": (Disk, "sync", not_synced),
    "said before it is committed": (FakeDispatcher, "_write", said_at_once),
    "prefetched in the state": (Consumer, "settle", settled_ahead(Consumer.settle)),
    "incremental credits": (ServedReader, "hear", summed_credits(ServedReader.hear)),
    "unnamed boundary": (StreamLedger, "settle", without_boundary(StreamLedger.settle)),
    "torn trainer": (FakeSharedStream, "hear", torn(FakeSharedStream.hear)),
    "everybody may ask everything": (permissions.Condition, "holds", property(lambda condition: anybody)),
    "retired streams vouch": (completing, "_all_asked_for", vouched_by_any),
    "positions are believed": (PositionSigner, "verifies", lambda signer, position, proof: True),
}


def could_show(bug: str, shape: Shape) -> bool:
    return bug != "torn trainer" or (shape.sharing is not None and shape.consumers > 1)


def schedule_for(bug: str, seed: int) -> Schedule:
    schedule = make_schedule(seed)
    if bug != "retired streams vouch":
        return schedule
    # One of thousands shows it: an epoch must begin while streams retire, which one opened ahead has done before.
    return replace(schedule, shape=replace(schedule.shape, ahead=False, keeps=False))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = [schedule for seed in range(400) if could_show(bug, (schedule := schedule_for(bug, seed)).shape)]
    with monkeypatch.context() as broken:
        broken.setattr(*BUGS[bug])
        failed = next((found for schedule in schedules if (found := fails(schedule))), None)
        assert failed is not None, f"400 schedules did not find {bug}"
        small = shrink(failed)
        assert len(small.schedule.faults) <= len(failed.schedule.faults)
        assert f"seed {failed.schedule.seed}:" in str(small)
        assert fails(small.schedule) is not None
    assert fails(failed.schedule) is None


@pytest.mark.parametrize("seed", [108480, 109878, 117171, 119285, 305459])
def test_a_stream_that_had_left_a_pass_reads_no_more_of_it_after_a_load(seed: int) -> None:
    """A split that went back was granted to it there, so that all it had made after that pass moved."""
    simulate(seed)


def test_a_split_that_one_rank_is_through_with_and_another_is_not_is_granted_to_no_other_stream() -> None:
    """Some ranks had seen the end of its stream at the first of two loads."""
    simulate(127180)


def test_a_stream_whose_reader_came_back_from_before_its_end_is_served_though_the_tail_has_ended() -> None:
    simulate(501645)


def test_states_of_one_number_of_steps_that_do_not_go_together_are_refused_and_earlier_ones_load() -> None:
    """A rank came back alone, and its streams end in other steps than in its first life, which others' states know."""
    simulate(203046)


def test_a_trainers_new_life_begins_where_its_ranks_say_and_not_where_an_older_one_ended_here() -> None:
    """A rank without its state came to a process that had served the life before; the others had been given more."""
    simulate(224446)


def test_a_trainer_that_went_back_behind_an_empty_window_is_served() -> None:
    simulate(228774)


def test_a_consumer_that_a_journal_lost_ends_its_streams_once_it_has_opened_them_again() -> None:
    simulate(301023)


def test_a_list_that_had_ended_is_not_asked_for_after_a_journal_is_lost() -> None:
    """The dispatcher knows no split that the stream was through with, and refuses to say what comes after one."""
    simulate(23186)


@pytest.mark.parametrize("seed", [17, 23, 31, 40])
def test_a_seed_says_everything(seed: int) -> None:
    one, other = simulate(seed), simulate(seed)
    assert one.world.log == other.world.log != []
    assert one.world.now == other.world.now
    assert _read(one) == _read(other) != []


def _read(simulation: Simulation) -> list[Any]:
    return [
        (trainer.name, read.histories, read.places) for trainer in simulation.trainers for read in trainer.epochs_read
    ]


def test_schedules_are_of_all_kinds() -> None:
    """Hundreds of runs in which nothing happens would prove nothing."""
    schedules = [make_schedule(seed) for seed in range(600)]
    shapes = [schedule.shape for schedule in schedules]
    assert {fault.kind for schedule in schedules for fault in schedule.faults} == set(get_args(FaultKind))
    for field, values in (
        ("consumers", {1, 2, 3}),
        ("epochs", {1, 2, 3}),
        ("repeat", {1, 2}),
        ("concatenated", {True, False}),
        ("trainers", {1, 2, 3}),
        ("fed", {True, False}),
        ("sharing", {None, *get_args(ShareKind)}),
        ("uneven", set(get_args(Uneven))),
    ):
        found = Counter(getattr(shape, field) for shape in shapes)
        assert found.keys() == values and min(found.values()) >= 10, (field, found)
    kinds = Counter((bool(shape.streams), shape.coordinated, shape.uneven) for shape in shapes)
    assert kinds.keys() == {
        *((False, False, uneven) for uneven in get_args(Uneven)),
        *((True, coordinated, uneven) for coordinated in (False, True) for uneven in ("drop", "pad")),
    }
    assert min(kinds.values()) >= 20, kinds
    shared = Counter((shape.sharing, shape.coordinated, shape.consumers > 1) for shape in shapes if shape.sharing)
    assert len(shared) == 8, "both ways to share, in turns and not, by trainers of one rank and of several"


def test_what_is_to_happen_in_schedules_happens() -> None:
    schedules = [make_schedule(seed) for seed in range(120)]
    runs = [simulate(schedule.seed) for schedule in schedules]
    noted = [line for run in runs for line in run.world.log]
    for text in ("(rejoin)", "(resume)", "(fresh)", "crash dispatcher", "freeze machine"):
        assert sum(text in line for line in noted) >= 10, text
    assert sum(run.dispatcher.disk.base is not None for run in runs) >= 20, "few snapshots were taken"
    reads = [read for run in runs for trainer in run.trainers for read in trainer.epochs_read]
    assert sum(len(read.before) > 0 for read in reads) >= 5, "few trainers went on as another number of ranks"
    assert sum(read.joined_late for read in reads) >= 3
    assert sum(len(history) for read in reads for history in read.histories) > 1500
    assert sum(run.hostile.asked for run in runs if run.hostile is not None) > 500


def undisturbed(**shape: Any) -> Schedule:
    given = {"splits": ((0, 1, 2), (3, 4), (5, 6, 7, 8)), "batch": 2, "consumers": 1, "streams": 0, **shape}
    return Schedule(seed=5, shape=Shape(**given), workers=2, faults=())


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"consumers": 2, "repeat": 2},
        {"consumers": 2, "repeat": 2, "concatenated": True, "uneven": "pad"},
        {"streams": 2, "consumers": 2, "uneven": "pad"},
        {"streams": 2, "coordinated": True, "epochs": 2},
        {"streams": 2, "fed": True},
        {"consumers": 2, "uneven": "allow"},
        {"sharing": "wait", "trainers": 2},
        {"sharing": "skip", "trainers": 2, "consumers": 2},
    ],
)
def test_an_undisturbed_run_reads_everything(shape: dict[str, Any]) -> None:
    simulation = Simulation(undisturbed(**shape))
    simulation.run()
    assert simulation.world.log == [], "something was started again"
    for trainer in simulation.trainers:
        assert len(trainer.epochs_read) == trainer.shape.epochs
        for read in trainer.epochs_read:
            given = {x for history in read.histories for batch in history for x in batch}
            left = len(set(trainer.shape.everything) - given)
            assert trainer.shape.sharing == "skip" or left <= trainer.shape.batch * (trainer.shape.consumers - 1)


def test_a_lost_start_costs_no_more_than_a_fault_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.testing.simulator.world.HEALS_AT_S", 0.0)  # nothing else is lost
    simulation = Simulation(replace(undisturbed(), workers=1))
    world = simulation.world
    unharmed = world.send
    lost: list[RunnerId] = []

    def send(sender: str, receiver: str, mail: Mail) -> None:
        if isinstance(mail.body, StartRunner) and not lost:
            lost.append(mail.body.runner)
        else:
            unharmed(sender, receiver, mail)

    world.send = send  # type: ignore[method-assign]
    simulation.run()
    assert len(lost) == 1 and world.now < 5.0


# The checks

SHAPE = Shape(splits=((0, 1, 2), (3, 4), (5, 6, 7, 8)), batch=2, consumers=2, streams=0)
Batches = list[tuple[int, ...]]
Histories = list[Batches]


def read_of(
    histories: Histories,
    shape: Shape = SHAPE,
    *,
    before: Batches | None = None,
    late: bool = False,
    places: list[list[RoundPlace]] | None = None,
) -> Read:
    read = Read(shape, before or [], joined_late=late)
    for rank, history in enumerate(histories):
        found = [NOWHERE] * len(history) if places is None else places[rank]
        read.ranks[rank] += [RankStep(batch, place, {}) for batch, place in zip(history, found)]
    return read


def expect(says: str | None, read: Read, *, streams_moved: bool = False) -> None:
    if says is None:
        check(read, streams_moved=streams_moved)
        return
    with pytest.raises(Failed, match=says):
        check(read, streams_moved=streams_moved)


@pytest.mark.parametrize(
    ("histories", "says"),
    [
        ([[(0, 1), (4, 5)], [(2, 3), (6, 7)]], None),
        ([[(0, 1), (4, 5)], [(2, 3), (6, 1)]], "more than once"),
        ([[(0, 1), (4, 5)], [(2, 3), (6, 99)]], "from nowhere"),
        ([[(0, 1)], [(2, 3)]], "were lost"),
        ([[(0, 1), (4, 5), (8,)], [(2, 3), (6, 7)]], "different steps"),
    ],
)
def test_the_checker_sees_what_is_wrong(histories: Histories, says: str | None) -> None:
    expect(says, read_of(histories))


@pytest.mark.parametrize(
    ("histories", "says"),
    [
        ([[(0, 1), (6, 7)], [(2, 3), (8,)], [(4, 5), (6, 7)]], None),
        ([[(0, 1), (6, 7)], [(2, 3), (8,)], [(4, 5), (4, 5)]], "more than once"),
        ([[(0, 1), (6, 7)], [(2, 3), (6, 7)], [(4, 5), (6, 7)]], "were lost"),
    ],
)
def test_a_padded_round_repeats_its_own_batches_only(histories: Histories, says: str | None) -> None:
    expect(says, read_of(histories, replace(SHAPE, consumers=3, uneven="pad")))


def test_what_was_given_to_another_number_of_ranks_counts() -> None:
    expect(None, read_of([[(4, 5)], [(6, 7)]], before=[(0, 1), (2, 3)]))
    expect("more than once", read_of([[(4, 5)], [(6, 7)]], before=[(0, 1), (2, 4)]))


def test_passes_of_an_epoch_are_told_apart() -> None:
    twice = replace(SHAPE, consumers=1, repeat=2)
    once = [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]
    again = [tuple(x + PASS for x in batch) for batch in once]
    expect(None, read_of([[*once, *again]], twice))
    expect("more than once", read_of([[*once, *once]], twice))


def test_ranks_that_sit_out_steps_may_have_fewer_batches() -> None:
    allowed = replace(SHAPE, uneven="allow")
    expect(None, read_of([[(0, 1), (4, 5), (6, 7)], [(2, 3), (8,), ()]], allowed))
    expect("were lost", read_of([[(0, 1), (4, 5), (6, 7)], [(2, 3), (), ()]], allowed))


WAITS = replace(SHAPE, sharing="wait", trainers=2)
SKIPS = replace(SHAPE, sharing="skip", trainers=2)
WHOLE: Histories = [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
PART: Histories = [[(0, 1)], [(2, 3)]]


def test_a_trainer_that_is_waited_for_misses_nothing() -> None:
    expect(None, read_of(WHOLE, WAITS))
    expect("were lost", read_of(PART, WAITS))
    expect(None, read_of(PART, SKIPS))
    expect(None, read_of(PART, WAITS, late=True))


def test_a_trainer_that_shares_is_given_nothing_twice() -> None:
    """Unless it came back without its state, and the process that knew of it is gone."""
    again: Histories = [[(0, 1), (0, 1)], [(2, 3), (6, 7)]]
    expect("more than once", read_of(again, SKIPS))
    expect("more than once", read_of(again, SKIPS), streams_moved=True)
    expect("more than once", read_of(again, SKIPS, late=True))
    expect(None, read_of(again, SKIPS, late=True), streams_moved=True)


def test_the_ranks_of_a_trainer_that_shares_end_together() -> None:
    expect("different steps", read_of([[(0, 1), (4, 5)], [(2, 3)]], SKIPS))


def test_a_torn_step_is_seen() -> None:
    in_turn = replace(SHAPE, streams=2, coordinated=True)
    expect(None, read_of(WHOLE, in_turn, places=[[(0, 0), (1, 0)], [(0, 0), (1, 0)]]))
    expect("step 1 was torn", read_of(WHOLE, in_turn, places=[[(0, 0), (1, 0)], [(0, 0), (0, 1)]]))


def test_deterministic_order_is_checked_against_the_description_alone() -> None:
    shape = replace(SHAPE, streams=2)
    expect(None, read_of(deterministic_histories(shape), shape))
    expect("deterministic order", read_of([history[::-1] for history in deterministic_histories(shape)], shape))


def test_a_torn_record_is_dropped_and_so_is_all_after_it() -> None:
    simulation = simulate(3)
    disk = Disk()
    disk.records = list(simulation.dispatcher.disk.records)
    disk.base = simulation.dispatcher.disk.base
    whole = len(disk.records)
    disk.records[-1] = disk.records[-1][:-1]
    disk.load()
    assert len(disk.records) == whole - 1


def test_a_failure_tells_the_seed_and_the_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BUGS["no sync"])
    assert main(["0-49", "--log"]) == 1
    said = capsys.readouterr().out
    assert "before that was on disk" in said
    assert "0 of 50 cases passed" in said and "50 failed: seeds [0, 1, 2" in said
    assert "seed 0: " in said and "Shape(splits=" in said
    assert issubclass(SimulationFailed, AssertionError)


def test_cases_run_in_several_processes_and_kinds_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["60-69", "--jobs", "2"]) == 0
    kinds = Counter(make_schedule(seed).shape.kind for seed in range(60, 70))
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    assert capsys.readouterr().out == f"seeds 60-69: 10 of 10 cases passed ({said})\n"
