"""Sessions that are being read: they hold their version, and those that follow take each committed row once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.warehouse.layout import compact, reorder
from penstock.warehouse.lifecycle import fill, vacuum
from penstock.warehouse.read_log import ReadLog
from tests.warehouse.session_kit import DAYS, ROWS, make_session, make_table, rows_of

ROOT = Path(__file__).parents[2]
KILLS = 4


def following(table: ps.Table, **changes: Any) -> ps.Session:
    return make_session(table, label="key", follow=True, **changes)


def keys_of(batches: list[Any]) -> list[int]:
    return [key for batch in batches for key in batch["key"].tolist()]


def test_rows_are_taken_as_they_are_committed_and_those_that_are_written_again_are_not(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    with following(table).open(idle_s=0.0, poll_s=0.01) as reader:
        first = keys_of([next(reader) for _ in range(4)])
        table.append(rows_of(3), date="2026-01-04")
        reorder(table, order=[3, 1])
        table.append(rows_of(4), date="2026-01-01")  # late rows of an old day
        compact(table)
        table.add_features([ps.Feature(id=9)])
        fill(table, lambda read: read.select("dense"), {"f2": 9}, features=[2])
        rest = keys_of(list(reader))
    assert sorted(first + rest) == list(range(5 * ROWS))
    assert rest[-2 * ROWS :] == list(range(3 * ROWS, 5 * ROWS)), "commit by commit"


def test_a_state_of_any_batch_goes_on_with_what_was_not_received(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    table.append(rows_of(3), date="2026-01-04")
    session = following(table, version=2, batch=40)
    states: list[dict[str, Any]] = []
    received: list[list[int]] = []
    with session.open(idle_s=0.0) as reader:
        states.append(reader.state_dict())
        for batch in reader:
            received.append(batch["key"].tolist())
            states.append(json.loads(json.dumps(reader.state_dict())))
        states.append(reader.state_dict())
    everything = [key for keys in received for key in keys]
    assert sorted(everything) == list(range(4 * ROWS))
    counts = [0]
    for keys in received:
        counts.append(counts[-1] + len(keys))
    for count, state in zip([*counts, counts[-1]], states, strict=True):
        with session.open(idle_s=0.0) as again:
            again.load_state_dict(state)
            assert keys_of(list(again)) == everything[count:]


def test_on_a_service_each_row_comes_once_over_a_resume(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    session = following(table)
    with ps.LocalService(workers=1) as service:
        with session.open(service, idle_s=0.0, poll_s=0.01, job="follows") as reader:
            first = keys_of([next(reader) for _ in range(5)])
            state = reader.state_dict()
        table.append(rows_of(3), date="2026-01-04")
        with session.open(service, idle_s=0.0, poll_s=0.01, job="follows again") as reader:
            reader.load_state_dict(state)
            rest = keys_of(list(reader))
    assert sorted(first + rest) == list(range(4 * ROWS))


def test_each_row_is_trained_on_once_though_the_trainer_is_killed_again_and_again(tmp_path: Path) -> None:
    table, saved = make_table(tmp_path), tmp_path / "trained.json"
    command = [sys.executable, "-m", "tests.warehouse.following_program", table.url, str(saved)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}

    def trained() -> list[int]:
        return list(json.loads(saved.read_text())["keys"]) if saved.exists() else []

    for kill in range(KILLS):
        wanted = min(len(trained()) + 55, 3 * ROWS + kill * ROWS)
        with subprocess.Popen(command, cwd=ROOT, env=environment) as trainer:
            if kill:
                table.append(rows_of(2 + kill), date=f"2026-01-{kill + 3:02d}")
                if kill % 2:
                    compact(table)
            _wait_for(lambda wanted=wanted: len(trained()) >= wanted, trainer)
            trainer.send_signal(signal.SIGKILL)
    with subprocess.Popen(command, cwd=ROOT, env=environment) as trainer:
        _wait_for(lambda: len(trained()) >= (2 + KILLS) * ROWS, trainer)
        trainer.send_signal(signal.SIGKILL)
    assert sorted(trained()) == list(range((2 + KILLS) * ROWS))


def _wait_for(condition: Any, trainer: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert trainer.poll() is None, "the trainer ended"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_session_has_still_to_read_is_not_vacuumed(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    with following(table, batch=10).open(idle_s=0.0, poll_s=0.01) as reader:
        first = keys_of([next(reader)])
        table.append(rows_of(3), date="2026-01-04")
        table.append(rows_of(4), date="2026-01-04")
        compact(table)
        reorder(table, order=[3])
        assert vacuum(table) == [str(each) for each in _made_and_replaced(table)], "what no reader comes to is removed"
        rest = keys_of(list(reader))
    assert sorted(first + rest) == list(range(5 * ROWS))
    assert vacuum(table), "and what was read is removed now"


def _made_and_replaced(table: ps.Table) -> list[Path]:
    """Return what compaction wrote and the reorder after it replaced: nobody reads that."""
    from penstock.sources.delta_log import read_commit

    added = {action.add.path for action in read_commit(table.url, 6) if action.add is not None}
    return [Path(path) for path in sorted(added - {file.path for file in table.snapshot().files})]


def test_a_session_whose_version_is_gone_is_refused_with_its_features_and_days(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    session = make_session(table).pinned()
    state = following(table, version=1).open().state_dict()
    reorder(table, order=[3], partitions=DAYS[:2])
    assert len(vacuum(table)) == 2
    with session.open() as reader, pytest.raises(
        ps.SnapshotGoneError, match=r"version 3: f1, f2, f3 and 1 more of 2026-01-01, 2026-01-02 were removed for good"
    ):  # fmt: skip
        next(reader)
    with following(table).open() as reader, pytest.raises(ps.SnapshotGoneError, match="of 2026-01-01 were removed"):
        reader.load_state_dict(state)
        next(reader)
    for number in (2, 3):
        (table.folder / "_delta_log" / f"{number:020d}.json").unlink()
    with pytest.raises(ps.SnapshotGoneError, match="of all days: version 3 is gone: commit 2 is no longer in the log"):
        session.dataset()
    with following(table, version=1).open(idle_s=0.0) as reader, pytest.raises(
        ps.SnapshotGoneError, match="commit 2 is no longer in the log, and this session has not read its rows"
    ):  # fmt: skip
        reader.load_state_dict({**state, "finished": True})
        next(reader)


def test_what_is_read_is_in_the_read_log_and_the_lease_ends_with_the_reader(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    with make_session(table, partitions=DAYS[:1]).open() as reader:
        assert len(list(reader)) == 3 and len(list(table.own_folder.glob("leases/*.json"))) == 1
    assert not list(table.own_folder.glob("leases/*.json"))
    (read,) = ReadLog(table.own_folder).read()
    assert read.features == (1, 2, 3, 4) and read.partitions == DAYS[:1]


def test_what_a_reader_cannot_do_is_refused(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    with pytest.raises(ps.InvalidArgumentError, match=r"is read with open\(\): a dataset has an end"):
        following(table).dataset()
    with pytest.raises(ps.InvalidArgumentError, match="the ranks of a session read the same version"):
        following(table).open(ranks=ps.Ranks(2, 0))
    with make_session(table).open() as reader:
        with pytest.raises(ps.StateMismatchError, match="this is no state of a session's reader"):
            reader.load_state_dict({})
        with pytest.raises(ps.StateMismatchError, match="open it with follow=True"):
            reader.load_state_dict({"session": 1, "appended": True})
        next(reader)
        with pytest.raises(ps.InvalidArgumentError, match="a state is loaded before the first batch"):
            reader.load_state_dict(reader.state_dict())
