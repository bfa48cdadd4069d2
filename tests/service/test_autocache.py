"""Kept splits on workers: computed once, found by every worker of the host, and the same elements in every mode."""

from __future__ import annotations

import os
import random
import time
from functools import partial

import numpy as np
import pytest

import penstock as ps
from penstock.caching.store import open_store
from penstock.testing.conformance import compare_all, read_all
from tests.caching.kit import write_texts
from tests.service.checks import Background, kill
from tests.waiting import wait_until


def counting(folder):
    """Return a function that leaves a trace of each of its calls."""

    def decoded(line):
        (folder / f"{hash(line)}-{os.urandom(4).hex()}").touch()
        return {"line": line, "values": np.arange(50)}

    return decoded


def noisy(row, rng):
    return {**row, "noise": rng.random()}


def test_workers_compute_a_prefix_once_and_give_the_same_in_every_epoch(three_workers, tmp_path):
    calls = tmp_path / "calls"
    calls.mkdir()
    paths = write_texts(tmp_path / "data", files=24, lines=10)
    prefix = ps.read_text(paths).map(counting(calls)).autocache(tmp_path / "kept", always=True)
    computed = ps.read_text(paths).map(counting(tmp_path / "data")).map(noisy).batch(5)
    dataset = prefix.map(noisy).batch(5)
    with dataset.distribute(three_workers, job="kept", order="deterministic", seed=3) as loader:
        epochs = [list(loader) for _ in range(3)]
    once = len(os.listdir(calls))
    assert 240 <= once <= 246, "of each element one call, in three epochs on three workers; a few are made twice"
    with computed.distribute(three_workers, job="computed", order="deterministic", seed=3) as loader:
        for kept in epochs:
            assert compare_all(list(loader), kept) is None
    with prefix.batch(9).distribute(three_workers, job="another suffix") as loader:
        assert sum(len(batch["line"]) for batch in loader) == 240
    assert len(read_all(prefix)) == 240
    assert len(os.listdir(calls)) == once, "other jobs and pipelines of this user find the same"


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_jobs_started_together_compute_a_common_prefix_once(tmp_path, order):
    calls, paths = tmp_path / "calls", write_texts(tmp_path / "data", files=60, lines=10)
    calls.mkdir()
    counted = counting(calls)

    def slow(line):
        time.sleep(0.005)
        return counted(line)

    prefix = ps.read_text(paths).shuffle(1).map(slow).autocache(tmp_path / "kept", always=True)
    with ps.LocalService(workers=2) as service:

        def read(number):
            dataset = prefix.map(noisy).batch(2 + number)
            limits = ps.Limits(timeout_s=120)
            with dataset.distribute(service, job=f"job {number}", order=order, seed=number, limits=limits) as loader:
                return sum(len(batch["line"]) for batch in loader)

        jobs = [Background(partial(read, number)) for number in range(8)]
        assert [job.result(120) for job in jobs] == [600] * 8
    made = len(os.listdir(calls))
    assert 600 <= made <= 1.1 * 600, f"{made / 600:.2f} times"


def test_a_state_saved_while_putting_loads_while_getting_on_other_workers(one_worker, three_workers, tmp_path):
    paths = write_texts(tmp_path / "data", files=12, lines=10)
    dataset = ps.read_text(paths).map(str.upper).autocache(tmp_path / "kept", always=True).map(lambda x: x).batch(7)
    with dataset.distribute(one_worker, job="saved", order="deterministic", seed=3) as loader:
        rows = iter(loader)
        first = [next(rows) for _ in range(5)]
        state = loader.state_dict()
        rest = list(rows)
    with dataset.distribute(three_workers, job="loaded", order="deterministic", seed=3) as loader:
        loader.load_state_dict(state)
        assert compare_all(rest, list(loader)) is None
    assert len(first) == 5


def test_a_choice_is_the_jobs_and_outlives_dispatcher_and_workers(tmp_path, capsys):
    from penstock.cli.main import main

    calls, paths = tmp_path / "calls", write_texts(tmp_path / "data", files=30, lines=8)
    calls.mkdir()
    counted = counting(calls)

    def slow(line):
        time.sleep(0.01)
        return counted(line)

    dataset = ps.read_text(paths).map(slow, threads=1).autocache(tmp_path / "kept").map(noisy).batch(8)
    with (
        ps.LocalService(workers=2) as service,
        dataset.distribute(service, job="chosen", limits=ps.Limits(timeout_s=60)) as loader,
    ):

        def epoch():
            before = len(os.listdir(calls))
            assert sum(len(batch["line"]) for batch in loader) == 240
            return len(os.listdir(calls)) - before

        for _ in range(20):
            epoch()
            if [line.step for line in service.why_kept("chosen")][-1:] == ["chosen"]:
                break
        trying, *_, chosen = service.why_kept("chosen")
        assert (trying.step, chosen.step, chosen.point) == ("trying", "chosen", 1), chosen.reason
        assert chosen.reason.startswith("keep at point 1")
        wait_until(lambda: epoch() == 0, "an epoch of which all elements are got", deadline_s=60)
        kill(service.dispatcher_pid)
        for pid in service.worker_pids().values():
            kill(pid)
        assert epoch() <= 120, "new processes are told at once"
        assert epoch() == 0
        lines = service.why_kept("chosen")
        assert [line.step for line in lines if line.step in ("trying", "measuring")] == ["trying"], "nothing began anew"
        assert main(["jobs", "why", "chosen", "--service", str(service.service_file)]) == 0
    said = capsys.readouterr().out
    assert "kept at point 1" in said and "compute" in said


def test_a_service_chooses_points_itself_where_it_is_asked(tmp_path):
    calls, paths = tmp_path / "calls", write_texts(tmp_path / "data", files=30, lines=8)
    calls.mkdir()
    counted = counting(calls)

    def slow(line):
        time.sleep(0.01)
        return counted(line)

    dataset = ps.read_text(paths).map(slow, threads=1).map(noisy).shuffle(16, seed=2).batch(8)
    placement = ps.Placement(cache=str(tmp_path / "kept"))
    with (
        ps.LocalService(workers=1) as service,
        dataset.distribute(
            service, job="auto", order="deterministic", seed=4, placement=placement, limits=ps.Limits(timeout_s=60)
        ) as loader,
    ):
        first = list(loader)
        state_of_first = loader.state_dict()
        for _ in range(20):
            before = len(os.listdir(calls))
            assert len(list(loader)) == 30
            if len(os.listdir(calls)) == before:
                break
        assert len(os.listdir(calls)) == before, "nothing is computed any more"
        assert service.why_kept("auto")[-1].point == 2, "before what draws random numbers"
    with dataset.distribute(1, order="deterministic", seed=4) as loader:
        assert compare_all(list(loader), first) is None
    assert state_of_first


def test_who_reads_without_workers_is_told_that_they_keep_things():
    with pytest.raises(ps.InvalidArgumentError, match=r"cache='auto' says what workers keep, .* put autocache\(\)"):
        ps.range(3).distribute(placement=ps.Placement(cache="auto"))


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_dies_while_entries_are_written_no_element_is_wrong(seed, tmp_path):
    """Fifty times in all a worker or the dispatcher is killed; half of the entries go in each epoch, and come again."""
    dice, kills = random.Random(seed), 0
    paths, kept = write_texts(tmp_path / "data", files=40, lines=20), tmp_path / "kept"

    def decoded(line):
        time.sleep(0.002)
        return {"line": line, "values": np.arange(5000) + len(line)}

    made = ps.read_text(paths).map(decoded)
    with made.batch(8).distribute(1, order="deterministic") as loader:
        expected = list(loader)
    dataset = made.autocache(kept, always=True).batch(8)
    with (
        ps.LocalService(workers=2) as service,
        dataset.distribute(service, job="dies", order="deterministic", limits=ps.Limits(timeout_s=60)) as loader,
    ):
        while kills < 25:
            seen, kill_at = [], dice.randrange(5, 40)
            for batch in loader:
                seen.append(batch)
                if len(seen) == kill_at:
                    victims = [service.dispatcher_pid, *service.worker_pids().values()]
                    kill(dice.choice(victims))
                    kills += 1
                    kill_at += dice.randrange(5, 40)
            assert compare_all(expected, seen) is None
            for path in sorted(kept.glob("*/*/*.entry"))[::2]:
                path.unlink(missing_ok=True)
    store = open_store(str(kept))
    store.rebuild()
    for name in sorted(store.catalogue.names()):
        entry = store.files.open(name)
        assert entry is not None
        entry.check()
        entry.close()
