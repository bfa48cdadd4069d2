import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CorruptRecordError, DataError, TruncatedFileError
from penstock.graph.readers import ReadTFRecord
from penstock.sources.base import SplitPosition
from penstock.sources.record_files import OFFSET_BITS
from penstock.sources.tfrecord import BLOCK_BYTES, TFRecordSource, TFRecordWriter

# Records "penstock" and "", as TensorFlow's own writer wrote them.
BY_TENSORFLOW = bytes.fromhex("0800000000000000ff86240f70656e73746f636b67533d79000000000000000029039807d8ea82a2")
HEADER_BYTES, FRAME_BYTES = 12, 16


def write(path: Path, records: list[bytes]) -> Path:
    with TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path


def read(source: TFRecordSource, at: SplitPosition | None = None, want: int = 100) -> list[Any]:
    elements: list[Any] = []
    for split in source.splits():
        reader = source.open(split, at or SplitPosition())
        while found := reader.read(want).elements:
            elements.extend(found)
        reader.close()
    return elements


def source_of(*paths: Path, **options: Any) -> TFRecordSource:
    return TFRecordSource(ReadTFRecord(paths=tuple(map(str, paths)), **options))


def collect_bad(source: TFRecordSource) -> list[tuple[int, DataError]]:
    bad: list[tuple[int, DataError]] = []
    source.on_bad = lambda error, index: bad.append((index, error))
    return bad


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


def test_a_file_written_by_tensorflow_is_read(tmp_path: Path) -> None:
    (tmp_path / "tf").write_bytes(BY_TENSORFLOW)
    assert read(source_of(tmp_path / "tf")) == [b"penstock", b""]


def test_the_writer_writes_what_tensorflow_would(tmp_path: Path) -> None:
    assert write(tmp_path / "ours", [b"penstock", b""]).read_bytes() == BY_TENSORFLOW


@pytest.mark.parametrize("name", ["x.tfrecord", "x.tfrecord.gz"])
@pytest.mark.parametrize(
    "records",
    [
        [],
        [b""] * 5,
        [bytes([i % 251]) * (i % 300) for i in range(20_000)],
        [b"x" * (BLOCK_BYTES - FRAME_BYTES), b"exactly one block before this"],
        [b"x" * (BLOCK_BYTES - FRAME_BYTES - 5), b"a header across two blocks"],
        [b"x" * (3 * BLOCK_BYTES), b"y", b"z" * (2 * BLOCK_BYTES)],
    ],
    ids=["none", "empty", "small", "block", "header", "big"],
)
def test_what_was_written_is_read(tmp_path: Path, name: str, records: list[bytes]) -> None:
    assert read(source_of(write(tmp_path / name, records))) == records


def test_compression_can_be_forced(tmp_path: Path) -> None:
    with TFRecordWriter(tmp_path / "x.bin", compression="gzip") as writer:
        writer.write(b"packed")
    assert gzip.decompress((tmp_path / "x.bin").read_bytes())[HEADER_BYTES:-4] == b"packed"
    assert read(source_of(tmp_path / "x.bin", compression="gzip")) == [b"packed"]


def test_small_files_share_a_split_and_a_hint_finds_the_file(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / f"{i}.tfrecord", [bytes([i, k]) for k in range(4)])
    source = source_of(tmp_path)
    (split,) = source.splits()
    reader = source.open(split, SplitPosition())
    first = reader.read(7)
    assert first.offsets is not None
    assert len(first.elements) == 4, "a block does not reach into the next file"
    second = reader.read(2)
    assert second.elements == [b"\x01\x00", b"\x01\x01"]
    assert second.offsets == [1 << OFFSET_BITS | 18, 1 << OFFSET_BITS | 36]
    resumed = source.open(split, SplitPosition(6, second.offsets[-1]))
    assert resumed.read(1).elements == [b"\x01\x02"]


def test_a_hint_is_a_seek_that_reads_nothing_before_it(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [b"aaaa", b"bbbb", b"cccc"])
    flip(path, HEADER_BYTES)  # the first record is bad now
    source = source_of(path)
    reader = source.open(source.splits()[0], SplitPosition(2, 2 * (FRAME_BYTES + 4)))
    assert reader.read(9).elements == [b"cccc"]


def test_a_corrupt_record_is_named_after_those_before_it_were_delivered(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [b"aaaa", b"bbbb", b"cccc"])
    flip(path, FRAME_BYTES + 4 + HEADER_BYTES + 2)
    source = source_of(path)
    reader = source.open(source.splits()[0], SplitPosition())
    assert reader.read(9).elements == [b"aaaa"]
    for _ in range(2):
        with pytest.raises(CorruptRecordError, match="does not match its checksum") as caught:
            reader.read(9)
        assert (caught.value.path, caught.value.offset) == (str(path), FRAME_BYTES + 4)


def test_a_corrupt_record_is_not_noticed_without_verify(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [b"aaaa", b"bbbb"])
    flip(path, HEADER_BYTES)
    assert read(source_of(path, verify=False)) == [b"!aaa", b"bbbb"]


@pytest.mark.parametrize("verify", [True, False])
def test_a_corrupt_length_is_always_noticed(tmp_path: Path, verify: bool) -> None:
    path = write(tmp_path / "x", [b"aaaa", b"bbbb", b"cccc"])
    flip(path, FRAME_BYTES + 4 + 5)  # makes the length astronomic
    with pytest.raises(CorruptRecordError, match=f"at byte {FRAME_BYTES + 4}: the checksum of a record's length"):
        read(source_of(path, verify=verify))


def test_a_bad_record_is_left_out_and_its_neighbours_keep_their_indices(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [bytes([i]) * 4 for i in range(6)])
    for number in (1, 4):
        flip(path, number * (FRAME_BYTES + 4) + HEADER_BYTES)
    source = source_of(path)
    bad = collect_bad(source)
    reader = source.open(source.splits()[0], SplitPosition())
    first = reader.read(2)
    assert first.elements == [b"\x00" * 4, b"\x02" * 4] and first.indices == [0, 2]
    assert [index for index, _ in bad] == [1], "a bad record is reported when it is passed, not before"
    second = reader.read(9)
    assert second.elements == [b"\x03" * 4, b"\x05" * 4] and second.indices == [3, 5]
    assert not reader.read(9).elements
    assert [(index, error.offset) for index, error in bad] == [(1, 20), (4, 80)]


def test_resuming_by_index_counts_bad_records_and_does_not_report_them_again(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [bytes([i]) * 4 for i in range(6)])
    flip(path, 20 + HEADER_BYTES)
    source = source_of(path)
    bad = collect_bad(source)
    assert read(source, SplitPosition(3)) == [bytes([i]) * 4 for i in range(3, 6)]
    assert bad == []


def cut_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_inside_a_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 2 * 20 + 7])


def break_a_length(path: Path) -> None:
    flip(path, 2 * 20)


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (cut_last_byte, TruncatedFileError),
        (cut_inside_a_header, TruncatedFileError),
        (break_a_length, CorruptRecordError),
    ],
)
def test_the_rest_of_a_file_that_cannot_be_read_on_is_one_bad_record(
    tmp_path: Path, harm: Callable[[Path], None], kind: type[DataError]
) -> None:
    broken = write(tmp_path / "1", [b"aaaa", b"bbbb", b"cccc"])
    write(tmp_path / "2", [b"dddd"])
    harm(broken)
    with pytest.raises(kind) as caught:
        read(source_of(tmp_path))
    assert (caught.value.path, caught.value.offset) == (str(broken), 40)
    source = source_of(tmp_path)
    bad = collect_bad(source)
    reader = source.open(source.splits()[0], SplitPosition())
    assert reader.read(9).elements == [b"aaaa", b"bbbb"]
    after = reader.read(9)
    assert after.elements == [b"dddd"] and list(after.indices or ()) == [3]
    assert [(index, type(error)) for index, error in bad] == [(2, kind)]


def test_truncated_gzip_data_delivers_every_record_that_can_be_unpacked(tmp_path: Path) -> None:
    records = [str(i).encode() * 50 for i in range(2_000)]
    path = write(tmp_path / "x.gz", records)
    path.write_bytes(path.read_bytes()[:-200])
    source = source_of(path)
    bad = collect_bad(source)
    reader = source.open(source.splits()[0], SplitPosition())
    found = reader.read(5_000)
    assert found.offsets is not None
    assert found.elements == records[: len(found.elements)] and len(found.elements) > 1_000
    assert not reader.read(1).elements
    assert [type(error) for _, error in bad] == [TruncatedFileError]
    resumed = source.open(source.splits()[0], SplitPosition(500, found.offsets[499]))
    assert resumed.read(5_000).elements == found.elements[500:]


def test_closing_early_ends_the_split(tmp_path: Path) -> None:
    source = source_of(write(tmp_path / "x", [b"a", b"b", b"c"]))
    reader = source.open(source.splits()[0], SplitPosition())
    reader.read(1)
    reader.close()
    reader.close()
    assert not reader.read(1).elements
