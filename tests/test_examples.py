"""The examples run, each in a process of its own, and say what they promise."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "accelerate_resume.py": ["moved: resumed after step 7", "pipeline: resumed after step 7"],
    "distribute_local.py": [
        "threads: 2000 documents",
        "2 processes: 2000 documents",
        "the same tokens in both",
    ],
    "jax_mesh.py": ["lies on 4 devices, 8 rows on each", "resumed: the same losses"],
    "keras_resume.py": ["died after step 13", "bit for bit"],
    "language_model.py": ["both ranks killed after step 9", "bit for bit"],
    "length_buckets.py": ["both ranks had batches of one padded length", "4000 sentences read once each"],
    "lightning_resume.py": ["resumed after step 10 of 40", "bit for bit"],
    "offload_keras.py": ["the same weights with offload=, bit for bit"],
    "offload_lightning.py": ["the same weights with offload=, bit for bit"],
    "offload_torch.py": ["outputs/s", "500 losses are the same, bit for bit"],
    "pack_text.py": ["rows of 256 tokens, 99."],
    "parquet_features.py": ["49664 rows of day 2"],
    "resume_after_kill.py": ["killed by signal 9 after step 17", "1000 elements seen once each"],
    "resume_on_service.py": ["2 ranks ended with [-9, -9] after 30 steps", "2400 elements seen once each"],
    "sweep_shared.py": ["best rate 0.", "480 batches read, 120 made"],
    "torch_ddp_resume.py": ["rank 1 ended with -9 after step 17", "bit for bit"],
    "torch_evaluation.py": ["2 ranks took 8 steps each and saw 1000 elements once each"],
    "torch_moved.py": ["the same losses with 1 worker, and with 2"],
    "train_images.py": ["epoch 1: ", "% right"],
}
NEEDS = {
    "language_model.py": ("torch",),
    "offload_torch.py": ("torch",),
    "torch_ddp_resume.py": ("torch",),
    "torch_evaluation.py": ("torch",),
    "torch_moved.py": ("torch",),
    "train_images.py": ("torch", "simplejpeg", "cv2"),
}
IN_TRAINERS = frozenset(
    {
        "accelerate_resume.py",
        "jax_mesh.py",
        "keras_resume.py",
        "lightning_resume.py",
        "offload_keras.py",
        "offload_lightning.py",
    }
)
"""What needs frameworks: `make test-trainers` runs them."""


RUN_ON_CLUSTERS = {"ray_train.py"}  # by make test-clusters


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS) | RUN_ON_CLUSTERS


@pytest.mark.parametrize("name", sorted(set(SAYS) - IN_TRAINERS))
def test_example_runs(name, tmp_path):
    missing = [module for module in NEEDS.get(name, ()) if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    run_example(name, tmp_path)


def run_example(name, tmp_path):
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    assert [text for text in SAYS[name] if text not in ran.stdout] == []
