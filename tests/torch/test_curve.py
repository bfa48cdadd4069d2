"""A script moved by its import: the loss curve is the same with 1, 2 and 4 workers, however often it is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.torch.curve_program import BATCH, EPOCHS, IMAGES

STEPS = IMAGES // BATCH


def run(folder, *arguments):
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.curve_program", str(folder), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2])


def test_the_curve_goes_on_after_kills_in_the_first_and_in_the_last_epoch(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run(tmp_path / "whole", 1)
    assert whole.returncode == 0, whole.stderr
    for workers, kill_after in ((2, 3), (4, 2 * STEPS + 3)):  # between two checkpoints: a step is made again
        assert run(tmp_path / "killed", workers, kill_after).returncode == -signal.SIGKILL
    last = run(tmp_path / "killed", 2)
    assert last.returncode == 0, last.stderr
    curve = json.loads((tmp_path / "whole" / "losses.json").read_text())
    assert len(curve) == EPOCHS * STEPS and curve[-1] < curve[0]
    assert json.loads((tmp_path / "killed" / "losses.json").read_text()) == curve
