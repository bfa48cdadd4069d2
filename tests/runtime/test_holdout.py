"""holdout: two parts of the data that stay what they are."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps


def both(dataset, **options):
    return [set(part) for part in dataset.holdout(0.1, **options)]


def test_parts_are_disjoint_and_together_everything():
    train, held_out = both(ps.range(5_000), seed=7)
    assert train | held_out == set(range(5_000)) and not train & held_out
    assert 400 < len(held_out) < 600


def test_parts_are_the_same_in_every_epoch_however_they_are_shuffled_repeated_or_read():
    _, held_out = ps.range(1_000).holdout(0.1, seed=7)
    expected = set(held_out)
    assert set(held_out.shuffle(seed=1)) == expected == set(held_out.shuffle(10, seed=3)), "before a shuffle"
    assert set(ps.range(1_000).shuffle(seed=1).holdout(0.1, seed=7)[1]) == expected, "after a shuffle"
    reads = list(held_out.repeat(2))
    assert set(reads) == expected and len(reads) == 2 * len(expected)
    assert set(held_out) == expected, "in a later epoch"


def test_another_seed_holds_out_others():
    assert both(ps.range(1_000), seed=1)[1] != both(ps.range(1_000), seed=2)[1]


def test_what_was_made_of_one_record_is_on_one_side():
    train, held_out = ps.range(300).flat_map(lambda x: [(x, i) for i in range(3)]).holdout(0.2, seed=1)
    records = [{x for x, _ in part} for part in (train, held_out)]
    assert not records[0] & records[1] and len(list(train)) == 3 * len(records[0])


def test_a_resumed_part_goes_on():
    train, _ = ps.range(300).holdout(0.2, seed=1)
    iterator = train.batch(7).iterator()
    head = [next(iterator) for _ in range(5)]
    resumed = train.batch(7).iterator()
    resumed.load_state_dict(iterator.state_dict())
    assert np.concatenate([*head, *resumed]).tolist() == list(train)


def test_text_files_are_divided_by_their_lines(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text("".join(f"{name}{i}\n" for i in range(200)))
    train, held_out = ps.read_text(tmp_path / "*").holdout(0.25, seed=5)
    assert sorted([*train, *held_out]) == sorted(f"{name}{i}" for name in "ab" for i in range(200))
    assert {line[1:] for line in held_out if line[0] == "a"} != {line[1:] for line in held_out if line[0] == "b"}


def test_behind_a_cache_it_is_refused():
    train, _ = ps.range(10).cache().holdout(0.5)
    list(train)
    with pytest.raises(ps.InvalidPipelineError, match=r"put it before what comes in between: cache\(\)"):
        list(train)


@pytest.mark.parametrize("fraction", [0, 1, 1.5, -0.1, True, "a"])
def test_a_fraction_is_between_0_and_1(fraction):
    with pytest.raises(ps.InvalidArgumentError, match="between 0 and 1"):
        ps.range(9).holdout(fraction)
