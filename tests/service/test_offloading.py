"""`ps.offload`: this host's processors first, a service's where they help, and nothing of it seen in what is read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.wire.modes import GUEST
from tests.waiting import is_alive, wait_gone, wait_until

QUICK = ps.Offloading(guests=1, window_s=0.15)
ROWS = 800
PROFILED_EPOCHS = 4  # on a fast machine one epoch ends before all ways have had their window


def slow(row: int, rng: np.random.Generator) -> dict[str, Any]:
    time.sleep(0.002)
    return {"id": int(row), "noise": float(rng.random())}


def quick(row: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"id": int(row), "noise": float(rng.random())}


def crop(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "crop": int(rng.integers(1 << 40))}


def pipeline(function: Any = slow, rows: int = ROWS) -> ps.Dataset:
    return ps.range(rows).shuffle(32, seed=3).map(function, threads=1).batch(4).map(crop)


def plain(batch: dict[str, Any]) -> tuple[Any, ...]:
    return (batch["id"].tolist(), batch["noise"].tolist(), batch["crop"])


@pytest.fixture(scope="module")
def service() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=2, threads=1) as found:
        yield found


def serving(service: ps.LocalService) -> set[str]:
    """Return the workers of the service's own that run something."""
    return {line.worker for line in service.workers() if line.jobs and not any(t.startswith(GUEST) for t in line.tags)}


def test_with_a_stall_both_places_work_and_every_element_comes_once(service: ps.LocalService) -> None:
    with ps.offload(pipeline(), service, offloading=QUICK) as loader:
        read = [plain(batch) for batch in loader]
        decision, profile = loader.decision, loader.profile
    assert sorted(id for ids, *_ in read for id in ids) == list(range(ROWS))
    assert decision is not None and profile is not None
    assert decision.cut is not None and decision.place == "both", decision
    assert decision.there >= 1 and decision.here == 1
    assert profile.step_per_s > profile.here_per_s
    tried = tuple(pace.cut for pace in profile.cuts)
    assert tried and tried == loader.cuts.names[: len(tried)], "one after the other, up to those that cannot win"


def test_in_deterministic_order_a_profiled_epoch_is_bit_equal_to_a_plain_one(service: ps.LocalService) -> None:
    options: dict[str, Any] = {"order": "deterministic", "sharding": ps.Sharding(streams=4), "seed": 5}
    profiled = ps.Offloading(guests=1, window_s=0.15, model="a")
    with (
        pipeline().distribute(service, **options) as loader,
        ps.offload(pipeline(), service, **options, offloading=profiled) as offloaded,
    ):
        for _ in range(PROFILED_EPOCHS):
            assert list(map(plain, offloaded)) == list(map(plain, loader))
            if offloaded.decision is not None:
                return
    raise AssertionError(f"nothing was decided in {PROFILED_EPOCHS} epochs")


def test_a_second_run_measures_nothing(service: ps.LocalService) -> None:
    known = ps.Offloading(guests=1, window_s=0.15, model="second run")
    with ps.offload(pipeline(), service, offloading=known) as loader:
        for _ in loader:
            if loader.decision is not None:
                break
        first = loader.decision
    with ps.offload(pipeline(), service, offloading=known) as loader:
        next(iter(loader))
        assert loader.decision == first
    with ps.offload(pipeline(), service, offloading=ps.Offloading(guests=1, model="another model")) as loader:
        next(iter(loader))
        assert loader.decision is None, "what was measured with one model is not another's"


def test_without_a_stall_nothing_is_offloaded_and_no_process_is_started_elsewhere() -> None:
    with ps.LocalService(workers=2, threads=1) as service:
        with ps.offload(pipeline(quick, rows=80), service, offloading=QUICK) as loader:
            seen = set()
            for _ in loader:
                time.sleep(0.1)  # what is made meanwhile is enough for several steps, however busy the machine
                seen |= serving(service)
            assert loader.decision is not None
            assert loader.decision.cut is None and loader.decision.place == "here"
            assert loader.decision.reason.startswith("no stall: the step alone takes ")
        assert seen == set()
        assert service.worker_pids() == {}


def test_having_asked_costs_no_second_way_and_no_wait() -> None:
    """One per cent of five minutes is three seconds: no way but the first is opened, and the step waits less."""
    with ps.LocalService(workers=2, threads=1) as service:
        asked = ps.Offloading(guests=1, cut="all there", place="here")
        waits, opened = [], []
        for offloading in (asked, QUICK):
            with ps.offload(pipeline(quick, rows=400), service, offloading=offloading) as loader:
                reading = iter(loader)
                next(reading)
                before = loader.statistics().wait_s
                for _ in reading:
                    time.sleep(0.03)
                waits.append(loader.statistics().wait_s - before)
                opened.append(len(loader._ways._sources))
                decision = loader.decision
        assert decision is not None and decision.place == "here", decision
    assert opened == [1, 1], "what was measured is what is kept"
    assert waits[1] - waits[0] <= 3.0, f"{waits[1]:.1f} s of waiting where {waits[0]:.1f} s are due anyway"


def test_when_those_elsewhere_slow_down_guests_take_over_and_every_element_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed, theirs, ours = (tmp_path / name for name in ("slowed", "theirs", "ours"))

    def work(row: int) -> dict[str, Any]:
        elsewhere = Path.cwd() == theirs  # a guest has the trainer's working folder
        time.sleep(0.08 if elsewhere and slowed.exists() else 0.02)
        return {"id": int(row), "elsewhere": elsewhere, "process": os.getpid()}

    read: list[dict[str, Any]] = []
    first = slowed_at = 0  # when all three work; when two of them become slow
    for folder in (ours, theirs):
        folder.mkdir()
    monkeypatch.chdir(theirs)
    with ps.LocalService(workers=2, threads=1) as service:
        monkeypatch.chdir(ours)
        asked = ps.Offloading(guests=1, cut="all there")
        with ps.offload(ps.range(900).map(work, threads=1), service, offloading=asked) as loader:
            for row in loader:
                read.append(row)
                first = first or len(read) * (len({each["process"] for each in read}) == 3)
                if first and not slowed_at and len(read) == first + 100:
                    slowed_at = len(read)
                    slowed.touch()
    assert sorted(row["id"] for row in read) == list(range(900))
    last = max(n for n, row in enumerate(read) if not row["elsewhere"])  # then all splits are in hands
    before, after = read[first:slowed_at], read[slowed_at:last]
    shares = [sum(row["elsewhere"] for row in part) / len(part) for part in (before, after)]
    # Two of three places that are as fast make two thirds; when they are four times slower, one third.
    assert shares[1] < min(shares[0], 0.5), shares


def test_those_elsewhere_and_guests_are_killed_and_every_element_comes_once() -> None:
    killed = 0
    ids = []
    asked = ps.Offloading(guests=1, cut="before batch")
    with ps.LocalService(workers=2, threads=1) as service, ps.offload(pipeline(), service, offloading=asked) as loader:
        for number, batch in enumerate(loader):
            ids += batch["id"].tolist()
            if number in (20, 60, 100):
                assert loader._guests is not None
                own = loader._guests.pids()[1:] if number == 60 else list(service.worker_pids().values())
                for pid in own:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
    assert killed >= 3
    assert sorted(ids) == list(range(ROWS))


def test_a_service_without_workers_leaves_it_here_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.offloaded.TRIAL_TIMEOUT_S", 1.0)
    with ps.LocalService(workers=0) as service, ps.offload(pipeline(), service, offloading=QUICK) as loader:
        ids = [id for batch in loader for id in batch["id"].tolist()]
        decision = loader.decision
    assert sorted(ids) == list(range(ROWS))
    assert decision is not None and decision.cut is None
    assert "it stays here, because reading elsewhere failed (WaitTimeoutError" in decision.reason


def test_a_state_saved_at_any_moment_loads_into_a_plain_loader_and_back(service: ps.LocalService) -> None:
    options: dict[str, Any] = {"order": "deterministic", "sharding": ps.Sharding(streams=4), "seed": 5}
    measured = ps.Offloading(guests=1, window_s=0.15, model="states")
    with pipeline().distribute(service, **options) as loader:
        expected = list(map(plain, loader))
    states: list[Any] = []
    with ps.offload(pipeline(), service, **options, offloading=measured) as loader:
        states += [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    assert len({state["cut"] for state in states}) > 1, "the epoch was cut in more than one way"
    at = len(states) // 3
    with pipeline().distribute(service, **options) as loader:
        loader.load_state_dict(states[at])
        reading = iter(loader)
        read = [plain(next(reading)) for _ in range(3)]
        state = loader.state_dict()
    with ps.offload(pipeline(), service, **options, offloading=measured) as loader:
        loader.load_state_dict(state)
        assert read + list(map(plain, loader)) == expected[at + 1 :]


def test_what_follows_offload_is_part_of_what_is_cut(service: ps.LocalService) -> None:
    short = pipeline(quick, rows=40)
    with ps.offload(short, service, offloading=QUICK).map(crop) as loader:
        assert len(list(loader)) == 10
        assert loader.cuts.names[:2] == ("all there", "before map(crop)")


def test_guests_serve_no_other_job_and_end_with_the_loader(service: ps.LocalService) -> None:
    loader = ps.offload(pipeline(), service, offloading=QUICK)
    reading = iter(loader)
    next(reading)
    assert loader._guests is not None
    own = f"{GUEST}{loader._guests.name}"
    guests = wait_until(lambda: [line.worker for line in service.workers() if own in line.tags], "guests to join")
    with pipeline(quick, rows=80).distribute(service) as other:
        for _ in other:
            assert not set(other.statistics().workers) & set(guests)
    pids = wait_until(loader._guests.pids, "their processes")
    loader.close()
    wait_gone(*pids)
    wait_until(lambda: not {line.worker for line in service.workers()} & set(guests), "the dispatcher to know")


def read_by_ranks(service: ps.LocalService, job: str, offloading: ps.Offloading) -> tuple[list[int], ps.OffloadLoader]:
    """Read an epoch with two ranks; return the ids, and the first rank's loader."""
    loaders = [
        ps.offload(
            pipeline(quick, rows=240), service, job=job, ranks=ps.Ranks(2, rank), offloading=offloading, **RANKED
        )
        for rank in range(2)
    ]
    read: list[int] = []
    seen: set[str] = set()

    def one(loader: ps.OffloadLoader) -> None:
        for batch in loader:
            read.extend(batch["id"].tolist())
            seen.update(loader.statistics().workers)

    threads = [threading.Thread(target=one, args=(loader,)) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for loader in loaders:
        loader.close()
    return sorted(read), loaders[0]


RANKED: dict[str, Any] = {"seed": 5, "order": "deterministic"}


def test_ranks_of_which_nobody_says_the_host_read_from_elsewhere(
    service: ps.LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    read, loader = read_by_ranks(service, "apart", ps.Offloading(guests=1, cut="before batch"))
    assert read == list(range(240))
    assert loader._guests is None
    assert loader.decision is not None and "2 ranks read every stream" in loader.decision.reason
    assert (loader.decision.cut, loader.decision.place) == ("before batch", "there")


def test_ranks_of_one_host_share_its_guests(service: ps.LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    read, loader = read_by_ranks(service, "together", ps.Offloading(guests=1, cut="all there", place="here"))
    assert read == list(range(240))
    assert loader._guests is not None
    assert loader.decision is not None and loader.decision.place == "here"


TRAINER = """
import sys, time
import penstock as ps
from tests.service.test_offloading import QUICK, pipeline

loader = ps.offload(pipeline(rows=50_000), sys.argv[1], offloading=QUICK)
reading = iter(loader)
next(reading)
while len(pids := loader._guests.pids()) < 2:
    next(reading)
print(*pids, flush=True)
time.sleep(600)
"""


def test_nothing_is_left_ten_seconds_after_the_trainer_was_killed(service: ps.LocalService) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(service.service_file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
    )
    assert trainer.stdout is not None
    pids = list(map(int, trainer.stdout.readline().split()))
    assert len(pids) >= 2
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_until(lambda: not any(map(is_alive, pids)), "the guests of a killed trainer to end", deadline_s=10.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"service": 4}, "service=4 must be an address, a service file or a LocalService"),
        ({"service": None}, "offload() needs a service to offload to"),
        ({"sharding": "file"}, "places pull from the same splits"),
        ({"placement": ps.Placement(workers="auto")}, "offload() decides itself how many workers are used"),
        ({"offloading": 3}, "offloading=3 must be a ps.Offloading"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    service: ps.LocalService, monkeypatch: pytest.MonkeyPatch, arguments: Any, text: str
) -> None:
    monkeypatch.delenv("PENSTOCK_SERVICE", raising=False)
    with pytest.raises(ps.InvalidArgumentError) as error:
        ps.offload(pipeline(), **{"service": service, **arguments})
    assert text in str(error.value)
