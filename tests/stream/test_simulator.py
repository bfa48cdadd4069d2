"""The simulator: its schedules, its checks, and that it finds what is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest

from penstock.core.ids import AttemptId
from penstock.testing.simulator.__main__ import main
from penstock.testing.simulator.checks import (
    check,
    check_histories,
    check_shared,
    check_steps,
    deterministic_histories,
)
from penstock.testing.simulator.dispatcher import Bug, Disk
from penstock.testing.simulator.engine import PASS, Shape
from penstock.testing.simulator.schedule import (
    Kind,
    Schedule,
    Simulation,
    SimulationFailed,
    fails,
    make_schedule,
    shrink,
    simulate,
)
from penstock.testing.simulator.trainer import Read
from penstock.testing.simulator.world import Failed
from penstock.wire.modes import ShareKind, Uneven

SCHEDULES = 250


def test_promises_are_kept_under_hundreds_of_seeded_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", str(SCHEDULES), "--log"]) == 0, capsys.readouterr().out


def could_show(bug: Bug, shape: Shape) -> bool:
    return bug != "torn_trainer" or (shape.sharing is not None and shape.consumers > 1)


@pytest.mark.parametrize("bug", [bug for bug in get_args(Bug) if bug])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    schedules = [schedule for seed in range(400) if could_show(bug, (schedule := make_schedule(seed)).shape)]
    failed = next((found for schedule in schedules if (found := fails(schedule, bug))), None)
    assert failed is not None, f"400 schedules did not find {bug}"
    assert fails(failed.schedule) is None
    small = shrink(failed, bug)
    assert len(small.schedule.faults) <= len(failed.schedule.faults)
    assert f"seed {failed.schedule.seed}:" in str(small)
    assert fails(small.schedule, bug) is not None


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
    assert {fault.kind for schedule in schedules for fault in schedule.faults} == set(get_args(Kind))
    for field, values in (
        ("consumers", {1, 2, 3}),
        ("epochs", {1, 2, 3}),
        ("repeat", {1, 2}),
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


def undisturbed(**shape: Any) -> Schedule:
    given = {"splits": ((0, 1, 2), (3, 4), (5, 6, 7, 8)), "batch": 2, "consumers": 1, "streams": 0, **shape}
    return Schedule(seed=5, shape=Shape(**given), workers=2, faults=())


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"consumers": 2, "repeat": 2},
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
    for trainer in simulation.trainers:
        assert trainer.restarts == 0 and len(trainer.epochs_read) == trainer.shape.epochs
        for read in trainer.epochs_read:
            given = {x for history in read.histories for batch in history for x in batch}
            left = len(set(trainer.shape.everything) - given)
            assert trainer.shape.sharing == "skip" or left <= trainer.shape.batch * (trainer.shape.consumers - 1)


# The checks

SHAPE = Shape(splits=((0, 1, 2), (3, 4), (5, 6, 7, 8)), batch=2, consumers=2, streams=0)
Histories = list[list[tuple[int, ...]]]


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
    _expect(says, lambda: check_histories(SHAPE, histories))


@pytest.mark.parametrize(
    ("histories", "says"),
    [
        ([[(0, 1), (6, 7)], [(2, 3), (8,)], [(4, 5), (6, 7)]], None),
        ([[(0, 1), (6, 7)], [(2, 3), (8,)], [(4, 5), (4, 5)]], "more than once"),
        ([[(0, 1), (6, 7)], [(2, 3), (6, 7)], [(4, 5), (6, 7)]], "were lost"),
    ],
)
def test_a_padded_round_repeats_its_own_batches_only(histories: Histories, says: str | None) -> None:
    _expect(says, lambda: check_histories(replace(SHAPE, consumers=3, uneven="pad"), histories))


def _expect(says: str | None, checks: Any) -> None:
    if says is None:
        checks()
        return
    with pytest.raises(Failed, match=says):
        checks()


def test_what_was_given_to_another_number_of_ranks_counts() -> None:
    check_histories(SHAPE, [[(4, 5)], [(6, 7)]], before=[(0, 1), (2, 3)])
    with pytest.raises(Failed, match="more than once"):
        check_histories(SHAPE, [[(4, 5)], [(6, 7)]], before=[(0, 1), (2, 4)])


def test_passes_of_an_epoch_are_told_apart() -> None:
    twice = replace(SHAPE, consumers=1, repeat=2)
    once = [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]
    again = [tuple(x + PASS for x in batch) for batch in once]
    check_histories(twice, [[*once, *again]])
    with pytest.raises(Failed, match="more than once"):
        check_histories(twice, [[*once, *once]])


def test_ranks_that_sit_out_steps_may_have_fewer_batches() -> None:
    allowed = replace(SHAPE, uneven="allow")
    check_histories(allowed, [[(0, 1), (4, 5), (6, 7)], [(2, 3), (8,), ()]])
    with pytest.raises(Failed, match="were lost"):
        check_histories(allowed, [[(0, 1), (4, 5), (6, 7)], [(2, 3), (), ()]])


def shared_read(histories: Histories, *, sharing: ShareKind = "wait", late: bool = False) -> Read:
    read = Read(replace(SHAPE, sharing=sharing, trainers=2))
    read.enter(AttemptId("a"))
    for rank, history in enumerate(histories):
        read.histories[rank].extend(history)
    if late:
        read.miss()
    return read


WHOLE: Histories = [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
PART: Histories = [[(0, 1)], [(2, 3)]]


def test_a_trainer_that_is_waited_for_misses_nothing() -> None:
    check_shared(shared_read(WHOLE))
    with pytest.raises(Failed, match="missed"):
        check_shared(shared_read(PART))
    check_shared(shared_read(PART, sharing="skip"))
    check_shared(shared_read(PART, late=True))


def test_a_trainer_that_shares_is_given_nothing_twice() -> None:
    again: Histories = [[(0, 1), (0, 1)], [(2, 3), (6, 7)]]
    with pytest.raises(Failed, match="more than once"):
        check_shared(shared_read(again, sharing="skip"))
    check_shared(shared_read(again, sharing="skip"), may_repeat=True)
    with pytest.raises(Failed, match="more than once"):
        check(shared_read(again, sharing="skip"), streams_moved=True)
    check(shared_read(again, sharing="skip", late=True), streams_moved=True)


def test_the_ranks_of_a_trainer_that_shares_end_together() -> None:
    with pytest.raises(Failed, match="different steps"):
        check_shared(shared_read([[(0, 1), (4, 5)], [(2, 3)]], sharing="skip"))


def test_a_torn_step_is_seen() -> None:
    check_steps([[(0, 0), (1, 0)], [(0, 0), (1, 0)]])
    with pytest.raises(Failed, match="step 1 was torn"):
        check_steps([[(0, 0), (1, 0)], [(0, 0), (0, 1)]])


def test_deterministic_order_is_checked_against_the_description_alone() -> None:
    shape = replace(SHAPE, streams=2)
    check_histories(shape, deterministic_histories(shape))
    swapped = [list(reversed(history)) for history in deterministic_histories(shape)]
    with pytest.raises(Failed, match="deterministic order"):
        check_histories(shape, swapped)


def test_a_torn_record_is_dropped_and_so_is_all_after_it() -> None:
    simulation = simulate(3)
    disk = Disk()
    disk.records = list(simulation.dispatcher.disk.records)
    disk.base = simulation.dispatcher.disk.base
    whole = len(disk.records)
    disk.records[-1] = disk.records[-1][:-1]
    disk.load()
    assert len(disk.records) == whole - 1


def test_a_failure_tells_the_seed_and_the_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "50", "--bug", "no_sync"]) == 1
    said = capsys.readouterr().out
    assert "before that was on disk" in said
    assert "seed " in said
    assert issubclass(SimulationFailed, AssertionError)
