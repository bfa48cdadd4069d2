"""Where a pipeline may be cut, and why not elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.graph import ops
from penstock.graph.cutting import Cuts, cuts_of
from penstock.graph.traverse import walk
from penstock.passes.shuffles import move_shuffles


def decode(row: int) -> dict[str, Any]:
    return {"x": row}


def augment(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "r": rng.random()}


def kept(row: dict[str, Any]) -> bool:
    return bool(row["x"])


def cuts(dataset: ps.Dataset, **options: Any) -> Cuts:
    return cuts_of(move_shuffles(dataset._plan.node), **options)


def test_all_that_follows_what_orders_and_skips_may_be_cut_off() -> None:
    found = cuts(ps.range(9).shuffle(4).map(decode).map(augment).batch(3).map(decode))
    assert found.names[:3] == ("all there", "before map(decode)", "before batch")
    assert found.names[3:] == ("before map(augment)", "before map(decode) (2)")
    assert [cut.group_rows for cut in found.legal] == [0, 0, 3, 3, 3]
    assert [[each.name for each in cut.here] for cut in found.legal[:3]] == [[], ["map"], ["batch", "map"]]


def test_a_shuffle_after_a_map_does_not_hide_it() -> None:
    assert "before map(decode)" in cuts(ps.range(9).map(decode).shuffle(4).batch(3)).names


def test_elements_carry_identities_only_where_a_function_after_the_cut_draws() -> None:
    found = cuts(ps.range(9).map(augment).map(decode).batch(3))
    carrying = {cut.name: any(isinstance(each, ops.Identified) for each in walk(cut.there)) for cut in found.legal}
    assert carrying == {
        "all there": False,
        "before batch": False,
        "before map(decode)": False,
        "before map(augment)": True,
    }


def test_what_stands_after_a_cut_is_put_over_what_workers_give() -> None:
    found = cuts(ps.range(9).map(decode).batch(3))
    source = ps.range(3).node
    made = found.legal[2].over(source)
    assert [each.name for each in walk(made)] == ["range", "map", "batch"]


@pytest.mark.parametrize(
    ("dataset", "operator", "text"),
    [
        (ps.range(9).map(decode).filter(kept).batch(3), "filter(kept)", "may leave elements out"),
        (ps.range(9).map(decode, on_error="skip").batch(3), "map(decode)", "may leave elements out"),
        (ps.range(9).map(decode).batch(3).rebatch(2), "rebatch", "groups them across the batches that follow"),
        (
            ps.range(9).map(decode).bucket_by_length(len, boundaries=[4], batch_size=3),
            "bucket_by_length(len)",
            "by their key",
        ),
        (ps.range(9).map(decode).shuffle(4).flat_map(list).batch(3), "flat_map(list)", "a meaning of its own"),
        (ps.range(9).shuffle(4).map(decode).batch(3), "shuffle", "gives the elements their order"),
        (ps.range(9).map(decode).batch(3).batch(2), "batch (2)", "groups them across the batches that follow"),
    ],
)
def test_what_is_above_an_operator_with_a_state_is_refused_in_a_sentence(dataset, operator, text) -> None:
    refused = {cut.name: cut.why for cut in cuts(dataset).illegal}
    assert text in refused[f"before {operator}"], refused


def test_batches_that_are_padded_alike_on_all_ranks_are_made_where_the_round_is() -> None:
    padded = ps.range(9).map(decode).padded_batch(3)
    assert "before map(decode)" in cuts(padded).names
    found = cuts(padded, coordinated=True)
    assert found.names == ("all there",)
    assert "pads the batches of all ranks alike" in found.illegal[0].why


def test_data_is_read_here_and_computed_there_with_the_whole_pipeline_on_workers(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n')
    dataset = ps.read_jsonl(f"{tmp_path}/*.jsonl").shuffle(9, seed=1).filter(bool).map(decode).batch(3)
    last = cuts(dataset).legal[-1]
    assert (last.name, last.form, last.here) == ("read here, compute there", "read here", ())
    assert last.there is cuts(dataset).legal[0].there


def test_what_is_in_the_pipeline_itself_is_not_read_here() -> None:
    (last,) = (cut for cut in cuts(ps.range(9)).illegal if cut.form == "read here")
    assert last.name == "read here, compute there" and "there is nothing to read here" in last.why
