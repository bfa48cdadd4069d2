"""What a service and a pipeline keep on disk is their user's alone, whatever the directory and the umask were."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.private_files import make_private, open_private
from penstock.dispatcher.blobs import BlobStore
from penstock.dispatcher.journal import Journal
from penstock.wire.blobs import put_blob_pieces


@pytest.fixture
def open_directory(tmp_path: Path) -> Iterator[Path]:
    """A directory that everybody may read and write, and a process that hides nothing by itself."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    before = os.umask(0)
    yield directory
    os.umask(before)


def modes(directory: Path) -> dict[str, str]:
    return {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in directory.rglob("*") if not path.is_dir()}


def keep_something(directory: Path) -> None:
    journal, blobs = Journal(directory), BlobStore(directory)
    journal.load()
    for piece in put_blob_pieces(b"a graph"):
        blobs.put(piece, by="a", now=0.0)
    blobs.commit()
    journal.append(b"an event", to=journal.position + 1)
    # Before they are closed: that removes the logs.
    found = modes(directory)
    blobs.close()
    journal.close()
    assert {"journal.db", "journal.db-wal", "blobs.db", "blobs.db-wal", "lock"} <= found.keys()
    assert set(found.values()) == {"0o600"}, found


def test_the_journal_and_the_blobs_are_their_owners_alone(open_directory: Path) -> None:
    keep_something(open_directory)


def test_files_that_others_could_read_are_closed_to_them_at_the_next_start(open_directory: Path) -> None:
    keep_something(open_directory)
    for path in open_directory.iterdir():
        path.chmod(0o666)
    keep_something(open_directory)
    assert set(modes(open_directory).values()) == {"0o600"}


def test_cached_elements_are_their_owners_alone(open_directory: Path) -> None:
    dataset = ps.range(100).cache(open_directory)
    assert len(list(dataset)) == 100
    found = modes(open_directory)
    assert sorted(found) == ["elements", "index.npy"] and set(found.values()) == {"0o600"}, found
    for path in open_directory.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    assert len(list(dataset)) == 100
    assert set(modes(open_directory).values()) == {"0o600"}


def fail(element: int) -> int:
    raise ValueError(element)


def test_what_was_skipped_is_its_owners_alone(open_directory: Path) -> None:
    path = open_directory / "skipped.jsonl"
    path.touch(0o666)
    assert list(ps.range(3).map(fail, on_error=ps.SkipErrors(budget=10, quarantine=str(path)))) == []
    assert path.read_text() and modes(open_directory) == {"skipped.jsonl": "0o600"}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_private_file_is_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        open_private(tmp_path / "file", "wb").close()
    finally:
        os.umask(before)
    assert modes(tmp_path) == {"file": "0o600"}


def test_a_link_is_not_followed_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "target").chmod(0o644)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    make_private(tmp_path / "link")
    assert modes(tmp_path)["target"] == "0o644"
