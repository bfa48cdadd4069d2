"""Lightning: two ranks of DDP on gloo, sampler injection, read-ahead, sanity check, `overfit_batches`, Fabric."""

from __future__ import annotations

import pytest

from tests.trainers.launching import run_ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the two ranks say; the first also has what runs on one."""
    return run_ranks("tests.trainers.lightning_program", tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("kind", ["moved", "served"])
def test_a_run_resumed_in_mid_epoch_on_two_ranks_ends_as_the_undisturbed_one(told, kind):
    for rank in told:
        whole, resumed = rank[kind]["whole"], rank[kind]["resumed"]
        assert len(whole["seen"]) == whole["steps"] == resumed["steps"] == 24
        assert resumed["seen"] == whole["seen"][5:], "each rank went on with its own data"
        assert resumed["weights"] == whole["weights"]


def test_the_class_of_a_loader_is_kept_with_the_sampler_that_lightning_injects(told):
    for rank in told:
        for run in ("whole", "resumed"):
            assert rank["moved"][run]["class"] == "penstock.torch.loader.DataLoader"
            assert rank["moved"][run]["sampler"]


def test_ranks_that_a_service_deals_to_see_every_row_once(told):
    seen = [row for rank in told for batch in rank["served"]["whole"]["seen"][:12] for row in batch]
    assert sorted(seen) == list(range(96))


def test_the_batch_that_lightning_reads_ahead_is_not_counted(told):
    whole, resumed = told[0]["unsized"]["whole"], told[0]["unsized"]["resumed"]
    assert resumed["seen"] == whole["seen"][5:] and resumed["weights"] == whole["weights"]
    assert whole["validated"] > 0


def test_overfitting_sees_the_same_batches_in_every_epoch(told):
    first, second, *again = told[0]["overfit"]["seen"]
    assert again == [first, second] and first != second


def test_fabric_keeps_the_class_and_saves_the_state(told):
    fabric = told[0]["fabric"]
    assert fabric["class"] == "penstock.torch.loader"
    assert fabric["again"] == fabric["rest"] and len(fabric["rest"]) == 21
