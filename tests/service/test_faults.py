"""Things die, and every element is still read exactly once. The checker counts ids and knows nothing of the service."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.waiting import wait_until

from .checks import assert_exactly_once, kill

ROWS = 4000


def slowly(i: int) -> int:
    time.sleep(0.001)
    return i


def dataset() -> ps.Dataset:
    return ps.range(ROWS).shuffle(seed=3).map(slowly).batch(16)


def runner_pids(service: ps.LocalService) -> list[int]:
    return wait_until(lambda: list(service.worker_pids().values()), "a running worker process")


def read_and_break(iterator: Iterator[np.ndarray], at: dict[int, object]) -> list[np.ndarray]:
    """Read to the end; before step n call `at[n]`."""
    read: list[np.ndarray] = []
    for batch in iterator:
        read.append(batch.copy())
        action = at.get(len(read))
        if callable(action):
            action()
    return read


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_a_killed_worker_loses_and_repeats_nothing(order: str) -> None:
    with (
        ps.LocalService(workers=3) as service,
        dataset().distribute(service, order=order, limits=ps.Limits(timeout_s=60)) as loader,
    ):
        breaks = {n: lambda: kill(runner_pids(service)[0]) for n in (5, 60, 140)}
        assert_exactly_once(read_and_break(iter(loader), breaks), range(ROWS))


def test_four_of_five_workers_killed() -> None:
    with ps.LocalService(workers=5) as service, dataset().distribute(service, limits=ps.Limits(timeout_s=60)) as loader:
        breaks = {20: lambda: [kill(pid) for pid in runner_pids(service)[:4]]}
        assert_exactly_once(read_and_break(iter(loader), breaks), range(ROWS))


def test_a_worker_lost_for_good_does_not_keep_a_finite_epoch_from_ending() -> None:
    with ps.LocalService(workers=3) as service, dataset().distribute(service, limits=ps.Limits(timeout_s=60)) as loader:
        breaks = {30: lambda: service.remove_worker()}
        assert_exactly_once(read_and_break(iter(loader), breaks), range(ROWS))


def test_a_worker_added_in_the_middle() -> None:
    with ps.LocalService(workers=1) as service, dataset().distribute(service, limits=ps.Limits(timeout_s=60)) as loader:
        breaks = {20: lambda: service.add_worker()}
        assert_exactly_once(read_and_break(iter(loader), breaks), range(ROWS))


def test_what_workers_hold_is_read_while_the_dispatcher_is_down() -> None:
    with (
        ps.LocalService(workers=2) as service,
        ps.range(200).distribute(service, limits=ps.Limits(timeout_s=60)) as loader,
    ):
        iterator = iter(loader)
        first = next(iterator)
        kill(service.dispatcher_pid)
        assert_exactly_once([first, *iterator], range(200))


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_dispatcher_restarts_before_during_and_between_epochs(order: str) -> None:
    with (
        ps.LocalService(workers=2) as service,
        dataset().distribute(service, order=order, limits=ps.Limits(timeout_s=60)) as loader,
    ):
        kill(service.dispatcher_pid)
        for _ in range(2):
            breaks = {n: lambda: kill(service.dispatcher_pid) for n in (1, 50, 120, 240)}
            assert_exactly_once(read_and_break(iter(loader), breaks), range(ROWS))
            kill(service.dispatcher_pid)


def test_an_epoch_without_sharding_ends_though_the_dispatcher_lost_its_journal() -> None:
    with ps.LocalService(workers=2) as service:
        numbers = ps.range(400).map(slowly).batch(4)
        with numbers.distribute(
            service, sharding=ps.Sharding("off", guarantee="zero_or_more"), limits=ps.Limits(timeout_s=60)
        ) as loader:

            def lose_journal() -> None:
                for file in (service.service_file.parent / "journal").iterdir():
                    file.unlink()
                kill(service.dispatcher_pid)

            read = read_and_break(iter(loader), {20: lose_journal})
        assert np.sort(np.concatenate(read)).tolist() == sorted([*range(400)] * 2)


def test_dispatcher_and_worker_killed_together() -> None:
    with ps.LocalService(workers=2) as service, dataset().distribute(service, limits=ps.Limits(timeout_s=60)) as loader:

        def both() -> None:
            kill(runner_pids(service)[0])
            kill(service.dispatcher_pid)

        assert_exactly_once(read_and_break(iter(loader), {10: both, 100: both}), range(ROWS))


def test_a_stopped_worker_is_passed_over_and_its_zombie_refused() -> None:
    with ps.LocalService(workers=2) as service, dataset().distribute(service, limits=ps.Limits(timeout_s=90)) as loader:
        stopped: list[int] = []

        def stop() -> None:
            stopped.append(runner_pids(service)[0])
            os.kill(stopped[0], signal.SIGSTOP)

        def resume() -> None:
            try:
                os.kill(stopped[0], signal.SIGCONT)
            except ProcessLookupError:
                pass  # ended as lost, which is as good

        read = read_and_break(iter(loader), {10: stop, 200: resume})
        resume()
        assert_exactly_once(read, range(ROWS))


def test_at_most_once_never_repeats() -> None:
    options: dict[str, Any] = {
        "sharding": ps.Sharding(guarantee="at_most_once"),
        "limits": ps.Limits(timeout_s=60),
    }
    with ps.LocalService(workers=3) as service, dataset().distribute(service, **options) as loader:
        read = read_and_break(iter(loader), {40: lambda: kill(runner_pids(service)[0])})
        ids = np.concatenate(read).tolist()
        assert len(set(ids)) == len(ids) and len(ids) > ROWS // 2


def test_a_killed_trainer_continues_from_its_state(three_workers: ps.LocalService) -> None:
    import json
    import subprocess
    import sys

    program = """
import json, os, sys, penstock as ps
loader = ps.range(4000).shuffle(seed=3).batch(16).distribute(sys.argv[1], job="trainer", order="deterministic")
if sys.argv[2] != "-":
    loader.load_state_dict(json.loads(sys.argv[2]))
for step, batch in enumerate(loader):
    print(json.dumps([batch.tolist(), loader.state_dict()]), flush=True)
    if sys.argv[2] == "-" and step == 40:
        os.kill(os.getpid(), 9)
"""

    def run(state: str) -> list[list[object]]:
        command = [sys.executable, "-c", program, str(three_workers.service_file), state]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        return [json.loads(line) for line in done.stdout.splitlines()]

    before = run("-")
    after = run(json.dumps(before[29][1]))
    whole = [
        b.tolist() for b in ps.range(4000).shuffle(seed=3).batch(16).distribute(three_workers, order="deterministic")
    ]
    assert [batch for batch, _ in before[:30]] + [batch for batch, _ in after] == whole


def test_an_element_that_kills_three_processes_is_left_out_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    def deadly(i: int) -> int:
        if i == 1234:
            os._exit(3)
        return i

    dataset = ps.range(2000).map(deadly)
    with ps.LocalService(workers=2) as service, dataset.distribute(service, limits=ps.Limits(timeout_s=90)) as loader:
        assert_exactly_once(loader, [i for i in range(2000) if i != 1234])
        assert any("element" in name for name in loader.statistics().dropped)


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import penstock as ps, time\n"
        "service = ps.LocalService(workers=2)\n"
        "loader = ps.range(10**6).batch(8).distribute(service)\n"
        "it = iter(loader); next(it)\n"
        "print(*service.pids(), flush=True)\n"
        "time.sleep(600)\n"
    )
    shm_before = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) >= 4
        process.kill()
    wait_until(lambda: not any(map(alive, pids)), f"the end of {pids}")
    assert set(os.listdir("/dev/shm")) <= shm_before


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
