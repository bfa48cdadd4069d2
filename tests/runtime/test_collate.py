import numpy as np
import pytest

from penstock.core.errors import BatchShapeError
from penstock.runtime.collate import collate


@pytest.mark.parametrize("others", [[{"a": 1}], [{"a": 1, "b": 2, "c": 3}], [{"a": 1}, {"a": 1, "b": 2, "c": 3}]])
def test_rows_with_other_keys_are_refused_even_where_their_number_adds_up(others: list[dict[str, int]]) -> None:
    with pytest.raises(BatchShapeError, match="row 1"):
        collate([{"a": 0, "b": 0}, *others])


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([1, 2], np.int64),
        ([1, True], np.int64),
        ([1, 2.5], np.float64),
        ([1, "a"], object),
        ([1, None], object),
        ([0.5, 2], np.float64),
        ([0.5, "a"], object),
        ([0.5, None], object),
    ],
)
def test_numbers_of_one_kind_keep_it_and_others_are_not_bent_to_it(rows: list[object], dtype: object) -> None:
    batch = collate([{"n": row} for row in rows])["n"]
    assert batch.dtype == dtype and batch.tolist() == rows and batch.flags.writeable


class NoArray:
    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise TypeError("this leaf is no array")


def test_a_leafs_own_error_is_not_taken_for_one_of_structure() -> None:
    with pytest.raises(TypeError, match="this leaf is no array"):
        collate([{"a": {"b": NoArray()}}, {"a": {"b": NoArray()}}])
