"""Sessions: declared in Python, TOML or JSON, the same here, on a service and again later; and no code in them."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.graph.codec import encode_graph
from penstock.graph.readers import ReadFeatures
from penstock.graph.traverse import walk
from penstock.testing.conformance import check_resumes_everywhere, compare_all
from tests.kernels import oracle
from tests.warehouse.session_kit import DAYS, OUTPUTS, ROWS, make_session, make_table, rows_of, transforms


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ps.Table:
    return make_table(tmp_path_factory.mktemp("session"))


def test_a_session_gives_what_plain_python_makes_of_the_rows(table: ps.Table) -> None:
    (batch,) = make_session(table, batch=ROWS, partitions=DAYS[:1]).dataset()
    rows = rows_of(0).to_pydict()
    hashed = transforms()[3]
    assert [batch["sparse"]["pages_id"][i].tolist() for i in range(ROWS)] == [
        oracle.apply(hashed, row[:3]) for row in rows["f3"]
    ]
    best = [oracle.best([(item["id"], item["score"]) for item in row], 2) for row in rows["f4"]]
    assert [batch["sparse"]["best_id"][i].tolist() for i in range(ROWS)] == [
        oracle.apply(transforms()[5], [id for id, _ in row]) for row in best
    ]
    assert batch["dense"].present("age_odds").tolist() == [age is not None for age in rows["f1"]]
    odds = [0.0 if age is None else oracle.logit(age, 1e-6) for age in rows["f1"]]
    np.testing.assert_allclose(batch["dense"]["age_odds"], odds, rtol=2e-5, atol=1e-6)
    assert batch["sparse"]["hour"].values.tolist() == [time // 3600 % 24 for time in rows["time"]]
    assert list(batch) == ["dense", "sparse", "label"] and batch["label"].tolist() == rows["label"]


def test_dead_features_are_not_read_and_explain_names_them(table: ps.Table) -> None:
    session = make_session(table, features=["unused"])
    (node,) = (each for each in walk(session.dataset().node) if isinstance(each, ReadFeatures))
    assert (node.dense, node.sparse, node.scored) == (("f1", "f2"), ("f3",), ("f4",)) and node.columns == (
        "time",
        "label",
    )
    shown = session.explain()
    assert "reads   2 dense, 1 sparse, 1 scored features" in shown
    assert "dead    feature f5, transform dead" in shown and "gives   3 dense, 3 sparse, label" in shown
    every = make_session(table, dense=None, sparse=None)
    assert next(iter(every.dataset()))["dense"].keys == ("age_odds", "f2c", "alike", "dead")


def test_a_session_is_the_same_in_python_toml_and_json(table: ps.Table, tmp_path: Path) -> None:
    session = make_session(table).pinned()
    plain = session.to_plain()
    assert json.loads(json.dumps(plain)) == plain and plain["version"] == len(DAYS)
    as_json = tmp_path / "session.json"
    as_json.write_text(json.dumps(plain))
    lines = [f"table = '{table.url}'", "batch = 32", f"version = {session.version}"]
    lines += [f"{name} = {json.dumps(list(keys))}" for name, keys in OUTPUTS.items()]
    for each in plain["transforms"]:
        lines += ["[[transforms]]", *(f"{name} = {json.dumps(value)}" for name, value in each.items())]
    as_toml = tmp_path / "session.toml"
    as_toml.write_text("\n".join(lines))
    for file in (as_json, as_toml):
        again = ps.Session.from_file(file)
        assert again.dataset().fingerprint() == session.dataset().fingerprint()
        assert compare_all(list(session.dataset()), list(again.dataset())) is None


def test_a_pinned_session_reads_the_same_rows_after_others_were_added(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    session = make_session(table).pinned()
    before = list(session.dataset())
    table.append(rows_of(9), date="2026-01-09")
    assert compare_all(before, list(session.dataset())) is None
    assert sum(len(batch["label"]) for batch in make_session(table).dataset()) == 4 * ROWS


def test_a_session_resumes_anywhere(table: ps.Table) -> None:
    assert check_resumes_everywhere(lambda: make_session(table, batch=20).dataset(), every=3) > 3


def test_what_a_session_cannot_mean_is_refused(table: ps.Table, tmp_path: Path) -> None:
    t = ps.transforms
    vector = t.Onehot("f1", out="o", low=0, high=1, count=3)
    for changes, message in (
        ({"transforms": [t.Logit("nope", out="x")]}, "'nope' is no feature of"),
        ({"transforms": [t.Sampling("key", "time", rate=0.5)]}, "samples rows with sample="),
        ({"label": "clicks"}, "label='clicks' must be a column of rows: key, time, label"),
        ({"transforms": [vector], "dense": None, "sparse": None}, "'o' is neither"),
        ({"transforms": [t.Logit("b", out="a"), t.Logit("f1", out="b")]}, "reads 'b', which is made after it"),
    ):  # fmt: skip
        with pytest.raises(ps.InvalidArgumentError, match=message):
            make_session(table, **{"dense": ("x",), "sparse": (), **changes}).dataset()
    broken = tmp_path / "broken.toml"
    broken.write_text("table = ")
    with pytest.raises(ps.InvalidArgumentError, match="is no session in TOML or JSON"):
        ps.Session.from_file(broken)
    with pytest.raises(ps.InvalidArgumentError, match="a session has no 'pickle'; it has table"):
        ps.Session.from_plain({"table": "t", "pickle": "x"})
    with pytest.raises(ps.InvalidArgumentError, match="FirstX has no 'y'; it has input, out, x, by"):
        ps.Session.from_plain({"table": "t", "transforms": [{"op": "FirstX", "y": 1}]})


def test_the_command_runs_and_explains_a_session(
    table: ps.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "session.json"
    file.write_text(json.dumps(make_session(table).to_plain()))
    assert main(["session", "run", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"version {len(DAYS)} of the table\n{3 * ROWS} rows in 9 batches, ")
    assert main(["session", "explain", str(file)]) == 0
    assert "transform_features" in capsys.readouterr().out
    file.write_text("{}")
    assert main(["session", "run", str(file)]) == 1
    assert "a session names its table" in capsys.readouterr().err


NO_UNPICKLING = """
import penstock.graph.functions

def refuse(*_, **__):
    raise RuntimeError("this runner does not unpickle")

penstock.graph.functions._unpickle = refuse
"""


@pytest.fixture
def without_unpickling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ps.LocalService]:
    """A service whose runners raise where a function would be loaded: they are forked with the function patched."""
    (tmp_path / "no_unpickling.py").write_text(textwrap.dedent(NO_UNPICKLING))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PENSTOCK_PRELOAD", "no_unpickling")
    with ps.LocalService(workers=1) as service:
        yield service


def test_a_session_runs_where_nothing_can_be_unpickled(table: ps.Table, without_unpickling: ps.LocalService) -> None:
    dataset = make_session(table).dataset()
    wanted: list[Any] = list(dataset)
    assert compare_all(wanted, list(dataset.distribute(without_unpickling))) is None
    assert b"cloudpickle" not in encode_graph(dataset.node)
    planted = dataset.map(lambda batch: batch)  # and a function shows that it would be noticed
    with pytest.raises(RuntimeError, match="this runner does not unpickle"):
        list(planted.distribute(without_unpickling))
