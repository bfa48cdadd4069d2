"""Features as tensors, over the same memory; and a small DLRM whose losses are the same wherever batches are made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.torch import dense_tensor, keyed_jagged, keyed_tensors
from tests.torch.dlrm import train
from tests.warehouse.session_kit import make_session, make_table

ROOT = Path(__file__).parents[2]
SPARSE = ps.KeyedRagged(("a", "b"), np.array([7, 8, 9]), np.array([0, 2, 2, 2, 3]), np.ones(3, np.float32))


def test_tensors_lie_over_the_column_s_own_memory() -> None:
    dense = ps.KeyedDense(("x", "y"), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert dense_tensor(dense).tolist() == [[0, 3], [1, 4], [2, 5]]
    dense_tensor(dense)[0, 1] = 9
    assert dense["y"].tolist() == [9, 4, 5]
    plain = keyed_tensors(SPARSE)
    assert plain.values.data_ptr() == SPARSE.values.ctypes.data
    assert plain.offsets.data_ptr() == SPARSE.offsets.ctypes.data
    values, offsets = plain.feature("a")
    assert values.tolist() == [7, 8] and offsets.tolist() == [0, 2]
    bag = torch.nn.EmbeddingBag(10, 3, mode="sum")
    assert torch.equal(bag(values, offsets)[0], bag.weight[7] + bag.weight[8]) and not bag(values, offsets)[1].any()


def test_a_keyed_jagged_tensor_lies_over_the_column_s_own_memory() -> None:
    pytest.importorskip("torchrec", reason="installed by `make torchrec`")
    jagged = keyed_jagged(SPARSE)
    assert jagged.keys() == ["a", "b"] and jagged.stride() == 2
    assert jagged.values().data_ptr() == SPARSE.values.ctypes.data
    assert jagged.offsets().data_ptr() == SPARSE.offsets.ctypes.data
    assert jagged.weights().data_ptr() == SPARSE.weights.ctypes.data
    assert jagged["a"].lengths().tolist() == [2, 0] and jagged["b"].values().tolist() == [9]


def run_program(table: ps.Table, folder: Path, *, die_at: int) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "tests.torch.dlrm", table.url, str(folder), "1", str(die_at)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_dlrm_has_the_same_losses_here_on_a_service_and_through_kill_and_resume(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    folders = [tmp_path / name for name in ("here", "service", "killed")]
    for folder in folders:
        folder.mkdir()
    dataset = make_session(table).dataset()
    here = train(dataset.distribute(), folders[0])
    assert len(here) == 9 and here[-1] != here[0]
    with dataset.distribute(1, order="deterministic") as loader:
        assert train(loader, folders[1]) == here
    killed = run_program(table, folders[2], die_at=4)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_program(table, folders[2], die_at=0)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[-1]) == here
