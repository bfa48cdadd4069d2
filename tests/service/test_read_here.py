"""Read here, compute there: the trainer reads for workers that cannot reach the data, and nothing else is different.

Paths go through `/proc/self/cwd`, and the trainer's folder is another than the service's: only the trainer, and guests
that it starts, find the files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.graph.cutting import READ_HERE
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
HERE = ps.Placement(read_by="trainer")
ROWS, FILES = 1_200, 6
DETERMINISTIC: dict[str, Any] = {"order": "deterministic", "sharding": ps.Sharding(streams=4), "seed": 5}
RELAXED: dict[str, Any] = {"seed": 5}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ps.LocalService]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("the service's"))
        found = ps.LocalService(workers=2, threads=1)
    with found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("only the trainer's")
    each = ROWS // FILES
    for number in range(FILES):
        ids = range(number * each, (number + 1) * each)
        lines = [json.dumps({"id": id, "text": "x" * 40}) for id in ids]
        (made / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
        lines[7] = "{no json"
        (made / f"{number}.damaged").write_text("\n".join(lines) + "\n")
        np.save(made / f"{number}.npy", np.array(ids).reshape(-1, 1))
        for id in list(ids)[:20]:
            (made / f"{id:05}.bin").write_bytes(str(id).encode())
    return made


@pytest.fixture(autouse=True)
def there(folder: Path, service: ps.LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def number_of(row: Any) -> int:
    if isinstance(row, dict):
        return int(row["id"] if "id" in row else row["data"])
    return int(np.asarray(row).ravel()[0])


def compute(row: Any, rng: np.random.Generator) -> dict[str, Any]:
    return {"id": number_of(row), "noise": float(rng.random())}


def slow(row: Any, rng: np.random.Generator) -> dict[str, Any]:
    time.sleep(0.002)
    return compute(row, rng)


def crop(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "crop": int(rng.integers(1 << 40))}


SOURCES: dict[str, Any] = {
    "by split": lambda root: ps.read_jsonl(f"{root}/*.jsonl").shuffle(100, seed=3),
    "by index": lambda root: ps.read_numpy(f"{root}/*.npy").shuffle(ROWS, seed=3),
    "a file each": lambda root: ps.read_files(f"{root}/*.bin"),
    "with bad records": lambda root: ps.read_jsonl(f"{root}/*.damaged", on_error=ps.SkipErrors(budget=0.5)),
    "two of them": lambda root: ps.read_jsonl(f"{root}/*.jsonl").concatenate(
        ps.read_numpy(f"{root}/*.npy").map(lambda row: {"id": int(row[0]) + ROWS})
    ),
}


def pipeline(root: str = "/proc/self/cwd", source: str = "by split", function: Any = compute) -> ps.Dataset:
    dataset: ps.Dataset = SOURCES[source](root).map(function, threads=1).batch(8).map(crop)
    return dataset


def plain(batch: dict[str, Any]) -> tuple[Any, ...]:
    return (batch["id"].tolist(), batch["noise"].tolist(), batch["crop"])


def ids_in(batches: list[tuple[Any, ...]]) -> list[int]:
    return sorted(id for ids, *_ in batches for id in ids)


@pytest.fixture(scope="module")
def expected(service: ps.LocalService, folder: Path) -> list[tuple[Any, ...]]:
    """What workers read that reach the files, by another path."""
    with pipeline(str(folder)).distribute(service, **DETERMINISTIC) as loader:
        return list(map(plain, loader))


@pytest.mark.parametrize("source", SOURCES)
def test_elements_batches_and_random_numbers_are_those_of_workers_that_read_themselves(
    service: ps.LocalService, folder: Path, source: str
) -> None:
    with pipeline(str(folder), source).distribute(service, **DETERMINISTIC) as loader:
        theirs = [list(map(plain, loader)) for _ in range(2)]
    with pipeline(source=source).distribute(service, **DETERMINISTIC, placement=HERE) as loader:
        assert [list(map(plain, loader)) for _ in range(2)] == theirs


def test_in_relaxed_order_every_element_comes_once_in_every_epoch(service: ps.LocalService) -> None:
    with pipeline().distribute(service, **RELAXED, placement=HERE) as loader:
        for _ in range(2):
            assert ids_in(list(map(plain, loader))) == list(range(ROWS))


@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_a_worker_that_is_killed_loses_nothing_and_doubles_nothing(
    service: ps.LocalService, expected: list[tuple[Any, ...]], order: str
) -> None:
    options = RELAXED if order == "relaxed" else DETERMINISTIC
    killed = 0
    read = []
    with pipeline(function=slow).distribute(service, **options, placement=HERE) as loader:
        for batch in loader:
            read.append(plain(batch))
            if len(read) in (20, 60):
                pids = list(service.worker_pids().values())
                if pids:
                    os.kill(pids[0], signal.SIGKILL)
                    killed += 1
    assert killed
    assert ids_in(read) == list(range(ROWS))
    if order == "deterministic":
        assert read == expected


TRAINER = """
import json, sys
import penstock as ps
from tests.service.test_read_here import DETERMINISTIC, HERE, pipeline, plain, slow

with pipeline(function=slow).distribute(sys.argv[1], **DETERMINISTIC, placement=HERE) as loader:
    for batch in loader:
        print(json.dumps([plain(batch), loader.state_dict()]), flush=True)
"""


def test_a_trainer_that_is_killed_goes_on_where_its_state_says(
    service: ps.LocalService, expected: list[tuple[Any, ...]]
) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(service.service_file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert trainer.stdout is not None
    lines = [json.loads(trainer.stdout.readline()) for _ in range(40)]
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    read = [tuple(batch) for batch, _ in lines]
    with pipeline().distribute(service, **DETERMINISTIC, placement=HERE) as loader:
        loader.load_state_dict(lines[-1][1])
        read += list(map(plain, loader))
    assert read == expected


def test_a_state_goes_from_cut_to_cut(service: ps.LocalService, expected: list[tuple[Any, ...]]) -> None:
    read: list[tuple[Any, ...]] = []
    state = None
    ways: list[tuple[str, Any]] = [(READ_HERE, "there"), ("all there", "here"), (READ_HERE, "both")]
    for cut, place in ways:
        asked = ps.Offloading(guests=1, cut=cut, place=place)
        with ps.offload(pipeline(), service, **DETERMINISTIC, offloading=asked) as loader:
            if state is not None:
                loader.load_state_dict(state)
            reading = iter(loader)
            read += [plain(next(reading)) for _ in range(20)]
            state = json.loads(json.dumps(loader.state_dict()))
    with pipeline().distribute(service, **DETERMINISTIC, placement=HERE) as loader:
        loader.load_state_dict(state)
        read += list(map(plain, loader))
    assert read == expected


def test_offload_reads_here_where_workers_cannot_reach_the_files(service: ps.LocalService) -> None:
    read = []
    with ps.offload(pipeline(function=slow), service, offloading=ps.Offloading(guests=1, window_s=0.15)) as loader:
        for _ in range(3):
            read = list(map(plain, loader))
            assert ids_in(read) == list(range(ROWS))
            if loader.decision is not None:
                break
        decision, profile = loader.decision, loader.profile
    assert decision is not None and profile is not None
    assert decision.cut == READ_HERE, decision
    assert {pace.cut for pace in profile.cuts if not pace.failure} == {READ_HERE}
    assert all("reading elsewhere failed" in pace.failure for pace in profile.cuts if pace.cut != READ_HERE)


def test_what_cannot_be_read_here_is_raised_here(service: ps.LocalService, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n{no json\n')
    with (
        ps.read_jsonl(f"{tmp_path}/*.jsonl").distribute(service, placement=HERE) as loader,
        pytest.raises(ps.DataError, match=r"bad\.jsonl"),
    ):
        list(loader)


def test_a_trainer_reads_ahead_within_bounds(service: ps.LocalService) -> None:
    limits = ps.Limits(memory_bytes=8 << 20)
    with pipeline().distribute(service, placement=HERE, limits=limits) as loader:
        reading = iter(loader)
        next(reading)
        (uplink,) = loader._sources[0].backend._uplinks.values()
        wait_until(lambda: uplink.statistics().answers, "something to be read")
        assert uplink.statistics().unsent_bytes <= limits.memory_bytes // 8
        list(reading)
        assert uplink.statistics().unsent_bytes == 0
