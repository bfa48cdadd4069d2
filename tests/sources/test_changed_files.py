"""A file that is not the one that was listed is an error that says so, never an end: before it is read, and after."""

from __future__ import annotations

import functools
import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.core.errors import DataError, ErrorBudgetExceededError, FileChangedError
from penstock.runtime.quarantine import read_quarantine
from penstock.sources import storage
from penstock.sources.base import SplitPosition
from penstock.sources.file_times import FileTimes
from penstock.sources.listing_codec import decode_listings, encode_listings
from penstock.sources.listing_codec import open_source as open_listed
from penstock.sources.registry import open_source
from penstock.sources.tfrecord import TFRecordWriter

ROWS = 40_000
LINE = 23
CSV_LINE = 100
CSV_ROWS = 350_000  # the reader is some 16 MB ahead of what was asked for
COLUMN_ROWS = 1_000_000  # and so many that a reader on its own thread is not through when the file changes


def text(path: Path) -> None:
    path.write_bytes(b"".join(b"line %06d, and so on\n" % i for i in range(ROWS)))


def packed_text(path: Path) -> None:
    lines = np.random.default_rng(1).integers(0, 1 << 60, ROWS).tolist()
    path.write_bytes(gzip.compress("".join(f"{x}\n" for x in lines).encode()))


def json_lines(path: Path) -> None:
    path.write_bytes(b"".join(b'{"number": %06d}\n' % (100_000 + i) for i in range(ROWS)))


@functools.cache
def csv_of(rows: int) -> bytes:
    return b"a,b\n" + b"".join(b"%06d,%0*d\n" % (i, CSV_LINE - 8, i) for i in range(rows))


def csv(path: Path) -> None:
    path.write_bytes(csv_of(CSV_ROWS))


def tfrecord(path: Path) -> None:
    with TFRecordWriter(str(path)) as writer:
        for i in range(ROWS):
            writer.write(b"record %09d" % i)


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for i in range(1000):
            member = tarfile.TarInfo(f"{i:06d}.bin")
            member.size = 1000
            archive.addfile(member, io.BytesIO(bytes(1000)))


def parquet(path: Path) -> None:
    pq.write_table(pa.table({"x": np.random.default_rng(1).random(COLUMN_ROWS)}), path, row_group_size=10_000)


def arrow(path: Path) -> None:
    table = pa.table({"x": np.random.default_rng(1).random(COLUMN_ROWS)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)


def array(path: Path) -> None:
    np.save(path, np.arange(ROWS, dtype=np.float64))


READERS: dict[str, tuple[Callable[[Path], None], Callable[..., ps.Dataset]]] = {
    "x.txt": (text, ps.read_text),
    "x.txt.gz": (packed_text, ps.read_text),
    "x.jsonl": (json_lines, ps.read_jsonl),
    "x.csv": (csv, ps.read_csv),
    "x.tfrecord": (tfrecord, ps.read_tfrecord),
    "x.tar": (tar, ps.read_webdataset),
    "x.parquet": (parquet, ps.read_parquet),
    "x.arrow": (arrow, ps.read_arrow),
    "x.npy": (array, ps.read_numpy),
}
SKIPPING = [name for name in READERS if name != "x.npy"]
"""What has on_error=."""


def cut_at_a_record(path: Path, fraction: float) -> None:
    """Shorten a file to a place where a reader that trusts the end of a file sees nothing wrong."""
    size = path.stat().st_size
    unit = {"x.txt": LINE, "x.jsonl": 19, "x.csv": CSV_LINE, "x.tfrecord": 32, "x.tar": 1536}.get(path.name, 1)
    header = 4 if path.name == "x.csv" else 0
    os.truncate(path, header + int((size - header) * fraction) // unit * unit)


@pytest.fixture(params=READERS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[..., ps.Dataset]]:
    write, read = READERS[request.param]
    path = tmp_path / request.param
    write(path)
    return path, read


class Reading:
    """A source whose files are listed, and read from then on: `bad` is what was passed over, if it may be."""

    def __init__(self, dataset: ps.Dataset, *, skip: bool = False) -> None:
        self._source = open_source(dataset.node)
        self._splits = self._source.splits()
        self.bad: list[DataError] = []
        if skip:
            self._source.on_bad = lambda error, index: self.bad.append(error)
        self._reader = None
        self.count = 0

    def begin(self) -> None:
        """Read a little of the first split."""
        self._reader = self._source.open(self._splits[0], SplitPosition())
        self.count += len(self._reader.read(1).elements)

    def finish(self) -> int:
        """Read all there is; return how many elements there were."""
        for split in self._splits:
            reader, self._reader = self._reader or self._source.open(split, SplitPosition()), None
            try:
                while found := len(reader.read(1000).elements):
                    self.count += found
            finally:
                reader.close()
        return self.count


@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_a_file_cut_while_it_is_read_is_an_error(made, fraction: float) -> None:
    path, read = made
    listed = path.stat().st_size
    reading = Reading(read(str(path)))
    reading.begin()
    cut_at_a_record(path, fraction)
    with pytest.raises(FileChangedError, match=r"when it was listed; make the dataset anew") as caught:
        reading.finish()
    assert caught.value.path == str(path) and caught.value.listed == listed
    assert caught.value.found == path.stat().st_size


@pytest.mark.parametrize("change", [b"more" * 128, b""], ids=["grown", "emptied"])
def test_a_file_that_changed_before_it_is_read_is_an_error(made, change: bytes) -> None:
    path, read = made
    reading = Reading(read(str(path)))
    path.write_bytes(path.read_bytes() + change if change else b"")
    with pytest.raises(FileChangedError, match="when it was listed"):
        reading.finish()
    assert not reading.count


def test_a_file_that_grows_while_it_is_read_is_an_error(made) -> None:
    path, read = made
    reading = Reading(read(str(path)))
    reading.begin()
    with path.open("ab") as file:
        file.write(b"more" * 128)
    with pytest.raises(FileChangedError, match="when it was listed"):
        reading.finish()


def replace(path: Path) -> None:
    """Move another file of the same size into a file's place, as one does it."""
    listed = path.stat()
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    os.utime(new, ns=(listed.st_atime_ns, listed.st_mtime_ns + 1_000_000))
    new.rename(path)


def test_a_file_replaced_by_one_of_its_size_before_it_is_read_is_an_error(made) -> None:
    path, read = made
    reading = Reading(read(str(path)))
    replace(path)
    with pytest.raises(FileChangedError, match="written again since it was listed or first read; make the dataset"):
        reading.finish()
    assert not reading.count


def test_a_file_replaced_by_one_of_its_size_is_not_opened_again(made) -> None:
    """As in the next epoch, or of another range of it; and in a process that has not listed it itself."""
    path, read = made
    listed = path.stat()
    source = open_source(read(str(path)).node)
    splits = source.splits()
    forget_times()
    source.open(splits[0], SplitPosition()).close()
    reader = source.open(splits[0], SplitPosition())
    assert len(reader.read(1).elements)
    reader.close()
    replace(path)
    with pytest.raises(FileChangedError, match="written again"):
        source.open(splits[0], SplitPosition()).read(1)
    assert path.stat().st_size == listed.st_size


def test_a_file_that_was_copied_is_read_by_who_lists_it_anew_or_was_given_a_listing(made) -> None:
    path, read = made
    dataset = read(str(path))
    listings = encode_listings([open_source(dataset.node)])
    count = Reading(dataset).finish()
    state_of = ps.Dataset(dataset.node).iterator().state_dict()
    replace(path)
    again = read(str(path))
    assert Reading(again).finish() == count
    again.iterator().load_state_dict(state_of)
    forget_times()  # another process, which has neither listed nor read it
    elsewhere = open_listed(dataset.node, decode_listings(listings)[0])
    split = elsewhere.splits()[0]
    replace(path)
    assert len(elsewhere.open(split, SplitPosition()).read(1).elements)


def forget_times() -> None:
    storage._times = FileTimes()


@pytest.mark.parametrize("name", SKIPPING)
def test_a_changed_file_is_passed_over_where_bad_records_are(tmp_path: Path, name: str) -> None:
    write, read = READERS[name]
    paths = [tmp_path / folder / name for folder in "abc"]
    for path in paths:
        path.parent.mkdir()
        write(path)
    whole = Reading(read(str(paths[0]))).finish()
    reading = Reading(read([str(path) for path in paths]), skip=True)
    reading.begin()
    cut_at_a_record(paths[0], 0.5)
    cut_at_a_record(paths[1], 0.9)
    count = reading.finish()
    assert whole < count < 2 * whole, "some of the first, nothing of the second and all of the third"
    changed = [error for error in reading.bad if isinstance(error, FileChangedError)]
    assert {error.path for error in changed} == {str(path) for path in paths[:2]}


@pytest.mark.parametrize("changed", [1, 2])
def test_a_changed_file_counts_against_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    # A file is one split, and each of those counts.
    monkeypatch.setattr("penstock.sources.cutting.FINEST_BYTES", 1 << 20)
    monkeypatch.setattr("penstock.sources.cutting.LEAST_BYTES", 1 << 20)
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for path in paths:
        text(path)
    skip = ps.SkipErrors(budget=1, quarantine=str(tmp_path / "quarantine.jsonl"))
    with ps.read_text(list(map(str, paths)), on_error=skip).iterator(threads=1) as reading:
        next(reading)
        for path in paths[1 : 1 + changed]:
            os.truncate(path, 2300)
        if changed == 1:
            assert 1 + sum(1 for _ in reading) == 2 * ROWS
        else:
            with pytest.raises(ErrorBudgetExceededError, match="2 elements failed, over the budget of 1"):
                list(reading)
    entries = read_quarantine(tmp_path / "quarantine.jsonl").values()
    assert len(entries) == changed
    assert all(entry.exception.endswith("FileChangedError") and "2,300 bytes now" in entry.message for entry in entries)


def test_a_range_of_a_large_file_notices_that_the_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sources.cutting.MOST_BYTES", 200_000)
    path = tmp_path / "x.txt"
    text(path)
    reading = Reading(ps.read_text(str(path)))
    reading.begin()
    with path.open("ab") as file:
        file.write(b"one more line\n")
    with pytest.raises(FileChangedError, match=f"{LINE * ROWS + 14:,} bytes now and had {LINE * ROWS:,} bytes"):
        reading.finish()
    assert reading.count < ROWS / 2, "at the end of the first range, not of the file"


@pytest.mark.parametrize("change", ["cut", "grown"])
@pytest.mark.parametrize("name", READERS)
def test_a_remote_file_that_changed_is_an_error(
    tmp_path: Path, name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a larger Parquet file whose footer is known, only the columns are read: what follows them may change.
    monkeypatch.setattr(f"{__name__}.COLUMN_ROWS", 40_000)
    monkeypatch.setattr(f"{__name__}.CSV_ROWS", 40_000)  # it changes before anything of it is read
    write, read = READERS[name]
    write(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/changed/{name}", content)
    try:
        reading = Reading(read(f"memory://changed/{name}"))
        memory.pipe(f"/changed/{name}", content[:-1000] if change == "cut" else content + b"more" * 128)
        with pytest.raises(FileChangedError, match="when it was listed"):
            reading.finish()
    finally:
        memory.rm("/changed", recursive=True)
