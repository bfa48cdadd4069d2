from __future__ import annotations

import bz2
import gzip
import io
import random
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from penstock.core.errors import CorruptRecordError, DataError, NoFilesError, TruncatedFileError
from penstock.graph.readers import ReadWebdataset
from penstock.sources.base import Split, SplitPosition
from penstock.sources.registry import open_source, source_digest
from penstock.sources.tar import TarStream
from penstock.sources.webdataset import WebdatasetSource, split_name

BEGIN = SplitPosition()
LONG = "folder-" * 20 + "/" + "name-" * 30
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
}


def tar_of(members: Sequence[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            if name.endswith("/"):
                header.type = tarfile.DIRTYPE
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return out.getvalue()


def samples_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    sizes = [0, 1, 511, 512, 513, 3000, 70_000]
    return [
        {"__key__": f"s/{i:04d}", "jpg": rng.randbytes(sizes[i % len(sizes)]), "cls": str(i).encode()}
        for i in range(count)
    ]


def members_of(samples: Sequence[dict[str, Any]]) -> list[tuple[str, bytes]]:
    return [
        (f"{sample['__key__']}.{extension}", content)
        for sample in samples
        for extension, content in sample.items()
        if extension != "__key__"
    ]


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def source_of(*paths: str, **parameters: Any) -> WebdatasetSource:
    source = open_source(ReadWebdataset(paths=paths, **parameters))
    assert isinstance(source, WebdatasetSource)
    return source


def read_all(
    source: WebdatasetSource, split: Split, at: SplitPosition = BEGIN, want: int = 3
) -> tuple[list[dict[str, Any]], list[SplitPosition]]:
    """Return the elements of a split from a position on, and the position after each."""
    reader = source.open(split, at)
    elements: list[dict[str, Any]] = []
    positions: list[SplitPosition] = []
    index = at.index
    while (records := reader.read(want)).elements:
        assert len(records.elements) <= want
        assert records.offsets is not None
        indices = records.indices if records.indices is not None else range(index, index + len(records.elements))
        elements.extend(records.elements)
        positions.extend(SplitPosition(i + 1, offset) for i, offset in zip(indices, records.offsets))
        index = positions[-1].index
    assert not reader.read(want).elements
    reader.close()
    return elements, positions


@pytest.mark.parametrize("packing", list(PACKERS))
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_reads_and_resumes_at_every_sample(tmp_path: Path, packing: str, format: int) -> None:
    samples = samples_of(17)
    if format != tarfile.USTAR_FORMAT:
        samples[5]["__key__"] = LONG  # needs a header of its own
        samples[9]["__key__"] = "ünïcode/ключ"
    source = source_of(write(tmp_path / f"x.tar{packing}", PACKERS[packing](tar_of(members_of(samples), format))))
    (split,) = source.splits()
    elements, positions = read_all(source, split)
    assert elements == samples
    for position in positions:
        assert read_all(source, split, position)[0] == samples[position.index :]
        assert read_all(source, split, SplitPosition(position.index))[0] == samples[position.index :]


def test_a_remote_shard_reads_and_resumes_too() -> None:
    samples = samples_of(30)
    memory = fsspec.filesystem("memory")
    memory.pipe("/wds/x.tar", tar_of(members_of(samples)))
    source = source_of("memory://wds/x.tar")
    assert source.remote
    (split,) = source.splits()
    elements, positions = read_all(source, split)
    assert elements == samples
    assert read_all(source, split, positions[19])[0] == samples[20:]
    memory.rm("/wds", recursive=True)


def test_ustar_keeps_long_paths_in_two_fields(tmp_path: Path) -> None:
    samples = samples_of(3)
    samples[1]["__key__"] = "folder-" * 15 + "/" + "name-" * 15
    source = source_of(write(tmp_path / "x.tar", tar_of(members_of(samples), tarfile.USTAR_FORMAT)))
    assert read_all(source, source.splits()[0])[0] == samples


def test_the_offset_is_that_of_the_next_samples_first_header(tmp_path: Path) -> None:
    samples = samples_of(6)
    samples[3]["__key__"] = LONG
    path = write(tmp_path / "x.tar", tar_of(members_of(samples), tarfile.GNU_FORMAT))
    source = source_of(path)
    with tarfile.open(path) as archive:
        first_headers = [member.offset for member in archive if member.name.endswith(".jpg")]
    _, positions = read_all(source, source.splits()[0])
    assert [position.offset for position in positions[:-1]] == first_headers[1:]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("0001.JPG", ("0001", "jpg")),
        ("a/b.c/0001.seg.png", ("a/b.c/0001", "seg.png")),
        ("./0001.jpg", ("./0001", "jpg")),
        ("../x/0001.jpg", ("../x/0001", "jpg")),
        ("README", None),
        (".hidden", None),
        ("a/.hidden.jpg", None),
        (".git/x.jpg", None),
        ("./._0001.jpg", None),
        ("__index__.json", None),
        ("a/__meta__.json", None),
        ("__meta__/a.json", None),
        ("trailing.", ("trailing", "")),
    ],
)
def test_names_split_at_the_first_dot_of_the_last_part(name: str, expected: tuple[str, str] | None) -> None:
    assert split_name(name) == expected


def test_what_belongs_to_no_sample_is_passed_over(tmp_path: Path) -> None:
    members = [("d/", b""), ("d/__info__.json", b"{}"), ("d/a.txt", b"1"), ("d/.x.txt", b"no"), ("d/a.cls", b"2")]
    source = source_of(write(tmp_path / "x.tar", tar_of([*members, ("d/b.txt", b"3"), ("README", b"no")])))
    elements, _ = read_all(source, source.splits()[0])
    assert elements == [{"__key__": "d/a", "txt": b"1", "cls": b"2"}, {"__key__": "d/b", "txt": b"3"}]


def test_links_have_no_bytes(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind in (("a.txt", tarfile.REGTYPE), ("b.txt", tarfile.SYMTYPE), ("c.txt", tarfile.AREGTYPE)):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, "a.txt"
            header.size = 3 if kind != tarfile.SYMTYPE else 0
            archive.addfile(header, io.BytesIO(b"abc"))
    source = source_of(write(tmp_path / "x.tar", out.getvalue()))
    assert [element["__key__"] for element in read_all(source, source.splits()[0])[0]] == ["a", "c"]


def test_a_split_is_a_shard_in_order(tmp_path: Path) -> None:
    for i in range(12):
        write(tmp_path / f"s-{i:02d}.tar", tar_of(members_of(samples_of(2, seed=i))))
    (tmp_path / "notes.txt").touch()
    expected = [str(tmp_path / f"s-{i:02d}.tar") for i in range(12)]
    for pattern in ("s-{00..11}.tar", "*.tar", "*", ""):
        source = source_of(str(tmp_path / pattern))
        assert [split.files[0].path for split in source.splits()] == expected
        assert not source.remote


def test_large_sizes_and_signed_checksums_are_understood() -> None:
    header = bytearray(tar_of([("a.bin", b"x")], tarfile.USTAR_FORMAT)[:512])
    header[0:5] = "é.bin".encode()[:5]
    header[124:136] = b"\x80" + (5 << 33).to_bytes(11, "big")
    rest = header[:148] + header[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in rest) + 256
    for checksum in (sum(rest) + 256, signed):
        header[148:156] = f"{checksum:06o}\0 ".encode()
        member = TarStream(io.BytesIO(bytes(header)), "x.tar").next_member()
        assert member is not None
        assert member.size == 5 << 33


def test_a_truncated_shard_gives_what_is_whole_and_then_the_offset(tmp_path: Path) -> None:
    samples = samples_of(12)
    whole = tar_of(members_of(samples), tarfile.USTAR_FORMAT)
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        members = archive.getmembers()
    victim = next(i for i, member in enumerate(members) if member.size > 600 and i > 6)
    in_data, in_header = members[victim].offset_data + 600, members[victim].offset + 100
    # Cut inside a header it is open whether the sample before it would have had another member.
    for cut, whole_samples in ((in_data, victim // 2), (in_header, victim // 2 - 1)):
        source = source_of(write(tmp_path / "x.tar", whole[:cut]))
        reader = source.open(source.splits()[0], SplitPosition())
        got: list[Any] = []
        with pytest.raises(TruncatedFileError, match=r"x\.tar at byte \d+") as caught:
            while True:
                got.extend(reader.read(4).elements)
        assert got == samples[:whole_samples]
        assert caught.value.offset in (members[victim].offset_data, members[victim].offset)
        with pytest.raises(TruncatedFileError):  # it does not turn into an end
            reader.read(4)
        reader.close()


def test_an_empty_file_is_no_archive(tmp_path: Path) -> None:
    source = source_of(write(tmp_path / "x.tar", b""))
    with pytest.raises(TruncatedFileError, match="empty file"):
        source.open(source.splits()[0], SplitPosition()).read(1)


def test_an_archive_without_its_end_mark_is_read(tmp_path: Path) -> None:
    samples = samples_of(3)
    whole = tar_of(members_of(samples), tarfile.USTAR_FORMAT)
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        last = archive.getmembers()[-1]
    source = source_of(write(tmp_path / "x.tar", whole[: last.offset_data + 512]))
    elements, positions = read_all(source, source.splits()[0])
    assert elements == samples
    assert read_all(source, source.splits()[0], positions[-1])[0] == []


def corrupt_header(members: Sequence[tuple[str, bytes]], which: str) -> tuple[bytes, int]:
    whole = bytearray(tar_of(members, tarfile.USTAR_FORMAT))
    with tarfile.open(fileobj=io.BytesIO(bytes(whole))) as archive:
        offset = archive.getmember(which).offset
    whole[offset + 3] ^= 0x10
    return bytes(whole), offset


def test_a_bad_checksum_names_file_and_offset(tmp_path: Path) -> None:
    samples = samples_of(8)
    damaged, offset = corrupt_header(members_of(samples), "s/0004.jpg")
    source = source_of(write(tmp_path / "x.tar", damaged))
    reader = source.open(source.splits()[0], SplitPosition())
    assert reader.read(3).elements == samples[:3]
    with pytest.raises(CorruptRecordError, match=rf"x\.tar at byte {offset}: the header's checksum is wrong"):
        reader.read(3)
    reader.close()


def test_a_file_that_is_not_a_tar_is_named(tmp_path: Path) -> None:
    source = source_of(write(tmp_path / "x.tar", b"{'this': 'is json'}" * 100))
    with pytest.raises(CorruptRecordError, match="at byte 0: the header's checksum is wrong: this is not a tar"):
        source.open(source.splits()[0], SplitPosition()).read(1)


def collect_bad(source: WebdatasetSource) -> list[tuple[DataError, int]]:
    bad: list[tuple[DataError, int]] = []
    source.on_bad = lambda error, index: bad.append((error, index))
    return bad


def test_the_rest_of_a_damaged_shard_is_one_bad_record(tmp_path: Path) -> None:
    samples = samples_of(8)
    damaged, offset = corrupt_header(members_of(samples), "s/0004.jpg")
    source = source_of(write(tmp_path / "x.tar", damaged))
    bad = collect_bad(source)
    elements, _ = read_all(source, source.splits()[0])
    assert elements == samples[:3], "whether the sample before the damage was whole cannot be known"
    assert [(error.offset, index) for error, index in bad] == [(offset, 3)]


def test_a_sample_with_two_equal_members_is_bad_and_the_others_keep_their_index(tmp_path: Path) -> None:
    samples = samples_of(6)
    members = members_of(samples)
    members.insert(5, (f"{samples[2]['__key__']}.jpg", b"again"))
    source = source_of(write(tmp_path / "x.tar", tar_of(members)))
    with pytest.raises(CorruptRecordError, match="'s/0002' has two members with the extension 'jpg'"):
        read_all(source, source.splits()[0])
    bad = collect_bad(source)
    elements, positions = read_all(source, source.splits()[0])
    assert elements == samples[:2] + samples[3:]
    assert [position.index for position in positions] == [1, 2, 4, 5, 6]
    assert [index for _, index in bad] == [2]
    for position in positions:
        assert read_all(source, source.splits()[0], position)[0] == [
            sample for i, sample in enumerate(samples) if i >= position.index and i != 2
        ]


def test_a_shard_that_cannot_be_opened_fails_when_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", tar_of(members_of(samples_of(2))))
    source = source_of(path)
    (split,) = source.splits()
    Path(path).unlink()
    reader = source.open(split, SplitPosition())
    with pytest.raises(NoFilesError, match="gone"):
        reader.read(1)
    bad = collect_bad(source)
    assert source.open(split, SplitPosition()).read(1).elements == []
    assert [index for _, index in bad] == [0]


def test_corrupt_compression_names_the_shard(tmp_path: Path) -> None:
    packed = gzip.compress(tar_of(members_of(samples_of(20))))
    source = source_of(write(tmp_path / "x.tgz", packed[: len(packed) // 2]))
    with pytest.raises(TruncatedFileError, match=r"x\.tgz at byte"):
        read_all(source, source.splits()[0])


def test_the_digest_is_of_the_data_not_of_its_place(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        for i in range(3):
            write(tmp_path / place / f"{i}.tar", tar_of(members_of(samples_of(2, seed=i))))
    here = source_digest(source_of(str(tmp_path / "here" / "*.tar")))
    assert here == source_digest(source_of(str(tmp_path / "there")))
    write(tmp_path / "there" / "1.tar", tar_of(members_of(samples_of(30))))
    assert here != source_digest(source_of(str(tmp_path / "there")))
