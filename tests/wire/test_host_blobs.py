"""A large blob is fetched by one process of a host, and mapped by the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from penstock.core.errors import ProtocolError
from penstock.core.host_memory import new_buffer, seal
from penstock.wire import host_blobs
from penstock.wire.blobs import blob_hash
from penstock.wire.host_blobs import share_blob
from penstock.wire.neighbours import DescriptorServer, name_for

PIECE = 1 << 20


def content_of(test: str) -> bytes:
    return (test.encode() * (3 * PIECE))[: 3 * PIECE + 5]


def pieces_of(content: bytes) -> Iterator[bytes]:
    for begin in range(0, len(content), PIECE):
        yield content[begin : begin + PIECE]


def never() -> Iterator[bytes]:
    raise AssertionError("somebody else has it")
    yield b""


def nothing() -> None:
    pass


def test_the_second_one_maps_what_the_first_has_fetched_and_writes_for_itself_alone() -> None:
    content = content_of("second")
    first = share_blob(blob_hash(content), len(content), pieces_of(content), nothing)
    second = share_blob(blob_hash(content), len(content), never(), nothing)
    assert first.fetched and not second.fetched
    assert first.memory == second.memory == content
    second.memory[0] = first.memory[0] ^ 1
    assert first.memory == content


def test_it_is_waited_for_while_it_arrives() -> None:
    content = content_of("waited for")
    asked, go_on, seen = threading.Event(), threading.Event(), []

    def slowly() -> Iterator[bytes]:
        head, *rest = pieces_of(content)
        yield head
        asked.set()
        assert go_on.wait(30)
        yield from rest

    first = threading.Thread(
        target=lambda: seen.append(share_blob(blob_hash(content), len(content), slowly(), nothing))
    )
    first.start()
    assert asked.wait(30)
    second = share_blob(blob_hash(content), len(content), never(), go_on.set)
    first.join()
    assert second.memory == seen[0].memory == content and not second.fetched


def die_midway(content: bytes) -> None:
    def dying() -> Iterator[bytes]:
        yield content[:PIECE]
        os.kill(os.getpid(), signal.SIGKILL)

    share_blob(blob_hash(content), len(content), dying(), nothing)


def test_where_the_one_that_fetches_is_killed_the_next_one_fetches() -> None:
    content = content_of("killed")
    process = multiprocessing.get_context("fork").Process(target=die_midway, args=(content,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert share_blob(blob_hash(content), len(content), pieces_of(content), nothing).fetched


@pytest.mark.parametrize("sealed", [True, False], ids=["something else", "something that never comes"])
def test_what_is_not_the_blob_is_not_taken_for_it(sealed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blobs, "STILL_S", 0.05)
    content = content_of(f"false {sealed}")
    descriptor = new_buffer()
    os.write(descriptor, bytes(len(content)))
    if sealed:
        seal(descriptor)
    server = DescriptorServer(descriptor, len(content), name_for(f"blob {blob_hash(content)}"))
    try:
        own = share_blob(blob_hash(content), len(content), pieces_of(content), nothing)
        assert own.memory == content and not own.fetched, "nobody else gets this copy"
    finally:
        server.close()
        os.close(descriptor)


def test_a_stop_ends_the_wait_and_frees_the_name() -> None:
    content = content_of("stopped")
    name = blob_hash(content)
    with pytest.raises(ProtocolError, match="sent 5 bytes"):
        share_blob(name, len(content), iter([b"short"]), nothing)
    descriptor = new_buffer()
    server = DescriptorServer(descriptor, len(content), name_for(f"blob {name}"))

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        share_blob(name, len(content), never(), stop)
    server.close()
    os.close(descriptor)
    assert share_blob(name, len(content), pieces_of(content), nothing).fetched
