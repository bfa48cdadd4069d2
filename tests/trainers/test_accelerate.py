"""Accelerate on two ranks: the loader is kept, nothing is dealt twice, checkpoints carry the data's state."""

from __future__ import annotations

import accelerate
import pytest

import penstock as ps
from penstock.torch import DataLoader
from tests.trainers.launching import run_ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_ranks("tests.trainers.accelerate_program", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize("kind", ["moved", "served"])
def test_a_run_resumed_in_mid_epoch_ends_as_the_undisturbed_one(told, kind):
    for rank in told:
        whole, resumed = rank[kind]["whole"], rank[kind]["resumed"]
        assert len(whole["seen"]) == 24
        assert resumed["seen"] == whole["seen"][5:], "skip_first_batches(5) skipped nothing of what the state had"
        assert resumed["weights"] == whole["weights"]


@pytest.mark.parametrize("kind", ["moved", "served"])
def test_ranks_see_every_row_of_an_epoch_once(told, kind):
    seen = [row for rank in told for batch in rank[kind]["whole"]["seen"][:12] for row in batch]
    assert sorted(seen) == list(range(96))


def test_prepare_keeps_the_loader_and_places_its_batches(told):
    for rank in told:
        assert rank["moved"]["whole"]["kept"] and rank["moved"]["whole"]["class"] == "penstock.torch.loader"
        assert rank["served"]["whole"]["kept"] and rank["served"]["whole"]["device"] == "cpu"


def test_the_last_batch_of_an_epoch_is_known_as_such(told):
    assert all(rank["moved"]["whole"]["ends"] == [11, 23] for rank in told)


def test_gather_for_metrics_drops_what_fills_up_the_last_step(told):
    assert all(rank["metrics"] == list(range(11)) for rank in told)


def test_a_loader_is_not_made_a_plain_one_without_a_word():
    accelerator, loader = accelerate.Accelerator(cpu=True), DataLoader(range(4), batch_size=2)
    with pytest.raises(ps.InvalidArgumentError, match=r"penstock.accelerate.prepare\(accelerator, loader\)"):
        accelerator.prepare(loader)
    made = ps.accelerate.prepare(accelerator, loader)
    assert accelerator.prepare(made) is made and made.loader is loader
    assert not hasattr(loader, "no_such_thing")
