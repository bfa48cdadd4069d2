"""Pipelines read by their id."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidArgumentError, InvalidPipelineError

from .checks import Background, assert_exactly_once, kill


def load_noted(path: str) -> int:
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return 0


class Noted:
    """Leaves a note of every process that unpickles it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return load_noted, (self._path,)


def test_its_reader_never_loads_its_code(one_worker: ps.LocalService, tmp_path: Path) -> None:
    captured = Noted(str(tmp_path / "loaded"))
    (tmp_path / "lines.txt").write_text("".join(f"{i}\n" for i in range(30)))
    made = ps.read_text(tmp_path / "*.txt").map(lambda line: (captured, int(line))[1]).batch(4)
    ps.register(one_worker, made, id="noted")
    (tmp_path / "loaded").write_text("")
    with ps.read_registered(one_worker, "noted", limits=ps.Limits(timeout_s=60)) as loader:
        assert "read_text" in loader.explain() and loader.fingerprint() == made.fingerprint()
        iterator = iter(loader)
        first = next(iterator)
        state = loader.state_dict()
    with ps.read_registered(one_worker, "noted", limits=ps.Limits(timeout_s=60)) as resumed:
        resumed.load_state_dict(state)
        assert_exactly_once([first, *resumed], range(30))
    loaded = (tmp_path / "loaded").read_text().split()
    assert loaded and str(os.getpid()) not in loaded


def test_its_options_are_those_of_distribute(three_workers: ps.LocalService) -> None:
    ps.register(three_workers, ps.range(100).batch(10), id="hundred")
    loaders = [
        ps.read_registered(three_workers, "hundred", job="two", ranks=ps.Ranks(2, c), limits=ps.Limits(timeout_s=60))
        for c in range(2)
    ]
    assert len(loaders[0]) == 5
    readings = [Background(lambda loader=loader: list(loader)) for loader in loaders]
    assert_exactly_once([batch for reading in readings for batch in reading.result(90)], range(100))
    for loader in loaders:
        loader.close()
    with ps.read_registered(three_workers, "hundred", sharding="data", order="deterministic") as loader:
        assert_exactly_once(loader.map(lambda batch: batch + 0), range(100))


def test_it_is_known_to_a_dispatcher_that_restarted(tmp_path: Path) -> None:
    with ps.LocalService(workers=1, journal=tmp_path / "journal") as service:
        ps.register(service, ps.range(50), id="kept")
        kill(service.dispatcher_pid)
        assert_exactly_once(ps.read_registered(service, "kept", limits=ps.Limits(timeout_s=60)), range(50))


def test_what_is_registered_to_run_everywhere_is_read_so(one_worker: ps.LocalService) -> None:
    ps.register(one_worker, ps.range(100).take(7), id="first seven", sharding="off")
    assert_exactly_once(ps.read_registered(one_worker, "first seven", limits=ps.Limits(timeout_s=60)), range(7))
    with pytest.raises(InvalidPipelineError, match="take"):
        ps.read_registered(one_worker, "first seven", sharding="dynamic")


def test_what_cannot_be_is_refused(one_worker: ps.LocalService) -> None:
    with pytest.raises(InvalidArgumentError, match="'nothing'"):
        ps.read_registered(one_worker, "nothing")
    with pytest.raises(InvalidArgumentError, match="id="):
        ps.register(one_worker, ps.range(1), id=" ")
    with pytest.raises(InvalidPipelineError, match="take"):
        ps.register(one_worker, ps.range(100).take(7), id="refused")
    with pytest.raises(InvalidPipelineError, match="loader"):
        ps.register(one_worker, ps.range(100).distribute(one_worker), id="refused")
    ps.register(one_worker, ps.from_items([np.arange(3)]), id="items")
    with pytest.raises(InvalidArgumentError, match="registered"):
        ps.read_registered(one_worker, "items", sharding="file")
    with ps.read_registered(one_worker, "items") as loader, pytest.raises(InvalidArgumentError, match="analyze"):
        loader.explain(analyze=True)
