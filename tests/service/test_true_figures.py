"""Figures against the truth: in planted situations they are what a clock outside, and the functions themselves, say."""

from __future__ import annotations

import functools
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import WaitTimeoutError
from tests.waiting import wait_until

from .checks import Background

pytestmark = pytest.mark.alone

DEADLINE_S = 60.0
WITHIN = 0.05
STILL = 20  # looks that find the same: on a busy machine a runner may make nothing for a second, and go on
LITTLE_S = 0.03  # what a busy machine may take from a trainer between two looks at a clock


def about(truth: float, little: float = LITTLE_S) -> Any:
    return pytest.approx(truth, rel=WITHIN, abs=little)


class Trainer:
    """Reads, and holds a clock of its own to it."""

    def __init__(self, step: Callable[[Any], Any] = lambda batch: None) -> None:
        self._step = step
        self.steps = 0
        self.wait_s = self.run_s = 0.0

    def train(self, batches: Iterator[Any]) -> None:
        """Take all there are; the last look says that there are no more."""
        while True:
            came = time.perf_counter()
            batch = next(batches, None)
            left = time.perf_counter()
            self.wait_s += left - came
            if batch is None:
                return
            self._step(batch)
            self.run_s += time.perf_counter() - left
            self.steps += 1

    def check(self, figures: ps.LoaderStatistics) -> None:
        total_s = self.wait_s + self.run_s
        assert figures.elements == self.steps
        assert (figures.wait_s, figures.run_s) == (about(self.wait_s), about(self.run_s))
        assert figures.step_s == about(self.run_s / self.steps, LITTLE_S / self.steps)
        assert figures.wait_fraction == about(self.wait_s / total_s, LITTLE_S / total_s)
        assert figures.elements_per_s == about(self.steps / total_s)


def sleepy(seconds: float) -> Callable[[Any], Any]:
    def sleep(x: Any) -> Any:
        time.sleep(seconds)
        return x

    return sleep


def plus_one(x: Any) -> Any:
    return x + 1


class Spent:
    """What calls took, by their own clocks, over all processes."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        path.touch()

    def asleep(self, seconds: float) -> Callable[[Any], Any]:
        path = self._path

        def asleep(x: Any) -> Any:
            return timed(path, lambda: time.sleep(seconds), x)

        return asleep

    def at_work(self, seconds: float) -> Callable[[Any], Any]:
        path = self._path

        def work() -> None:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                sum(range(1000))

        def at_work(x: Any) -> Any:
            return timed(path, work, x)

        return at_work

    def read(self) -> tuple[int, float, float]:
        """Return how many calls there were, and how long they took: time, and processor time."""
        calls = np.fromfile(self._path).reshape(-1, 2)
        return len(calls), float(calls[:, 0].sum()), float(calls[:, 1].sum())


@functools.cache
def appended_to(path: str) -> int:
    """Return a descriptor of this process that adds to a file."""
    return os.open(path, os.O_WRONLY | os.O_APPEND)


def timed(path: str, work: Callable[[], None], x: Any) -> Any:
    """Do work, and note what it took: but for one write, all that happens in here, however busy the machine is."""
    began, cpu = time.perf_counter(), time.thread_time()
    file = appended_to(path)
    work()
    os.write(file, struct.pack("2d", time.perf_counter() - began, time.thread_time() - cpu))
    return x


def stage_of(figures: ps.JobFigures, name: str) -> ps.StageFigures:
    (found,) = (stage for stage in figures.stages if name in stage.name)
    return found


def settled(loader: ps.Loader, condition: Callable[[ps.JobFigures], bool]) -> ps.JobFigures:
    """Return the job's figures once they are so: they are a beat or two behind."""

    def ask() -> ps.JobFigures | None:
        time.sleep(0.1)
        figures = loader.job_figures()
        return figures if figures.stages and condition(figures) else None

    found = wait_until(ask, "figures")
    assert found is not None
    return found


def still(value: Callable[[], int]) -> int:
    """Return a value that has not changed for a while, else 0."""
    before = value()
    time.sleep(0.3)
    return before if value() == before else 0


def ready(service: ps.LocalService) -> ps.LocalService:
    """Return a service once it has its workers: what follows has a short deadline."""
    service.wait_ready(DEADLINE_S)
    return service


def read_through(service: ps.LocalService, dataset: ps.Dataset, job: str, **more: Any) -> ps.Loader:
    more.setdefault("limits", ps.Limits(timeout_s=DEADLINE_S))
    return dataset.distribute(service, job=job, **more)


def test_a_slow_trainer(one_worker: ps.LocalService) -> None:
    trainer = Trainer(sleepy(0.04))
    with read_through(one_worker, ps.range(200).batch(4), "slow-trainer") as loader:
        trainer.train(iter(loader))
        figures = loader.statistics()
    trainer.check(figures)
    batches = [np.arange(4)] * trainer.steps
    fed_from_memory = Trainer(sleepy(0.04))
    fed_from_memory.train(iter(batches))
    assert figures.ideal_elements_per_s == pytest.approx(fed_from_memory.steps / fed_from_memory.run_s, rel=WITHIN)


def test_a_step_that_is_under_way_counts(one_worker: ps.LocalService) -> None:
    with read_through(one_worker, ps.range(800).batch(4), "under-way") as loader:
        batches = iter(loader)
        next(batches)
        before = loader.statistics()
        began = time.perf_counter()
        for _ in range(2):  # of one frame: nothing is looked at between them
            time.sleep(0.1)
            next(batches)
        time.sleep(0.1)
        after = loader.statistics()
        took = time.perf_counter() - began
    assert after.run_s - before.run_s == about(took)
    assert after.elements - before.elements == 2


def test_a_slow_function(one_worker: ps.LocalService, tmp_path: Path) -> None:
    trainer, spent = Trainer(), Spent(tmp_path / "spent")
    dataset = ps.range(80).map(spent.asleep(0.1)).map(plus_one).batch(2)
    with read_through(one_worker, dataset, "slow-function") as loader:
        trainer.train(iter(loader))
        trainer.check(loader.statistics())
        figures = settled(loader, lambda figures: stage_of(figures, "asleep").elements == 80)
    stage = stage_of(figures, "asleep")
    assert spent.read() == (80, about(stage.busy_s), about(stage.cpu_s, 0.1))
    assert figures.outputs == 40 and figures.workers[0].kind == "process"
    assert figures.workers[0].resident_bytes < figures.workers[0].memory_bytes


def test_a_function_that_holds_the_gil(one_worker: ps.LocalService, tmp_path: Path) -> None:
    trainer, spent = Trainer(), Spent(tmp_path / "spent")
    with read_through(one_worker, ps.range(150).map(spent.at_work(0.02)).batch(2), "gil") as loader:
        trainer.train(iter(loader))
        trainer.check(loader.statistics())
        figures = settled(loader, lambda figures: stage_of(figures, "at_work").elements == 150)
    stage = stage_of(figures, "at_work")
    calls, _, cpu_s = spent.read()
    assert (calls, stage.cpu_s) == (150, about(cpu_s, 0.1))
    assert figures.cpu_s == pytest.approx(figures.workers[0].cpu_s)


def test_a_slow_source(one_worker: ps.LocalService, tmp_path: Path) -> None:
    trainer, spent = Trainer(), Spent(tmp_path / "spent")
    nap = spent.asleep(0.03)

    def rows() -> Iterator[int]:
        for i in range(100):
            yield nap(i)

    with read_through(one_worker, ps.from_generator(rows).batch(4), "slow-source") as loader:
        trainer.train(iter(loader))
        trainer.check(loader.statistics())
        figures = settled(loader, lambda figures: figures.stages[0].elements == 100)
    calls, seconds, _ = spent.read()
    assert (calls, figures.stages[0].busy_s) == (100, about(seconds, 0.1))
    assert figures.stages[0].cpu_s < 0.3 * seconds


def test_what_a_worker_waits_for_and_how_fast_it_is(
    one_worker: ps.LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.session.BEAT_S", 0.5)
    per_s, step, began = 25.0, count(1), 0.0
    trainer = Trainer(lambda batch: time.sleep(max(0.0, began + next(step) / per_s - time.perf_counter())))
    limits = ps.Limits(timeout_s=DEADLINE_S, memory_bytes=4 << 20)  # buffers are soon full
    dataset = ps.range(10**9).map(lambda x: np.full(25_000, x))
    with read_through(one_worker, dataset, "held-up", limits=limits) as loader:
        batches = iter(loader)
        next(batches)
        began = time.perf_counter()
        while time.perf_counter() - began < 11.0:  # all samples that are kept are of this time
            trainer.train(islice(batches, 25))
        figures = loader.job_figures()
    (worker,), (told,) = figures.workers, figures.trainers
    assert worker.waits_for == "credit"
    assert told.batches_per_s == pytest.approx(per_s, rel=WITHIN)
    assert worker.outputs_per_s == pytest.approx(per_s, rel=2 * WITHIN)
    assert told.batches == pytest.approx(trainer.steps, abs=2.5 * per_s)


def test_a_runner_that_is_started_again(tmp_path: Path) -> None:
    """What was done before it was killed stays counted."""
    spent, trainer = Spent(tmp_path / "spent"), Trainer()
    with (
        ps.LocalService(workers=1) as service,
        read_through(service, ps.range(240).map(spent.asleep(0.08)).batch(4), "again") as loader,
    ):
        batches = iter(loader)
        trainer.train(islice(batches, 20))
        left = time.perf_counter()
        calls_before = wait_until(lambda: still(lambda: spent.read()[0]), "an idle worker")
        settled(loader, lambda figures: stage_of(figures, "asleep").elements >= 0.9 * calls_before)
        (before,) = service.worker_pids().values()
        os.kill(before, signal.SIGKILL)
        trainer.run_s += time.perf_counter() - left
        trainer.train(batches)
        assert trainer.steps == 60
        trainer.check(loader.statistics())
        figures = settled(loader, lambda figures: stage_of(figures, "asleep").elements >= 0.95 * spent.read()[0])
    calls, seconds, _ = spent.read()
    stage = stage_of(figures, "asleep")
    assert stage.elements == pytest.approx(calls, rel=WITHIN)
    assert stage.busy_s == pytest.approx(seconds, rel=WITHIN)


def test_full_buffers() -> None:
    """What is buffered is what can be read when nothing more comes."""
    with (
        ready(ps.LocalService(workers=1)) as service,
        read_through(
            service,
            ps.range(10**9).map(lambda x: np.full(25_000, x)),
            "full",
            limits=ps.Limits(timeout_s=4.0, memory_bytes=8 << 20),
            transport="sockets",
        ) as loader,
    ):
        batches = iter(loader)
        taken = len(list(islice(batches, 5)))
        seen: list[int] = []

        def is_full() -> bool:
            seen.append(loader.statistics().buffered_elements)
            time.sleep(0.1)
            return len(seen) > STILL and len(set(seen[-STILL:])) == 1 and seen[-1] > 0

        wait_until(is_full, "full buffers")
        figures = loader.statistics()
        assert figures.elements == taken
        for pid in service.worker_pids().values():
            os.kill(pid, signal.SIGSTOP)
        found: list[int] = []
        with pytest.raises(WaitTimeoutError):
            found.extend(batch.nbytes for batch in batches)
        assert figures.buffered_elements == pytest.approx(len(found), rel=WITHIN)
        assert figures.buffered_bytes == pytest.approx(sum(found), rel=WITHIN)
        assert loader.statistics().buffered_elements == loader.statistics().buffered_bytes == 0


@pytest.mark.parametrize("step_s", [0.0, 0.004])
def test_operators_after_distribute(one_worker: ps.LocalService, step_s: float) -> None:
    trainer, spent_s = Trainer(sleepy(step_s)), []

    def nap(x: Any) -> Any:
        began = time.perf_counter()
        time.sleep(0.08)
        spent_s.append(time.perf_counter() - began)
        return x

    with read_through(one_worker, ps.range(80).batch(4), f"piped-{step_s}") as direct:
        loader = direct.unbatch().map(nap).batch(2)
        trainer.train(iter(loader))
        figures = loader.statistics()
    trainer.check(figures)
    assert sum(stream.elements for stream in figures.streams) == 20
    (napped,) = (stage for stage in figures.stages if "nap" in stage.name)
    assert napped.elements == len(spent_s) == 80
    assert napped.busy_s == about(sum(spent_s)) and napped.cpu_s < 0.3 * napped.busy_s


def test_two_epochs(one_worker: ps.LocalService) -> None:
    with read_through(one_worker, ps.range(200).map(sleepy(0.002)).batch(4), "two-epochs") as loader:
        trained = []
        for step_s in (0.004, 0.012):
            trainer = Trainer(sleepy(step_s))
            trainer.train(iter(loader))
            trainer.check(loader.statistics())
            trained.append(trainer)
        figures = settled(loader, lambda figures: figures.stages[0].elements >= 400)
    assert 100 <= figures.outputs <= 150, "and what was made of the third epoch, which was opened ahead"
    (told,) = figures.trainers
    assert told.batches == 100
    assert told.wait_s == about(sum(trainer.wait_s for trainer in trained))
    assert told.run_s == about(sum(trainer.run_s for trainer in trained))


def test_shared(one_worker: ps.LocalService) -> None:
    dataset = ps.range(400).map(sleepy(0.002)).batch(4)
    first, second = Trainer(sleepy(0.002)), Trainer(sleepy(0.004))
    with (
        read_through(one_worker, dataset, "shared-figures", sharing=ps.Share("wait", "1", trainers=2)) as one,
        read_through(one_worker, dataset, "shared-figures", sharing=ps.Share("wait", "2", trainers=2)) as two,
    ):
        reading = [
            Background(lambda trainer=trainer, loader=loader: trainer.train(iter(loader)))
            for trainer, loader in ((first, one), (second, two))
        ]
        for each in reading:
            each.result()
        first.check(one.statistics())
        second.check(two.statistics())
        assert one.statistics().shared + two.statistics().shared == pytest.approx(100, rel=WITHIN)


def test_fed(one_worker: ps.LocalService) -> None:
    trainer = Trainer(sleepy(0.004))
    dataset = ps.range(400).map(sleepy(0.002)).batch(4)
    with read_through(one_worker, dataset, "fed-figures", feed=ps.Feed(list(range(399, -1, -1)))) as loader:
        trainer.train(iter(loader))
        trainer.check(loader.statistics())


def test_the_plan_of_a_loader_says_what_runs_where(one_worker: ps.LocalService) -> None:
    dataset = ps.range(400).map(plus_one)
    with read_through(one_worker, dataset, "planned") as direct:
        there = direct.explain()
        assert there.startswith("on workers, job 'planned'\n  as written\n") and "map(plus_one)" in there
        assert "in this process" not in there
        whole = direct.map(sleepy(0.0)).explain(analyze=True, duration_s=0.1)
    workers, here = whole.split("\n\nin this process\n")
    assert "map(plus_one)" in workers and "map(sleep)" not in workers and "map(sleep)" in here
    assert "sampled in this process, not on workers: " in workers and "sampled" not in here
