"""When an entry is found, and when it is another one's."""

from __future__ import annotations

import os

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidPipelineError
from penstock.testing.conformance import read_all
from tests.caching.kit import numbered, store_at, write_texts


def misses_of(dataset, location) -> int:
    before = store_at(location).counts.misses
    read_all(dataset)
    return store_at(location).counts.misses - before


def kept(paths, location):
    return ps.read_text(paths).map(numbered).autocache(location, always=True)


def test_an_edit_in_place_with_its_modification_time_restored_misses(tmp_path):
    paths, location = write_texts(tmp_path / "data"), tmp_path / "kept"
    read_all(kept(paths, location))
    assert misses_of(kept(paths, location), location) == 0
    edited = tmp_path / "data" / "003.txt"
    before = edited.stat()
    edited.write_text(edited.read_text().replace("3-5", "3*5"))
    os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert edited.stat().st_size == before.st_size
    assert misses_of(kept(paths, location), location) == 1
    assert any("3*5" in row["line"] for row in read_all(kept(paths, location)))


def test_the_same_prefix_under_another_suffix_hits(tmp_path):
    paths, location = write_texts(tmp_path / "data"), tmp_path / "kept"
    read_all(kept(paths, location).batch(4))
    assert misses_of(kept(paths, location).filter(lambda row: True).shuffle(9).batch(3), location) == 0


def test_another_function_in_the_prefix_misses(tmp_path):
    paths, location = write_texts(tmp_path / "data"), tmp_path / "kept"
    read_all(kept(paths, location))
    other = ps.read_text(paths).map(numbered).map(lambda row: row).map(len).autocache(location, always=True)
    assert misses_of(other, location) > 0


def write_images(folder, numbers):
    for number in numbers:
        path = folder / f"class{number % 3}" / f"{number:05}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"P6 1 1 255\n" + bytes([number % 256, 0, 0]))


def decoded(row):
    return {"pixels": np.frombuffer(row["image"][-3:], np.uint8).copy(), "label": row["label"]}


def test_the_second_epoch_of_shuffled_images_hits_and_added_files_keep_entries(tmp_path):
    folder, location = tmp_path / "images", tmp_path / "kept"
    write_images(folder, range(300))

    def images():
        return ps.read_images(folder).shuffle(seed=1).map(decoded).autocache(location, always=True).batch(16)

    read_all(images(), epoch=0)
    assert store_at(location).counts.misses == 300
    expected = read_all(ps.read_images(folder).shuffle(seed=1).map(decoded).batch(16), epoch=1)
    got = read_all(images(), epoch=1)
    assert store_at(location).counts.misses == 300 and store_at(location).counts.hits == 300
    assert [batch["pixels"].tolist() for batch in got] == [batch["pixels"].tolist() for batch in expected]
    write_images(folder, range(300, 303))
    read_all(images(), epoch=2)
    assert store_at(location).counts.misses == 303, "three files more are three elements more"


def test_one_more_file_in_a_hundred_keeps_nearly_all_splits(tmp_path):
    folder, location = tmp_path / "data", tmp_path / "kept"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number:03}.txt").write_text(f"{number} {'x' * 300_000}\n")

    def lengths():
        return ps.read_text(str(folder / "*.txt")).map(len).autocache(location, always=True)

    assert misses_of(lengths(), location) == 300, "three splits of each"
    (folder / "0505.txt").write_text(f"{'y' * 300_000}\n")
    assert misses_of(lengths(), location) <= 5


@pytest.mark.parametrize(
    "make, remedy",
    [
        (lambda: ps.read_text("x").shuffle(9).filter(numbered), "after autocache"),
        (lambda: ps.range(9).batch(3).map(numbered), "save"),
        (lambda: ps.range(9).take(3), "save"),
        (lambda: ps.range(9).zip(ps.range(9)), "each of the pipelines"),
        (lambda: ps.range(9).map(lambda x, rng: x), "frozen=True"),
        (lambda: ps.from_generator(lambda split: [split], splits=[1]), "version="),
    ],
    ids=["block shuffle", "batch", "take", "zip", "random", "generator"],
)
def test_what_is_not_split_local_is_refused_with_the_remedy(make, remedy, tmp_path, monkeypatch):
    (tmp_path / "x").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidPipelineError, match=remedy):
        read_all(make().autocache(tmp_path / "kept", always=True))


def test_a_point_after_a_batch_or_a_shuffle_sinks_before_it(tmp_path):
    paths = write_texts(tmp_path / "data")
    dataset = ps.read_text(paths).map(numbered).shuffle(5, seed=1).batch(4).autocache(tmp_path / "kept", always=True)
    assert len(read_all(dataset)) == len(read_all(dataset)) == 80
    assert store_at(tmp_path / "kept").counts.hits
    plan = dataset.explain().partition("as run")[2]
    assert plan.index("autocache(") < plan.index("shuffle(") < plan.index("batch(4)")


def test_a_point_passes_a_shuffle_with_the_maps_that_follow_it_and_changes_no_element_or_state(tmp_path):
    paths = write_texts(tmp_path / "data")
    plain = ps.read_text(paths).shuffle(5, seed=1).map(str.upper)
    kept = plain.autocache(tmp_path / "kept", always=True)
    for epoch in (0, 1):
        with plain.iterator(epoch=epoch) as before, kept.iterator(epoch=epoch) as after:
            whole = list(before)
            assert [next(after) for _ in range(7)] == whole[:7]
            state = after.state_dict()
        with kept.iterator(epoch=epoch) as resumed:
            resumed.load_state_dict(state)
            assert list(resumed) == whole[7:]
    assert store_at(tmp_path / "kept").counts.hits
    plan = kept.explain().partition("as run")[2]
    assert plan.index("map(") < plan.index("autocache(") < plan.index("shuffle(")
