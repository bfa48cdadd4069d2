from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import CorruptRecordError, DataError, InvalidArgumentError, NoFilesError, TruncatedFileError
from penstock.graph.readers import ReadNumpy
from penstock.sources import numpy_files
from penstock.sources.base import IndexableSource, SplitPosition
from penstock.sources.numpy_files import NumpySource


def source_of(*paths: Path | str, **options: Any) -> NumpySource:
    return NumpySource(ReadNumpy(paths=tuple(map(str, paths)), **options))


def saved(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


def read(source: NumpySource, want: int = 7) -> list[Any]:
    elements: list[Any] = []
    for split in source.splits():
        reader = source.open(split, SplitPosition())
        while found := reader.read(want).elements:
            elements.extend(found)
        reader.close()
    return elements


def windows(values: Any, window: int, stride: int) -> list[list[Any]]:
    return [values[at : at + window].tolist() for at in range(0, len(values) - window + 1, stride)]


@pytest.fixture
def memory() -> Any:
    """fsspec's file system in memory, which counts as remote."""
    import fsspec

    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(60.0).reshape(20, 3),
        np.arange(60, dtype=">i4").reshape(20, 3),
        np.asfortranarray(np.arange(60).reshape(20, 3)),
        np.arange(20, dtype=np.uint16),
        np.zeros((5, 0)),
        np.zeros((0, 3)),
        np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=["rows", "big-endian", "fortran", "values", "empty rows", "no rows", "structured"],
)
def test_rows_of_npy_files_are_read(tmp_path: Path, array: Any) -> None:
    saved(tmp_path / "1.npy", array)
    saved(tmp_path / "2.npy", array[:3])
    source = source_of(tmp_path)
    assert isinstance(source, IndexableSource)
    expected = [*array, *array[:3]]
    rows = read(source)
    assert len(rows) == len(source) == len(expected)
    for row, other in zip(rows, expected):
        np.testing.assert_array_equal(row, other)
        assert row.dtype == other.dtype.newbyteorder("=")


def test_rows_are_writable_and_share_nothing_with_the_file_or_each_other(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.zeros((40, 4)))
    source = source_of(path)
    for elements in (read(source), source.fetch(np.array([3, 3, 4])), source.fetch(range(5))):
        for number, row in enumerate(elements):
            row += number + 1
        assert [row[0] for row in elements] == list(range(1, len(elements) + 1))
    assert not np.load(path).any()


def test_overlapping_windows_share_nothing(tmp_path: Path) -> None:
    source = source_of(saved(tmp_path / "x.npy", np.zeros(100)), window=10, stride=1)
    first, second = source.fetch([0, 1])
    first += 1
    assert not second.any()
    first, second = source.fetch(range(2))
    first += 1
    assert not second.any()


@pytest.mark.parametrize(("window", "stride"), [(8, None), (8, 3), (8, 20), (1, 1), (100, None), (101, None)])
def test_windows_stay_inside_their_file_and_leave_out_the_rest(tmp_path: Path, window: int, stride: int | None) -> None:
    tokens = [np.arange(100, dtype=np.uint16), np.arange(7, dtype=np.uint16), np.arange(200, 283, dtype=np.uint16)]
    for number, values in enumerate(tokens):
        values.tofile(tmp_path / f"{number}.bin")
    source = source_of(tmp_path, window=window, stride=stride, dtype="uint16")
    expected = [part for values in tokens for part in windows(values, window, stride or window)]
    assert [element.tolist() for element in read(source)] == expected
    assert len(source) == len(expected)


def test_flat_npy_and_raw_files_of_one_type_go_together(tmp_path: Path) -> None:
    saved(tmp_path / "a.npy", np.arange(4, dtype=np.uint16))
    np.arange(4, 8, dtype=np.uint16).tofile(tmp_path / "b.bin")
    elements = source_of(tmp_path, window=4, dtype="uint16").fetch(range(2))
    assert [element.tolist() for element in elements] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_indices_in_any_order_are_fetched(tmp_path: Path) -> None:
    for number in range(5):
        saved(tmp_path / f"{number}.npy", np.arange(10).reshape(10, 1) + 10 * number)
    source = source_of(tmp_path)
    wanted = np.random.default_rng(0).integers(0, 50, 200)
    assert [int(row[0]) for row in source.fetch(wanted)] == wanted.tolist()
    assert [int(row[0]) for row in source.fetch(wanted.tolist())] == wanted.tolist()
    assert [int(row[0]) for row in source.fetch(range(44, 3, -5))] == list(range(44, 3, -5))


def test_an_archive_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", np.arange(3))
    for options in ({}, {"dtype": "int64"}):
        with pytest.raises(InvalidArgumentError, match=r"x\.npz: read_numpy reads \.npy files, and raw files"):
            len(source_of(tmp_path / "x.npz", **options))
    with pytest.raises(InvalidArgumentError, match="if dtype= names their type"):
        (tmp_path / "x.bin").write_bytes(b"1234")
        len(source_of(tmp_path / "x.bin"))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", CorruptRecordError),
        (b"not numpy at all", CorruptRecordError),
        (b"\x93NUMPY\x01\x00\x40\x00{'descr': '<i8', 'fortran_or", CorruptRecordError),
        (b"\x93NUMPY\x01\x00\x10\x00{'descr': (((((((", CorruptRecordError),
    ],
)
def test_a_broken_header_names_the_file(tmp_path: Path, content: bytes, error: type[DataError]) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(error, match=r"x\.npy at byte 0: not a \.npy file, or its header is broken"):
        len(source_of(tmp_path / "x.npy"))


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.arange(100))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedFileError, match=r"x\.npy at byte 927: the header tells of 928 bytes"):
        len(source_of(path))
    (tmp_path / "x.bin").write_bytes(b"123")
    with pytest.raises(TruncatedFileError, match="3 bytes are no whole number of uint16 values"):
        len(source_of(tmp_path / "x.bin", dtype="uint16"))


def test_a_file_that_shrank_or_went_after_listing_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.arange(100_000))
    source = source_of(path)
    assert len(source) == 100_000
    path.write_bytes(path.read_bytes()[:4_000])
    with pytest.raises(TruncatedFileError, match="4,000 bytes now and had 800,128 bytes when it was listed"):
        source.fetch([0])
    path.unlink()
    with pytest.raises(NoFilesError, match="gone since it was listed"):
        source.fetch([0])


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        (np.arange(3), {"dtype": "uint16"}, "holds int64, not dtype='uint16'"),
        (np.zeros((3, 3)), {"window": 2}, "window= is for flat files"),
        (np.array(3), {}, "a single value"),
        (np.array([None]), {}, "holds Python objects, which are never unpickled"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, array: Any, options: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        len(source_of(saved(tmp_path / "x.npy", array), **options))


def test_files_whose_elements_differ_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "1.npy", np.zeros((3, 2)))
    saved(tmp_path / "2.npy", np.zeros((3, 4)))
    with pytest.raises(DataError, match=r"2\.npy: elements of float64 \(4,\), but those of .*1\.npy"):
        len(source_of(tmp_path))


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="needs window="):
        source_of(tmp_path, stride=3)
    with pytest.raises(InvalidArgumentError, match="dtype='tokens'"):
        source_of(tmp_path, dtype="tokens")


def test_more_files_than_may_be_mapped_at_once_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_files, "OPEN_MAPS", 2)
    for number in range(10):
        saved(tmp_path / f"{number}.npy", np.full(20, number))
    source = source_of(tmp_path, window=5)
    assert [int(element[0]) for element in source.fetch(np.tile(np.arange(40), 3))] == [i // 4 for i in range(40)] * 3


@pytest.mark.parametrize(("window", "stride"), [(None, None), (8, None), (8, 3), (8, 20)])
def test_remote_files_give_the_same_elements(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None, stride: int | None
) -> None:
    monkeypatch.setattr(numpy_files, "GAP_BYTES", 64)
    monkeypatch.setattr(numpy_files, "REQUEST_BYTES", 256)
    rng = np.random.default_rng(0)
    for number in range(3):
        shape = (100,) if window else (100, 3)
        path = saved(tmp_path / f"{number}.npy", rng.integers(0, 1 << 40, shape).astype(">i8"))
        memory.pipe_file(f"/tokens/{number}.npy", path.read_bytes())
    local = source_of(tmp_path, window=window, stride=stride)
    remote = source_of("memory://tokens", window=window, stride=stride)
    assert remote.remote and not local.remote
    expected = [element.tolist() for element in read(local)]
    assert [element.tolist() for element in read(remote)] == expected
    wanted = rng.integers(0, len(local), 50)
    assert [element.tolist() for element in remote.fetch(wanted)] == [expected[i] for i in wanted]
    element = remote.fetch([1])[0]
    element += 1
    (split, *_) = remote.splits()
    reader = remote.open(split, SplitPosition())
    reader.read(1)
    reader.close()
    assert not reader.read(1).elements
