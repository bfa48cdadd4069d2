"""Where passes rewrite most: a state saved with passes goes on without them, and the other way round."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.graph import ops, readers
from penstock.graph.traverse import walk
from penstock.passes import optimize
from penstock.testing.conformance import compare_all
from tests.passes.pipelines import digest, is_even, keeps, marked, noisy, plus, times, write_files

col = ps.col


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_files(folder)
    lines = [f"{i},{i / 4},{'xyz'[i % 3]}\n" for i in range(30)]
    (folder / "0.csv").write_text("a,b,c\n" + "".join(lines[:12]))
    (folder / "1.csv").write_text("a,b,c\n" + "".join(lines[12:]))
    for year in (2023, 2024):
        (folder / "hive" / f"year={year}").mkdir(parents=True)
        table = pa.table({"a": list(range(year, year + 9)), "b": [i % 2 == 0 for i in range(9)]})
        pq.write_table(table, folder / "hive" / f"year={year}" / "0.parquet", row_group_size=4)
    return folder


def parquet(folder, **options):
    return ps.read_parquet(folder / "*.parquet", **{"nulls": None, **options})


CASES = {
    "filter into the source, then rng": lambda f: parquet(f).filter(col("n") > 2).map(marked),
    "filters through renames, then a block shuffle": lambda f: (
        parquet(f, columns=["a", "b"])
        .rename({"a": "x"})
        .filter(col("x") > 4)
        .filter(col("b") < 2)
        .shuffle(5)
        .map(marked)
    ),
    "filter into the source below a split shuffle": lambda f: parquet(f).filter("d").shuffle(4).map(digest).map(noisy),
    "filter on a partition": lambda f: ps.read_parquet(f / "hive").filter(col("year") > 2023).select("b", "a"),
    "filter into arrow": lambda f: ps.read_arrow(f / "*.arrow", nulls=None).filter(col("c") == "bee").map(marked),
    "filter where nulls are filled": lambda f: parquet(f, nulls=0).filter(col("n") < 3).map(marked),
    "filter that leaves nothing": lambda f: parquet(f).filter(col("a") > 1000).concatenate(ps.range(3)),
    "projection of rows": lambda f: (
        parquet(f).filter(col("d")).shuffle(4).take(17).repeat(2).select("c", "a").map(marked)
    ),
    "projection of column batches": lambda f: parquet(f, batch=6, nulls=0).select("n", "b"),
    "projection of csv": lambda f: ps.read_csv(f / "*.csv").filter(col("a") > 3).select("c", "b").map(marked).batch(4),
    "shuffle above maps": lambda f: parquet(f).filter(keeps).map(marked).select("mark", "a").map(digest).shuffle(6),
    "shuffles around maps": lambda f: parquet(f).shuffle(3).map(marked).shuffle(7).map(digest).shuffle(5).map(noisy),
    "full permutation": lambda f: ps.range(40).map(noisy).shuffle().map(times).shuffle(3).filter(is_even),
    "fused steps": lambda f: ps.range(60).map(plus).filter(is_even).map(noisy).filter(is_even).skip(3),
    "fused batch": lambda f: ps.range(60).filter(is_even).map(noisy).map(plus).batch(4).map(lambda rows: rows.sum()),
    "counters that say nothing": lambda f: (
        ps.range(30).take(-1).skip(0).shuffle(4).repeat(1).map(noisy).take(20).take(25)
    ),
    "shared rows": lambda f: (lambda rows: rows.map(digest).zip(rows.select("a").map(marked)))(parquet(f)),
}


def read(make, *, state=None, **options):
    states, elements = [], []
    with make().iterator(epoch=0, seed=5, **options) as iterator:
        if state is not None:
            iterator.load_state_dict(json.loads(json.dumps(state)))
        states.append(iterator.state_dict())
        for element in iterator:
            elements.append(element)
            states.append(iterator.state_dict())
    return elements, states


@pytest.mark.parametrize("name", CASES)
def test_states_go_from_one_setting_to_the_other(folder, name):
    def make():
        return CASES[name](folder)

    assert {type(node) for node in walk(optimize(make().node))} != {type(node) for node in walk(make().node)}
    plain, optimized = {"optimize": False, "threads": 1}, {"optimize": True, "threads": 2}
    expected, plain_states = read(make, **plain)
    found, optimized_states = read(make, **optimized)
    assert len(expected) > 2
    assert compare_all(expected, found) is None
    for at in range(0, len(expected), 3):
        for state, options in ((plain_states[at], optimized), (optimized_states[at], plain)):
            rest, _ = read(make, state=state, **options)
            assert compare_all(expected[at:], rest) is None, f"after {at}: {state['state']}, read {options}"


def test_a_pushed_filter_and_projection_reach_the_source(folder):
    plan = optimize(CASES["filter on a partition"](folder).node)
    (source,) = [node for node in walk(plan) if isinstance(node, readers.ReadParquet)]
    assert source.columns == ("b", "a")
    assert source.predicate is not None
    assert {type(node) for node in walk(plan)} == {readers.ReadParquet, ops.Prefetch}


def test_a_restored_block_computes_only_what_is_due(folder):
    """Why shuffles move above maps."""
    calls: Counter[int] = Counter()

    def counted(x):
        calls[x] += 1
        return x

    def make():
        return ps.range(100).take(100).map(counted).shuffle(50)

    _, states = read(make, threads=1)
    calls.clear()
    rest, _ = read(make, state=states[45], threads=1)
    assert calls == Counter(rest)
    assert len(rest) == 55
