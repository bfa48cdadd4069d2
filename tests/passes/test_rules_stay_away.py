"""Where each rule must not fire: the graph comes back as it was, the same object."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.passes import canonicalize
from penstock.passes.columns import merge_columns, push_projections
from penstock.passes.filters import MAX_CONDITIONS, push_filters
from penstock.passes.fusion import fuse_batches, fuse_neighbours, insert_prefetch
from penstock.passes.no_ops import remove_no_ops
from penstock.passes.shuffles import merge_shuffles, move_shuffles
from tests.passes.golden import Identity, children, col, csv, f, g, keep, length, parquet, skip


def shared_map():
    mapped = ps.range(9).map(f)
    return mapped.shuffle(2).zip(mapped.map(g).batch(2))


def shared_source():
    source = parquet()
    return source.filter(col("a") > 1).zip(source)


def shared_select():
    selected = parquet().select("a", "b")
    return selected.filter(col("a") > 1).zip(selected)


def many_conditions():
    rows = parquet()
    for number in range(MAX_CONDITIONS + 1):
        rows = rows.filter(col("a") != number)
    return ps.Dataset(push_filters(rows.node))


STAYS = {
    # canonical form
    "take, skip and repeat that count": (canonicalize, ps.range(9).take(0).skip(1).repeat(0).repeat(-1).repeat(2)),
    "take above a map above a take": (canonicalize, ps.range(9).take(4).map(f).take(3)),
    "rename of one of two": (canonicalize, csv().rename({"a": "a", "b": "c"})),
    # no-ops
    "map of something": (remove_no_ops, ps.range(9).map(f)),
    "identity that may skip": (remove_no_ops, ps.range(9).map(lambda x: x, on_error=skip)),
    "identity of lists": (remove_no_ops, ps.range(9).map(lambda x: x, batch_size=3)),
    "identity with rng": (remove_no_ops, ps.range(9).map(lambda x, rng: x)),
    "identity of a class": (remove_no_ops, ps.range(9).map(Identity)),
    "prefetches of given sizes": (remove_no_ops, csv().prefetch(2).prefetch().prefetch(3)),
    "rebatch to the same size": (remove_no_ops, ps.range(9).batch(3).rebatch(3)),
    # shuffles
    "shuffles around a filter": (merge_shuffles, csv().shuffle(2).filter(keep).shuffle(3)),
    "shuffles around a filter on columns": (merge_shuffles, csv().shuffle(2).filter(col("a") > 1).shuffle(3)),
    "shuffles around a map that skips": (merge_shuffles, csv().shuffle(2).map(f, on_error=skip).shuffle(3)),
    "shuffles around a map of lists": (merge_shuffles, csv().shuffle(2).map(f, batch_size=2).shuffle(3)),
    "shuffles around a prefetch": (merge_shuffles, csv().shuffle(2).prefetch().shuffle(3)),
    "shuffles around a batch": (merge_shuffles, csv().shuffle(2).batch(2).shuffle(3)),
    "shuffles around a take": (merge_shuffles, csv().shuffle(2).take(5).shuffle(3)),
    "shuffle after a filter": (move_shuffles, ps.range(9).filter(keep).shuffle(2)),
    "shuffle after flat_map": (move_shuffles, ps.range(9).flat_map(children).shuffle(2)),
    "shuffle after a map that skips": (move_shuffles, ps.range(9).map(f, on_error=skip).shuffle(2)),
    "shuffle after a map of lists": (move_shuffles, ps.range(9).map(f, batch_size=3).shuffle(2)),
    "shuffle after a batch": (move_shuffles, ps.range(9).map(f).batch(2).shuffle(2)),
    "shuffle after a select: narrow rows are smaller": (move_shuffles, csv().select("a").shuffle(2)),
    "shuffle after a map that is read elsewhere": (move_shuffles, shared_map()),
    # columns
    "select of more than there is": (merge_columns, csv().select("a").select("a", "b")),
    "select of what was dropped": (merge_columns, csv().drop("a").select("a")),
    "select that reorders": (merge_columns, csv(columns=["a", "b"]).select("b", "a")),
    "select after a function": (merge_columns, csv(columns=["a"]).filter(keep).select("a")),
    "select after a cache": (merge_columns, csv(columns=["a"]).cache().select("a")),
    "select of columns beside masks": (merge_columns, parquet(columns=["a"], nulls="mask").select("a")),
    "drop of unknown columns": (merge_columns, csv().drop("a")),
    "drop of all": (merge_columns, csv(columns=["a"]).drop("a")),
    "drop of what is not there": (merge_columns, csv(columns=["a", "b"]).drop("c")),
    "select after a rename onto a taken name": (merge_columns, csv(columns=["a", "b"]).rename({"a": "b"}).select("b")),
    # filters
    "function filter": (push_filters, parquet().filter(keep)),
    "filter above a shuffle: other blocks": (push_filters, parquet().shuffle(4).filter(col("a") > 1)),
    "filter above take": (push_filters, parquet().take(4).filter(col("a") > 1)),
    "filter above skip": (push_filters, parquet().skip(4).filter(col("a") > 1)),
    "filter above repeat": (push_filters, parquet().repeat(2).filter(col("a") > 1)),
    "filter above a map": (push_filters, parquet().map(f).filter(col("a") > 1)),
    "filter above a function filter": (push_filters, parquet().filter(keep).filter(col("a") > 1)),
    "filter above a cache": (push_filters, parquet().cache().filter(col("a") > 1)),
    "filter that may skip": (push_filters, parquet().filter(col("a") > 1, on_error=skip)),
    "filter of batches of columns": (push_filters, parquet(batch=4).filter(col("a") > 1)),
    "filter where nulls are masked": (push_filters, parquet(nulls="mask").filter(col("a") > 1)),
    "filter where nulls are filled": (push_filters, parquet(nulls=0).filter(col("a") < 5)),
    "filter where nulls are filled by an array's value": (
        push_filters,
        parquet(nulls=np.float32(0)).filter(col("a") < 5),
    ),
    "filter of rows of which bad ones are left out": (push_filters, parquet(on_error="skip").filter(col("a") > 1)),
    "filter on a column that is not read": (push_filters, parquet(columns=["b"]).filter(col("a") > 1)),
    "filter on a column that is not selected": (push_filters, parquet().select("b").filter(col("a") > 1)),
    "filter on a dropped column": (push_filters, parquet().drop("a").filter(col("a") > 1)),
    "filter on the old name": (push_filters, parquet().rename({"a": "x"}).filter(col("a") > 1)),
    "filter on a name that may be taken": (push_filters, parquet().rename({"a": "x"}).filter(col("x") > 1)),
    "filter on a name that is taken": (
        push_filters,
        parquet(columns=["a", "x"]).rename({"a": "x"}).filter(col("x") > 1),
    ),
    "filter of a source without predicates": (push_filters, csv().filter(col("a") > 1)),
    "filter of a source that is read elsewhere": (push_filters, shared_source()),
    "filter through a select that is read elsewhere": (push_filters, shared_select()),
    "very many conditions": (push_filters, many_conditions()),
    # projections
    "no select": (push_projections, parquet().filter(col("a") > 1).shuffle(3)),
    "select after a map": (push_projections, parquet().map(f).select("a")),
    "select after a function filter": (push_projections, parquet().filter(keep).select("a")),
    "select after a cache that others read": (push_projections, parquet().cache().select("a")),
    "select after unbatch: the shortest column counts": (push_projections, parquet(batch=4).unbatch().select("a")),
    "select after bucket_by_length": (
        push_projections,
        parquet().bucket_by_length(length, boundaries=[2], batch_size=2).select("a"),
    ),
    "select of rows of a mix by size": (push_projections, ps.mix([parquet(), csv()], unit=length).select("a")),
    "select in one of two branches": (push_projections, (lambda rows: rows.select("a").zip(rows))(parquet())),
    "select of a column that is not read": (push_projections, parquet(columns=["b"]).select("a")),
    "select of a mask": (push_projections, parquet(nulls="mask").select("a", "a__mask")),
    "select of rows of which bad ones are left out": (push_projections, csv(on_error="skip").select("a")),
    "select of rows of which bad groups are left out": (push_projections, parquet(on_error="skip").select("a")),
    "select through a name that may be taken": (push_projections, parquet().rename({"a": "x"}).select("x")),
    "select of a source that reads all": (push_projections, ps.read_jsonl("t.jsonl").select("a")),
    # fusion
    "map of lists": (fuse_neighbours, ps.range(9).map(f, batch_size=2).map(g, batch_size=2)),
    "one operator": (fuse_neighbours, ps.range(9).map(f).batch(2).map(g)),
    "neighbours of a flat_map": (fuse_neighbours, ps.range(9).map(f).flat_map(children).map(g)),
    "map that is read twice": (fuse_neighbours, (lambda rows: rows.map(f).zip(rows.map(g)))(ps.range(9).map(f))),
    "batch of a map that may skip": (fuse_batches, ps.range(9).map(f, on_error=skip).batch(2)),
    "batch of a map of lists": (fuse_batches, ps.range(9).map(f, batch_size=2).batch(2)),
    "batch of a filter": (fuse_batches, ps.range(9).map(f).filter(keep).batch(2)),
    "batch of columns": (fuse_batches, csv().select("a").batch(2)),
    "padded batch": (fuse_batches, ps.range(9).map(f).padded_batch(2)),
    "ragged batch": (fuse_batches, ps.range(9).map(f).ragged_batch(2)),
    "batch of a map that is read twice": (fuse_batches, (lambda rows: rows.batch(2).zip(rows))(ps.range(9).map(f))),
    # prefetch
    "prefetch at the root already": (insert_prefetch, ps.range(9).map(f).prefetch(3)),
    "prefetch below what only counts": (insert_prefetch, ps.range(9).map(f).prefetch().repeat(2).take(3).enumerate()),
    "numbers in memory": (insert_prefetch, ps.range(9).take(3)),
}


@pytest.mark.parametrize("name", STAYS)
def test_rule_stays_away(name):
    rule, before = STAYS[name]
    assert rule(before.node) is before.node
