"""`penstock table`, from an empty folder to a table that is cleaned up."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.warehouse.column_sizes import column_bytes
from penstock.warehouse.generating import generate
from penstock.warehouse.model_statistics import MODELS, draw_features
from penstock.warehouse.read_log import LoggedRead, ReadLog, popular_share, popularity
from tests.warehouse.tables import rows_by_key, small_table


def run(*arguments):
    return main(["table", *map(str, arguments)])


def test_a_table_is_generated_laid_out_tiered_and_cleaned_up(tmp_path, capsys):
    folder = tmp_path / "t"
    assert run("generate", folder, "--like", "rm1", "--scale", 0.01, "--rows", 64, "--days", 3, "--sessions", 8) == 0
    assert "days      3: 2026-01-01 to 2026-01-03" in capsys.readouterr().out
    table = ps.Table(folder)
    session = ReadLog(table.own_folder).read()[0].features
    kept = {"partitions": ["2026-01-02", "2026-01-03"], "features": session, "columns": ["key", "label"]}
    before = rows_by_key(ps.read_features(table, **kept))
    assert run("reorder", folder, "--stripe-rows", 32) == 0
    assert run("tier", folder, "--to", tmp_path / "fast") == 0
    assert run("compact", folder) == 0
    assert run("retain", folder, "--days", 2) == 0
    assert run("vacuum", folder) == 0
    out = capsys.readouterr().out
    assert (
        "features that are read together stand side by side" in out
        and "1 days let go: 2026-01-01" in out
        and "files removed" in out
    )
    assert rows_by_key(ps.read_features(table, features=session, columns=["key", "label"])) == before
    assert run("reap", folder, "--features", "0,1") == 0
    assert run("show", folder, "--features") == 0
    assert "reaped" in capsys.readouterr().out


def test_derive_takes_a_function_by_name(tmp_path, capsys):
    table = small_table(tmp_path / "t")
    code = "def build(ds):\n    return ds.map(lambda b: {'sums': b['dense'].values.sum(axis=0)})\n"
    (tmp_path / "mine.py").write_text(code)
    arguments = ["--pipeline", f"{tmp_path}/mine.py:build", "--into", "sums=40:dense", "--features", "0,1"]
    assert run("derive", table.url, *arguments) == 0
    made = [batch["dense"] for batch in ps.read_features(table, features=[0, 1, 40])]
    assert all(np.allclose(dense["f0"] + dense["f1"], dense["f40"]) for dense in made)
    assert run("derive", table.url, "--pipeline", f"{tmp_path}/mine.py:build", "--into", "x") == 2
    assert "write it as KEY=ID:KIND" in capsys.readouterr().err


def test_a_key_is_its_owners_alone_and_is_never_overwritten(tmp_path, capsys):
    key = tmp_path / "key"
    assert run("key", key) == 0
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    assert run("key", key) == 2 and "a key in use is not overwritten" in capsys.readouterr().err
    assert small_table(tmp_path / "t", key=f"file:{key}").version == 3


def test_generating_is_seeded_and_goes_on_where_it_stopped(tmp_path):
    options = {"like": "rm3", "scale": 0.01, "rows": 32, "sessions": 2, "seed": 5}
    generate(tmp_path / "a", partitions=2, **options)
    begun = ps.Table(tmp_path / "a").version
    again = generate(tmp_path / "a", partitions=2, **options)
    other = generate(tmp_path / "b", partitions=2, **options)
    assert again.version == begun
    for one, two in zip(ps.read_features(again, batch=32), ps.read_features(other, batch=32), strict=True):
        assert one["dense"] == two["dense"] and one["sparse"] == two["sparse"]


@pytest.mark.parametrize("name", ["rm1", "rm2", "rm3"])
def test_features_have_the_published_statistics(name):
    """A quarter as wide: fewer features than that leave too much to chance."""
    statistics = MODELS[name].scaled(0.25)
    drawn = draw_features(statistics, partitions=30, seed=0)
    dense, sizes = statistics.stored_dense, drawn.bytes_per_row
    assert drawn.coverage.mean() == pytest.approx(statistics.coverage, rel=0.01)
    lists = drawn.coverage[dense:]
    assert (drawn.length[dense:] * lists).sum() / lists.sum() == pytest.approx(statistics.mean_length, rel=0.02)
    sessions = drawn.sessions(64)
    by_all = sizes[list(set().union(*sessions))].sum() / sizes.sum()
    assert by_all == pytest.approx(statistics.bytes_read_by_all, abs=0.05)
    kinds = np.mean(
        [[sum(n < dense for n in session), sum(n >= dense for n in session)] for session in sessions], axis=0
    )
    assert kinds == pytest.approx([statistics.read_dense, statistics.read_sparse], rel=0.06)
    read = np.mean([sizes[session].sum() for session in sessions]) / sizes.sum()
    assert read == pytest.approx(statistics.bytes_used, abs=0.03)
    log = [LoggedRead(at_s=0.0, features=tuple(session)) for session in sessions]
    order = popularity(log[:32])
    order += sorted(set(range(len(sizes))) - set(order))
    later = np.bincount(np.concatenate(sessions[32:]), minlength=len(sizes))
    traffic = np.cumsum((later * sizes)[order])
    needed = np.searchsorted(traffic, 0.8 * traffic[-1]) + 1
    assert sizes[order[:needed]].sum() / sizes.sum() == pytest.approx(statistics.popular_bytes, abs=0.03)
    _, by_hindsight = popular_share(log, dict(enumerate(sizes.tolist())), 0.8)
    assert by_hindsight == pytest.approx(statistics.popular_bytes, abs=0.06)


def test_features_that_came_in_the_month_of_the_sessions_have_the_last_ids_of_their_kind_and_no_earlier_rows():
    statistics = MODELS["rm1"].scaled(0.25)
    drawn = draw_features(statistics, partitions=90, seed=0)
    came = drawn.release.came
    new = drawn.feature_of[came > 0]
    assert (drawn.first_day[new] >= 60).all() and drawn.first_day[drawn.feature_of[came == 0]].max() < 60
    for first, stop in ((0, statistics.stored_dense), (statistics.stored_dense, len(drawn.coverage))):
        of_kind = new[(new >= first) & (new < stop)]
        assert set(of_kind.tolist()) == set(range(stop - len(of_kind), stop))
    earlier, later = np.split(np.array(drawn.sessions(64), object), 2)
    unseen = set().union(*later) - set().union(*earlier)
    assert unseen and np.mean([number in set(new.tolist()) for number in unseen]) > 0.8


def test_what_columns_take_is_in_their_footers(tmp_path):
    sizes = column_bytes(small_table(tmp_path / "t"))
    assert set(sizes) == {0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 20} and sizes[20] > 0
