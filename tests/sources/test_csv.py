import gzip
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CorruptRecordError, DataError, InvalidArgumentError, TruncatedFileError
from penstock.graph.readers import ReadCsv
from penstock.sources import csv_files
from penstock.sources.base import SplitPosition
from penstock.sources.csv_files import CsvSource


def source_of(*paths: Path, **options: Any) -> CsvSource:
    return CsvSource(ReadCsv(paths=tuple(map(str, paths)), **options))


def written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def read(source: CsvSource, at: SplitPosition | None = None, want: int = 1_000) -> list[Any]:
    rows: list[Any] = []
    for split in source.splits():
        reader = source.open(split, at or SplitPosition())
        while found := reader.read(want).elements:
            rows.extend(found)
        reader.close()
    return rows


def collect_bad(source: CsvSource) -> list[tuple[int, DataError]]:
    bad: list[tuple[int, DataError]] = []
    source.on_bad = lambda error, index: bad.append((index, error))
    return bad


def test_cells_are_plain_python_values(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x.csv",
        "int,float,bool,text,date,time,stamp,none\n"
        '1,0.5,true,"a,""b""\nc",2020-01-31,12:30:00,2020-01-31T00:00:00Z,\n'
        ",,,,,,,NA\n",
    )
    first, second = read(source_of(path))
    assert first == {
        "int": 1,
        "float": 0.5,
        "bool": True,
        "text": 'a,"b"\nc',
        "date": "2020-01-31",
        "time": "12:30:00",
        "stamp": "2020-01-31T00:00:00Z",
        "none": None,
    }
    assert {name: type(value) for name, value in first.items()} == {
        "int": int,
        "float": float,
        "bool": bool,
        "text": str,
        "date": str,
        "time": str,
        "stamp": str,
        "none": type(None),
    }
    assert second == dict.fromkeys(first, "") | dict.fromkeys(["int", "float", "bool", "none"])


def test_columns_are_chosen_in_the_order_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "a,b,c\n1,2,3\n")
    assert [list(row.items()) for row in read(source_of(path, columns=("c", "a")))] == [[("c", 3), ("a", 1)]]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.csv: Column 'z' .* does not exist"):
        read(source_of(written(tmp_path / "x.csv", "a\n1\n"), columns=("a", "z")))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two columns have the same name; the header is a, b, a"):
        read(source_of(written(tmp_path / "x.csv", "a,b,a\n1,2,3\n")))


def test_another_delimiter_can_be_given(tmp_path: Path) -> None:
    assert read(source_of(written(tmp_path / "x.tsv", "a\tb\n1\t2\n"), delimiter="\t")) == [{"a": 1, "b": 2}]
    with pytest.raises(InvalidArgumentError, match="one character"):
        source_of(tmp_path / "x.tsv", delimiter="||")


@pytest.mark.parametrize("content", ["", "a,b\n", "a,b"])
def test_files_without_rows_have_none(tmp_path: Path, content: str) -> None:
    written(tmp_path / "1.csv", content)
    written(tmp_path / "2.csv", "a,b\n1,2\n")
    assert read(source_of(tmp_path)) == [{"a": 1, "b": 2}]


def test_many_blocks_and_a_packed_file_give_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 1_000)
    monkeypatch.setattr(csv_files, "ROWS_AT_ONCE", 17)
    rows = [{"i": i, "text": f"a\n{i}" if i % 10 == 0 else ""} for i in range(2_000)]
    content = "i,text\n" + "".join(f'{row["i"]},"{row["text"]}"\n' for row in rows)
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(content.encode()))
    assert read(source_of(written(tmp_path / "x.csv", content))) == rows
    source = source_of(tmp_path / "x.csv.gz")
    assert read(source) == rows
    assert read(source, SplitPosition(1_234)) == rows[1_234:]


def test_a_hint_names_file_and_row(tmp_path: Path) -> None:
    for name in "ab":
        written(tmp_path / f"{name}.csv", "x\n" + "".join(f"{name}{i}\n" for i in range(3)))
    source = source_of(tmp_path)
    (split,) = source.splits()
    reader = source.open(split, SplitPosition())
    offsets = [offset for _ in range(2) for offset in reader.read(9).offsets or ()]
    assert len(offsets) == 6
    resumed = source.open(split, SplitPosition(4, offsets[3]))
    assert [row["x"] for row in resumed.read(9).elements] == ["b1", "b2"]
    assert resumed.read(9).elements == ()


def test_rows_longer_than_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 1_000)
    rows = [{"i": i, "text": "x" * (20_000 if i in (300, 500) else 5)} for i in range(600)]
    path = written(tmp_path / "x.csv", "i,text\n" + "".join(f"{row['i']},{row['text']}\n" for row in rows))
    assert read(source_of(path)) == rows


def test_a_row_that_does_not_fit_the_header_is_named_after_those_before_it(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "a,b\n1,2\n\n3\n4,5\n6,7,8\n")
    source = source_of(path)
    reader = source.open(source.splits()[0], SplitPosition())
    assert reader.read(9).elements == [{"a": 1, "b": 2}]
    with pytest.raises(CorruptRecordError, match=r"x\.csv: row 3 has 1 cells, not 2: '3'"):
        reader.read(9)
    bad = collect_bad(source)
    reader = source.open(source.splits()[0], SplitPosition())
    records = reader.read(9)
    assert [row["a"] for row in records.elements] == [1, 4] and list(records.indices or ()) == [0, 2]
    assert not reader.read(9).elements
    assert [index for index, _ in bad] == [1, 3]


def test_bad_rows_in_many_blocks_keep_the_others_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 300)
    monkeypatch.setattr(csv_files, "ROWS_AT_ONCE", 10)
    wrong = {0, 1, 50, 51, 52, 399}
    path = written(tmp_path / "x.csv", "i,j\n" + "".join(f"{i}\n" if i in wrong else f"{i},0\n" for i in range(400)))
    source = source_of(path)
    bad = collect_bad(source)
    split = source.splits()[0]
    for at in (SplitPosition(), SplitPosition(60), SplitPosition(60, 60), SplitPosition(51, 51)):
        bad.clear()
        reader = source.open(split, at)
        found: list[tuple[int, int]] = []
        expected = at.index
        while (records := reader.read(7)).elements:
            indices = records.indices or range(expected, expected + len(records.elements))
            found += [(index, row["i"]) for index, row in zip(indices, records.elements)]
            expected = indices[-1] + 1
        assert found == [(i, i) for i in range(at.index, 400) if i not in wrong]
        assert [index for index, _ in bad] == sorted(i for i in wrong if i >= at.index)


def test_a_cell_of_another_type_than_its_column_names_row_and_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 1_000)
    cells = [str(i) for i in range(1_000)]
    cells[700] = "oops"
    path = written(tmp_path / "x.csv", "a\n" + "\n".join(cells))
    with pytest.raises(CorruptRecordError, match=r"x\.csv: .*Row #702.*int64.*'oops'"):
        read(source_of(path))
    source = source_of(path)
    bad = collect_bad(source)
    rows = read(source)
    assert [row["a"] for row in rows] == list(range(len(rows))) and 400 < len(rows) <= 700
    assert [index for index, _ in bad] == [len(rows)]


def test_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"a,b\n1,ok\n2,\xff\n")
    with pytest.raises(CorruptRecordError, match=r"x\.csv: .*Row #3.*UTF8"):
        read(source_of(tmp_path / "x.csv"))


def test_a_truncated_packed_file_gives_its_whole_rows_and_not_the_cut_one(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    content = "i,text\n" + "".join(f"{i},{i * i}\n" for i in range(20_000))
    path.write_bytes(gzip.compress(content.encode())[:-3_000])
    with pytest.raises(TruncatedFileError, match=r"x\.csv\.gz"):
        read(source_of(path))
    source = source_of(path)
    bad = collect_bad(source)
    rows = read(source)
    assert [(row["i"], row["text"]) for row in rows] == [(i, i * i) for i in range(len(rows))]
    assert len(rows) > 10_000
    assert [(index, type(error)) for index, error in bad] == [(len(rows), TruncatedFileError)]


def test_closing_in_the_middle_of_a_file_leaves_no_reading_behind(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "i\n" + "".join(f"{i}\n" for i in range(200_000)))
    source = source_of(path)
    for _ in range(20):
        reader = source.open(source.splits()[0], SplitPosition())
        assert reader.read(1).elements
        reader.close()
        assert not reader.read(1).elements
