"""Hosts that fetch kept elements from each other: two network namespaces, each with workers and a cache of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

import penstock as ps
from penstock.cli.main import main
from penstock.testing.conformance import compare_all
from tests.caching.kit import write_texts
from tests.running import Running
from tests.service.checks import kill
from tests.two_hosts import network_of
from tests.waiting import wait_until

COMMAND = str(Path(sys.executable).parent / "penstock")
ELEMENTS = 400


class TwoHosts(NamedTuple):
    service: str
    """The file that says where it is."""
    workers: list[Running]


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    with network_of(2, folder) as network, ExitStack() as stack:
        file, keys = str(folder / "service.json"), folder / "keys"
        assert main(["keys", "make", str(keys)]) == 0
        listening = ("--bind", network.address, "--port", "0", "--keys", str(keys / "server.json"))
        dispatcher = stack.enter_context(Running.command(COMMAND, "dispatcher", "--service-file", file, *listening))
        dispatcher.wait_said("serving at")
        workers = []
        for host in network.hosts:
            asked = ("worker", "--dispatcher", file, "--processes", "1", "--bind", host.address)
            asked += ("--keys", str(keys / "agent.json"))
            workers.append(stack.enter_context(Running.command(*host.prefix, COMMAND, *asked)))
        for worker in workers:
            worker.wait_said("registered at")
        yield TwoHosts(file, workers)


def counted(folder: Path):
    """Return a function that leaves a trace of each call, and is slow enough for two hosts to share the work."""

    def made(element):
        time.sleep(0.01)
        (folder / os.urandom(8).hex()).touch()
        return {"element": element, "values": np.arange(500)}

    return made


def noisy(row, rng):
    return {**row, "noise": rng.random()}


def by_splits(folder: Path, calls: Path) -> ps.Dataset:
    paths = write_texts(folder / "data", files=40, lines=ELEMENTS // 40)
    return ps.read_text(paths).shuffle(1, seed=1).map(counted(calls), threads=1).autocache(always=True)


def by_index(folder: Path, calls: Path) -> ps.Dataset:
    return ps.from_items(range(ELEMENTS)).shuffle(seed=2).map(counted(calls), threads=1).autocache(always=True)


def test_the_second_epoch_on_two_hosts_finds_what_either_has_made(tmp_path):
    calls = tmp_path / "calls"
    calls.mkdir()
    dataset = by_splits(tmp_path, calls).map(noisy).batch(8)
    options = {"order": "deterministic", "seed": 3, "limits": ps.Limits(timeout_s=120)}
    with two_hosts(tmp_path) as hosts, dataset.distribute(hosts.service, job="two", **options) as loader:
        epochs, made = [], []
        for _ in range(2):
            before = len(os.listdir(calls))
            epochs.append(list(loader))
            made.append(len(os.listdir(calls)) - before)
    assert min(kept_by_each(tmp_path)) > 0, "both hosts keep some of it"
    assert made[0] >= ELEMENTS and made[1] <= 0.05 * ELEMENTS, made
    with by_splits(tmp_path, calls).map(noisy).batch(8).distribute(1, **options) as loader:
        for elements in epochs:
            assert compare_all(list(loader), elements) is None


def test_the_second_pass_over_single_elements_on_two_hosts_finds_what_either_has_made(tmp_path):
    """In two jobs: the streams of a next epoch begin before the last of the one before have published their packs."""
    calls = tmp_path / "calls"
    calls.mkdir()
    dataset = by_index(tmp_path, calls).map(noisy).batch(8)
    made, passes = [], {}
    with two_hosts(tmp_path) as hosts:
        for seed in (3, 4):
            before = len(os.listdir(calls))
            options = {"order": "deterministic", "seed": seed, "limits": ps.Limits(timeout_s=120)}
            with dataset.distribute(hosts.service, job=f"pass {seed}", **options) as loader:
                passes[seed] = list(loader)
            made.append(len(os.listdir(calls)) - before)
    assert min(kept_by_each(tmp_path)) > 0, "both hosts keep some of it"
    assert made[0] >= ELEMENTS and made[1] <= 0.05 * ELEMENTS, made
    for seed, elements in passes.items():
        with by_index(tmp_path, calls).map(noisy).batch(8).distribute(1, order="deterministic", seed=seed) as loader:
            assert compare_all(list(loader), elements) is None


def kept_by_each(folder: Path) -> list[int]:
    return [len(list((folder / f"cache{n}").rglob("*.entry"))) for n in range(2)]


def test_a_host_that_dies_costs_time_and_no_element(tmp_path):
    calls = tmp_path / "calls"
    calls.mkdir()
    dataset = by_splits(tmp_path, calls).batch(8)
    with (
        two_hosts(tmp_path) as hosts,
        dataset.distribute(hosts.service, job="dies", limits=ps.Limits(timeout_s=120)) as loader,
    ):
        for epoch in range(3):
            seen: list[str] = []
            for number, batch in enumerate(loader):
                seen.extend(str(line) for line in batch["element"])
                if epoch == 1 and number == 5:
                    kill(hosts.workers[0].process.pid)
            assert len(seen) == len(set(seen)) == ELEMENTS
        wait_until(lambda: len(os.listdir(calls)) >= ELEMENTS, "what the first epoch made")
        before = len(os.listdir(calls))
        assert sum(len(batch["element"]) for batch in loader) == ELEMENTS
        assert len(os.listdir(calls)) == before, "the host that is left has made what the other had"
