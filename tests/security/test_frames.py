"""What somebody can make a listener allocate before it is known who that is, and what a friend can after."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from penstock.core.errors import ProtocolError, RefusedError
from penstock.dispatcher.main import DispatcherConfig
from penstock.wire.blobs import blob_hash, fetch_blob, put_blob_pieces
from penstock.wire.framing import (
    IDLE_S,
    MAX_REQUEST_BYTES,
    PIECE_FRAME_BYTES,
    RequestAssembler,
    cut_request,
)
from penstock.wire.messages import Done
from tests.dispatcher.serving import DEADLINE_S, KNOWN, client, ended, opening, started
from tests.keys import SERVER
from tests.security.strangers import connections, flood, frame, resident_mb


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[tuple[int, str]]:
    process, address = started(DispatcherConfig(server=SERVER, known=KNOWN, journal=str(tmp_path / "journal")))
    try:
        yield process.pid, address
    finally:
        os.kill(process.pid, signal.SIGTERM)
        ended(process)


@pytest.mark.parametrize("command", [True, False], ids=["command", "message"])
def test_a_frame_that_claims_79_mb_is_not_made_room_for(dispatcher: tuple[int, str], command: bool) -> None:
    pid, address = dispatcher
    before_mb = resident_mb(pid)
    with connections(address, 16) as peers:
        for peer in peers:
            peer.sendall(frame(79_000_000, command=command))
            assert flood(peer, 78_000_000) < 78_000_000  # it hung up
        assert resident_mb(pid) - before_mb < 16


def test_requests_larger_than_a_frame_arrive(dispatcher: tuple[int, str]) -> None:
    _, address = dispatcher
    blob = os.urandom(5_000_000)
    with client(address) as control:
        for piece in put_blob_pieces(blob):
            assert control.ask(piece, timeout_s=DEADLINE_S, what="storing a blob") == Done()
        ask = partial(control.ask, timeout_s=DEADLINE_S, what="a blob")
        assert fetch_blob(blob_hash(blob), ask) == blob


def test_a_request_above_the_limit_is_refused_by_its_sender(dispatcher: tuple[int, str]) -> None:
    _, address = dispatcher
    with client(address) as control, pytest.raises(RefusedError, match=r"above the limit of 67,108,864"):
        control.ask(opening(host="h" * MAX_REQUEST_BYTES), timeout_s=DEADLINE_S, what="opening")


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_FRAME_BYTES, PIECE_FRAME_BYTES + 1, 1_000_000])
def test_what_was_cut_comes_back(nbytes: int) -> None:
    whole = os.urandom(nbytes)
    assembler = RequestAssembler()
    frames = cut_request(whole)
    assert all(len(piece) <= PIECE_FRAME_BYTES for piece in frames)
    *first, last = [assembler.add(b"peer", piece, principal="a", now=0.0) for piece in frames]
    assert first == [None] * len(first) and last == whole
    assert assembler.held_bytes == 0


def test_pieces_of_several_connections_do_not_mix() -> None:
    assembler = RequestAssembler()
    wholes = {bytes((number,)) * 4: os.urandom(100_000) for number in range(5)}
    for pieces in zip(*map(cut_request, wholes.values())):
        for peer, piece in zip(wholes, pieces):
            found = assembler.add(peer, piece, principal="a", now=0.0)
            assert found is None or found == wholes[peer]
    assert assembler.held_bytes == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames: [frames[1]],
        lambda frames: [frames[0], frames[2]],
        lambda frames: [frames[0], frames[1][:-1]],
        lambda frames: [frames[0][:9]],
        lambda frames: [frames[0][:5]],
        lambda frames: [b"\xc1\xff\xff\xff\xff" + frames[0][5:]],
        lambda frames: [b"\xc1\0\0\0\0" + frames[0][5:]],
        lambda frames: [*frames[:-1], frames[-1] + b"x"],
    ],
)
def test_pieces_that_fit_nothing_are_dropped_and_the_next_request_arrives(
    spoil: Callable[[list[bytes]], list[bytes]],
) -> None:
    assembler = RequestAssembler()
    whole = os.urandom(100_000)
    *before, last = spoil(cut_request(whole))
    for piece in before:
        assert assembler.add(b"peer", piece, principal="a", now=0.0) is None
    with pytest.raises(ProtocolError):
        assembler.add(b"peer", last, principal="a", now=0.0)
    assert assembler.held_bytes == 0
    assert [assembler.add(b"peer", piece, principal="a", now=0.0) for piece in cut_request(whole)][-1] == whole


def test_a_principal_holds_no_more_than_its_limit_whatever_its_connections() -> None:
    assembler = RequestAssembler(principal_bytes=1 << 20)
    frames = cut_request(bytes(1 << 19))[:-1]
    refused = 0
    for number in range(10):
        for piece in frames:
            try:
                assembler.add(b"%d" % number, piece, principal="greedy", now=0.0)
            except ProtocolError:
                refused += 1
                break
        assert assembler.held_bytes <= 1 << 20
    assert refused
    assert assembler.add(b"other", frames[0], principal="modest", now=0.0) is None
    assembler.drop_idle(IDLE_S + 0.1)
    assert assembler.held_bytes == 0
