"""JAX as two processes of two simulated devices: sharded batches, and a run resumed through Orbax."""

from __future__ import annotations

import pytest

from tests.trainers.launching import run_ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_ranks("tests.trainers.jax_program", tmp_path_factory.mktemp("jax"))


def test_shards_are_the_rows_of_the_unsharded_batch(told):
    for step in range(12):
        unsharded = told[0]["plain"][step] + told[1]["plain"][step]
        sharded = [rows for process in told for rows in process["shards"][step]]
        assert len(sharded) == 4, "two devices in each of two processes"
        assert [row for rows in sharded for row in rows] == unsharded


def test_a_run_resumed_through_orbax_ends_as_the_undisturbed_one(told):
    for process in told:
        assert len(process["whole"]) == 12
        assert process["resumed"] == process["whole"]
        assert process["weights resumed"] == process["weights"]
