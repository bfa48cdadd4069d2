"""Operators that say which columns they need and give: no function is called, and only what is needed is read."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.api.dataset import Dataset
from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.explain import explain_text
from penstock.graph.readers import ReadParquet
from penstock.graph.traverse import walk
from penstock.passes import InvalidPlanError, Pass, optimize
from penstock.passes.columns import push_projections
from penstock.passes.filters import push_filters
from penstock.passes.shuffles import move_shuffles
from penstock.runtime.ops.columns import Compute, computes
from tests.passes.golden import col, f

seen: list[tuple[str, tuple[int, ...]]] = []


class Standardize(ops.ColumnOperator, frozen=True, kw_only=True, eq=False):
    """A column minus another, over a third, instead of what it was."""

    column: str
    mean: str
    scale: float

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.column, self.mean)

    @property
    def gives(self) -> tuple[str, ...]:
        return (self.column, f"{self.column}_centred")


@computes(Standardize)
def _standardize(node: Standardize) -> Compute:
    def compute(columns):
        seen.extend((name, np.shape(value)) for name, value in columns.items())
        centred = columns[node.column] - columns[node.mean]
        return {node.column: centred / node.scale, f"{node.column}_centred": centred}

    return compute


def standardized(rows: Dataset) -> Dataset:
    return rows._with(Standardize, column="x", mean="m", scale=2.0)


@pytest.fixture
def files(tmp_path):
    columns = {"x": np.arange(20.0), "m": np.full(20, 4.0), "y": np.arange(20), "unread": ["text"] * 20}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=10)
    return str(tmp_path / "t.parquet")


@pytest.mark.parametrize("optimized", [True, False])
def test_batches_of_columns_are_computed_as_arrays(files, optimized):
    seen.clear()
    dataset = standardized(ps.read_parquet(files, batch=10)).select("y", "x", "x_centred")
    with dataset.iterator(epoch=0, optimize=optimized) as iterator:
        first, second = iterator
    assert list(first) == ["y", "x", "x_centred"]
    np.testing.assert_array_equal(second["x"], (np.arange(10.0, 20.0) - 4) / 2)
    np.testing.assert_array_equal(first["x_centred"], np.arange(10.0) - 4)
    assert seen == [("x", (10,)), ("m", (10,))] * 2


def test_rows_are_computed_as_values(files):
    rows = list(standardized(ps.read_parquet(files)).drop("unread"))
    assert rows[6] == {"x": 1.0, "m": 4.0, "y": 6, "x_centred": 2.0}


def columns_read(dataset: Dataset) -> tuple[str, ...] | None:
    (source,) = [node for node in walk(optimize(dataset.node)) if isinstance(node, ReadParquet)]
    return source.columns


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        (("y", "x_centred"), {"y", "x", "m"}),
        (("x",), {"x", "m"}),
        (("y",), {"y", "x", "m"}),  # it runs, so that what it needs must be there
    ],
)
def test_projections_pass_through(files, asked, read):
    dataset = standardized(ps.read_parquet(files).shuffle(4)).prefetch().select(*asked)
    assert set(columns_read(dataset) or ()) == read
    assert len(list(dataset)) == 20


def test_nothing_is_known_of_columns_that_nobody_names(files):
    assert columns_read(standardized(ps.read_parquet(files))) is None


def plan(dataset: Dataset, rewrite) -> str:
    return explain_text(rewrite(dataset.node))


def test_known_columns_pass_through():
    rows = standardized(ps.read_parquet("t.parquet", columns=["m", "x", "y"])).drop("m")
    assert explain_text(optimize(rows.node)).splitlines() == [
        "read_parquet('t.parquet', columns=('y', 'x', 'm'))",
        "fused: standardize('x', 'm', 2.0) + select(('x', 'y', 'x_centred'))",
        "prefetch()",
    ]


def test_a_filter_on_other_columns_passes_through():
    rows = standardized(ps.read_parquet("t.parquet"))
    pushed = "read_parquet('t.parquet', predicate=col('y') > 3)\nstandardize('x', 'm', 2.0)"
    assert plan(rows.filter(col("y") > 3), push_filters) == pushed
    on_what_it_gives = rows.filter(col("x") > 3)
    assert push_filters(on_what_it_gives.node) is on_what_it_gives.node


def test_a_shuffle_moves_above_it_and_a_batch_takes_it_in():
    rows = standardized(ps.read_csv("t.csv"))
    assert plan(rows.shuffle(4), move_shuffles) == "read_csv('t.csv')\nshuffle(size=4)\nstandardize('x', 'm', 2.0)"
    batched = explain_text(optimize(rows.map(f).batch(4).node)).splitlines()
    assert batched[1] == "fused: standardize('x', 'm', 2.0) + map(f) + batch(4)"


def test_a_function_above_stops_projections():
    mapped = standardized(ps.read_parquet("t.parquet")).map(f).select("x")
    assert push_projections(mapped.node) is mapped.node


def test_a_pass_that_loses_it_is_found():
    rows = standardized(ps.read_csv("t.csv"))
    losing = Pass("losing", lambda node: node.upstream if isinstance(node, Standardize) else node)
    with pytest.raises(InvalidPlanError, match="functions or conditions were lost"):
        optimize(rows.node, [losing])


def test_a_missing_column_is_named_with_those_there_are():
    rows = standardized(ps.from_items([{"x": 1.0, "m": 2.0}, {"x": 1.0, "z": 2.0}]))
    with rows.iterator(epoch=0) as iterator:
        assert next(iterator)["x_centred"] == -1.0
        with pytest.raises(InvalidPipelineError, match=r"no column 'm'; it has the columns \['x', 'z'\]"):
            next(iterator)


def test_what_goes_wrong_inside_is_told_as_it_is():
    with pytest.raises(TypeError, match="unsupported operand"):
        list(standardized(ps.from_items([{"x": 1.0, "m": "two"}])))
