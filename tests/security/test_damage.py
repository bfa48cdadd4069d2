"""Damaged files and full disks are named as such, and never end in whatever Python or SQLite happened to raise."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import JournalCorruptError
from penstock.dispatcher.blobs import BlobStore
from penstock.dispatcher.journal import Journal
from penstock.dispatcher.main import DispatcherConfig
from penstock.wire.blobs import blob_hash, put_blob_pieces
from penstock.wire.messages import BlobPiece, GetBlob, Refused
from tests.dispatcher.serving import DEADLINE_S, KNOWN, ended
from tests.keys import SERVER
from tests.security.web import get
from tests.waiting import wait_until

POSITIONS = 250


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


def use_blobs(directory: Path) -> None:
    store = BlobStore(directory)
    try:
        for number in range(30):
            data = b"blob %d" % number * (number + 1)
            answer = store.get(GetBlob(hash=blob_hash(data)), now=0.0)
            assert isinstance(answer, Refused) or (isinstance(answer, BlobPiece) and answer.piece == data)
            for piece in put_blob_pieces(data + b"again"):
                store.put(piece, by="a", now=0.0)
        store.drop_unused(frozenset(), now=0.0)
    finally:
        store.close()


def make_blobs(directory: Path) -> None:
    store = BlobStore(directory)
    for number in range(30):
        for piece in put_blob_pieces(b"blob %d" % number * (number + 1)):
            store.put(piece, by="a", now=0.0)
    store.commit()
    store.close()


def use_journal(directory: Path) -> None:
    journal = Journal(directory)
    try:
        journal.load()
        journal.recall("port")
        journal.append(b"more", to=journal.position + 1)
    finally:
        journal.close()


def make_journal(directory: Path) -> None:
    journal = Journal(directory)
    journal.load()
    journal.remember("port", "5050")
    for number in range(20):
        journal.append(b"event %d" % number, to=journal.position + 2)
        if number == 10:
            journal.snapshot(b"state" * 200)
    journal.close()


@pytest.mark.parametrize(
    ("name", "make", "use"),
    [("blobs.db", make_blobs, use_blobs), ("journal.db", make_journal, use_journal)],
    ids=["blobs", "journal"],
)
def test_damage_anywhere_is_a_corrupt_journal_or_harmless(
    memory_path: Path, name: str, make: Callable[[Path], None], use: Callable[[Path], None]
) -> None:
    whole, damaged = memory_path / "whole", memory_path / "damaged"
    whole.mkdir()
    make(whole)
    content = (whole / name).read_bytes()
    rng = random.Random(14)
    used = [place for place, byte in enumerate(content) if byte]  # most of a page is empty
    refused = 0
    for place in [*range(100), *rng.choices(used, k=POSITIONS)]:
        flipped = bytearray(content)
        flipped[place : place + rng.choice((1, 1, 2, 8))] = rng.randbytes(1) * rng.choice((1, 1, 2, 8))
        del flipped[len(content) :]
        shutil.copytree(whole, damaged)
        (damaged / name).write_bytes(flipped)
        try:
            use(damaged)
        except JournalCorruptError as error:
            assert name in str(error)
            refused += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} after damage at {place}: {error}") from error
        shutil.rmtree(damaged)
    assert refused > POSITIONS // 10


@contextlib.contextmanager
def dispatcher_on_a_small_disk(mount: Path, megabytes: int) -> Iterator[tuple[Path, int]]:
    """Run a dispatcher whose journal has a disk of its own; yield the disk, as seen from here, and the HTTP port."""
    config = DispatcherConfig(server=SERVER, known=KNOWN, journal=str(mount / "journal"), http_port=0)
    code = (
        "import signal, sys, msgspec\nfrom penstock.dispatcher.main import Dispatcher, DispatcherConfig\n"
        "ended = []\nsignal.signal(signal.SIGTERM, lambda *_: ended.append(1))\n"
        "dispatcher = Dispatcher(msgspec.json.decode(sys.argv[1], type=DispatcherConfig))\n"
        "print(dispatcher.http_port, flush=True)\n"
        "dispatcher.serve(lambda: bool(ended))\ndispatcher.close()\n"
    )
    mounting = f'mount -t tmpfs -o size={megabytes}m tmpfs "$1" && exec "$2" -c "$3" "$4"'
    arguments = [str(mount), sys.executable, code, msgspec.json.encode(config).decode()]
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounting, "sh", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            process.wait(DEADLINE_S)
            pytest.skip("this host lets nobody mount a disk of his own")
        yield Path(f"/proc/{process.pid}/root{mount}"), int(port)
    finally:
        process.terminate()
        ended(process)


def test_a_full_disk_under_the_journal_is_not_ready_until_there_is_room(tmp_path: Path) -> None:
    with dispatcher_on_a_small_disk(tmp_path, 32) as (disk, port):
        assert get(port, "/readyz") == (200, "ready")
        with contextlib.suppress(OSError), (disk / "filler").open("wb") as filler:
            while filler.write(bytes(1 << 16)):
                filler.flush()
        _, text = wait_until(lambda: (found := get(port, "/readyz"))[0] == 503 and found, "it to be not ready")
        assert "room" in text or "full" in text
        assert get(port, "/livez")[0] == 200, "a restart would not make room"
        (disk / "filler").unlink()
        wait_until(lambda: get(port, "/readyz") == (200, "ready"), "it to be ready again")
