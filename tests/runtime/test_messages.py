"""What a pipeline that is wrong says: which operator, which element, and what to do."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.core.errors import BatchShapeError, InvalidPipelineError


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"a": n} if n != 5 else {"b": n}) + "\n" for n in range(8)))
    return path


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"id": list(range(10)), "x": [n / 2 for n in range(10)]}), path)
    return path


def forgets_to_return(x):
    x + 1


@pytest.mark.parametrize("batch", ["batch", "padded_batch", "ragged_batch"])
@pytest.mark.parametrize(
    "make", [forgets_to_return, lambda x: x if x != 2 else None, lambda x: {"x": x} if x else None]
)
def test_an_element_that_is_none_is_refused_in_a_batch(batch, make):
    with pytest.raises(BatchShapeError, match=r"row \d is None.*return"):
        list(getattr(ps.range(4).map(make), batch)(4))


def test_an_element_that_is_none_is_refused_in_batches_that_threads_fill():
    with pytest.raises(BatchShapeError, match=r"row \d+ is None.*return"):
        list(ps.range(400).map(lambda x: np.zeros(5000) if x < 300 else None, threads=2).batch(100))


def test_a_field_that_is_none_is_kept():
    (batch,) = ps.range(2).map(lambda x: {"x": x, "y": None}).batch(2)
    assert batch["y"].tolist() == [None, None]


@pytest.mark.parametrize(
    "change",
    [lambda ds: ds.select("idd", "x"), lambda ds: ds.drop("idd"), lambda ds: ds.rename({"idd": "number"})],
    ids=["select", "drop", "rename"],
)
def test_a_column_that_is_missing_is_named(change):
    with pytest.raises(InvalidPipelineError, match=r"no column 'idd'.*\['id', 'x'\]"):
        list(change(ps.from_items([{"id": 1, "x": 2}])))


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda ds: ds.batch(4),
        lambda ds: ds.batch(3),
        lambda ds: ds.padded_batch(4),
        lambda ds: ds.ragged_batch(8),
        lambda ds: ds.map(lambda row: row).batch(4),
        lambda ds: ds.map(lambda row: row, threads=2).batch(3),
        lambda ds: ds.map(lambda row: {**row, "image": np.zeros(5000)}).batch(4),
        lambda ds: ds.bucket_by_length(lambda row: 1, boundaries=[2], batch_size=4),
    ],
)
def test_a_row_of_another_structure_is_named_with_its_file(rows_file, pipeline):
    with pytest.raises(BatchShapeError) as caught:
        list(pipeline(ps.read_jsonl(rows_file)))
    (note,) = caught.value.__notes__
    assert "batch" in note or "bucket" in note
    assert f"element 5 of split 0 ({rows_file}, byte 45)" in note


def test_an_array_of_another_shape_is_named_with_its_element():
    with pytest.raises(BatchShapeError) as caught:
        list(ps.range(20).map(lambda x: np.zeros(3 + (x == 13))).batch(5))
    assert caught.value.__notes__ == ["penstock: in batch, element 13 of split 0"]


def test_an_expression_after_a_reader_of_column_batches_is_its_filter(table):
    batches = ps.read_parquet(table, batch=3)
    assert [b["id"].tolist() for b in batches.filter(ps.col("id") > 3)] == [[4, 5, 6], [7, 8, 9]]
    chosen = (
        ps.read_parquet(table, columns=["id", "x"], batch=3)
        .rename({"id": "n"})
        .select("n")
        .filter(ps.col("n").isin([1, 2, 8]))
    )
    assert [b["n"].tolist() for b in chosen] == [[1, 2, 8]]
    twice = ps.read_parquet(table, batch=3, filter=ps.col("x") < 3).filter(ps.col("id") > 3)
    assert [b["id"].tolist() for b in twice] == [[4, 5]]
    assert "predicate" in batches.filter(ps.col("id") > 3).explain()


def test_an_expression_over_what_is_no_column_batch_names_the_remedy(table):
    mapped = ps.read_parquet(table, batch=3).map(lambda batch: {**batch, "more": 1}).filter(ps.col("id") > 3)
    with pytest.raises(InvalidPipelineError, match=r"filter.*column batch.*unbatch\(\)") as caught:
        list(mapped)
    assert caught.value.__notes__[0].startswith("penstock: in filter, element 1 of split 0")


def test_a_function_without_one_truth_value_is_named(table):
    def large(batch):
        return batch["id"] > 3

    with pytest.raises(
        InvalidPipelineError, match=r"filter\(large\) returned an array of shape \[4\].*unbatch"
    ) as caught:
        list(ps.read_parquet(table, batch=4).filter(large))
    assert caught.value.__notes__[0].startswith("penstock: in filter(large), element 0 of split 0")


def test_elements_before_one_without_a_truth_value_are_given():
    ds = iter(ps.range(4).filter(lambda x: np.ones(2) if x == 2 else True))
    assert [next(ds), next(ds)] == [0, 1]
    with pytest.raises(InvalidPipelineError, match="array of shape"):
        next(ds)


def test_pack_of_dicts_says_that_key_is_missing():
    documents = ps.from_items([{"tokens": np.arange(3), "n": 1}])
    with pytest.raises(InvalidPipelineError, match=r"key=.*'tokens', 'n'"):
        list(documents.pack(8))
    with pytest.raises(InvalidPipelineError, match=r"no 'token'.*'tokens', 'n'"):
        list(documents.pack(8, key="token"))


def test_a_key_that_cannot_name_a_window_is_blamed_on_its_operator_and_element():
    with pytest.raises(TypeError, match="unhashable") as caught:
        list(ps.range(4).group_by_window(lambda x: [x] if x == 2 else x, size=2))
    assert any("group_by_window" in note and "element 2 of split 0" in note for note in caught.value.__notes__)


def test_a_generator_function_that_gives_nothing_to_iterate_over_is_named():
    with pytest.raises(
        InvalidPipelineError, match="from_generator's function returned a int, which cannot be iterated"
    ):
        list(ps.from_generator(lambda: 5))
