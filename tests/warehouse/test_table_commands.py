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
from penstock.warehouse.read_log import ReadLog, popular_share
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
    sessions = [drawn.session(number) for number in range(64)]
    read = np.mean([sizes[session].sum() for session in sessions]) / sizes.sum()
    assert read == pytest.approx(statistics.bytes_used, abs=0.03)
    from penstock.warehouse.read_log import LoggedRead

    log = [LoggedRead(at_s=0.0, features=tuple(session)) for session in sessions]
    popular, share = popular_share(log[:32], dict(enumerate(sizes.tolist())), 0.8)
    assert share == pytest.approx(statistics.popular_bytes, abs=0.03)
    served = sum(sizes[list(set(session) & set(popular))].sum() for session in sessions[32:])
    assert served / sum(sizes[session].sum() for session in sessions[32:]) == pytest.approx(0.8, abs=0.03)


def test_what_columns_take_is_in_their_footers(tmp_path):
    sizes = column_bytes(small_table(tmp_path / "t"))
    assert set(sizes) == {0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 20} and sizes[20] > 0
