"""Keras on its three backends: `fit` reads a loader, and a resumed run ends as one that was not interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module", params=["jax", "torch", "tensorflow"])
def told(request, tmp_path_factory):
    """What the program says on one backend."""
    folder = tmp_path_factory.mktemp(request.param)
    environment = {**os.environ, "KERAS_BACKEND": request.param, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainers.keras_program", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["backend"] == request.param
    return found


def test_fit_trains_on_the_batches_of_the_loader_in_its_order(told):
    assert told["whole"]["step"] == 36
    assert told["without dropout"]["weights"] == pytest.approx(told["by hand"], abs=1e-6)


def test_a_run_that_was_killed_in_mid_epoch_ends_as_the_undisturbed_one(told):
    assert told["resumed"]["first"] == 1, "killed in the second epoch"
    assert told["resumed"]["step"] == 36
    assert told["resumed"]["weights"] == told["whole"]["weights"]


def test_a_state_saved_after_the_last_batch_begins_the_next_epoch(told):
    assert told["resumed at end"]["first"] == 1 and told["resumed at end"]["step"] == 36
    assert told["resumed at end"]["weights"] == told["whole"]["weights"]


def test_several_steps_of_one_execution_are_counted(told):
    if told["backend"] == "torch":
        pytest.skip("there an execution is one step")
    assert told["several steps"]["step"] == 36
    assert told["several steps"]["weights"] == pytest.approx(told["whole"]["weights"], abs=1e-6)


def test_a_model_that_is_built_from_the_first_batch_loses_none(told):
    assert told["unbuilt"] == {"epoch": 1, "validated": 2}, "two epochs of fit are two of the loader"


def test_worker_processes_change_nothing(told):
    if told["backend"] != "jax":
        pytest.skip("once is enough")
    assert told["over processes"]["weights"] == told["over processes, whole"]["weights"]


def test_replicas_of_a_strategy_share_each_batch(told):
    if told["backend"] != "tensorflow":
        pytest.skip("tf.distribute is TensorFlow's")
    assert told["strategy"]["step"] == 36
