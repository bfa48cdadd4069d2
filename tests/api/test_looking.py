"""peek() and dataset[i]: looking at a dataset without reading it."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps


def noisy(x, rng):
    return x, float(rng.random())


def test_peek_is_what_the_next_iteration_begins_with():
    ds = ps.range(50).shuffle(seed=3).map(noisy).batch(4, collate=list)
    for _ in range(2):
        first = ds.peek()
        assert first == ds.peek() == next(iter(ds))


def test_peek_into_an_empty_dataset_says_so():
    with pytest.raises(ps.EmptyInputError, match="no element to look at"):
        ps.range(0).peek()


def test_an_element_by_its_index_is_that_of_the_next_iteration():
    ds = ps.range(40).shuffle(seed=3).map(noisy)
    picked = [ds[i] for i in (0, 7, 39, -1)]
    whole = list(ds)
    assert picked == [whole[i] for i in (0, 7, 39, -1)]
    assert [ds[3] for _ in range(2)] == [list(ds)[3]] * 2, "of the next epoch"


def test_only_the_element_asked_for_is_made():
    made = []

    def note(x):
        made.append(x)
        return x

    assert ps.range(10_000).map(note)[9_000] == 9_000
    assert len(made) < 100


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (ps.range(9).filter(lambda x: x % 2), "filter"),
        (ps.range(9).flat_map(lambda x: [x, x]), "flat_map"),
        (ps.from_generator(lambda: iter(range(9))), "from_generator"),
    ],
    ids=["filter", "flat_map", "generator"],
)
def test_a_dataset_without_indices_says_which_operator_is_the_reason(dataset, named):
    with pytest.raises(ps.InvalidPipelineError, match=named):
        dataset[0]


def test_an_index_outside_is_an_index_error():
    with pytest.raises(IndexError, match="index 9 of a dataset of 9 elements"):
        ps.range(9)[9]


def test_leaves_are_described_by_path_type_and_shape():
    ds = ps.range(3).map(lambda x: {"a": np.zeros((2, 2), "f2"), "b": [x, (None, b"x")]})
    assert ds.schema == {"a": "float16[2, 2]", "b[0]": "int", "b[1][0]": "None", "b[1][1]": "bytes"}


def test_what_is_not_iterable_is_no_items():
    with pytest.raises(ps.InvalidArgumentError, match="from_items takes a list or another iterable, not int"):
        ps.from_items(3)


def test_an_index_is_a_whole_number():
    assert ps.range(10)[np.int64(3)] == 3
    with pytest.raises(
        ps.InvalidArgumentError, match=r"slice\(2, 4, None\)\]: an index is a whole number; skip\(\) and"
    ):
        ps.range(10)[2:4]
