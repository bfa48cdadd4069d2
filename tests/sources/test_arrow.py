import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from pyarrow import ipc

from penstock.core.element import Ragged
from penstock.core.errors import CorruptRecordError, DataError, InvalidArgumentError, NoFilesError
from penstock.graph.expressions import col
from penstock.graph.readers import ReadArrow
from penstock.sources import arrow, cutting
from penstock.sources.arrow import ArrowSource
from penstock.sources.base import Records, Split, SplitPosition
from penstock.sources.ipc_messages import DICTIONARY_BATCH, RECORD_BATCH, scan_messages

BEGINNING = SplitPosition()
FORMATS = {"file": ipc.new_file, "stream": ipc.new_stream}


def write(path: Path, table: pa.Table | dict[str, Any], form: str = "file", rows: int = 10, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = pa.table(table)
    with (
        pa.OSFile(str(path), "wb") as file,
        FORMATS[form](file, made.schema, options=ipc.IpcWriteOptions(**options)) as writer,
    ):
        writer.write_table(made, max_chunksize=rows)
    return path


def source(*paths: Path | str, **options: Any) -> ArrowSource:
    return ArrowSource(ReadArrow(paths=tuple(map(str, paths)), **options))


def records(made: ArrowSource, split: Split, at: SplitPosition = BEGINNING, want: int = 7) -> Iterator[Records]:
    reader = made.open(split, at)
    try:
        while (found := reader.read(want)).elements:
            yield found
    finally:
        reader.close()


def positions(found: Iterator[Records], at: SplitPosition = BEGINNING) -> Iterator[tuple[Any, SplitPosition]]:
    for each in found:
        indices = each.indices or range(at.index, at.index + len(each.elements))
        for number, element in enumerate(each.elements):
            at = SplitPosition(indices[number] + 1, each.offsets[number] if each.offsets else None)
            yield element, at


def read_all(made: ArrowSource, want: int = 7) -> list[Any]:
    return [e for split in made.splits() for found in records(made, split, want=want) for e in found.elements]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-columns"]


TABLE = {"x": range(100), "half": [i / 2 for i in range(100)], "name": [f"n{i}" for i in range(100)]}


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("form", FORMATS)
def test_files_and_streams_are_told_apart(tmp_path: Path, form: str, compression: str | None) -> None:
    path = write(tmp_path / "a.arrow", TABLE, form, compression=compression)
    assert read_all(source(path)) == [{"x": i, "half": i / 2, "name": f"n{i}"} for i in range(100)]
    batches = read_all(source(path, batch=30, columns=("name", "x")))
    assert [list(batch) for batch in batches] == [["name", "x"]] * 4
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(100))
    assert [len(batch["x"]) for batch in batches] == [30, 30, 30, 10]


def test_feather_is_read_and_its_first_version_is_refused(tmp_path: Path) -> None:
    pyarrow.feather.write_feather(pa.table(TABLE), str(tmp_path / "two.feather"))
    assert [row["x"] for row in read_all(source(tmp_path / "two.feather"))] == list(range(100))
    (tmp_path / "one.feather").write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(DataError, match=r"one\.feather: Feather version 1.*rewrite"):
        source(tmp_path / "one.feather").splits()


@pytest.mark.parametrize("form", FORMATS)
def test_splits_are_record_batches_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    big = write(tmp_path / "d/big.arrow", {"x": range(1000)}, form, rows=100)
    for number in range(4):
        write(tmp_path / f"d/small{number}.arrow", {"x": range(10)}, form)
    monkeypatch.setattr(cutting, "MOST_BYTES", big.stat().st_size // 3)
    made = source(tmp_path / "d")
    splits = made.splits()
    ranges = [(file.path, file.start, file.stop) for split in splits for file in split.files]
    of_big = [(start, stop) for path, start, stop in ranges if path.endswith("big.arrow")]
    assert of_big[0][0] == 0 and of_big[-1][1] == 10 and len(of_big) >= 3
    assert len(splits) < len(ranges)
    assert splits == source(tmp_path / "d", columns=("x",), predicate=col("x") < 0).splits()
    assert [row["x"] for row in read_all(made)] == [*range(1000), *list(range(10)) * 4]


@pytest.mark.parametrize("predicate", [None, col("x").isin([0, 17, 18, 50, 99]), col("half") > 44.5], ids=repr)
@pytest.mark.parametrize("batch", [None, 7, 40])
@pytest.mark.parametrize("form", [*FORMATS, "dictionaries"])
def test_reading_resumes_at_every_position(tmp_path: Path, form: str, batch: int | None, predicate: Any) -> None:
    table = pa.table(TABLE)
    if form == "dictionaries":
        table = table.set_column(2, "name", table["name"].combine_chunks().dictionary_encode())
    write(tmp_path / "d/a.arrow", table.slice(0, 45), "file" if form == "file" else "stream")
    write(tmp_path / "d/b.arrow", table.slice(45), "file" if form == "file" else "stream")
    made = source(tmp_path / "d", batch=batch, predicate=predicate)
    (split,) = made.splits()
    whole = list(positions(records(made, split)))
    names = [element["name"] if batch is None else element["name"].tolist() for element, _ in whole]
    for number, (_, at) in enumerate(whole):
        for position in {at, SplitPosition(at.index)}:
            rest = [element["name"] for element, _ in positions(records(made, split, position, want=3), position)]
            assert [each if batch is None else each.tolist() for each in rest] == names[number + 1 :]
    if batch is None:
        assert [at.index - 1 for _, at in whole] == [element["x"] for element, _ in whole]


@pytest.mark.parametrize("form", FORMATS)
def test_restoring_passes_over_record_batches_without_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    made = source(write(tmp_path / "a.arrow", TABLE, form))
    (split,) = made.splits()
    read: list[int] = []
    plain_message = arrow._ArrowFile._read_message
    plain_open = ipc.open_file

    def read_message(file: Any, block: Any) -> Any:
        read.append(block.offset)
        return plain_message(file, block)

    class Watching:
        def __init__(self, *given: Any, **options: Any) -> None:
            self._reader = plain_open(*given, **options)
            self.schema = self._reader.schema

        def get_batch(self, number: int) -> Any:
            read.append(number)
            return self._reader.get_batch(number)

    monkeypatch.setattr(arrow._ArrowFile, "_read_message", read_message)
    monkeypatch.setattr(ipc, "open_file", Watching)
    rows = [row["x"] for found in records(made, split, SplitPosition(75)) for row in found.elements]
    assert rows == list(range(75, 100))
    assert len(read) == 3


def test_a_projection_reads_only_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.arrow", TABLE, compression="lz4")
    loaded: set[str] = set()
    plain = arrow._cut

    def cut(node: Any, projection: Any, path: str, part: Any, *rest: Any) -> Any:
        loaded.update(part.batch.schema.names)
        return plain(node, projection, path, part, *rest)

    monkeypatch.setattr(arrow, "_cut", cut)
    rows = read_all(source(path, columns=("name",), predicate=col("x") > 97))
    assert rows == [{"name": "n98"}, {"name": "n99"}]
    assert loaded == {"name", "x"}


def test_types_survive_the_file(tmp_path: Path) -> None:
    table = pa.table(
        {
            "d": pa.array(["p", "q", "p", "q"]).dictionary_encode(),
            "l": [[1], [], [2, 3], [4]],
            "f": pa.array([[1, 2]] * 4, pa.list_(pa.float32(), 2)),
            "st": [{"a": i} for i in range(4)],
            "t": pa.array([1, 2, 3, 4], pa.timestamp("s")),
            "b": [True, False, True, False],
        }
    )
    for form in FORMATS:
        (batch,) = read_all(source(write(tmp_path / f"{form}.arrow", table, form, rows=3), batch=4))
        assert batch["d"].tolist() == ["p", "q", "p", "q"] and batch["l"] == Ragged.of([[1], [], [2, 3], [4]])
        assert batch["f"].shape == (4, 2) and batch["st"]["a"].tolist() == [0, 1, 2, 3]
        assert batch["t"].dtype == "M8[s]" and batch["b"].tolist() == [True, False, True, False]


@pytest.mark.parametrize("form", FORMATS)
def test_writing_to_a_batch_does_not_reach_the_file(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / "a.arrow", TABLE, form)
    before = path.read_bytes()
    batches = read_all(source(path, batch=25))
    for batch in batches:
        batch["x"] += 1000
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(1000, 1100))
    assert path.read_bytes() == before
    assert [row["x"] for row in read_all(source(path))] == list(range(100))


def test_nulls_name_file_and_record_batch(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", {"x": [None if i == 17 else i for i in range(30)]})
    with pytest.raises(DataError, match=r"a\.arrow: column 'x' is null in row 7 of record batch 1"):
        read_all(source(path))
    assert [row["x"] for row in read_all(source(path, nulls=-1))][17] == -1
    (batch,) = read_all(source(path, nulls="mask", batch=30))
    assert not batch["x__mask"][17] and batch["x__mask"].sum() == 29


@pytest.mark.parametrize("form", FORMATS)
def test_remote_files_read_as_local_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    path = write(tmp_path / "a.arrow", TABLE, form)
    monkeypatch.setattr("penstock.sources.ranged.REQUEST_BYTES", 1000)
    monkeypatch.setattr("penstock.sources.ranged.AHEAD_BYTES", 3000)
    for number in range(3):
        fsspec.filesystem("memory").pipe(f"/arrow-{form}/{number}.arrow", path.read_bytes())
    for options in ({}, {"columns": ("name",), "predicate": (col("x") < 25) | (col("x") > 80)}):
        made = source(f"memory://arrow-{form}/*.arrow", **options)
        assert made.remote
        assert read_all(made) == read_all(source(path, **options)) * 3
    made = source(f"memory://arrow-{form}/*.arrow", batch=33)
    assert np.concatenate([batch["x"] for batch in read_all(made)]).tolist() == list(range(100)) * 3


def test_headers_tell_what_pyarrow_reads(tmp_path: Path) -> None:
    table = pa.table({"d": pa.array(["p", "q"] * 50).dictionary_encode(), "x": range(100)})
    path = write(tmp_path / "a.arrow", table, "stream", rows=30)
    content = path.read_bytes()
    found = list(scan_messages(lambda offset, size: content[offset : offset + size], 0, len(content)))
    assert [header.kind for _, header in found] == [1, DICTIONARY_BATCH, *[RECORD_BATCH] * 4]
    assert [header.rows for _, header in found if header.kind == RECORD_BATCH] == [30, 30, 30, 10]
    assert all(after.offset == before.end for (before, _), (after, _) in pairwise(found))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kept", [0, 3, 7, 300, -20])
def test_a_cut_file_is_named(tmp_path: Path, form: str, kept: int) -> None:
    path = write(tmp_path / "a.arrow", TABLE, form)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptRecordError, match=r"a\.arrow.*not a whole Arrow file or stream"):
        source(path).splits()


def test_what_is_no_arrow_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"just some text that goes on and on and on and on")
    with pytest.raises(CorruptRecordError, match=r"a\.arrow: not a whole Arrow file or stream"):
        source(tmp_path / "a.arrow").splits()
    with pytest.raises(NoFilesError):
        source(tmp_path / "*.ipc").splits()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("batch", [None, 10])
def test_a_damaged_record_batch_is_told_and_can_be_passed_over(tmp_path: Path, form: str, batch: int | None) -> None:
    path = write(tmp_path / "a.arrow", {"x": range(100)}, form, compression="zstd")
    content = bytearray(path.read_bytes())
    start = 8 if form == "file" else 0
    found = scan_messages(lambda offset, size: bytes(content[offset : offset + size]), start, len(content))
    block = [block for block, header in found if header.kind == RECORD_BATCH][4]
    body = block.offset + block.header_bytes
    content[body + 8 : body + 16] = b"\xff" * 8
    path.write_bytes(bytes(content))
    made = source(path, batch=batch)
    (split,) = made.splits()
    with pytest.raises(CorruptRecordError, match=rf"a\.arrow at byte {block.offset}: record batch 4 cannot be read"):
        list(records(made, split))
    told: list[int] = []
    made.on_bad = lambda error, index: told.append(index)
    found_elements = list(positions(records(made, split)))
    values = np.concatenate([np.atleast_1d(element["x"]) for element, _ in found_elements])
    assert values.tolist() == [*range(40), *range(50, 100)]
    assert told == [40 if batch is None else 4]
    if batch is None:
        assert [at.index - 1 for _, at in found_elements] == values.tolist()


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    write(tmp_path / "d/a.arrow", {"x": [1], "y": [1]})
    write(tmp_path / "d/b.arrow", {"x": [2]}, "stream")
    with pytest.raises(DataError, match=r"b\.arrow: no column 'y'"):
        source(tmp_path / "d").splits()
    assert read_all(source(tmp_path / "d", columns=("x",))) == [{"x": 1}, {"x": 2}]
    with pytest.raises(InvalidArgumentError, match="twice"):
        source(tmp_path / "d", columns=("x", "x"))


def test_a_file_that_changed_or_went_since_it_was_listed_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", TABLE)
    made = source(path)
    (split,) = made.splits()
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="when it was listed"):
        list(records(made, split))
    path.unlink()
    with pytest.raises(NoFilesError, match="gone"):
        list(records(made, split))
