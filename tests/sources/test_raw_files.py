from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from penstock.core.errors import DataError, NoFilesError
from penstock.graph.readers import ReadFiles
from penstock.sources import cutting, raw_files
from penstock.sources.base import IndexableSource, SplitPosition
from penstock.sources.raw_files import Contents, RawFilesSource
from penstock.sources.registry import open_source, source_digest


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(cutting, "LEAST_FILES", 256)  # one split, however few the files
    names = [f"{'ab'[i % 2]}/{i:02d}.bin" for i in range(20)]
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pipe({f"/files/{name}": name.encode() * 10 for name in names})
        yield "memory://files"
        memory.store.clear()
        return
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode() * 10)
    yield str(tmp_path)


def source_of(*paths: str) -> RawFilesSource:
    source = open_source(ReadFiles(paths=paths))
    assert isinstance(source, RawFilesSource)
    return source


def read_split(source: RawFilesSource, number: int = 0, at: int = 0, want: int = 3) -> list[Any]:
    reader = source.open(source.splits()[number], SplitPosition(at))
    found: list[Any] = []
    while elements := reader.read(want).elements:
        assert len(elements) <= want
        found.extend(elements)
    reader.close()
    return found


def test_each_file_is_an_element_with_its_relative_path(root: str) -> None:
    elements = read_split(source_of(root))
    assert len(elements) == 20
    assert elements == [{"path": e["path"], "data": e["path"].encode() * 10} for e in elements]
    assert [e["path"] for e in elements] == sorted(e["path"] for e in elements)


def test_a_split_is_read_from_any_position(root: str) -> None:
    source = source_of(root)
    everything = read_split(source)
    for at in range(21):
        assert read_split(source, at=at, want=7) == everything[at:]


def test_elements_are_fetched_in_any_order(root: str) -> None:
    source = source_of(root)
    assert isinstance(source, IndexableSource)
    everything = read_split(source)
    assert list(source.fetch([19, 0, 7, 7])) == [everything[i] for i in (19, 0, 7, 7)]
    assert list(source.fetch([])) == []


def test_splits_cover_all_indices_within_both_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(13):
        (tmp_path / f"{i:04d}").touch()
    splits = source_of(str(tmp_path)).splits()
    assert [(split.start, split.stop) for split in splits] == [(0, 4), (4, 8), (8, 12), (12, 13)]
    for i in range(6):
        (tmp_path / f"{i:04d}").write_bytes(b"x" * 400)
    monkeypatch.setattr(cutting, "MOST_BYTES", 1000)
    splits = source_of(str(tmp_path)).splits()
    assert [(split.start, split.stop) for split in splits] == [(0, 2), (2, 4), (4, 8), (8, 12), (12, 13)]


def test_a_changed_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for changed, told in ((b"longer than before", "18 bytes"), (b"short", "5 bytes")):
        path.write_bytes(b"as listed")
        source = source_of(str(tmp_path))
        reader = source.open(source.splits()[0], SplitPosition())
        path.write_bytes(changed)
        with pytest.raises(DataError, match=rf"x: the file has {told} now and had 9 bytes"):
            reader.read(1)


def test_a_missing_file_is_told_after_the_good_ones_before_it(root: str) -> None:
    source = source_of(root)
    everything = read_split(source)
    remove(root, everything[4]["path"])
    reader = source.open(source.splits()[0], SplitPosition(2))
    assert list(reader.read(5).elements) == everything[2:4]
    with pytest.raises(NoFilesError, match="gone since it was listed"):
        reader.read(5)
    reader.close()


def remove(root: str, name: str) -> None:
    if root.startswith("memory://"):
        fsspec.filesystem("memory").rm(f"/files/{name}")
    else:
        os.remove(os.path.join(root, name))


def test_bad_files_are_left_out_and_the_others_keep_their_index(root: str) -> None:
    source = source_of(root)
    everything = read_split(source)
    remove(root, everything[4]["path"])
    remove(root, everything[19]["path"])
    bad: list[int] = []
    source.on_bad = lambda error, index: bad.append(index)
    reader = source.open(source.splits()[0], SplitPosition(3))
    records = reader.read(100)
    assert records.indices == [3, *range(5, 19)]
    assert list(records.elements) == [everything[i] for i in records.indices]
    assert list(reader.read(100).elements) == []
    assert bad == [4, 19]
    bad.clear()
    assert list(source.fetch([18, 19, 4, 0])) == [everything[18], everything[0]]
    assert bad == [19, 4]


def test_remote_files_are_in_flight_from_the_opening_on_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_files, "FILES_IN_FLIGHT", 6)
    begun: list[int] = []
    gate, all_begun = threading.Event(), threading.Event()

    class Table:
        sizes = [10] * 50
        paths = [f"test://{i}" for i in range(50)]

        def read(self, index: int) -> bytes:
            begun.append(index)
            if len(begun) == 6:
                all_begun.set()
            assert gate.wait(20)
            return b"%d" % index

    contents = Contents(Table(), range(50), ahead=True)  # type: ignore[arg-type]
    assert all_begun.wait(20), "six files are asked for before anybody reads"
    assert sorted(begun) == list(range(6))
    gate.set()
    assert [content() for _, content in contents] == [b"%d" % i for i in range(50)]
    contents.close()


def test_the_digest_covers_the_files_of_index_splits(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    before = source_digest(source_of(str(tmp_path)))
    assert before == source_digest(source_of(str(tmp_path)))
    (tmp_path / "a").rename(tmp_path / "c")
    assert before != source_digest(source_of(str(tmp_path)))


def test_closing_from_another_thread_wakes_a_reader_that_waits() -> None:
    gate = threading.Event()

    class Table:
        sizes = [10] * 5
        paths = [f"test://{i}" for i in range(5)]

        def read(self, index: int) -> bytes:
            assert gate.wait(20)
            return b"late"

    contents = Contents(Table(), range(5), ahead=True)  # type: ignore[arg-type]
    _, content = next(contents)
    threading.Timer(0.05, contents.close).start()
    with pytest.raises(ValueError, match="test://0: the reader was closed"):
        content()
    assert next(contents, None) is None
    gate.set()
