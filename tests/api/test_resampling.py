"""resample and balanced: weighted sampling without a sampler."""

from __future__ import annotations

from collections import Counter

import pytest

import penstock as ps


def rows(count=1_000):
    return ps.range(count).map(lambda x: {"id": x, "label": int(x % 10 == 0)})


def test_an_element_comes_as_often_as_its_weight_says():
    ds = ps.range(2_000).resample(lambda x: (0, 0.5, 1, 2.25)[x % 4])
    seen = Counter(x % 4 for x in ds.shuffle(64, seed=1))
    assert seen[0] == 0 and 200 < seen[1] < 300 and seen[2] == 500 and 1_080 < seen[3] < 1_170


def test_other_elements_are_drawn_in_each_epoch_and_the_same_after_a_resume():
    ds = ps.range(200).resample(lambda x: 0.5).shuffle(16, seed=2)
    first, second = list(ds), list(ds)
    assert set(first) != set(second)
    iterator = ds.iterator(epoch=0)
    head = [next(iterator) for _ in range(30)]
    resumed = ds.iterator()
    resumed.load_state_dict(iterator.state_dict())
    assert head + list(resumed) == first


def test_classes_come_equally_often():
    seen = Counter(row["label"] for row in rows().balanced("label", counts={0: 900, 1: 100}))
    assert 430 < seen[0] < 570 and seen[1] == 500
    by_function = rows().balanced(lambda row: row["label"], counts=ps.count_classes(rows(), "label"))
    assert Counter(row["label"] for row in by_function)[1] == 500


def test_classes_of_image_folders_are_counted_by_their_listing(tmp_path):
    for name, count in (("cat", 30), ("dog", 10)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.jpg").write_bytes(b"x")
    seen = Counter(element["label"] for element in ps.read_images(tmp_path).balanced("label"))
    assert 10 <= seen[0] <= 29 and seen[1] == 20


def test_what_is_not_known_is_asked_for():
    with pytest.raises(ps.InvalidArgumentError, match=r"give counts=, such as"):
        rows().balanced("label")
    with pytest.raises(ps.InvalidArgumentError, match=r"of class 1, and counts= has 0; add it"):
        list(rows().balanced("label", counts={0: 10}))
    with pytest.raises(ps.InvalidArgumentError, match=r"weight of an element is -1.0"):
        list(rows().resample(lambda row: -1))
    with pytest.raises(ps.InvalidArgumentError, match="takes a function of an element, not list"):
        rows().resample([1, 2])
