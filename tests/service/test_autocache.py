"""Kept splits on workers: computed once, found by every worker of the host, and the same elements in every mode."""

from __future__ import annotations

import os

import numpy as np

import penstock as ps
from penstock.testing.conformance import compare_all, read_all
from tests.caching.kit import write_texts


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
    assert len(os.listdir(calls)) == 240, "of each element one call, in three epochs on three workers"
    with computed.distribute(three_workers, job="computed", order="deterministic", seed=3) as loader:
        for kept in epochs:
            assert compare_all(list(loader), kept) is None
    with prefix.batch(9).distribute(three_workers, job="another suffix") as loader:
        assert sum(len(batch["line"]) for batch in loader) == 240
    assert len(read_all(prefix)) == 240
    assert len(os.listdir(calls)) == 240, "other jobs and pipelines of this user find the same"


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
