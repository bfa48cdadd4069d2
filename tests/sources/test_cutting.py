"""Splits: enough of them, and the same ones when data grows a little."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import penstock as ps
from penstock.sources.cutting import (
    FINEST_BYTES,
    LEAST_COLUMNAR_BYTES,
    LEAST_REMOTE_BYTES,
    MOST_BYTES,
    MOST_FILES,
    cut_neighbours,
    split_step,
)
from penstock.sources.registry import open_source


def splits_of(dataset: ps.Dataset) -> int:
    return len(open_source(dataset.node).splits())


def test_a_file_of_a_hundred_megabytes_has_enough_for_many_workers(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    assert splits_of(ps.read_jsonl(path)) == splits_of(ps.read_text(path)) == 191
    with path.open("wb") as file:
        file.truncate(1_000_000_000)
    assert 256 <= splits_of(ps.read_jsonl(path)) <= 512


def test_a_folder_of_forty_texts_and_three_thousand_images_have_enough_for_eight_workers(tmp_path: Path) -> None:
    for i in range(40):
        with (tmp_path / f"{i}.txt").open("wb") as file:
            file.truncate(150_000)
    assert splits_of(ps.read_text(tmp_path)) >= 160
    sizes, names = [100_000] * 3_000, [f"{i:05d}.jpg" for i in range(3_000)]
    assert 256 <= len(list(cut_neighbours(sizes, names, split_step(sum(sizes), 3_000)))) <= 1_024


@pytest.mark.parametrize("total", [10**6, 10**8, 10**10, 10**13])
def test_splits_are_neither_too_small_nor_too_large(total: int) -> None:
    step = split_step(total, 1)
    assert FINEST_BYTES <= step.nbytes <= MOST_BYTES
    assert total / step.nbytes <= 512 or step.nbytes == MOST_BYTES


@pytest.mark.parametrize("total", [5 * 10**6, 10**7, 5 * 10**7, 10**8])
def test_small_data_is_cut_into_a_hundred_splits_and_more(total: int) -> None:
    """Work on a byte may take long: of 6 MB in steps of 512 KB, eight workers would wait for the last one."""
    assert 128 <= total / split_step(total, 40).nbytes <= 512


def test_what_is_far_away_or_columnar_is_not_cut_finer() -> None:
    assert split_step(6e6, 40, remote=True).nbytes == LEAST_REMOTE_BYTES
    assert split_step(6e6, 40, columnar=True).nbytes == LEAST_COLUMNAR_BYTES


@pytest.mark.parametrize(("count", "size"), [(3_000, 100_000), (40_000, 1_000), (300_000, 30_000)])
@pytest.mark.parametrize("where", ["at the end", "anywhere"])
def test_one_percent_more_files_move_few_cuts(count: int, size: int, where: str) -> None:
    rng = random.Random(3)
    names = [f"{i:07d}" for i in range(count)]
    added = [f"{count + i:07d}" for i in range(count // 100)]
    if where == "anywhere":
        added = [f"{rng.choice(names)}-{i}" for i in range(10)]
    grown = sorted([*names, *added])

    def cuts(listed: list[str]) -> set[str]:
        """Return the files that splits begin with."""
        sizes = [size] * len(listed)
        return {listed[start] for start, _ in cut_neighbours(sizes, listed, split_step(sum(sizes), len(sizes)))}

    before, after = cuts(names), cuts(grown)
    assert len(before & after) >= 0.8 * len(before)


def test_every_file_is_in_one_split_and_none_is_too_full() -> None:
    rng = random.Random(5)
    sizes = [rng.choice((0, 10, 5_000, 3_000_000)) for _ in range(5_000)]
    names = [f"f{i}" for i in range(5_000)]
    step = split_step(sum(sizes), len(sizes))
    cuts = list(cut_neighbours(sizes, names, step))
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])] and cuts[-1][1] == 5_000
    for start, stop in cuts:
        assert stop - start <= min(step.files, MOST_FILES)
        assert stop - start == 1 or sum(sizes[start:stop]) <= step.nbytes
    assert list(cut_neighbours([], [], step)) == []
