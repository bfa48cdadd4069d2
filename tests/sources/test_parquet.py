import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.element import Ragged
from penstock.core.errors import CorruptRecordError, DataError, InvalidArgumentError, NoFilesError
from penstock.graph.expressions import Expression, col
from penstock.graph.readers import ReadParquet
from penstock.sources import columnar, cutting, parquet
from penstock.sources.base import Records, Split, SplitPosition
from penstock.sources.parquet import ParquetSource
from penstock.sources.parquet_groups import UNITS_AT_ONCE, RowGroup, units_at_once

BEGINNING = SplitPosition()


def source(*paths: Path | str, **options: Any) -> ParquetSource:
    return ParquetSource(ReadParquet(paths=tuple(map(str, paths)), **options))


def records(made: ParquetSource, split: Split, at: SplitPosition = BEGINNING, want: int = 7) -> Iterator[Records]:
    reader = made.open(split, at)
    try:
        while (found := reader.read(want)).elements:
            assert len(found.elements) <= want
            yield found
    finally:
        reader.close()


def positions(found: Iterator[Records], at: SplitPosition = BEGINNING) -> Iterator[tuple[Any, SplitPosition]]:
    """Yield each element with the position after it, as the contract says."""
    for each in found:
        indices = each.indices or range(at.index, at.index + len(each.elements))
        for number, element in enumerate(each.elements):
            at = SplitPosition(indices[number] + 1, each.offsets[number] if each.offsets else None)
            yield element, at


def read_all(made: ParquetSource, want: int = 7) -> list[Any]:
    return [
        element for split in made.splits() for found in records(made, split, want=want) for element in found.elements
    ]


def write(path: Path, table: pa.Table | dict[str, Any], rows: int = 10, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path, row_group_size=rows, **options)
    return path


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """100 rows in 10 row groups."""
    table = {"x": range(100), "half": [i / 2 for i in range(100)], "name": [f"n{i}" for i in range(100)]}
    return write(tmp_path / "numbers.parquet", table)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    ours = ("penstock-columns", "penstock-making")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(ours)]


def test_rows_are_dicts_of_python_values(numbers: Path) -> None:
    rows = read_all(source(numbers))
    assert rows == [{"x": i, "half": i / 2, "name": f"n{i}"} for i in range(100)]
    assert [type(value) for value in rows[0].values()] == [int, float, str]


@pytest.mark.parametrize("size", [1, 7, 10, 30, 99, 100, 1000])
def test_batches_are_full_across_row_groups_and_files(tmp_path: Path, size: int) -> None:
    write(tmp_path / "d/a.parquet", {"x": range(45)})
    write(tmp_path / "d/b.parquet", {"x": range(45, 52)})
    write(tmp_path / "d/c.parquet", {"x": range(52, 100)}, rows=48)
    batches = read_all(source(tmp_path / "d", batch=size), want=3)
    assert [len(batch["x"]) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(100))


def test_columns_choose_and_order(numbers: Path) -> None:
    assert list(read_all(source(numbers, columns=("name", "x")))[0]) == ["name", "x"]
    batch = read_all(source(numbers, columns=("half",), batch=100))[0]
    assert list(batch) == ["half"] and batch["half"].dtype == np.float64


def test_a_projection_reads_only_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    table = {"small": np.arange(10_000, dtype=np.int16), "big": rng.random(10_000), "huge": rng.random(10_000)}
    path = write(tmp_path / "wide.parquet", table, rows=5_000, compression="none")
    fsspec.filesystem("memory").pipe("/wide/x.parquet", path.read_bytes())
    read = 0
    plain_fetch = parquet.RangedFile._submit

    def counted(self: Any, start: int, stop: int) -> Any:
        nonlocal read
        read += stop - start
        return plain_fetch(self, start, stop)

    monkeypatch.setattr(parquet, "WHOLE_FILE_BYTES", 0)
    monkeypatch.setattr(parquet, "FOOTER_BYTES", 4096)
    monkeypatch.setattr("penstock.sources.ranged.HOLE_BYTES", 0)
    monkeypatch.setattr(parquet.RangedFile, "_submit", counted)
    made = source("memory://wide/x.parquet", columns=("small",), batch=1000)
    split = made.splits()[0]
    read = 0
    assert sum(len(batch["small"]) for found in records(made, split) for batch in found.elements) == 10_000
    stored = pq.read_metadata(path)
    small = sum(stored.row_group(i).column(0).total_compressed_size for i in range(2))
    assert read == small < path.stat().st_size / 4


def test_splits_are_row_groups_up_to_a_size_whatever_is_pushed_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    big = write(tmp_path / "d/big.parquet", {"x": range(1000), "y": rng.random(1000)}, rows=100, compression="none")
    for number in range(5):
        write(tmp_path / f"d/small{number}.parquet", {"x": range(10), "y": rng.random(10)})
    size = big.stat().st_size
    monkeypatch.setattr(cutting, "MOST_BYTES", size // 3)
    splits = source(tmp_path / "d").splits()
    ranges = [(os.path.basename(file.path), file.start, file.stop) for split in splits for file in split.files]
    of_big = [(start, stop) for name, start, stop in ranges if name == "big.parquet"]
    assert of_big[0][0] == 0 and of_big[-1][1] == 1000 and len(of_big) >= 3
    assert all(stop % 100 == 0 for _, stop in of_big) and [b for _, b in of_big[:-1]] == [a for a, _ in of_big[1:]]
    assert len(splits) < len(ranges)  # small files share a split
    assert source(tmp_path / "d", columns=("x",), predicate=col("x") < 0, batch=3).splits() == splits
    assert [row["x"] for row in read_all(source(tmp_path / "d"))] == [*range(1000), *list(range(10)) * 5]


# --- positions --------------------------------------------------------------------------------------------------------

PREDICATES = [None, col("x") > 33, (col("x") < 5) | (col("x") > 93), col("x").isin([0, 17, 18, 50, 99]), col("x") < 0]


@pytest.mark.parametrize("predicate", PREDICATES, ids=repr)
@pytest.mark.parametrize("batch", [None, 1, 7, 40])
def test_reading_resumes_at_every_position(tmp_path: Path, batch: int | None, predicate: Expression | None) -> None:
    write(tmp_path / "d/a.parquet", {"x": range(45)})
    write(tmp_path / "d/b.parquet", {"x": range(45, 100)})
    made = source(tmp_path / "d", batch=batch, predicate=predicate)
    (split,) = made.splits()
    whole = list(positions(records(made, split)))
    values = [element["x"] if batch is None else element["x"].tolist() for element, _ in whole]
    for number, (_, at) in enumerate(whole):
        for position in {at, SplitPosition(at.index)}:  # the hint is a hint
            rest = [element["x"] for element, _ in positions(records(made, split, position, want=3), position)]
            assert [each if batch is None else each.tolist() for each in rest] == values[number + 1 :]


def test_rows_keep_their_index_under_a_predicate(numbers: Path) -> None:
    for predicate in (col("x").isin([3, 40, 41, 99]), (col("x") >= 20) & (col("x") < 60)):
        made = source(numbers, predicate=predicate)
        found = list(positions(records(made, made.splits()[0])))
        assert [at.index for _, at in found] == [element["x"] + 1 for element, _ in found]


class Watched:
    """Counts what is read through pyarrow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[int] = []
        self.columns: set[str] = set()
        self.opened: list[str] = []
        plain = pq.ParquetFile.iter_batches
        plain_init = pq.ParquetFile.__init__
        watched = self

        def iter_batches(file: Any, rows: int, *, row_groups: list[int], columns: list[str], **options: Any) -> Any:
            watched.groups.extend(row_groups)
            watched.columns.update(columns)
            return plain(file, rows, row_groups=row_groups, columns=columns, **options)

        def init(file: Any, path: Any, **options: Any) -> None:
            watched.opened.append(os.path.basename(str(path)))
            plain_init(file, path, **options)

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
        monkeypatch.setattr(pq.ParquetFile, "__init__", init)


def test_restoring_passes_over_row_groups_and_files_without_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d/a.parquet", {"x": range(50)})
    write(tmp_path / "d/b.parquet", {"x": range(50, 100)})
    made = source(tmp_path / "d")
    batched = source(tmp_path / "d", batch=25)
    split, _ = made.splits()[0], batched.splits()
    watched = Watched(monkeypatch)
    assert [row["x"] for found in records(made, split, SplitPosition(75)) for row in found.elements] == list(
        range(75, 100)
    )
    assert watched.groups == [2, 3, 4] and watched.opened == ["b.parquet"]
    watched.groups.clear()
    (last,) = [batch for found in records(batched, split, SplitPosition(3)) for batch in found.elements]
    assert last["x"].tolist() == list(range(75, 100))
    assert watched.groups == [2, 3, 4]


# --- predicates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicate", "groups"),
    [
        (col("x") > 87, [8, 9]),
        (col("x") == 55, [5]),
        (col("x").isin([5, 95]), [0, 9]),
        (~(col("x") < 90), [9]),
        (col("half") >= 44.5, [8, 9]),
        ((col("x") < 10) | (col("half") > 49.3), [0, 9]),
        ((col("x") < 10) & (col("half") > 49.3), []),
        (col("x").is_null(), []),
        (col("name") > "n98", [9]),
        (col("x") != 5, list(range(10))),
    ],
    ids=repr,
)
def test_statistics_pass_over_row_groups(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, predicate: Expression, groups: list[int]
) -> None:
    expected = [row for row in read_all(source(numbers)) if predicate.evaluate(row)]
    made = source(numbers, predicate=predicate, columns=("name",))
    split = made.splits()[0]
    watched = Watched(monkeypatch)
    assert [row["name"] for found in records(made, split) for row in found.elements] == [
        row["name"] for row in expected
    ]
    assert watched.groups == groups
    assert watched.columns <= {"name", *predicate.columns()}


@pytest.mark.parametrize(
    ("arrow", "predicate"),
    [
        *((arrow, col("x") > 8) for arrow in (pa.int8(), pa.uint16(), pa.int64(), pa.uint64(), pa.float32())),
        *((pa.timestamp(unit), col("x") > "1970-01-01T00:00:08") for unit in ("s", "ms", "us", "ns")),
        (pa.timestamp("us", "Asia/Tokyo"), col("x") > "1970-01-01T00:00:08"),
        (pa.date32(), col("x") > "1970-01-09"),
        (pa.string(), col("x") > "8"),
        (pa.large_string(), col("x") > "8"),
        (pa.binary(), col("x") > b"8"),
    ],
    ids=str,
)
def test_statistics_of_every_kind_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrow: pa.DataType, predicate: Expression
) -> None:
    if pa.types.is_timestamp(arrow):
        values = pa.array(range(10), pa.timestamp("s", arrow.tz)).cast(arrow)
    elif pa.types.is_date(arrow):
        values = pa.array(range(10), pa.int32()).cast(arrow)
    else:
        values = pa.array([str(i) for i in range(10)]).cast(arrow)
    path = write(tmp_path / "a.parquet", {"x": values, "n": range(10)}, rows=2)
    made = source(path, predicate=predicate)
    (split,) = made.splits()
    watched = Watched(monkeypatch)
    assert [row["n"] for found in records(made, split) for row in found.elements] == [9]
    assert watched.groups == [4]


def test_statistics_do_not_tell_of_nan(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": [1.0, math.nan, 1.0, 1.0, 2.0, 3.0]}, rows=2)
    assert math.isnan(read_all(source(path, predicate=(col("x") != 1.0) & ~(col("x") > 1.0)))[0]["x"])
    assert len(read_all(source(path, predicate=~(col("x") >= 1.0)))) == 1


def literals(kind: str) -> st.SearchStrategy[Any]:
    if kind == "number":
        return st.one_of(
            st.integers(-4, 4),
            st.sampled_from([-0.5, 0.0, -0.0, 0.1, 1.5, 3.0, math.inf, -math.inf, True, 127, 128, 255, 256, -(2**63)]),
            st.sampled_from([2**53, 2**53 + 1, float(2**53), 2**63, 2**64 - 1, float(2**63), 0.10000000149011612]),
        )
    if kind == "time":
        return st.sampled_from(["1970-01-01", "1970-01-02T00:00:00.0000015", "1970-01-03", "9000-01-01", "1970"])
    return st.sampled_from(["", "a", "b", "é", "zz"] if kind == "text" else [b"", b"a", b"\xff", b"b\x00"])


def values_of(arrow: pa.DataType, kind: str) -> st.SearchStrategy[Any]:
    if kind == "text":
        return st.sampled_from(["", "a", "b", "é", "z"])
    if kind == "bytes":
        return st.sampled_from([b"", b"a", b"b", b"\xff"])
    if pa.types.is_boolean(arrow):
        return st.booleans()
    if pa.types.is_floating(arrow):
        return st.sampled_from([0.0, -0.0, 0.1, 1.0, 1.5, -2.0, math.nan, math.inf, 2.0**53])
    if kind == "time":
        scale = {"date32[day]": 1, "timestamp[ms]": 86_400_000, "timestamp[ns]": 86_400 * 10**9}[str(arrow)]
        return st.sampled_from([0, scale, 2 * scale, scale + 1, -scale])
    info = np.iinfo(arrow.to_pandas_dtype())
    bounds = [0, 1, 2, 3, info.max, info.min] + ([2**53 + 1] if info.max > 2**53 else [])
    return st.sampled_from(bounds)


KINDS: list[tuple[pa.DataType, str]] = [
    *((t, "number") for t in (pa.int8(), pa.int64(), pa.uint8(), pa.uint64(), pa.bool_(), pa.float32(), pa.float64())),
    *((pa.string(), "text"), (pa.binary(), "bytes")),
    *((pa.date32(), "time"), (pa.timestamp("ms"), "time"), (pa.timestamp("ns"), "time")),
]


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, dict[str, tuple[pa.DataType, str]]]:
    kinds = {f"c{i}": draw(st.sampled_from(KINDS)) for i in range(draw(st.integers(1, 3)))}
    rows = draw(st.integers(0, 12))
    columns = {}
    for name, (arrow, kind) in kinds.items():
        cell = st.none() | values_of(arrow, kind)
        values = draw(st.lists(cell, min_size=rows, max_size=rows))
        whole = pa.int32() if str(arrow) == "date32[day]" else pa.int64()
        columns[name] = pa.array(values, whole).cast(arrow) if kind == "time" else pa.array(values, arrow)
    return pa.table(columns), kinds


def expressions(kinds: dict[str, tuple[pa.DataType, str]]) -> st.SearchStrategy[Expression]:
    def leaf(name: str) -> st.SearchStrategy[Expression]:
        arrow, kind = kinds[name]
        options = [
            st.builds(lambda op, value: getattr(col(name), op)(value), st.sampled_from(OPERATORS), literals(kind)),
            st.lists(literals(kind), max_size=3).map(col(name).isin),
            st.just(col(name).is_null()),
        ]
        if pa.types.is_boolean(arrow):
            options.append(st.just(col(name)))
        return st.one_of(options)

    leaves = st.sampled_from(sorted(kinds)).flatmap(leaf)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            inner.map(lambda e: ~e),
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
        ),
        max_leaves=4,
    )


OPERATORS = ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), rows=st.integers(1, 5), dictionary=st.booleans())
def test_a_pushed_down_predicate_keeps_the_rows_it_is_true_for(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rows: int, dictionary: bool
) -> None:
    table, kinds = data.draw(tables())
    predicate = data.draw(expressions(kinds))
    path = tmp_path_factory.getbasetemp() / "random.parquet"
    pq.write_table(table, path, row_group_size=rows, use_dictionary=dictionary)
    everything = read_all(source(path, nulls=None))
    expected = [index for index, row in enumerate(everything) if predicate.evaluate(row)]
    made = source(path, nulls=None, predicate=predicate)
    found = [pair for split in made.splits() for pair in positions(records(made, split))]
    assert [at.index - 1 for _, at in found] == expected
    assert repr([row for row, _ in found]) == repr([everything[index] for index in expected])


@pytest.mark.parametrize(
    ("predicate", "told"),
    [
        (col("y") > 1, "no column 'y'; there are x, half, name"),
        (col("x") == "a", "compares with bool or int or float"),
        (col("name") == 1, "compares with str"),
        (col("x") & (col("half") > 1), "no column of bools"),
    ],
)
def test_a_predicate_that_does_not_fit_is_refused_when_splits_are_listed(
    numbers: Path, predicate: Expression, told: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        source(numbers, predicate=predicate).splits()


# --- hive partitions --------------------------------------------------------------------------------------------------


@pytest.fixture
def partitioned(tmp_path: Path) -> Path:
    for year in (2023, 2024):
        for city in ("Rome", "New%20York"):
            write(tmp_path / f"t/year={year}/city={city}/part.parquet", {"x": [year, year + 1]})
    return tmp_path / "t"


def test_partitions_are_columns(partitioned: Path) -> None:
    rows = read_all(source(partitioned))
    assert {(row["x"], row["year"], row["city"]) for row in rows} == {
        (year + i, year, city) for year in (2023, 2024) for i in (0, 1) for city in ("Rome", "New York")
    }
    batch = read_all(source(partitioned, batch=8, columns=("city", "year", "x")))[0]
    assert list(batch) == ["city", "year", "x"]
    assert batch["year"].dtype == np.int64 and batch["city"].dtype == object
    assert (batch["x"] - batch["year"]).tolist() == [0, 1] * 4
    assert {tuple(row) for row in read_all(source(partitioned, columns=("year",)))} == {("year",)}


def test_a_partition_is_text_if_any_value_is(tmp_path: Path) -> None:
    write(tmp_path / "t/k=1/a.parquet", {"x": [1]})
    write(tmp_path / "t/k=b/a.parquet", {"x": [2]})
    write(tmp_path / "t/k=__HIVE_DEFAULT_PARTITION__/a.parquet", {"x": [3]})
    assert [row["k"] for row in read_all(source(tmp_path / "t", nulls=None))] == ["1", None, "b"]
    kept = read_all(source(tmp_path / "t", nulls=None, predicate=col("k").is_null() | (col("k") == "b")))
    assert [row["x"] for row in kept] == [3, 2]


def test_partitions_choose_files_without_opening_them(partitioned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = source(partitioned, predicate=(col("year") == 2024) & (col("city") != "Rome") & (col("x") > 2024))
    (split,) = made.splits()
    watched = Watched(monkeypatch)
    found = list(positions(records(made, split)))
    assert [row for row, _ in found] == [{"x": 2025, "year": 2024, "city": "New York"}]
    assert len(watched.opened) == 1
    assert found[0][1].index == 6  # four rows of 2023 and two of 2024 lie before the next


def test_partition_keys_must_be_those_of_all_files(partitioned: Path) -> None:
    write(partitioned / "year=2025/odd.parquet", {"x": [1]})
    with pytest.raises(DataError, match=r"odd\.parquet.*partition keys year"):
        source(partitioned).splits()


def test_a_split_carries_what_its_reader_must_know(partitioned: Path) -> None:
    splits = source(partitioned).splits()
    elsewhere = source(partitioned)  # another process, which never listed
    assert [e["year"] for s in splits for f in records(elsewhere, s) for e in f.elements] == [2023] * 4 + [2024] * 4


# --- remote files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_file_bytes", [0, 1 << 20])
def test_remote_files_read_as_local_ones(numbers: Path, monkeypatch: pytest.MonkeyPatch, whole_file_bytes: int) -> None:
    monkeypatch.setattr(parquet, "WHOLE_FILE_BYTES", whole_file_bytes)
    monkeypatch.setattr("penstock.sources.ranged.REQUEST_BYTES", 100)
    for number in range(7):
        fsspec.filesystem("memory").pipe(f"/remote/{number}.parquet", numbers.read_bytes())
    predicate = (col("x") < 25) | (col("x") > 80)
    for options in ({}, {"columns": ("name",), "predicate": predicate}, {"batch": 33}):
        local = read_all(source(numbers, **options))
        made = source("memory://remote/*.parquet", **options)
        assert made.remote
        far = read_all(made)
        if "batch" not in options:
            assert far == local * 7
        else:
            assert np.concatenate([batch["x"] for batch in far]).tolist() == list(range(100)) * 7


def test_more_remote_files_than_there_are_threads_are_listed(tmp_path: Path) -> None:
    content = write(tmp_path / "a.parquet", {"x": [1]}).read_bytes()
    for number in range(100):
        fsspec.filesystem("memory").pipe(f"/many/{number}.parquet", content)
    assert len(read_all(source("memory://many"))) == 100


def test_closing_a_reader_that_waits_for_storage_returns_at_once(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.filesystem("memory").pipe("/stuck/x.parquet", numbers.read_bytes())
    made = source("memory://stuck/x.parquet")
    (split,) = made.splits()
    release, asked = threading.Event(), threading.Event()

    def stuck(*_: Any) -> bytes:
        asked.set()
        release.wait(60)
        return b""

    monkeypatch.setattr("penstock.sources.ranged.RangedFile._fetch", stuck)
    reader = made.open(split, SplitPosition())
    assert asked.wait(30)
    reader.close()
    assert not release.is_set()
    release.set()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_missing_column_is_told_with_those_there_are(numbers: Path) -> None:
    with pytest.raises(DataError, match=r"numbers\.parquet: no column 'z'; there are x, half, name"):
        source(numbers, columns=("x", "z")).splits()


def test_a_column_named_twice_is_refused(numbers: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="twice"):
        source(numbers, columns=("x", "x"))


def test_files_with_other_columns_are_named(tmp_path: Path) -> None:
    write(tmp_path / "d/a.parquet", {"x": [1], "y": [1]})
    write(tmp_path / "d/b.parquet", {"x": [2]})
    with pytest.raises(DataError, match=r"b\.parquet: no column 'y', which .*a\.parquet has"):
        source(tmp_path / "d").splits()
    with pytest.raises(DataError, match=r"b\.parquet: no column 'y'"):
        source(tmp_path / "d", columns=("y",)).splits()
    assert [row["x"] for row in read_all(source(tmp_path / "d", columns=("x",)))] == [1, 2]
    write(tmp_path / "d/b.parquet", {"x": [2.0], "y": [1]})
    with pytest.raises(DataError, match=r"b\.parquet: column 'x' is double, but int64 in .*a\.parquet"):
        source(tmp_path / "d").splits()


def test_columns_in_another_order_and_nullability_are_no_difference(tmp_path: Path) -> None:
    write(tmp_path / "d/a.parquet", {"x": [1], "y": [5.0]})
    schema = pa.schema([pa.field("y", pa.float64(), nullable=False), pa.field("x", pa.int64(), nullable=False)])
    write(tmp_path / "d/b.parquet", pa.table({"y": [6.0], "x": [2]}, schema))
    (batch,) = read_all(source(tmp_path / "d", batch=10))
    assert batch["x"].tolist() == [1, 2] and batch["y"].tolist() == [5.0, 6.0]


def test_a_null_is_told_with_column_file_and_row(tmp_path: Path) -> None:
    write(tmp_path / "d/a.parquet", {"x": range(30), "y": [None if i == 5 else i for i in range(30)]})
    write(tmp_path / "d/b.parquet", {"x": range(30), "y": [None if i == 17 else i for i in range(30)]})
    with pytest.raises(DataError, match=r"a\.parquet: column 'y' is null in row 5; .*is_null"):
        read_all(source(tmp_path / "d"))
    keep = (col("x") > 15) & (col("x") != 18)
    for batch in (None, 4, 20):
        with pytest.raises(DataError, match=r"b\.parquet: column 'y' is null in row 17"):
            read_all(source(tmp_path / "d", predicate=keep, batch=batch))
    rows = read_all(source(tmp_path / "d", predicate=~col("y").is_null()))
    assert len(rows) == 58


def test_masks_go_through_files_and_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": [1, None, 3], "s": ["a", "b", None]})
    assert read_all(source(path, nulls="mask"))[1:] == [
        {"x": 0, "x__mask": False, "s": "b", "s__mask": True},
        {"x": 3, "x__mask": True, "s": "", "s__mask": False},
    ]
    (batch,) = read_all(source(path, nulls="mask", batch=3))
    assert batch["x"].tolist() == [1, 0, 3] and batch["x__mask"].tolist() == [True, False, True]


def test_nothing_to_read_is_told_or_empty(tmp_path: Path) -> None:
    with pytest.raises(NoFilesError):
        source(tmp_path / "none-*.parquet").splits()
    empty = write(tmp_path / "empty.parquet", {"x": pa.array([], pa.int64())})
    assert read_all(source(empty)) == []


@pytest.mark.parametrize("kept", [0, 3, 100, -4])
def test_a_cut_file_is_named(numbers: Path, kept: int) -> None:
    numbers.write_bytes(numbers.read_bytes()[:kept])
    with pytest.raises(CorruptRecordError, match=r"numbers\.parquet.*not a whole Parquet file"):
        source(numbers).splits()


def test_a_file_that_changed_or_went_since_it_was_listed_is_told(numbers: Path) -> None:
    made = source(numbers)
    (split,) = made.splits()
    with numbers.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="when it was listed"):
        list(records(made, split))
    numbers.unlink()
    with pytest.raises(NoFilesError, match="gone"):
        list(records(made, split))


def damage(path: Path, group: int) -> None:
    """Overwrite a row group's pages; with checksums that is found for sure."""
    column = pq.read_metadata(path).row_group(group).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    middle = start + column.total_compressed_size // 2
    content[middle : middle + 8] = bytes(255 - byte for byte in content[middle : middle + 8])
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("batch", [None, 10])
def test_a_damaged_row_group_is_told_and_can_be_passed_over(tmp_path: Path, batch: int | None) -> None:
    stored_plainly = {"compression": "none", "use_dictionary": False}  # so that only the checksum can tell
    path = write(tmp_path / "a.parquet", {"x": range(100)}, write_page_checksum=True, **stored_plainly)
    damage(path, 4)
    made = source(path, batch=batch)
    (split,) = made.splits()
    with pytest.raises(CorruptRecordError, match=r"a\.parquet: row group.* cannot be read"):
        list(records(made, split))
    reader = made.open(split, SplitPosition())
    for _ in range(2):  # asking again does not get past it
        with pytest.raises(CorruptRecordError):
            while reader.read(100).elements:
                pass
    reader.close()
    told: list[tuple[str, int]] = []
    made.on_bad = lambda error, index: told.append((str(error), index))
    found = list(positions(records(made, split)))
    values = np.concatenate([np.atleast_1d(element["x"]) for element, _ in found])
    assert values.tolist() == [*range(40), *range(50, 100)]
    assert len(told) == 1 and "row group 4 (rows 40 to 49)" in told[0][0]
    assert told[0][1] == (40 if batch is None else 4)
    if batch is None:
        assert [at.index for _, at in found] == [value + 1 for value in values]
    for number in (10, 30, 45, 60) if batch is None else (0, 3, 4, 6):
        _, at = found[number]
        rest = [element["x"] for element, _ in positions(records(made, split, at), at)]
        assert (
            np.concatenate([np.atleast_1d(each) for each in rest]).tolist()
            == np.concatenate([np.atleast_1d(element["x"]) for element, _ in found[number + 1 :]]).tolist()
        )


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_types_survive_the_file(tmp_path: Path) -> None:
    table = pa.table(
        {
            "i": pa.array([1, 2, 3], pa.int8()),
            "u": pa.array([1, 2, 2**64 - 1], pa.uint64()),
            "h": pa.array(np.array([1, 2, 3], np.float16)),
            "b": [True, False, True],
            "s": ["a", "b", "c"],
            "y": [b"a", b"b", b"c"],
            "t": pa.array([1, 2, 3], pa.timestamp("us")),
            "d": pa.array(["p", "q", "p"]).dictionary_encode(),
            "l": [[1], [], [2, 3]],
            "f": pa.array([[1, 2]] * 3, pa.list_(pa.float32(), 2)),
            "st": [{"a": 1}, {"a": 2}, {"a": 3}],
        }
    )
    path = write(tmp_path / "t.parquet", table, rows=2)
    (batch,) = read_all(source(path, batch=3))
    dtypes = {name: leaf.dtype.str[1:] for name, leaf in batch.items() if isinstance(leaf, np.ndarray)}
    assert list(dtypes) == ["i", "u", "h", "b", "s", "y", "t", "d", "f"]
    assert list(dtypes.values()) == ["i1", "u8", "f2", "b1", "O", "O", "M8[us]", "O", "f4"]
    assert batch["l"] == Ragged.of([[1], [], [2, 3]])
    assert batch["u"].tolist() == [1, 2, 2**64 - 1] and batch["d"].tolist() == ["p", "q", "p"]
    assert batch["f"].shape == (3, 2) and batch["st"]["a"].tolist() == [1, 2, 3]
    rows = read_all(source(path))
    assert rows[2]["l"].tolist() == [2, 3] and rows[2]["st"] == {"a": 3} and rows[2]["t"] == np.datetime64(3, "us")


def test_batches_do_not_share_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": range(100), "l": [[i] for i in range(100)]}, rows=100)
    batches = read_all(source(path, batch=10))
    for batch in batches:
        assert batch["x"].flags.writeable and batch["l"].values.flags.writeable
        batch["x"] += 1000
        batch["l"].values.fill(-1)
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(1000, 1100))
    again = read_all(source(path, batch=10))
    assert again[3]["x"].tolist() == list(range(30, 40)) and again[3]["l"].values.tolist() == list(range(30, 40))


def test_memory_follows_bytes_and_not_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    path = write(tmp_path / "images.parquet", {"image": [rng.bytes(10_000) for _ in range(200)]}, rows=200)
    monkeypatch.setattr(columnar, "CHUNK_BYTES", 100_000)
    made = source(path)
    chunks: list[int] = []
    plain = columnar.RowChunk.keep

    def keep(chunk: Any, *rest: Any) -> Any:
        chunks.append(len(chunk))
        return plain(chunk, *rest)

    monkeypatch.setattr(columnar.RowChunk, "keep", keep)
    assert len(read_all(made, want=50)) == 200
    assert max(chunks) <= 10


def test_row_groups_decoded_side_by_side_come_in_order(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on a handle of its own, no more of them than are decoded at once."""
    at_once = 3
    monkeypatch.setattr(parquet, "units_at_once", lambda groups, rows: at_once)
    opened: list[Any] = []
    plain = pq.ParquetFile

    def open_file(*args: Any, **options: Any) -> Any:
        opened.append(plain(*args, **options))
        return opened[-1]

    monkeypatch.setattr(columnar, "CHUNK_ROWS", 10)
    made = source(numbers, batch=10)
    (split,) = made.splits()
    monkeypatch.setattr(pq, "ParquetFile", open_file)
    values = np.concatenate([batch["x"] for found in records(made, split) for batch in found.elements])
    assert values.tolist() == list(range(100))
    assert 1 <= len(opened) <= at_once and all(file.closed for file in opened)


def test_row_groups_larger_than_a_chunk_are_decoded_one_at_a_time() -> None:
    large, small = RowGroup(0, 0, 1000), RowGroup(1, 1000, 10)
    assert units_at_once([large, small], 100) == 1
    assert units_at_once([small, small], 100) == min(UNITS_AT_ONCE, pa.cpu_count())


@pytest.mark.parametrize("at", [0, 5])
def test_a_reader_closed_in_the_middle_stops_its_thread(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(columnar, "CHUNK_ROWS", 1)
    made = source(numbers)
    reader = made.open(made.splits()[0], SplitPosition())
    if at:
        reader.read(at)
    reader.close()
    reader.close()
    assert reader.read(5).elements == ()


def test_a_forgotten_reader_stops_its_thread(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "CHUNK_ROWS", 1)
    made = source(numbers)
    reader = made.open(made.splits()[0], SplitPosition())
    reader.read(1)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "penstock-columns"]
    del reader
    thread.join(30)
    assert not thread.is_alive()


def test_many_tiny_files_share_splits(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2]})
    for number in range(300):
        pq.write_table(table, tmp_path / f"{number:03}.parquet")
    made = source(tmp_path)
    assert [len(split.files) for split in made.splits()] == [4] * 75
    assert len(read_all(made, want=1000)) == 600
