"""What other hosts keep, asked for and given: `Fellows` asks them, `KeptServer` answers.

A runner asks a process of each other host that runs its job, and is answered out of that host's own locations, for the
principal whose job it is: who may ask is decided by the key it shows, and what there is to be had by the job that the
asked one runs itself. Who asks has opened the source first, which is what a subject takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty
from threading import Lock
from time import monotonic
from typing import Any, Protocol

import numpy as np

from penstock.caching.elsewhere import BeingMade, RemoteEntry
from penstock.caching.entries import Bytes, DamagedEntryError, OpenEntry, checksum
from penstock.caching.names import SUBJECT_BYTES
from penstock.caching.packs import PackIndex, pack_index
from penstock.caching.patience import PatientThreads
from penstock.caching.store import CacheStore, open_store
from penstock.cluster_cache.fellow_links import AnswerQueue, FellowAnswer, FellowLinks
from penstock.core.ids import RunnerId
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.traverse import walk
from penstock.wire.fetching import (
    BEING_MADE,
    MOST_SUBJECTS,
    NOT_KEPT,
    PIECE_BYTES,
    DoubtSplit,
    ElementFrames,
    FromFellow,
    ReadElements,
    ReadSplit,
    SplitBytes,
    ToFellow,
)

ANSWER_S = 3.0  # that a question may take, as storage of this host may; computing goes on after it
LAST_BYTES = 64 << 10  # of an entry, with which it is opened: small ones are had whole by that
MOST_FETCHED_BYTES = 8 << 20  # of elements, in one go
MOST_QUESTIONS = 64  # that wait here for storage; what is asked beyond is not kept, as far as others can tell
REFRESH_S = 2.0  # packs that other processes of this host published since


class FellowGoneError(Exception):
    """A fellow did not give what it had."""


class Fellows:
    """The other hosts, as `caching.elsewhere.OtherHosts` asks them."""

    def __init__(self, links: FellowLinks) -> None:
        self._links = links

    def open(self, key: str, subject: bytes) -> RemoteEntry | BeingMade | None:
        being_made = False
        for answer in self._ask(
            self._links.known(), lambda number: ReadSplit(number, key, subject, -LAST_BYTES, LAST_BYTES)
        ):
            if not isinstance(answer.header, SplitBytes):
                continue
            if answer.header.size >= 0:
                remote = self._opened(answer.fellow, answer.header.size, _bytes_of(answer), key, subject)
                if remote is not None:
                    return remote
            being_made = being_made or answer.header.size == BEING_MADE
        return BeingMade() if being_made else None

    def _opened(self, fellow: RunnerId, size: int, last: Bytes, key: str, subject: bytes) -> RemoteEntry | None:
        doubt = partial(self._links.tell, fellow, DoubtSplit(key, subject))

        def read_at(offset: int, count: int) -> Bytes:
            if offset >= size - len(last):
                at = offset - (size - len(last))
                return last[at : at + count].copy()
            content = np.empty(max(0, min(count, size - offset)), np.uint8)
            for start in range(0, len(content), PIECE_BYTES):
                stop = min(start + PIECE_BYTES, len(content))
                content[start:stop] = self._piece(fellow, key, subject, offset + start, stop - start)
            return content

        try:
            return RemoteEntry(OpenEntry.of(size, read_at, lambda: None), doubt)
        except DamagedEntryError:
            doubt()
        except FellowGoneError:
            pass
        return None

    def _piece(self, fellow: RunnerId, key: str, subject: bytes, offset: int, count: int) -> Bytes:
        for answer in self._ask([fellow], lambda number: ReadSplit(number, key, subject, offset, count)):
            if isinstance(answer.header, SplitBytes) and answer.header.size >= 0:
                piece = _bytes_of(answer)
                if len(piece) == count:
                    return piece
        raise FellowGoneError(f"runner {fellow} does not give bytes {offset} to {offset + count} any more")

    def frames(self, key: str, subjects: Sequence[bytes]) -> Mapping[bytes, Bytes]:
        found: dict[bytes, Bytes] = {}
        nbytes, asked = 0, self._links.known()
        missing = list(subjects[:MOST_SUBJECTS])
        while asked and missing and nbytes < MOST_FETCHED_BYTES:
            wanted, again = list(missing), []
            for answer in self._ask(asked, partial(_elements_asked, key, b"".join(wanted))):
                if not isinstance(answer.header, ElementFrames):
                    continue
                given = list(_checked(answer.header, answer.buffers, wanted))
                found.update(given)
                nbytes += sum(len(frame) for _, frame in given)
                if answer.header.more and given:
                    again.append(answer.fellow)
            missing = [subject for subject in missing if subject not in found]
            asked = again
        return found

    def _ask(self, fellows: Sequence[RunnerId], question: Callable[[int], FromFellow]) -> Iterator[FellowAnswer]:
        """Give answers as they come, until all are there or time is up: who has not answered by then is given up."""
        answers: AnswerQueue = self._links.ask(fellows, question)
        waiting, deadline = set(fellows), monotonic() + ANSWER_S
        while waiting:
            try:
                answer = answers.get(timeout=max(0.0, deadline - monotonic()))
            except Empty:
                for fellow in waiting:
                    self._links.give_up(fellow)
                return
            waiting.discard(answer.fellow)
            yield answer


def _elements_asked(key: str, subjects: bytes, number: int) -> ReadElements:
    return ReadElements(number, key, subjects)


def _bytes_of(answer: FellowAnswer) -> Bytes:
    """Return the one buffer of an answer, in memory of our own."""
    return np.array(np.frombuffer(answer.buffers[0], np.uint8)) if answer.buffers else np.empty(0, np.uint8)


def _checked(header: ElementFrames, buffers: Sequence[Any], asked: Sequence[bytes]) -> Iterator[tuple[bytes, Bytes]]:
    """Give the frames whose bytes are as they were written."""
    if len(header.found) != 4 * len(buffers) or len(header.sums) != 4 * len(buffers):
        return
    places, sums = np.frombuffer(header.found, np.uint32), np.frombuffer(header.sums, np.uint32)
    for place, wanted, buffer in zip(places.tolist(), sums.tolist(), buffers):
        frame = np.array(np.frombuffer(buffer, np.uint8))
        if place < len(asked) and checksum(frame) == wanted:
            yield asked[place], frame


# Answering


class SendsAnswers(Protocol):
    def __call__(self, peer: bytes, header: ToFellow, buffers: Sequence[Any] = ()) -> None: ...


class KeptServer:
    """Gives fellows what this host keeps of the job's prefixes. Questions come from the data socket's thread."""

    def __init__(self, graph: Node, scope: str, send: SendsAnswers) -> None:
        self._points = {node.prefix_key: node for node in walk(graph) if isinstance(node, ops.Autocache)}
        self._scope = scope
        self._send = send
        self._threads = PatientThreads("penstock kept")
        self._lock = Lock()
        self._waiting = 0
        self._refreshed: dict[PackIndex, float] = {}

    def take(self, peer: bytes, message: FromFellow) -> None:
        """Answer, soon and in another thread."""
        with self._lock:
            full = self._waiting >= MOST_QUESTIONS
            self._waiting += not full
        if not full:
            self._threads.submit(partial(self._answer, peer, message))
        elif not isinstance(message, DoubtSplit):
            self._send(peer, _nothing(message))

    def _answer(self, peer: bytes, message: FromFellow) -> None:
        header: ToFellow | None = None if isinstance(message, DoubtSplit) else _nothing(message)
        buffers: Sequence[Any] = ()
        try:
            store = self._store_of(message.key)
            if store is not None and not store.away:
                match message:
                    case ReadSplit():
                        header, buffers = self._split(store, message)
                    case ReadElements():
                        header, buffers = self._elements(store, message)
                    case DoubtSplit():
                        self._look_at(store, message)
        finally:
            with self._lock:
                self._waiting -= 1
            if header is not None:
                self._send(peer, header, buffers)

    def _store_of(self, key: str) -> CacheStore | None:
        """Return the location that the job keeps a prefix at: no other is looked into, whatever is asked."""
        node = self._points.get(key) or next(
            (node for prefix, node in self._points.items() if node.frozen and key.startswith(f"{prefix} frozen ")), None
        )
        return None if node is None else open_store(node.location, self._scope, node.capacity_bytes)

    def _split(self, store: CacheStore, message: ReadSplit) -> tuple[SplitBytes, Sequence[Any]]:
        name = store.secret.entry_name(message.key, message.subject)
        first = message.offset < 0
        try:
            entry = store.open_here(name) if first else store.files.open(name)
        except DamagedEntryError:
            store.damaged(name)
            entry = None
        if entry is None:
            made = store.claims.is_being_made(name, also_here=True)
            return SplitBytes(message.number, BEING_MADE if made else NOT_KEPT), ()
        try:
            offset = max(0, entry.nbytes + message.offset) if first else message.offset
            count = max(0, min(message.count, PIECE_BYTES, entry.nbytes - offset))
            return SplitBytes(message.number, entry.nbytes), [entry.read_at(offset, count)]
        finally:
            entry.close()

    def _elements(self, store: CacheStore, message: ReadElements) -> tuple[ElementFrames, Sequence[Any]]:
        ids = [store.secret.id_of(subject) for subject in _subjects_in(message.subjects)]
        packs = pack_index(store, store.secret.prefix_name(message.key))
        now = monotonic()
        due = packs.is_outdated or now - self._refreshed.get(packs, 0.0) > REFRESH_S
        if due and not all(map(packs.has, ids)):
            self._refreshed[packs] = now
            packs.refresh()
        given = packs.frames(ids, PIECE_BYTES)
        more = bool(given) and any(packs.has(each) for each in ids[given[-1][0] + 1 :])
        places = np.array([place for place, _, _ in given], np.uint32)
        sums = np.array([each for _, _, each in given], np.uint32)
        header = ElementFrames(message.number, places.tobytes(), sums.tobytes(), more)
        return header, [frame for _, frame, _ in given]

    def _look_at(self, store: CacheStore, message: DoubtSplit) -> None:
        name = store.secret.entry_name(message.key, message.subject)
        try:
            entry = store.files.open(name)
            if entry is not None:
                try:
                    entry.check()
                finally:
                    entry.close()
        except DamagedEntryError:
            store.damaged(name)


def _nothing(message: ReadSplit | ReadElements) -> ToFellow:
    return SplitBytes(message.number, NOT_KEPT) if isinstance(message, ReadSplit) else ElementFrames(message.number)


def _subjects_in(joined: bytes) -> list[bytes]:
    many = min(MOST_SUBJECTS, len(joined) // SUBJECT_BYTES)
    return [joined[at * SUBJECT_BYTES : (at + 1) * SUBJECT_BYTES] for at in range(many)]
