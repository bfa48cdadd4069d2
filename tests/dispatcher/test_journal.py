"""The journal keeps what it acknowledged, and says so when it cannot."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import JournalCorruptError, JournalError, JournalLockedError, JournalWriteError
from penstock.dispatcher import database
from penstock.dispatcher.database import on_network
from penstock.dispatcher.journal import MEMORY_SNAPSHOT_BYTES, Journal, Recovered


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where syncs cost nothing: for tests that damage a journal and open it hundreds of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(20 + 37 * number % 400)


def fill(journal: Journal, rows: int, *, first: int = 0) -> None:
    for number in range(first, first + rows):
        journal.append(payload(number), to=journal.position + 1 + number % 3)


def reopened(directory: Path) -> tuple[Recovered, int, str]:
    journal = Journal(directory)
    try:
        return journal.load(), journal.position, journal.identity
    finally:
        journal.close()


def files_of_a_killed_dispatcher(tmp_path: Path, rows: int, *, snapshot_at: int | None = None) -> Path:
    """Copy the files while they are open, as a kill leaves them."""
    journal = Journal(tmp_path / "open")
    journal.load()
    for number in range(rows):
        fill(journal, 1, first=number)
        if number == snapshot_at:
            journal.snapshot(b"state" * 100)
    copy = tmp_path / "killed"
    shutil.copytree(tmp_path / "open", copy)
    journal.close()
    (copy / "lock").unlink()
    return copy


def variant(source: Path, target: Path, name: str, content: bytes) -> Path:
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)
    (target / name).write_bytes(content)
    return target


class FailingConnection:
    """Fails the n-th write, before it happens or after it did."""

    def __init__(self, path: str, fail: dict[str, Any]) -> None:
        self._inner, self._fail = database.connect(path), fail

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        if sql.split()[0] in ("INSERT", "DELETE", "COMMIT", "BEGIN", "UPDATE"):
            self._fail["seen"] = self._fail.get("seen", 0) + 1
            if self._fail["seen"] == self._fail.get("at"):
                if self._fail.get("after"):
                    self._inner.execute(sql, parameters)
                raise sqlite3.OperationalError("database or disk is full")
        return self._inner.execute(sql, parameters)

    def close(self) -> None:
        self._inner.close()


def test_what_was_appended_is_there_after_reopening(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.load() == Recovered(snapshot=None, rows=(), torn=False)
    fill(journal, 5)
    position, identity = journal.position, journal.identity
    journal.close()
    found, at, name = reopened(tmp_path)
    assert found.rows == tuple(map(payload, range(5)))
    assert (at, name) == (position, identity)
    assert not found.torn


def test_a_journal_in_memory_has_the_same_interface() -> None:
    journal = Journal(None)
    journal.load()
    fill(journal, 3)
    journal.snapshot(b"s")
    fill(journal, 1, first=3)
    journal.reopen()
    assert journal.load() == Recovered(snapshot=b"s", rows=(payload(3),), torn=False)
    journal.close()


def test_a_snapshot_replaces_the_rows_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path, snapshot_events=6)
    journal.load()
    fill(journal, 2)
    assert not journal.snapshot_is_due
    fill(journal, 2, first=2)
    assert journal.snapshot_is_due
    journal.snapshot(b"all so far")
    assert not journal.snapshot_is_due
    fill(journal, 1, first=4)
    position = journal.position
    journal.close()
    found, at, _ = reopened(tmp_path)
    assert found == Recovered(snapshot=b"all so far", rows=(payload(4),), torn=False)
    assert at == position


def test_a_journal_in_memory_stays_about_as_small_as_its_snapshot() -> None:
    journal = Journal(None)
    journal.load()
    for state_bytes in (1_000, 4 * MEMORY_SNAPSHOT_BYTES):
        most = held = 0
        for _ in range(8 * MEMORY_SNAPSHOT_BYTES // 1_000):
            journal.append(bytes(1_000), to=journal.position + 1)
            held += 1_000
            if journal.snapshot_is_due:
                journal.snapshot(bytes(state_bytes))
                held = 0
            most = max(most, held)
        assert most <= 1_000 + max(MEMORY_SNAPSHOT_BYTES, state_bytes)
    journal.close()


def test_a_log_cut_at_any_byte_gives_a_whole_prefix(memory_path: Path) -> None:
    killed = files_of_a_killed_dispatcher(memory_path, 4)
    log = (killed / "journal.db-wal").read_bytes()
    history = tuple(map(payload, range(4)))
    longest = -1
    # Close together in the last two frames, then a sample: each opening takes some milliseconds.
    places = [*range(len(log) - 2 * 4120, len(log), 11), *range(0, len(log), 997), len(log)]
    for cut in sorted(places):
        found, _, _ = reopened(variant(killed, memory_path / "cut", "journal.db-wal", log[:cut]))
        assert found.rows == history[: len(found.rows)], cut
        assert len(found.rows) >= longest, "a longer log has more"
        longest = len(found.rows)
    assert longest == 4


@pytest.mark.parametrize("snapshot_at", [None, 2])
def test_a_flipped_bit_in_the_log_drops_the_last_commit_at_most_or_is_refused(
    memory_path: Path, snapshot_at: int | None
) -> None:
    killed = files_of_a_killed_dispatcher(memory_path, 6, snapshot_at=snapshot_at)
    log = (killed / "journal.db-wal").read_bytes()
    whole, _, _ = reopened(variant(killed, memory_path / "flipped", "journal.db-wal", log))
    rng = random.Random(7)
    refused = 0
    for place in [*range(0, 56, 3), *rng.sample(range(len(log)), 120)]:
        flipped = bytearray(log)
        flipped[place] ^= 1 << rng.randrange(8)
        directory = variant(killed, memory_path / "flipped", "journal.db-wal", bytes(flipped))
        try:
            found, _, _ = reopened(directory)
        except JournalCorruptError as error:
            refused += 1
            assert "journal.db" in str(error)
            with pytest.raises(JournalCorruptError):
                reopened(directory)  # refusing has not cleaned the evidence away
            continue
        assert found.rows in (whole.rows, whole.rows[:-1]), place
        assert found.snapshot == whole.snapshot
    assert refused > 30


def test_a_file_cut_at_any_byte_is_refused(memory_path: Path) -> None:
    journal = Journal(memory_path / "whole")
    journal.load()
    fill(journal, 60)
    journal.snapshot(bytes(30_000))
    fill(journal, 60, first=60)
    journal.close()
    content = (memory_path / "whole" / "journal.db").read_bytes()
    for cut in [0, 1, 15, 16, 99, 100, 4095, 4096, *range(5000, len(content), 1777), len(content) - 1]:
        with pytest.raises(JournalError):
            reopened(variant(memory_path / "whole", memory_path / "cut", "journal.db", content[:cut]))


def test_a_flipped_bit_in_the_file_is_refused_or_without_meaning(memory_path: Path) -> None:
    journal = Journal(memory_path / "whole")
    journal.load()
    fill(journal, 20)
    journal.snapshot(b"state" * 500)
    fill(journal, 30, first=20)
    journal.close()
    whole, position, identity = reopened(memory_path / "whole")
    content = (memory_path / "whole" / "journal.db").read_bytes()
    rng = random.Random(3)
    refused = 0
    for place in [*range(0, 100, 2), *rng.sample(range(len(content)), 250)]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        try:
            found, at, name = reopened(
                variant(memory_path / "whole", memory_path / "flipped", "journal.db", bytes(flipped))
            )
        except JournalError:
            refused += 1
            continue
        assert name == identity
        assert found.snapshot == whole.snapshot
        if found.rows != whole.rows:
            assert found.torn and found.rows == whole.rows[:-1] and at < position
    assert refused > 60


def test_damage_is_named_by_file_and_position(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.load()
    fill(journal, 3)
    journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as raw:
        raw.execute("UPDATE rows SET events = x'00' WHERE position = 3")
    raw.close()
    with pytest.raises(JournalCorruptError, match=r"journal\.db at position 3: .*; restore it from a copy"):
        reopened(tmp_path)


def test_a_missing_row_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.load()
    fill(journal, 3)
    journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as raw:
        raw.execute("DELETE FROM rows WHERE position = 3")
    raw.close()
    with pytest.raises(JournalCorruptError, match="the one before ends at 1"):
        reopened(tmp_path)


def test_a_log_without_its_file_is_refused(tmp_path: Path) -> None:
    killed = files_of_a_killed_dispatcher(tmp_path, 2)
    (killed / "journal.db").unlink()
    with pytest.raises(JournalCorruptError, match="missing"):
        reopened(killed)


@pytest.mark.parametrize("after", [False, True])
def test_every_failing_write_leaves_what_was_acknowledged(tmp_path: Path, after: bool) -> None:
    for at in range(1, 14):
        directory = tmp_path / f"{at}"
        Journal(directory).close()
        fail: dict[str, Any] = {"after": after}
        journal = Journal(directory, connect=lambda path, fail=fail: FailingConnection(path, fail))
        journal.load()
        fail |= {"seen": 0, "at": at}
        acknowledged = 0
        failures = 0
        snapshots = 0
        while acknowledged < 8:
            try:
                journal.append(payload(acknowledged), to=journal.position + 1)
                acknowledged += 1
                if acknowledged == 4:
                    journal.snapshot(b"four")
                    snapshots += 1
            except JournalWriteError as error:
                failures += 1
                assert "disk is full" in str(error)
                journal.reopen()
                found = journal.load()
                there = len(found.rows) + (4 if found.snapshot else 0)
                assert there in (acknowledged, acknowledged + 1)
                assert found.rows == tuple(map(payload, range(there - len(found.rows), there)))
                acknowledged = there
        assert failures == (1 if at <= 13 else 0)
        journal.close()
        found, position, _ = reopened(directory)
        assert position == 8
        assert len(found.rows) + (4 if found.snapshot else 0) == 8


def test_a_second_dispatcher_on_one_journal_is_refused_by_name(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom penstock.dispatcher.journal import Journal\n"
        "journal = Journal(pathlib.Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None and first.stdin is not None
        assert first.stdout.readline() == "open\n"
        with pytest.raises(JournalLockedError, match=f"in use by process {first.pid} on .*stop that dispatcher"):
            Journal(tmp_path)
        os.kill(first.pid, signal.SIGKILL)
        first.wait(timeout=30)
        Journal(tmp_path).close()  # the kernel has let go of it
    finally:
        first.kill()
        first.wait(timeout=30)
        first.stdin.close()
        first.stdout.close()


def test_a_second_journal_in_one_process_is_refused_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalLockedError):
        Journal(tmp_path)
    journal.close()


@pytest.mark.parametrize(
    ("kind", "network"),
    [("ext4", False), ("nfs4", True), ("cifs", True), ("fuse.sshfs", True), ("9p", True), ("tmpfs", False)],
)
def test_network_mounts_are_told_by_their_type(kind: str, network: bool) -> None:
    mounts = ["/dev/a / xfs rw 0 0", f"x /mnt/with\\040space {kind} rw 0 0", "garbage"]
    assert on_network(Path("/mnt/with space/journal"), mounts) is network


def test_on_a_network_mount_the_log_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "on_network", lambda path: True)
    journal = Journal(tmp_path)
    journal.load()
    fill(journal, 3)
    assert not (tmp_path / "journal.db-wal").exists()
    journal.close()
    assert len(reopened(tmp_path)[0].rows) == 3


@pytest.mark.alone
def test_restart_does_not_grow_with_history(tmp_path: Path) -> None:
    """A million events in rows of a hundred, with snapshots as the dispatcher makes them."""
    journal = Journal(tmp_path)
    journal.load()
    journal._write("PRAGMA synchronous=OFF")  # the writing is not what is measured
    events = os.urandom(4000)
    for _ in range(10_000):
        journal.append(events, to=journal.position + 100)
        if journal.snapshot_is_due:
            journal.snapshot(os.urandom(1 << 20))
    journal.append(events, to=journal.position + 49_000)
    journal.close()
    begin = time.perf_counter()
    found, position, _ = reopened(tmp_path)
    assert time.perf_counter() - begin < 2.0
    assert position == 1_049_000
    assert len(found.rows) <= 501
    assert (tmp_path / "journal.db").stat().st_size < 16 << 20


def test_what_is_remembered_survives(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.recall("port") is None
    journal.remember("port", "5050")
    journal.remember("port", "5051")
    journal.close()
    journal = Journal(tmp_path)
    assert journal.recall("port") == "5051"
    journal.close()
