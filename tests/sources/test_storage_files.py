from __future__ import annotations

import bz2
import gzip
import io
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import fsspec
import pytest
import zstandard
from tests.waiting import wait_until

from penstock.core.errors import CorruptRecordError, NoFilesError, StorageUnavailableError, TruncatedFileError
from penstock.graph.readers import FileCompression
from penstock.sources import io_threads, readahead
from penstock.sources.compression import compression_of, open_decompressed
from penstock.sources.readahead import RandomAccessFile, ReadAheadFile
from penstock.sources.storage import open_file, open_random

CONTENT = random.Random(1).randbytes(100_003)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(readahead, "WINDOW_BYTES", 4000)


class SlowStore:
    """Serves CONTENT; `gate` holds the answers back; remembers every range and how many were asked for at a time."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()

    def fetch(self, start: int, stop: int) -> bytes:
        with self._lock:
            self.ranges.append((start, stop))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        assert self.gate.wait(20)
        with self._lock:
            self.in_flight -= 1
        return CONTENT[start:stop]

    def open(self, start: int = 0) -> ReadAheadFile:
        return ReadAheadFile(self.fetch, "test://content", len(CONTENT), start)


@pytest.mark.usefixtures("small_blocks")
def test_a_remote_file_reads_like_a_local_one() -> None:
    local, remote = io.BytesIO(CONTENT), SlowStore().open()
    rng = random.Random(2)
    for _ in range(300):
        match rng.randrange(5):
            case 0:
                to = rng.randrange(len(CONTENT) + 10)
                assert remote.seek(to) == local.seek(to)
            case 1:
                assert remote.seek(-7, io.SEEK_END) == local.seek(-7, io.SEEK_END)
            case 2:
                ours, theirs = bytearray(rng.randrange(3000)), bytearray()
                theirs = bytearray(len(ours))
                assert remote.readinto(ours) == local.readinto(theirs)
                assert ours == theirs
            case _:
                size = rng.choice([0, 1, 10, 999, 1000, 1001, 5000])
                assert remote.read(size) == local.read(size)
        assert remote.tell() == local.tell()
    remote.seek(0)
    assert remote.read() == CONTENT
    assert remote.read(1) == b""
    remote.close()


@pytest.mark.usefixtures("small_blocks")
def test_opening_asks_for_the_window_and_waits_for_nothing() -> None:
    store = SlowStore()
    store.gate.clear()
    file = store.open(start=500)
    wait_until(lambda: store.in_flight == 4, "four blocks in flight")
    assert sorted(store.ranges) == [(500, 1500), (1500, 2500), (2500, 3500), (3500, 4500)]
    store.gate.set()
    assert file.read(10) == CONTENT[500:510]
    file.close()


@pytest.mark.usefixtures("small_blocks")
def test_no_more_than_the_window_is_asked_for_ahead_of_the_reader() -> None:
    store = SlowStore()
    file = store.open()
    for _ in range(50):
        at = file.tell()
        assert file.read(777) == CONTENT[at : at + 777]
        assert max(stop for _, stop in store.ranges) <= file.tell() + 4000 + 1000
    assert store.most_in_flight <= 5
    assert len(store.ranges) == len(set(store.ranges)), "a block was asked for twice"
    file.close()


@pytest.mark.usefixtures("small_blocks")
def test_a_short_seek_forward_keeps_what_was_read_ahead() -> None:
    store = SlowStore()
    file = store.open()
    file.read(10)
    file.seek(2500)
    assert file.read(10) == CONTENT[2500:2510]
    assert len(store.ranges) == len(set(store.ranges))
    file.close()


@pytest.mark.usefixtures("small_blocks")
def test_closing_takes_back_what_was_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_threads, "MAX_REQUESTS", 0)  # nobody begins anything
    monkeypatch.setattr(io_threads, "_pool", io_threads._Pool())
    store = SlowStore()
    file = store.open()
    file.close()
    monkeypatch.setattr(io_threads, "MAX_REQUESTS", 1)
    assert io_threads.submit(lambda: "later").result(20) == "later"
    assert store.ranges == []
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_threads_leave_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_threads, "IDLE_S", 0.01)
    monkeypatch.setattr(io_threads, "_pool", io_threads._Pool())
    before = set(threading.enumerate())
    assert io_threads.run_all([lambda i=i: i * i for i in range(100)], deadline_s=20) == [i * i for i in range(100)]
    wait_until(lambda: not set(threading.enumerate()) - before, "the threads to leave")


def test_never_more_requests_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_threads, "_pool", io_threads._Pool())
    store = SlowStore()
    store.gate.clear()
    futures = [io_threads.submit(lambda: store.fetch(0, 1)) for _ in range(100)]
    wait_until(lambda: store.in_flight == io_threads.MAX_REQUESTS, "the limit to be reached")
    store.gate.set()
    assert [future.result(20) for future in futures] == [CONTENT[:1]] * 100
    assert store.most_in_flight == io_threads.MAX_REQUESTS


@pytest.mark.usefixtures("small_blocks")
def test_a_block_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "WAIT_S", 0.05)
    store = SlowStore()
    store.gate.clear()
    file = store.open(start=3000)
    with pytest.raises(StorageUnavailableError, match=r"test://content: bytes 3000 to 4000 did not come"):
        file.read(1)
    store.gate.set()
    file.close()


@pytest.mark.usefixtures("small_blocks")
def test_a_failed_request_is_raised_where_its_bytes_are_read() -> None:
    def fetch(start: int, stop: int) -> bytes:
        if start >= 2000:
            raise StorageUnavailableError("test://x", f"bytes {start} to {stop} could not be read")
        return CONTENT[start:stop]

    file = ReadAheadFile(fetch, "test://x", len(CONTENT))
    assert file.read(2000) == CONTENT[:2000]
    with pytest.raises(StorageUnavailableError, match="bytes 2000 to 3000"):
        file.read(1)
    file.close()


@pytest.mark.parametrize("kind", [ReadAheadFile, RandomAccessFile])
def test_a_file_shorter_than_listed_is_an_error(kind: type[ReadAheadFile]) -> None:
    file = kind(lambda start, stop: CONTENT[start:stop], "test://x", len(CONTENT) + 5)
    with pytest.raises(TruncatedFileError, match=f"test://x at byte {len(CONTENT)}"):
        file.read()
    file.close()


def test_random_access_asks_for_exactly_what_is_read() -> None:
    store = SlowStore()
    file = RandomAccessFile(store.fetch, "test://x", len(CONTENT))
    file.seek(-8, io.SEEK_END)
    assert file.read() == CONTENT[-8:]
    file.seek(100)
    buffer = bytearray(50)
    assert file.readinto(buffer) == 50
    assert buffer == CONTENT[100:150]
    assert store.ranges == [(len(CONTENT) - 8, len(CONTENT)), (100, 150)]


@pytest.fixture(params=["local", "memory"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        (tmp_path / "x.bin").write_bytes(CONTENT)
        yield str(tmp_path / "x.bin")
        return
    memory = fsspec.filesystem("memory")
    memory.pipe("/files/x.bin", CONTENT)
    yield "memory://files/x.bin"
    memory.rm("/files", recursive=True)


@pytest.mark.parametrize("start", [0, 70_000, len(CONTENT)])
def test_files_open_at_any_byte(stored: str, start: int) -> None:
    with open_file(stored, len(CONTENT), start=start) as file:
        assert file.tell() == start
        assert file.read() == CONTENT[start:]
    with open_random(stored, len(CONTENT)) as file:
        file.seek(start)
        assert file.read() == CONTENT[start:]


def test_a_file_that_is_gone_is_named(stored: str) -> None:
    with pytest.raises(NoFilesError, match=r"gone\.bin: the file is gone since it was listed"):
        open_file(stored.replace("x.bin", "gone.bin"), 10).read()


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0)


PACKERS: dict[FileCompression, Callable[[bytes], bytes]] = {
    "gzip": gzipped,
    "bz2": bz2.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
each_kind = pytest.mark.parametrize("kind", list(PACKERS))


def unpack(packed: bytes, kind: FileCompression) -> bytes:
    with open_decompressed(io.BytesIO(packed), "x", kind) as file:
        return file.read()


@each_kind
def test_packed_files_read_as_their_content(kind: FileCompression) -> None:
    content = CONTENT + b"\0" * 3_000_000
    assert unpack(PACKERS[kind](content), kind) == content
    assert unpack(PACKERS[kind](b""), kind) == b""
    assert unpack(b"", kind) == b""


@each_kind
def test_members_one_after_the_other_are_one_stream(kind: FileCompression) -> None:
    pack = PACKERS[kind]
    assert unpack(pack(b"one ") + pack(b"") + pack(CONTENT) + pack(b" end"), kind) == b"one " + CONTENT + b" end"


def test_zeros_behind_the_last_member_are_padding() -> None:
    assert unpack(gzipped(CONTENT) + b"\0" * 1024, "gzip") == CONTENT


@each_kind
def test_a_stream_is_read_in_pieces_and_seeks_forward(kind: FileCompression) -> None:
    file = open_decompressed(io.BytesIO(PACKERS[kind](CONTENT)), "x", kind)
    assert file.read(10) == CONTENT[:10]
    file.seek(50_000)
    buffer = bytearray(20)
    assert file.readinto(buffer) == 20  # type: ignore[attr-defined]
    assert buffer == CONTENT[50_000:50_020]
    assert file.tell() == 50_020
    with pytest.raises(io.UnsupportedOperation, match="only be read forward"):
        file.seek(0)
    file.seek(len(CONTENT) + 100)
    assert file.read() == b""
    file.close()


@each_kind
def test_truncated_data_is_named_with_the_compressed_offset(kind: FileCompression) -> None:
    packed = PACKERS[kind](CONTENT)
    for keep in (1, len(packed) // 2, len(packed) - 1):
        with pytest.raises(TruncatedFileError, match=f"x at byte {keep}: the {kind} data ends too early"):
            unpack(packed[:keep], kind)


@each_kind
def test_corrupt_data_is_named(kind: FileCompression) -> None:
    packed = bytearray(PACKERS[kind](CONTENT))
    packed[len(packed) // 2] ^= 0xFF
    with pytest.raises(CorruptRecordError, match=f"x at byte .*corrupt {kind} data"):
        unpack(bytes(packed), kind)
    with pytest.raises(CorruptRecordError, match="x at byte 0"):
        unpack(b"plain text", kind)


@each_kind
def test_garbage_behind_a_member_is_an_error(kind: FileCompression) -> None:
    packed = PACKERS[kind](CONTENT)
    with pytest.raises(CorruptRecordError, match=f"x at byte {len(packed)}"):
        unpack(packed + b"garbage, and enough of it to see", kind)


def test_the_checksum_of_gzip_is_verified() -> None:
    packed = bytearray(gzipped(CONTENT))
    packed[-6] ^= 1  # inside the stored CRC
    with pytest.raises(CorruptRecordError, match="incorrect data check"):
        unpack(bytes(packed), "gzip")
    assert zlib.decompress(packed[10:-8], -15) == CONTENT, "the data itself is whole"


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [
        ("x.gz", "auto", "gzip"),
        ("x.TGZ", "auto", "gzip"),
        ("x.tar.zst", "auto", "zstd"),
        ("x.bz2", "auto", "bz2"),
        ("dir.gz/x", "auto", "none"),
        ("x.gz", "none", "none"),
        ("x", "zstd", "zstd"),
    ],
)
def test_names_tell_the_compression_unless_it_is_forced(path: str, given: FileCompression, expected: str) -> None:
    assert compression_of(path, given) == expected


def test_closing_a_packed_file_closes_the_raw_one() -> None:
    raw = io.BytesIO(gzipped(b"x"))
    open_decompressed(raw, "x.gz", "auto").close()
    assert raw.closed
    plain = io.BytesIO(b"x")
    assert open_decompressed(plain, "x", "auto") is plain


def test_closing_from_another_thread_wakes_a_reader_that_waits() -> None:
    store = SlowStore()
    store.gate.clear()
    file = store.open()
    told: list[str] = []

    def read() -> None:
        try:
            file.read(1)
        except ValueError as error:
            told.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: file._awaited is not None, "the reader to wait")
    file.close()
    reader.join(20)
    assert told == ["test://content: read of a closed file"]
    store.gate.set()
    wait_until(lambda: store.in_flight == 0, "the abandoned request to end by itself")


def test_a_thread_survives_a_call_that_was_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_threads, "_pool", io_threads._Pool())
    monkeypatch.setattr(io_threads, "MAX_REQUESTS", 1)
    begun, gate = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        assert gate.wait(20)

    future = io_threads.submit(call)
    assert begun.wait(20)
    io_threads.abandon(future)
    with pytest.raises(CancelledError):
        future.result(20)
    following = io_threads.submit(lambda: "served by the same thread")
    gate.set()
    assert following.result(20) == "served by the same thread"
    io_threads.abandon(following)
    assert following.result(0) == "served by the same thread"
