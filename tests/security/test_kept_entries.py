"""Who may have what is kept: not who may not read its source, nor another principal, who is not told that it exists."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.caching.names import Secret
from penstock.caching.store import open_store
from penstock.sources.stamps import file_stamp
from tests.caching.kit import entry_files, store_at, write_texts

ALICE, BOB = "principal alice", "principal bob"
PROBES = 1000
NOBODY = 65534


def rank_sum_p(ones: list[float], others: list[float]) -> float:
    """Return how likely two samples of one distribution differ as much in their ranks (Mann and Whitney)."""
    together = np.argsort(np.argsort(np.array([*ones, *others]), kind="stable"), kind="stable") + 1
    n, m = len(ones), len(others)
    spread = math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(float(together[:n].sum()) - n * (n + m + 1) / 2) / spread / math.sqrt(2))


def test_the_ranks_of_two_samples_tell_them_apart_where_they_differ() -> None:
    rng = np.random.default_rng(1)
    ones, others = rng.random(500).tolist(), rng.random(500).tolist()
    assert rank_sum_p(ones, others) > 0.01 > rank_sum_p(ones, [each + 0.2 for each in others])


def keep_as(scope: str, location: Path, prefix: str, name: str) -> None:
    store = open_store(str(location), scope)
    writing = store.write(prefix, name, "label", lambda: 1.0)
    assert writing is not None and writing.add(np.zeros(4096, np.uint8), 1, indices=[0])
    writing.finish(1.0)
    assert store.flush(30)
    assert store.open(name) is not None


def test_a_thousand_timed_probes_do_not_tell_another_principal_that_an_entry_exists(tmp_path: Path) -> None:
    secret = Secret.of_host()
    prefix = secret.name("prefix", "a pipeline that both may have")
    there, absent = (f"{prefix}/{secret.name('split', str(n))}.entry" for n in range(2))
    keep_as(ALICE, tmp_path, prefix, there)
    bob = open_store(str(tmp_path), BOB)

    def probe(name: str) -> float:
        began = time.perf_counter()
        assert bob.open(name) is None, "it is alice's"
        return time.perf_counter() - began

    found = []
    for _ in range(3):  # a machine that is busy with other things may favour one of them by chance, not always
        took: dict[str, list[float]] = {there: [], absent: []}
        for number in range(PROBES):
            name = (there, absent)[(number ^ number >> 1) & 1]  # in pairs that begin with either
            took[name].append(probe(name))
        found.append(rank_sum_p(took[there], took[absent]))
        if found[-1] > 0.01:
            break
    assert max(found) > 0.01, found


def test_names_say_nothing_without_the_secret_and_folders_are_closed(tmp_path: Path) -> None:
    secret = Secret.of_host()
    assert secret.name("prefix", "x") != Secret(b"another secret of 32 bytes, that is").name("prefix", "x")
    keep_as(ALICE, tmp_path, "aa", "aa/bb.entry")
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert folders and all(path.stat().st_mode & 0o077 == 0 for path in folders)
    assert all("alice" not in str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


def test_two_principals_have_a_capacity_each_and_evict_nothing_of_the_other(tmp_path: Path) -> None:
    alice, bob = (open_store(str(tmp_path), scope, 64 << 10) for scope in (ALICE, BOB))
    for store in (alice, bob):
        for number in range(40):
            writing = store.write("aa", f"aa/{number:02}.entry", "label", lambda: 1.0)
            assert writing is not None and writing.add(np.zeros(4096, np.uint8), 1, indices=[0])
            writing.finish(float(number + 1))
            assert store.flush(30)
        held = sum(size for _, size in store.files.names())
        assert 32 << 10 < held <= 64 << 10
    assert 32 << 10 < sum(size for _, size in alice.files.names()) <= 64 << 10, "bob's took none of alice's room"


@pytest.fixture
def folder_of_a_user_without_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder; who is root, and may read everything, is another user while the test runs."""
    if os.geteuid():
        yield tmp_path
        return
    before = ps.read_text(write_texts(tmp_path / "data")).map(str.upper).autocache(tmp_path / "kept", always=True)
    assert list(before) and store_at(tmp_path / "kept"), "everything is imported"
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("PENSTOCK_CACHE", f"{name}/host")
        os.chown(name, NOBODY, NOBODY)
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)
            os.setegid(0)


def test_who_may_not_read_the_source_gets_no_hit(folder_of_a_user_without_rights: Path) -> None:
    folder = folder_of_a_user_without_rights
    paths = write_texts(folder / "data", files=1, lines=5)
    dataset = ps.read_text(paths).map(str.upper).autocache(folder / "kept", always=True)
    assert len(list(dataset)) == 5 and len(entry_files(folder / "kept")) == 1
    hits = store_at(folder / "kept").counts.hits
    (folder / "data").chmod(0)  # the file stays as it is, and so does the key of what is kept of it
    with pytest.raises(Exception, match=r"[Pp]ermission"):
        list(dataset)
    assert store_at(folder / "kept").counts.hits == hits
    (folder / "data").chmod(0o700)
    assert len(list(dataset)) == 5
    assert store_at(folder / "kept").counts.hits == hits + 1, "it was there all the time"


def test_a_file_that_cannot_be_opened_has_no_stamp_and_so_no_entry(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    assert file_stamp(str(path)) is not None
    opened = os.open

    def refuse(name, *rest, **more):
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(name, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert file_stamp(str(path)) is None
