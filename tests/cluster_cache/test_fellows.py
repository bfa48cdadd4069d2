"""What a runner gives others of what its host keeps: of its own job's prefixes and principal, and nothing else."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.caching.claims import Claim
from penstock.caching.entries import OpenEntry, checksum, decode_frame, encode_frame
from penstock.caching.names import subject_of
from penstock.caching.store import CacheStore, open_store
from penstock.cluster_cache.fellows import KeptServer
from penstock.graph import ops
from penstock.graph.traverse import walk
from penstock.passes import optimize
from penstock.wire.fetching import (
    BEING_MADE,
    NOT_KEPT,
    PIECE_BYTES,
    DoubtSplit,
    ElementFrames,
    ReadElements,
    ReadSplit,
    SplitBytes,
)
from tests.waiting import wait_until

ALICE, BOB = "principal alice", "principal bob"
PEER = b"peer"
SUBJECT = subject_of("key", "a file as it is")


class Answers:
    """A server over one pipeline, and what it sends."""

    def __init__(self, location: Path) -> None:
        dataset = ps.range(10).map(str).autocache(location, version="1")
        graph = optimize(dataset._node)
        (self.key,) = (node.prefix_key for node in walk(graph) if isinstance(node, ops.Autocache))
        self.store: CacheStore = open_store(str(location), ALICE)
        self._sent: SimpleQueue[tuple[Any, list[Any]]] = SimpleQueue()
        self._server = KeptServer(graph, ALICE, self._send)

    def _send(self, peer: bytes, header: Any, buffers: Any = ()) -> None:
        assert peer == PEER
        self._sent.put((header, list(buffers)))

    def ask(self, message: Any) -> tuple[Any, list[Any]]:
        self._server.take(PEER, message)
        return self._sent.get(timeout=30)

    def tell(self, message: Any) -> None:
        self._server.take(PEER, message)

    def keep_split(self, nbytes: int, store: CacheStore | None = None) -> str:
        store = store or self.store
        name = store.secret.entry_name(self.key, SUBJECT)
        writing = store.write(store.secret.prefix_name(self.key), name, "label", lambda: 1.0)
        assert writing is not None
        assert writing.add(encode_frame([np.arange(nbytes // 8)]), 1, indices=[0])
        writing.finish(1.0)
        assert store.flush(30)
        return name

    def path(self, name: str) -> Path:
        return self.store.files.folder / name  # type: ignore[attr-defined]


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    return Answers(tmp_path / "kept")


def read(answers: Answers, offset: int, count: int) -> tuple[int, bytes]:
    header, buffers = answers.ask(ReadSplit(7, answers.key, SUBJECT, offset, count))
    assert isinstance(header, SplitBytes) and header.number == 7
    return header.size, b"".join(bytes(buffer) for buffer in buffers)


def test_an_entry_is_given_a_piece_at_a_time(answers: Answers) -> None:
    name = answers.keep_split(3 * PIECE_BYTES)
    content = answers.path(name).read_bytes()
    assert read(answers, -100, 100) == (len(content), content[-100:])
    assert read(answers, -(1 << 40), 10) == (len(content), content[:10])
    assert read(answers, 5, 1 << 40) == (len(content), content[5 : 5 + PIECE_BYTES]), "no more at once"
    assert read(answers, len(content) + 5, 10) == (len(content), b"")

    def read_at(offset: int, count: int) -> Any:
        return np.frombuffer(read(answers, offset, count)[1], np.uint8)

    assert OpenEntry.of(len(content), read_at, lambda: None).indices.tolist() == [0]


def test_what_the_job_does_not_keep_is_not_given(answers: Answers, tmp_path: Path) -> None:
    assert read(answers, -100, 100) == (NOT_KEPT, b"")
    answers.keep_split(100, open_store(str(tmp_path / "kept"), BOB))
    assert read(answers, -100, 100) == (NOT_KEPT, b""), "it is another principal's"
    answers.keep_split(100)
    header, _ = answers.ask(ReadSplit(1, "another prefix", SUBJECT, -100, 100))
    assert header.size == NOT_KEPT, "the job has no such point"
    header, _ = answers.ask(ReadSplit(1, f"{answers.key} frozen 1 0 0", SUBJECT, -100, 100))
    assert header.size == NOT_KEPT


def test_an_entry_that_is_being_made_is_told_of(answers: Answers) -> None:
    claim = answers.store.claim(answers.store.secret.entry_name(answers.key, SUBJECT))
    assert isinstance(claim, Claim)
    assert read(answers, -100, 100) == (BEING_MADE, b"")
    claim.release()
    assert read(answers, -100, 100) == (NOT_KEPT, b"")


def test_an_entry_that_others_doubt_is_looked_at_and_removed_if_they_are_right(answers: Answers) -> None:
    name = answers.keep_split(100_000)
    answers.tell(DoubtSplit(answers.key, SUBJECT))
    assert read(answers, -100, 100)[0] > 0 and answers.path(name).exists(), "it is as it was written"
    content = bytearray(answers.path(name).read_bytes())
    content[1000] ^= 1
    answers.path(name).write_bytes(content)
    answers.tell(DoubtSplit(answers.key, SUBJECT))
    wait_until(lambda: not answers.path(name).exists(), "the damaged entry is removed")


def test_elements_are_given_with_their_sums_as_many_as_fit(answers: Answers) -> None:
    store = answers.store
    subjects = [subject_of("key", str(number)) for number in range(5)]
    frames = {number: encode_frame([np.full(50_000, number)]) for number in range(4)}
    writing = store.write(
        store.secret.prefix_name(answers.key), f"{store.secret.prefix_name(answers.key)}/p.entry", "", float
    )
    assert writing is not None
    for number, frame in frames.items():
        assert writing.add(frame, 1, ids=[store.secret.id_of(subjects[number])])
    writing.finish(1.0)
    assert store.flush(30)
    got: dict[int, int] = {}
    asked = list(range(4, -1, -1))
    for _ in range(2):
        header, buffers = answers.ask(ReadElements(3, answers.key, b"".join(subjects[number] for number in asked)))
        assert isinstance(header, ElementFrames)
        places, sums = np.frombuffer(header.found, np.uint32), np.frombuffer(header.sums, np.uint32)
        for place, expected, buffer in zip(places, sums, buffers):
            frame = np.array(np.frombuffer(buffer, np.uint8))
            assert checksum(frame) == expected
            got[asked[place]] = int(decode_frame(frame)[0][0])  # type: ignore[index]
        if not header.more:
            break
        asked = [number for number in asked if number not in got]
    assert got == {number: number for number in range(4)}
    header, buffers = answers.ask(ReadElements(3, "another prefix", subjects[0]))
    assert (header.found, buffers) == (b"", [])
