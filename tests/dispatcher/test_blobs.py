"""Blobs are whole and what their name says, or not there."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import JournalCorruptError, JournalWriteError
from penstock.core.ids import BlobHash
from penstock.dispatcher.blobs import UNUSED_AFTER_S, BlobStore
from penstock.wire.blobs import PIECE_BYTES, blob_hash, put_blob_pieces
from penstock.wire.messages import BlobPiece, Done, GetBlob, PutBlob, Refused
from tests.dispatcher.test_journal import FailingConnection

BIG = os.urandom(2 * PIECE_BYTES + 17)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlobStore]:
    store = BlobStore(tmp_path)
    yield store
    store.close()


def put(store: BlobStore, data: bytes, *, now: float = 0.0) -> BlobHash:
    for piece in put_blob_pieces(data):
        assert store.put(piece, by="alice", now=now) == Done()
    store.commit()
    return blob_hash(data)


def get(store: BlobStore, name: BlobHash) -> bytes:
    found = b""
    while True:
        answer = store.get(GetBlob(hash=name, offset=len(found)), now=0.0)
        assert isinstance(answer, BlobPiece), answer
        found += answer.piece
        if len(found) == answer.size:
            return found


@pytest.mark.parametrize("data", [b"", b"x", bytes(PIECE_BYTES), BIG], ids=["empty", "small", "one piece", "three"])
def test_a_blob_comes_back_as_it_was_sent(store: BlobStore, data: bytes) -> None:
    name = put(store, data)
    assert store.whole == {name}
    assert get(store, name) == data


def test_pieces_may_come_in_any_order_and_twice(tmp_path: Path) -> None:
    pieces = list(put_blob_pieces(BIG)) * 2
    random.Random(1).shuffle(pieces)
    name = blob_hash(BIG)
    for piece in pieces:  # each by another dispatcher
        store = BlobStore(tmp_path)
        store.put(piece, by="alice", now=0.0)
        store.commit()
        store.close()
    store = BlobStore(tmp_path)
    assert store.whole == {name} and get(store, name) == BIG
    store.close()


def test_a_blob_is_not_there_before_its_last_piece(store: BlobStore) -> None:
    *most, last = put_blob_pieces(BIG)
    for piece in most:
        store.put(piece, by="alice", now=0.0)
    assert not store.whole
    assert isinstance(store.get(GetBlob(hash=last.hash), now=0.0), Refused)


def test_pieces_that_do_not_make_the_hash_are_refused_and_forgotten(store: BlobStore) -> None:
    name = blob_hash(b"good")
    assert isinstance(store.put(PutBlob(hash=name, offset=0, size=4, piece=b"evil"), by="alice", now=0.0), Refused)
    assert put(store, b"good") == name
    assert get(store, name) == b"good"


def test_a_wrong_size_does_not_keep_the_right_one_out(store: BlobStore) -> None:
    name = blob_hash(b"good")
    store.put(PutBlob(hash=name, offset=0, size=2 * PIECE_BYTES, piece=bytes(PIECE_BYTES)), by="alice", now=0.0)
    put(store, b"good")
    assert get(store, name) == b"good"
    wrong = PutBlob(hash=name, offset=0, size=3, piece=b"goo")
    assert isinstance(store.put(wrong, by="alice", now=0.0), Refused), "what is whole stays"


@pytest.mark.parametrize(
    "bad",
    [
        PutBlob(hash=BlobHash("0" * 40), offset=1, size=4, piece=b"abc"),
        PutBlob(hash=BlobHash("0" * 40), offset=-PIECE_BYTES, size=4, piece=b"abc"),
        PutBlob(hash=BlobHash("0" * 40), offset=0, size=4, piece=b"abc"),
        PutBlob(hash=BlobHash("0" * 40), offset=0, size=1 << 50, piece=bytes(PIECE_BYTES)),
        PutBlob(hash=BlobHash("0" * 40_000), offset=0, size=1, piece=b"x"),
    ],
    ids=["off the grid", "negative", "short", "too large", "long name"],
)
def test_pieces_that_fit_nowhere_are_refused(store: BlobStore, bad: PutBlob) -> None:
    assert isinstance(store.put(bad, by="alice", now=0.0), Refused)
    assert not store.whole


def test_what_nothing_refers_to_is_dropped_after_a_while(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    used, unused = put(store, b"used"), put(store, b"unused")
    assert store.drop_unused({used}, now=UNUSED_AFTER_S - 1) == 0
    assert store.drop_unused({used}, now=UNUSED_AFTER_S + 1) == 1
    store.commit()
    assert store.whole == {used}
    store.close()
    store = BlobStore(tmp_path)
    assert store.whole == {used}
    assert isinstance(store.get(GetBlob(hash=unused), now=0.0), Refused)
    later = 1e9
    assert store.drop_unused(set(), now=later) == 0, "after a restart the time begins anew"
    assert store.drop_unused(set(), now=later + UNUSED_AFTER_S) == 1
    store.close()


def test_a_piece_damaged_on_disk_is_refused_and_can_be_sent_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    name = put(store, b"precious")
    store.close()
    with sqlite3.connect(tmp_path / "blobs.db") as raw:
        raw.execute("UPDATE pieces SET piece = x'00'")
    raw.close()
    store = BlobStore(tmp_path)
    answer = store.get(GetBlob(hash=name), now=0.0)
    assert isinstance(answer, Refused) and "damaged" in answer.reason
    assert name not in store.whole
    put(store, b"precious")
    assert get(store, name) == b"precious"
    store.close()


def test_a_file_that_is_no_database_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "blobs.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(JournalCorruptError, match="clients send their blobs again"):
        BlobStore(tmp_path)


def test_a_failing_write_leaves_no_half_blob(tmp_path: Path) -> None:
    for at in range(1, 8):
        fail: dict[str, int] = {}
        directory = tmp_path / str(at)
        directory.mkdir()
        store = BlobStore(directory, connect=lambda path, fail=fail: FailingConnection(path, fail))
        fail |= {"seen": 0, "at": at}
        failures = 0
        for _ in range(2):
            try:
                put(store, BIG)
            except JournalWriteError:
                failures += 1
                store.reopen()
        assert failures == 1
        assert get(store, blob_hash(BIG)) == BIG
        store.close()


def test_who_has_sent_all_of_a_blob_has_it_and_who_knows_its_name_does_not(store: BlobStore) -> None:
    name = put(store, BIG)
    assert store.has(name, "alice") and not store.has(name, "bob")
    first, *rest = put_blob_pieces(BIG)
    wrong = PutBlob(hash=name, offset=0, size=len(BIG), piece=bytes(len(first.piece)))
    assert isinstance(store.put(wrong, by="bob", now=0.0), Refused)
    assert store.put(first, by="bob", now=0.0) == Done()
    assert store.put(first, by="bob", now=0.0) == Done()
    assert not store.has(name, "bob"), "one piece, twice"
    for piece in rest:
        assert store.put(piece, by="bob", now=0.0) == Done()
    assert store.has(name, "bob")
    assert (store.bytes_of("alice"), store.bytes_of("bob")) == (len(BIG), 0), "it is stored once"
