from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest

from penstock.testing.simulator import (
    Kind,
    Simulation,
    SimulationFailed,
    check_histories,
    check_steps,
    deterministic_histories,
    fails,
    main,
    make_schedule,
    shrink,
    simulate,
)
from penstock.testing.simulator_dispatcher import Bug, Disk
from penstock.testing.simulator_workers import Shape
from penstock.testing.simulator_world import Failed
from penstock.wire.jobs import Uneven

SCHEDULES = 1000


def test_promises_are_kept_under_a_thousand_seeded_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", str(SCHEDULES), "--log"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("bug", [bug for bug in get_args(Bug) if bug])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    failed = next((found for seed in range(400) if (found := fails(make_schedule(seed), bug))), None)
    assert failed is not None, f"400 schedules did not find {bug}"
    small = shrink(failed, bug)
    assert len(small.schedule.faults) <= len(failed.schedule.faults)
    assert f"seed {failed.schedule.seed}:" in str(small)
    assert fails(small.schedule, bug) is not None
    assert fails(small.schedule) is None


def test_a_seed_says_everything() -> None:
    one, other = simulate(17), simulate(17)
    assert one.world.log == other.world.log
    assert one.trainer.epochs_read == other.trainer.epochs_read
    assert (one.world.now, one.world.accepted) == (other.world.now, other.world.accepted)


def test_schedules_are_of_all_kinds_and_do_something() -> None:
    """A thousand runs in which nothing happens would prove nothing."""
    schedules = [make_schedule(seed) for seed in range(200)]
    assert {fault.kind for schedule in schedules for fault in schedule.faults} == set(get_args(Kind))
    assert {schedule.shape.consumers for schedule in schedules} == {1, 2, 3}
    kinds = Counter((bool(s.shape.streams), s.shape.coordinated, s.shape.uneven) for s in schedules)
    assert sum(s.shape.fed for s in schedules) >= 8
    assert kinds.keys() == {
        *((in_turn, False, uneven) for in_turn in (False, True) for uneven in get_args(Uneven)),
        *((True, True, uneven) for uneven in ("drop", "pad")),
    }
    assert min(kinds.values()) >= 8, kinds
    runs = [simulate(schedule.seed) for schedule in schedules]
    noted = [line for run in runs for line in run.world.log]
    for text in ("(rejoin)", "(resume)", "(fresh)", "crash dispatcher", "freeze machine"):
        assert sum(text in line for line in noted) >= 10, text
    assert sum(run.dispatcher.disk.base is not None for run in runs) >= 20, "few snapshots were taken"
    assert sum(run.world.accepted for run in runs) > 2000


def test_an_undisturbed_run_reads_everything() -> None:
    simulation = Simulation(replace(make_schedule(5), faults=()))
    simulation.run()
    assert simulation.trainer.restarts == 0


SHAPE = Shape(splits=((0, 1, 2), (3, 4), (5, 6, 7, 8)), batch=2, consumers=2, streams=0)


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
def test_the_checker_sees_what_is_wrong(histories: list[list[tuple[int, ...]]], says: str | None) -> None:
    if says is None:
        check_histories(SHAPE, histories)
    else:
        with pytest.raises(Failed, match=says):
            check_histories(SHAPE, histories)


PADDED = replace(SHAPE, consumers=3, uneven="pad")


@pytest.mark.parametrize(
    ("histories", "says"),
    [
        ([[(0, 1), (6, 7)], [(2, 3), (8,)], [(4, 5), (6, 7)]], None),
        ([[(0, 1), (6, 7)], [(2, 3), (8,)], [(4, 5), (4, 5)]], "more than once"),
        ([[(0, 1), (6, 7)], [(2, 3), (6, 7)], [(4, 5), (6, 7)]], "were lost"),
    ],
)
def test_a_padded_round_repeats_its_own_batches_only(histories: list[list[tuple[int, ...]]], says: str | None) -> None:
    if says is None:
        check_histories(PADDED, histories)
    else:
        with pytest.raises(Failed, match=says):
            check_histories(PADDED, histories)


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
