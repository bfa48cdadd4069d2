from concurrent.futures import Future
from typing import Any

import fsspec
import pytest

from penstock.sources import ranged
from penstock.sources.ranged import RangedFile, ReadAbortedError

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The byte ranges requested, with small limits."""
    for name, value in {"REQUEST_BYTES": 1000, "AHEAD_BYTES": 3000, "HOLE_BYTES": 100}.items():
        monkeypatch.setattr(ranged, name, value)
    found: list[tuple[int, int]] = []
    plain = RangedFile._submit

    def submit(file: RangedFile, start: int, stop: int) -> Any:
        found.append((start, stop))
        return plain(file, start, stop)

    monkeypatch.setattr(RangedFile, "_submit", submit)
    return found


def opened() -> RangedFile:
    fsspec.filesystem("memory").pipe("/ranged/x", CONTENT)
    return RangedFile("memory://ranged/x", len(CONTENT), (), Future())


def test_what_was_asked_for_is_fetched_once_and_the_rest_on_the_spot(asked: list[tuple[int, int]]) -> None:
    with opened() as file:
        file.ask([(5000, 5010), (100, 300), (350, 1500)])
        assert asked == [(100, 1100), (1100, 1500), (5000, 5010)]
        file.seek(50)
        assert file.read(1500) == CONTENT[50:1550]
        assert asked[3:] == [(50, 100), (1500, 1550)]
        file.seek(-3, 2)
        assert file.read() == CONTENT[-3:] and file.read(5) == b""
        buffer = bytearray(20)
        file.seek(4995)
        assert file.readinto(buffer) == 20 and buffer == CONTENT[4995:5015]


def test_reading_on_and_on_asks_for_every_byte_once_and_keeps_a_window(asked: list[tuple[int, int]]) -> None:
    with opened() as file:
        file.ask([(0, 64), (len(CONTENT) - 64, len(CONTENT))])
        read = b""
        while len(read) < len(CONTENT):
            file.ask_ahead(file.tell())
            held = sum(end - start for start, (end, _) in file._asked.items())
            assert held <= 3000 + 1000 + 1000 + 64  # the window, the request it ends in, the one being read, the tail
            read += file.read(333)
    assert read == CONTENT
    assert sum(stop - start for start, stop in asked) <= len(CONTENT) + 64


def test_forgotten_parts_are_freed(asked: list[tuple[int, int]]) -> None:
    with opened() as file:
        parts = file.ask([(0, 2500)])
        file.forget(parts)
        assert not file._asked
        assert file.read(10) == CONTENT[:10]


def test_a_wait_ends_when_the_reading_is_given_up() -> None:
    file = opened()
    file._aborted.set_result(None)
    with pytest.raises(ReadAbortedError):
        file.read(10)
    file.close()
