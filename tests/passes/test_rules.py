"""Each rule by itself: (pass, pipeline, plan after it)."""

from __future__ import annotations

from textwrap import dedent

import pytest

import penstock as ps
from penstock.graph.explain import explain_text
from penstock.passes import canonicalize, optimize
from penstock.passes.columns import merge_columns, push_projections
from penstock.passes.filters import push_filters
from penstock.passes.fusion import fuse_batches, fuse_neighbours, insert_prefetch
from penstock.passes.no_ops import remove_no_ops
from penstock.passes.shuffles import merge_shuffles, move_shuffles
from tests.passes.golden import col, csv, f, g, keep, noisy, parquet, skip


def passing_rows_on(rows):
    return rows.shuffle(4).take(9).skip(1).repeat(2).prefetch().with_length(16).with_epoch(5)


FIRES = {
    # canonical form
    "take of all": (canonicalize, ps.range(9).take(-1).map(f), "range(0, 9)\nmap(f)"),
    "skip of none": (canonicalize, ps.range(9).skip(0).map(f), "range(0, 9)\nmap(f)"),
    "one repetition": (canonicalize, ps.range(9).repeat(1).map(f), "range(0, 9)\nmap(f)"),
    "rename to the same names": (canonicalize, csv().rename({"a": "a", "b": "b"}), "read_csv('t.csv')"),
    "take of take": (canonicalize, ps.range(9).take(5).take(-1).take(7).take(6), "range(0, 9)\ntake(5)"),
    "skip of skip": (canonicalize, ps.range(9).skip(2).skip(0).skip(3), "range(0, 9)\nskip(5)"),
    # no-ops
    "identity": (remove_no_ops, ps.range(9).map(lambda x: x).map(f, threads=2), "range(0, 9)\nmap(f, threads=2)"),
    "prefetch of prefetch": (remove_no_ops, csv().prefetch().prefetch().prefetch(), "read_csv('t.csv')\nprefetch()"),
    # shuffles
    "shuffle of shuffle": (
        merge_shuffles,
        csv().shuffle(7, seed=1).shuffle(5, seed=2, reshuffle=False),
        "read_csv('t.csv')\nshuffle(size=7, seed=2, reshuffle=False)",
    ),
    "shuffle of everything is the largest": (
        merge_shuffles,
        ps.range(9).shuffle().shuffle(5, seed=2),
        "range(0, 9)\nshuffle(seed=2)",
    ),
    "shuffles with one-to-one operators between": (
        merge_shuffles,
        csv().map(f).shuffle(3).map(noisy).select("a").shuffle(5).rename({"a": "b"}).shuffle(4),
        """
        read_csv('t.csv')
        map(f)
        map(noisy, rng)
        select('a')
        rename(('a', 'b'))
        shuffle(size=5)
        """,
    ),
    "shuffle after maps": (
        move_shuffles,
        csv().filter(keep).map(f).map(noisy).shuffle(5),
        "read_csv('t.csv')\nfilter(keep)\nshuffle(size=5)\nmap(f)\nmap(noisy, rng)",
    ),
    "shuffle after a map and a select": (
        move_shuffles,
        csv().drop("c").map(f).select("a").shuffle(5),
        "read_csv('t.csv')\ndrop('c')\nshuffle(size=5)\nmap(f)\nselect('a')",
    ),
    "shuffle in a branch": (
        move_shuffles,
        ps.range(3).map(f).shuffle(2).zip(ps.range(3)),
        """
        ┌ range(0, 3)
        │ shuffle(size=2)
        │ map(f)
        ├ range(0, 3)
        zip()
        """,
    ),
    # columns
    "select of select": (
        merge_columns,
        csv().select("a", "b", "c").select("c", "a"),
        "read_csv('t.csv')\nselect(('c', 'a'))",
    ),
    "select of drop": (merge_columns, csv().drop("c").select("a"), "read_csv('t.csv')\nselect('a')"),
    "drop of known columns": (
        merge_columns,
        csv().select("a", "b", "c").drop("b"),
        "read_csv('t.csv')\nselect(('a', 'c'))",
    ),
    "select of what is there": (
        merge_columns,
        parquet(columns=["b", "a"]).filter(col("a") > 1).shuffle(4).batch(2).select("b", "a"),
        "read_parquet('t.parquet', columns=('b', 'a'))\nfilter(col('a') > 1)\nshuffle(size=4)\nbatch(2)",
    ),
    "select after a rename of known columns": (
        merge_columns,
        csv(columns=["a", "b"]).rename({"a": "x"}).select("x", "b"),
        "read_csv('t.csv', columns=('a', 'b'))\nrename(('a', 'x'))",
    ),
    # filters
    "filter above the source": (
        push_filters,
        parquet().filter(col("a") > 3),
        "read_parquet('t.parquet', predicate=col('a') > 3)",
    ),
    "filters after each other": (
        push_filters,
        parquet(filter=col("a") > 3).filter("b").filter(col("c").isin([1, 2]) | ~col("d").is_null()),
        "read_parquet('t.parquet', predicate=(col('a') > 3) & (col('b') == True) & "
        "(col('c').isin([1, 2]) | ~col('d').is_null()))",
    ),
    "filter through column operators": (
        push_filters,
        ps.read_arrow("t.arrow").prefetch(3).drop("c").select("a", "b").filter(col("a") == 1).drop("a"),
        "read_arrow('t.arrow', predicate=col('a') == 1)\nprefetch(size=3)\ndrop('c')\nselect(('a', 'b'))\ndrop('a')",
    ),
    "filter through a rename": (
        push_filters,
        parquet(columns=["a", "b"]).rename({"a": "x"}).filter((col("x") > 1) & (col("b") < 5)),
        "read_parquet('t.parquet', columns=('a', 'b'), predicate=(col('a') > 1) & (col('b') < 5))\nrename(('a', 'x'))",
    ),
    "filter through an exchange of names": (
        push_filters,
        parquet().rename({"a": "b", "b": "a"}).filter(col("a") > 1),
        "read_parquet('t.parquet', predicate=col('b') > 1)\nrename((('a', 'b'), ('b', 'a')))",
    ),
    "filter on a column that a rename leaves alone": (
        push_filters,
        parquet().rename({"a": "x"}).filter(col("b") > 1),
        "read_parquet('t.parquet', predicate=col('b') > 1)\nrename(('a', 'x'))",
    ),
    "filter where nulls stay nulls": (
        push_filters,
        parquet(nulls=None).filter(col("a") > 3),
        "read_parquet('t.parquet', predicate=col('a') > 3, nulls=None)",
    ),
    # projections
    "select above the source": (
        push_projections,
        csv().select("b", "a"),
        "read_csv('t.csv', columns=('b', 'a'))\nselect(('b', 'a'))",
    ),
    "select of a part": (
        push_projections,
        parquet(columns=["a", "b", "c"]).select("c"),
        "read_parquet('t.parquet', columns='c')\nselect('c')",
    ),
    "select through what passes rows on": (
        push_projections,
        passing_rows_on(csv().filter(col("c") > 1)).batch(2).select("a"),
        """
        read_csv('t.csv', columns=('a', 'c'))
        filter(col('c') > 1)
        shuffle(size=4)
        take(9)
        skip(1)
        repeat(count=2)
        prefetch()
        with_length(16)
        with_epoch(5)
        batch(2)
        select('a')
        """,
    ),
    "select of batches of columns": (
        push_projections,
        parquet(batch=8).rebatch(4).select("a"),
        "read_parquet('t.parquet', columns='a', batch=8)\nrebatch(4)\nselect('a')",
    ),
    "select through a rename": (
        push_projections,
        parquet(columns=["a", "b", "c"]).rename({"a": "x"}).select("x"),
        "read_parquet('t.parquet', columns='a')\nrename(('a', 'x'))\nselect('x')",
    ),
    "select through a drop": (
        push_projections,
        csv().drop("c").shuffle(3).select("a"),
        "read_csv('t.csv', columns=('a', 'c'))\ndrop('c')\nshuffle(size=3)\nselect('a')",
    ),
    "select beside masks": (
        push_projections,
        parquet(nulls="mask").select("a"),
        "read_parquet('t.parquet', columns='a', nulls='mask')\nselect('a')",
    ),
    # fusion
    "map, map, filter": (
        fuse_neighbours,
        ps.range(9).map(f).map(noisy).filter(keep),
        "range(0, 9)\nfused: map(f) + map(noisy, rng) + filter(keep)",
    ),
    "column operators go with anybody": (
        fuse_neighbours,
        csv().select("a").map(f, threads=2).rename({"a": "b"}).filter(keep, threads=2).drop("b"),
        "read_csv('t.csv')\n"
        "fused: select('a') + map(f, threads=2) + rename(('a', 'b')) + filter(keep, threads=2) + drop('b')",
    ),
    "steps keep their policies": (
        fuse_neighbours,
        ps.range(9).map(f, on_error=skip).filter(keep),
        "range(0, 9)\nfused: map(f, on_error=skip(budget=3)) + filter(keep)",
    ),
    "different threads": (
        fuse_neighbours,
        ps.range(9).map(f, threads=2).map(g, threads=2).map(f, threads=3).map(g),
        "range(0, 9)\nfused: map(f, threads=2) + map(g, threads=2)\nmap(f, threads=3)\nmap(g)",
    ),
    "map and batch": (fuse_batches, ps.range(9).map(f).batch(4), "range(0, 9)\nfused: map(f) + batch(4)"),
    "maps, columns and batch": (
        fuse_batches,
        ps.range(9).filter(keep).map(f).select("a").map(g).batch(4, drop_last=True),
        "range(0, 9)\nfilter(keep)\nfused: map(f) + select('a') + map(g) + batch(4, drop_last=True)",
    ),
    "the batch takes the maps of its own threads": (
        fuse_batches,
        ps.range(9).map(f, threads=2).map(g).batch(4),
        "range(0, 9)\nmap(f, threads=2)\nfused: map(g) + batch(4)",
    ),
    "two batches": (
        fuse_batches,
        ps.range(9).map(f).batch(2).map(g).batch(2),
        "range(0, 9)\nfused: map(f) + batch(2)\nfused: map(g) + batch(2)",
    ),
    # prefetch
    "prefetch at the root": (insert_prefetch, ps.range(9).batch(2), "range(0, 9)\nbatch(2)\nprefetch()"),
    "prefetch of a file": (insert_prefetch, csv(), "read_csv('t.csv')\nprefetch()"),
}


@pytest.mark.parametrize("name", FIRES)
def test_rule_fires(name):
    rule, before, after = FIRES[name]
    once = rule(before.node)
    assert explain_text(once) == dedent(after).strip()
    assert explain_text(rule(once)) == dedent(after).strip()


@pytest.mark.parametrize("name", FIRES)
def test_every_pass_leaves_a_valid_plan(name):
    optimize(FIRES[name][1].node)
