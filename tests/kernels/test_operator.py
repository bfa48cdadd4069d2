"""Transforms as an operator: over columns or keyed columns, fused or not, here or on a worker; and no function."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.graph import ops
from penstock.graph.codec import decode_graph, encode_graph
from penstock.graph.traverse import walk
from penstock.testing.conformance import compare_all, read_all

t = ps.transforms
KEYS = ("s1", "s2")


def batches(rows: int = 6, count: int = 4) -> ps.Dataset:
    """Return batches of columns, in memory: no function makes them."""
    rng = np.random.default_rng(7)
    items = []
    for number in range(count):
        lengths = rng.integers(0, 5, 2 * rows)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        values = rng.integers(-100, 100, offsets[-1])
        weights = rng.random(len(values)).astype(np.float32)
        presence = rng.random((2, rows)) < 0.8
        dense = np.where(presence, rng.normal(size=(2, rows)), 0).astype(np.float32)
        items.append(
            {
                "dense": ps.KeyedDense(("d1", "d2"), dense, presence),
                "scored": ps.KeyedRagged(KEYS, values, offsets, weights),
                "time": np.arange(rows) * 3600 + number,
                "file": np.full(rows, number),
                "row": np.arange(rows),
                "label": np.ones(rows, np.float32),
            }
        )
    return ps.from_items(items)


CHAIN = (
    t.FirstX("s1", out="s1x", x=2),
    t.SigridHash("s1x", out="s1h", salt=1, max_value=1000),
    t.BoxCox("d1", out="d1b", lambda1=0.5, lambda2=5.0),
    t.Clamp("d1b", out="d1c", low=0, high=3),
    t.Bucketize("d2", out="d2b", borders=(-0.5, 0.0, 0.5)),
    t.Cartesian("s1", "s2", out="pairs", limit=5),
    t.ComputeScore("s1", "s2", out="alike", mode="cosine"),
    t.GetLocalHour("time", out="hour", offset_s=3600),
)
KEYED: dict[str, Any] = {
    "within": ("dense", "scored"),
    "columns": ("time",),
    "dense": ("d1c", "alike", "d2"),
    "sparse": ("s1h", "d2b", "pairs", "hour"),
}


def test_features_of_keyed_columns_are_made_and_gathered_into_keyed_columns() -> None:
    (made,) = batches(count=1).transform_features(*CHAIN, **KEYED)
    (read,) = batches(count=1)
    assert made["dense"].keys == KEYED["dense"] and made["sparse"].keys == KEYED["sparse"]
    assert made["sparse"]["hour"].values.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.array_equal(made["dense"].present("d1c"), read["dense"].present("d1"))
    absent = ~read["dense"].present("d2")
    assert absent.any() and (made["sparse"]["d2b"].lengths == ~absent).all()  # what is null is an empty list
    first = [row[:2].tolist() for row in (read["scored"]["s1"][i] for i in range(6))]
    assert [len(made["sparse"]["s1h"][i]) for i in range(6)] == list(map(len, first))
    assert made["sparse"].weights is not None and made["sparse"].weights_of("pairs") is not None
    assert np.array_equal(made["scored"].values, read["scored"].values)  # what is read passes by


def test_fused_and_unfused_transforms_are_equal_bit_for_bit(one_worker: ps.LocalService) -> None:
    items = [{**{key: batch["scored"][key] for key in KEYS}, "time": batch["time"]} for batch in batches()]
    for item, batch in zip(items, batches()):
        item.update({key: batch["dense"][key] for key in ("d1", "d2")})
    plain = ps.from_items(items)
    together = plain.transform_features(*CHAIN)
    chained = plain
    for transform in CHAIN:
        chained = chained.transform_features(transform)
    wanted = read_all(together, optimize=False)
    for found in (
        read_all(together),
        read_all(chained),
        read_all(chained, optimize=False),
        list(chained.distribute(one_worker)),
    ):
        assert compare_all(wanted, found) is None


def test_what_nothing_is_made_of_is_not_read_and_not_computed(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"a": [[1, 2], [3]], "b": [0.5, 0.25], "c": [[4], []], "label": [1, 0]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    made = ps.read_parquet(str(tmp_path / "t.parquet"), batch=2).transform_features(
        t.SigridHash("a", out="h", max_value=10),
        t.Clamp("b", out="dead", low=0, high=1),
        t.IdListTransform("h", "c", out="also_dead"),
    )
    plan = made.select("h", "label").explain()
    assert "columns=('label', 'a')" in plan and "h = SigridHash(a)" in plan.split("as run")[-1]
    assert "dead" not in plan.split("as run")[-1]
    (batch,) = made.select("h", "label")
    assert batch["h"].lengths.tolist() == [2, 1] and batch["label"].tolist() == [1, 0]
    assert [set(batch) for batch in made.select("label")] == [{"label"}]


def test_sampling_changes_counts_and_its_trait_says_so() -> None:
    sampled = batches().transform_features(t.Sampling("file", "row", rate=0.5))
    node, kept = sampled.node, list(sampled)
    assert node.traits.may_skip and not node.traits.one_to_one
    assert not batches().transform_features(CHAIN[0], within=("scored",)).node.traits.may_skip
    rows = [(int(f), int(r)) for batch in kept for f, r in zip(batch["file"], batch["row"])]
    assert 0 < len(rows) < 24 and all(len({len(c) for c in batch.values()}) == 1 for batch in kept)
    other = batches().rebatch(5).transform_features(t.Sampling("file", "row", rate=0.5))
    assert [(int(f), int(r)) for b in other for f, r in zip(b["file"], b["row"])] == rows
    assert list(batches().transform_features(t.Sampling("file", "row", rate=0.0))) == []


def test_a_graph_of_transforms_has_no_function_and_survives_its_bytes() -> None:
    made = batches().transform_features(*CHAIN, **KEYED)
    again = decode_graph(encode_graph(made.node))
    (node,) = (each for each in walk(again) if isinstance(each, ops.TransformFeatures))
    assert node.transforms == CHAIN and node.dense == KEYED["dense"]
    assert ps.Dataset(made.node).fingerprint() == batches().transform_features(*CHAIN, **KEYED).fingerprint()
    assert made.fingerprint() != batches().transform_features(*CHAIN[1:], within=("dense", "scored")).fingerprint()


PACKAGE = """
from penstock.kernels.features import Numbers

def double(numbers, *, by=2):
    return Numbers(numbers.values * by, numbers.presence)
"""


def test_an_installed_package_adds_a_transform_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_features.py").write_text(textwrap.dedent(PACKAGE))
    info = tmp_path / "acme_features-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-features\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.transforms]\nacme.double = acme_features:double\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    triple = t.Custom("acme.double", ("time",), out="later", parameters=(("by", 3),))
    made = (
        batches(count=2).transform_features(triple, t.PositiveModulus("later", out="m", divisor=7)).select("m", "time")
    )
    with made.distribute(1) as loader:
        found = list(loader)
    assert [batch["m"].tolist() for batch in found] == [(batch["time"] * 3 % 7).tolist() for batch in found]
    unknown = batches().transform_features(t.Custom("acme.treble", ("time",), out="x"))
    with pytest.raises(ps.InvalidPipelineError, match=r"no transform 'acme.treble' is registered here; install"):
        next(iter(unknown))


def test_kernels_are_compiled_before_processes_are_forked_and_only_where_they_are_needed() -> None:
    from penstock.kernels import hashing, single_values

    def where_made(batch: Any) -> Any:
        kernels = (hashing._sigrid_hash, single_values._bucketize)
        return [os.getpid(), os.getppid(), *(kernel.made_in for kernel in kernels)]

    made = batches(count=1).transform_features(t.SigridHash("row", out="h", max_value=1000)).map(where_made)
    with made.distribute(1) as loader:
        ((runner, nursery, hashed, bucketized),) = list(loader)
    assert hashed == nursery and hashed != runner and bucketized is None
    without = batches(count=1).map(lambda batch: "penstock.kernels.compiling" in __import__("sys").modules)
    with without.distribute(1) as loader:
        assert list(loader) == [False]


@pytest.mark.parametrize(
    ("transforms", "options", "message"),
    [
        ([t.SigridHash("d1", out="x", max_value=9)], {"within": ("dense",)}, r"x = SigridHash\(d1\): it takes ids"),
        ([t.FirstX("d1", out="x", x=1)], {"within": ("dense",)}, "it takes lists, and not one number a row"),
        ([t.Clamp("zz", out="x", low=0, high=1)], {"within": ("dense",)}, "there is no feature 'zz' in dense"),
        ([t.Clamp("nope", out="x", low=0, high=1)], {}, "an element has no column 'nope'"),
        ([t.Logit("dense", out="x")], {}, "column 'dense': a feature is one number a row"),
        ([t.Enumerate("s1", out="x")], {"within": ("scored",), "dense": ("x",)}, "'x' has lists; name it in sparse="),
        ([t.Logit("d1", out="x")], {"within": ("dense",), "sparse": ("x",)}, "not whole; Bucketize it"),
    ],
)
def test_features_that_do_not_fit_are_named(transforms: Any, options: Any, message: str) -> None:
    with pytest.raises(ps.InvalidPipelineError, match=message):
        list(batches().transform_features(*transforms, **options))


def test_offsets_that_lead_out_of_their_values_are_refused_before_a_kernel_reads_them() -> None:
    wild = ps.KeyedRagged(("a",), np.arange(3), np.array([0, 10**9, 3]))
    made = ps.from_items([{"s": wild}]).transform_features(t.FirstX("a", out="x", x=2), within=("s",))
    with pytest.raises(ps.InvalidPipelineError, match="offsets of a ragged column rise from 0 to 3"):
        list(made)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: t.Bucketize("a", out="b", borders=()), "must be one finite number"),
        (lambda: t.Bucketize("a", out="b", borders=(2, 1)), "must not fall"),
        (lambda: t.Bucketize("a", out="b", borders=(1, 1, 1)), "stands three times"),
        (lambda: t.Clamp("a", out="b", low=2, high=1), "low=2 must not be more than high=1"),
        (lambda: t.SigridHash("a", out="b", max_value=0), "max_value=0 must be a whole number from 1"),
        (lambda: t.Cartesian("a", "b", out="c", limit=0), "limit=0 must be"),
        (lambda: t.ComputeScore("a", "b", out="c", mode="x"), "mode"),  # type: ignore[arg-type]
        (lambda: t.MapId("a", out="b"), "either mapping or table"),
        (lambda: t.NGram(("a", "b"), out="c"), "a tuple of one list"),
        (lambda: t.Onehot("a", out="b", low=1, high=1, count=2), "must be less than"),
        (lambda: t.Sampling("f", "r", rate=1.5), "from 0 to 1"),
        (lambda: batches().transform_features(CHAIN[0], CHAIN[0]), "'s1x' is made twice"),
        (lambda: batches().transform_features(len), "takes records of ps.transforms"),  # type: ignore[arg-type]
    ],
)
def test_a_record_that_means_nothing_is_refused_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(ps.InvalidArgumentError, match=message):
        make()
