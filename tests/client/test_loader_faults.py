"""What a loader does while processes around it die. Elements carry their ids; the multiset decides."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from tests.client.conftest import WAIT_S, in_threads, rows
from tests.waiting import wait_until

N = 400


def slow_pipeline(size: int = 4) -> ps.Dataset:
    def work(x: int) -> int:
        time.sleep(0.002)
        return x

    return ps.range(N).shuffle(seed=5).map(work).batch(size)


def wait_workers(service: ps.LocalService, count: int) -> dict[str, int]:
    return wait_until(lambda: pids if len(pids := service.worker_pids()) >= count else {}, f"{count} runners")


@pytest.mark.alone
@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_killed_workers_lose_and_repeat_nothing(order: str) -> None:
    with ps.LocalService(workers=3, threads=1) as service:
        loader = slow_pipeline().distribute(service, order=order, limits=ps.Limits(timeout_s=WAIT_S))
        got: list[Any] = []
        pauses: list[float] = []
        at = time.monotonic()
        for step, batch in enumerate(loader):
            pauses.append(time.monotonic() - at)
            got.append(batch.tolist())
            if step in (10, 40, 70):
                os.kill(next(iter(wait_workers(service, 1).values())), signal.SIGKILL)
            at = time.monotonic()
        assert sorted(rows(got)) == list(range(N))
        assert loader.statistics().reconnects > 0
        assert max(pauses[1:]) < 10  # well under two seconds on an idle machine
        if order == "deterministic":
            quiet = slow_pipeline().distribute(service, order=order, limits=ps.Limits(timeout_s=WAIT_S))
            assert [batch.tolist() for batch in quiet] == got
        loader.close()


def test_a_dispatcher_that_dies_is_not_noticed(tmp_path: Path) -> None:
    with ps.LocalService(workers=2, threads=1, journal=tmp_path) as service:
        loader = slow_pipeline().distribute(service, job="j", limits=ps.Limits(timeout_s=WAIT_S))
        got = []
        for step, batch in enumerate(loader):
            got.append(batch)
            if step in (0, 60):
                os.kill(service.dispatcher_pid, signal.SIGKILL)
        assert sorted(rows(got)) == list(range(N))
        os.kill(service.dispatcher_pid, signal.SIGKILL)
        assert sorted(rows(loader)) == list(range(N))
        loader.close()


def signalled(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False: the process has ended. One that stands still is replaced, sooner on a busy machine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_stands_still_is_left_behind() -> None:
    with ps.LocalService(workers=2, threads=1) as service:
        loader = slow_pipeline().distribute(service, limits=ps.Limits(timeout_s=WAIT_S))

        def stop_one() -> int:
            found = wait_workers(service, 2).values()
            return next((pid for pid in found if signalled(pid, signal.SIGSTOP)), 0)

        got = []
        stopped = 0
        try:
            for step, batch in enumerate(loader):
                got.append(batch)
                if step == 10:
                    stopped = wait_until(stop_one, "a runner that can be stopped")
                if step == 80:
                    signalled(stopped, signal.SIGCONT)
        finally:
            if stopped:
                signalled(stopped, signal.SIGCONT)
        assert sorted(rows(got)) == list(range(N))
        loader.close()


def test_workers_that_come_and_go_change_nothing() -> None:
    with ps.LocalService(workers=1, threads=1) as service:
        loader = slow_pipeline().distribute(service, limits=ps.Limits(timeout_s=WAIT_S))
        got = []
        for step, batch in enumerate(loader):
            got.append(batch)
            if step == 10:
                service.add_worker()
            if step == 50:
                service.remove_worker()
        assert sorted(rows(got)) == list(range(N))
        loader.close()


def test_a_killed_trainer_goes_on_from_its_last_state(tmp_path: Path) -> None:
    """The state lies before what the killed trainer had read; other services know nothing of it."""
    with ps.LocalService(workers=2, threads=1) as service:
        log = tmp_path / "seen.jsonl"
        pid = os.fork()
        if pid == 0:  # has no loader yet, and so may make one
            try:
                loader = slow_pipeline().distribute(
                    str(service.service_file), job="t", limits=ps.Limits(timeout_s=WAIT_S)
                )
                with log.open("w") as file:
                    for batch in loader:
                        print(json.dumps([batch.tolist(), loader.state_dict()]), file=file, flush=True)
            finally:
                os._exit(0)
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 30, "30 lines of the trainer")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        lines = [json.loads(line) for line in log.read_text().splitlines()[:25]]
        before, state = [batch for batch, _ in lines], lines[-1][1]
        with slow_pipeline().distribute(service, job="t", limits=ps.Limits(timeout_s=WAIT_S)) as again:
            again.load_state_dict(state)
            after = [batch.tolist() for batch in again]
        assert sorted(rows(before) + rows(after)) == list(range(N))
    with (
        ps.LocalService(workers=1) as elsewhere,
        slow_pipeline().distribute(elsewhere, limits=ps.Limits(timeout_s=WAIT_S)) as moved,
    ):
        moved.load_state_dict(state)
        assert sorted(rows(before) + rows(moved)) == list(range(N))


def test_a_lost_journal_is_mended_from_what_the_reader_holds(tmp_path: Path) -> None:
    """The dispatcher comes back without any memory; the reader is alone and knows where it stands."""
    with ps.LocalService(workers=2, threads=1, journal=tmp_path / "j") as service:
        loader = slow_pipeline().distribute(service, limits=ps.Limits(timeout_s=WAIT_S))
        got = []
        for step, batch in enumerate(loader):
            got.append(batch)
            if step == 20:
                pid = service.dispatcher_pid
                os.kill(pid, signal.SIGSTOP)
                for file in (tmp_path / "j").iterdir():
                    file.unlink()
                os.kill(pid, signal.SIGKILL)
        assert sorted(rows(got)) == list(range(N))
        loader.close()


def test_consumers_survive_a_worker_and_one_of_them_returns() -> None:
    with ps.LocalService(workers=3, threads=1) as service:

        def read(consumer: int) -> list[Any]:
            loader = slow_pipeline().distribute(
                service, job="two", ranks=ps.Ranks(2, consumer), limits=ps.Limits(timeout_s=WAIT_S)
            )
            iterator = iter(loader)
            got = [next(iterator).tolist() for _ in range(15)]
            if consumer == 0:
                os.kill(next(iter(wait_workers(service, 1).values())), signal.SIGKILL)
            else:  # ends, and comes back with its state
                state = loader.state_dict()
                next(iterator)
                loader.close()
                loader = slow_pipeline().distribute(
                    service, job="two", ranks=ps.Ranks(2, consumer), limits=ps.Limits(timeout_s=WAIT_S)
                )
                loader.load_state_dict(state)
                iterator = iter(loader)
            got += [batch.tolist() for batch in iterator]
            loader.close()
            return got

        parts = in_threads(2, read)
        assert len(parts[0]) == len(parts[1]) == N // 8
        assert sorted(value for part in parts for value in rows(part)) == list(range(N))


def test_at_most_once_ends_without_what_was_lost() -> None:
    with ps.LocalService(workers=2, threads=1) as service:
        loader = slow_pipeline().distribute(
            service, sharding=ps.Sharding(guarantee="at_most_once"), limits=ps.Limits(timeout_s=WAIT_S)
        )
        got = []
        for step, batch in enumerate(loader):
            got.append(batch)
            if step == 10:
                os.kill(next(iter(wait_workers(service, 1).values())), signal.SIGKILL)
        values = rows(got)
        assert len(values) == len(set(values)) and set(values) <= set(range(N))
        loader.close()


def test_processes_that_are_lost_in_vain_are_an_error_where_that_is_asked_for() -> None:
    def deadly(rows: list[int]) -> list[int]:
        if 5 in rows:
            os._exit(3)
        return rows

    with ps.LocalService(workers=1, threads=1) as service:
        loader = ps.range(8).batch(2, collate=deadly).distribute(service, limits=ps.Limits(lost_workers=2))
        with pytest.raises(ps.WorkersLostError, match="3 processes in a row that ran stream 0 were lost") as raised:
            list(loader)
        assert raised.value.lost == 3
        loader.close()


def test_one_stuck_worker_does_not_stop_the_others() -> None:
    def work(x: int) -> int:
        if x == 150:
            time.sleep(600)
        time.sleep(0.001)
        return x

    with ps.LocalService(workers=3, threads=1) as service:
        service.wait_ready(WAIT_S)
        loader = ps.range(N).map(work).distribute(service, limits=ps.Limits(timeout_s=8.0))
        got: list[int] = []
        with pytest.raises(TimeoutError, match="on worker"):
            got.extend(loader)
        assert len(got) == len(set(got)) and len(got) > N // 4
        loader.close()
