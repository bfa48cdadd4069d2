import bz2
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import CorruptRecordError, DataError, InvalidArgumentError, TruncatedFileError
from penstock.graph.readers import ReadJsonl, ReadText
from penstock.sources import cutting, text
from penstock.sources.base import SplitPosition
from penstock.sources.text import JsonlSource, LineSource, TextSource


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (None, "paths=None must be a path or URL, or a list of them"),
        (5, "paths=5 must be a path"),
        (b"x.txt", "paths=b'x.txt' must be a path"),
        (["x.txt", None], "paths= holds None, which is no path or URL"),
    ],
)
def test_what_is_no_path_is_named(paths: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        ps.read_text(paths)


def text_source(*paths: Path, **options: Any) -> TextSource:
    return TextSource(ReadText(paths=tuple(map(str, paths)), **options))


def json_source(*paths: Path, **options: Any) -> JsonlSource:
    return JsonlSource(ReadJsonl(paths=tuple(map(str, paths)), **options))


def read(source: LineSource, want: int = 1_000) -> list[Any]:
    elements: list[Any] = []
    for split in source.splits():
        reader = source.open(split, SplitPosition())
        while found := reader.read(want).elements:
            elements.extend(found)
        reader.close()
    return elements


def collect_bad(source: LineSource) -> list[tuple[int, DataError]]:
    bad: list[tuple[int, DataError]] = []
    source.on_bad = lambda error, index: bad.append((index, error))
    return bad


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\n\r\nb\nc\r", ["a", "", "b", "c"]),
        (b"a\rb\n", ["a\rb"]),
        ("é\u2028ü\x0bz\n".encode(), ["é\u2028ü\x0bz"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
    ],
)
def test_lines_end_with_newlines_only(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    assert read(text_source(tmp_path / "x.txt")) == lines


@pytest.mark.parametrize("last", ["", "\n"])
def test_big_files_are_cut_into_ranges_that_own_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    rng = random.Random(0)
    lines = [rng.choice("abü") * rng.choice([0, 1, 7, 40]) for _ in range(300)]
    (tmp_path / "x.txt").write_text("\n".join(lines) + last)
    size = (tmp_path / "x.txt").stat().st_size
    monkeypatch.setattr(text, "BLOCK_BYTES", 16)
    for split_bytes in (1, 2, 3, 10, 64, 100, size - 1, size, size + 1):
        monkeypatch.setattr(cutting, "MOST_BYTES", split_bytes)
        source = text_source(tmp_path / "x.txt")
        expected = lines if last or lines[-1] else lines[:-1]
        assert read(source) == expected, split_bytes
        sizes = [split.files[0].stop - split.files[0].start for split in source.splits()]
        assert max(sizes) <= split_bytes


def test_lines_longer_than_a_block_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["x" * 1_000, "y", "z" * 999]
    (tmp_path / "x.txt").write_text("\n".join(lines))
    monkeypatch.setattr(text, "BLOCK_BYTES", 10)
    monkeypatch.setattr(cutting, "MOST_BYTES", 150)
    assert read(text_source(tmp_path / "x.txt")) == lines


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_compressed_files_are_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Any) -> None:
    lines = [str(i) for i in range(5_000)]
    path = tmp_path / ("x.gz" if pack is gzip.compress else "x.bz2")
    path.write_bytes(pack("\n".join(lines).encode()))
    monkeypatch.setattr(cutting, "MOST_BYTES", 100)
    source = text_source(path)
    assert len(source.splits()) == 1
    assert read(source) == lines


def test_small_files_around_a_big_one_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in [("a", 2), ("b", 2), ("c", 50), ("d", 2)]:
        (tmp_path / name).write_text("".join(f"{name}{i}\n" for i in range(count)))
    monkeypatch.setattr(cutting, "MOST_BYTES", 64)
    source = text_source(tmp_path)
    assert [len(split.files) for split in source.splits()] == [2, 1, 1, 1, 1]
    assert read(source) == [f"{name}{i}" for name, count in zip("abcd", [2, 2, 50, 2]) for i in range(count)]


def test_a_hint_is_the_offset_behind_the_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"ab\r\n\xc3\xbc\n\nlast")
    source = text_source(tmp_path / "x")
    reader = source.open(source.splits()[0], SplitPosition())
    assert [reader.read(1).offsets for _ in range(4)] == [[4], [7], [8], [12]]
    assert source.open(source.splits()[0], SplitPosition(2, 7)).read(10).elements == [""]
    assert source.open(source.splits()[0], SplitPosition(3, 8)).read(10).elements == ["last"]
    assert not source.open(source.splits()[0], SplitPosition(4, 12)).read(10).elements


def test_bytes_that_are_not_utf8_are_named_by_their_offset(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"good\nb\xffd\ngood\n")
    source = text_source(tmp_path / "x")
    reader = source.open(source.splits()[0], SplitPosition())
    assert reader.read(10).elements == ["good"]
    with pytest.raises(CorruptRecordError, match=r"x at byte 6: not UTF-8.*b'b\\xffd'") as caught:
        reader.read(10)
    assert caught.value.offset == 6
    bad = collect_bad(source)
    records = source.open(source.splits()[0], SplitPosition()).read(10)
    assert records.elements == ["good", "good"] and records.indices == [0, 2] and records.offsets == [5, 14]
    assert [index for index, _ in bad] == [1]


def test_json_values_of_every_kind_are_read(tmp_path: Path) -> None:
    values = [{"a": [1, 2.5, None]}, "text", 3, True, [], {"ü": "\n"}]
    (tmp_path / "x.jsonl").write_text("\r\n".join(map(json.dumps, values)))
    assert read(json_source(tmp_path / "x.jsonl")) == values


def test_empty_json_lines_are_passed_over_and_have_no_index(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("\n1\n\n  \n2\r\n\r\n3\n\n")
    source = json_source(tmp_path / "x")
    records = source.open(source.splits()[0], SplitPosition()).read(10)
    assert records.elements == [1, 2, 3] and records.indices is None
    assert source.open(source.splits()[0], SplitPosition(2)).read(10).elements == [3]
    assert records.offsets is not None
    assert source.open(source.splits()[0], SplitPosition(2, records.offsets[1])).read(10).elements == [3]


@pytest.mark.parametrize("line", [b'{"a": ', b"{'a': 1}", b"1 2", b'"\xff"', b"[1,"])
def test_a_line_that_is_not_json_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "x").write_bytes(b"1\n" + line + b"\n2\n")
    with pytest.raises(CorruptRecordError, match="x at byte 2: not JSON") as caught:
        read(json_source(tmp_path / "x"))
    assert repr(line) in str(caught.value)
    source = json_source(tmp_path / "x")
    bad = collect_bad(source)
    assert read(source) == [1, 2]
    assert [(index, error.offset) for index, error in bad] == [(1, 2)]


def test_a_line_that_is_nested_too_deep_is_named_as_any_bad_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1\n" + b"[" * 100_000 + b"]" * 100_000 + b"\n2\n")
    with pytest.raises(CorruptRecordError, match="x at byte 2: JSON that is nested too deep to be read"):
        read(json_source(tmp_path / "x"))
    source = json_source(tmp_path / "x")
    bad = collect_bad(source)
    assert read(source) == [1, 2] and len(bad) == 1


def test_only_the_beginning_of_a_long_bad_line_is_shown(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"{" * 10_000)
    with pytest.raises(CorruptRecordError) as caught:
        read(json_source(tmp_path / "x"))
    assert len(str(caught.value)) < 500


def test_bad_lines_in_several_ranges_are_all_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["oops" if i % 7 == 3 else json.dumps({"i": i}) for i in range(200)]
    (tmp_path / "x").write_text("\n".join(lines))
    monkeypatch.setattr(cutting, "MOST_BYTES", 300)
    monkeypatch.setattr(text, "BLOCK_BYTES", 50)
    source = json_source(tmp_path / "x")
    bad = collect_bad(source)
    assert [row["i"] for row in read(source, want=3)] == [i for i in range(200) if i % 7 != 3]
    assert len(bad) == len([i for i in range(200) if i % 7 == 3])


def test_a_truncated_packed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"i": %d}\n' % i for i in range(5_000)))[:-500])
    with pytest.raises(TruncatedFileError, match=str(path)):
        read(json_source(path))
    source = json_source(path)
    bad = collect_bad(source)
    rows = read(source)
    assert [row["i"] for row in rows] == list(range(len(rows))) and len(rows) > 1_000
    assert [index for index, _ in bad] == [len(rows)]
