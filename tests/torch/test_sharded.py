"""Checkpoints of torch.distributed carry the data's state: torchrun restarts what was killed, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.errors import StateMismatchError
from penstock.torch import DataLoader, RankStates, tensors
from tests.torch.sharded_program import BATCH, EPOCHS, SAVE_EVERY

RANKS, ROWS = 2, 54
STEPS = EPOCHS * -(-ROWS // (RANKS * BATCH))
DIES_AT = 7


def launch(folder, dies_at):
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(RANKS), "-m", "tests.torch.sharded_program", str(folder), str(dies_at)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said


def curve(folder, rank):
    """What the rank has computed at each step; a step that was made again counts as it was the last time."""
    lines = map(json.loads, (folder / f"seen-{rank}.jsonl").read_text().splitlines())
    return {step: rest for step, *rest in lines}


@pytest.mark.timeout(300)
def test_a_rank_is_killed_and_torchrun_s_restart_from_a_sharded_checkpoint_ends_as_the_undisturbed_run(tmp_path):
    launch(tmp_path, DIES_AT)
    again = (tmp_path / "killed" / "seen-1.jsonl").read_text().splitlines()
    assert len(again) == STEPS + DIES_AT % SAVE_EVERY, "it died, and began again at its last checkpoint"
    for rank in range(RANKS):
        expected = curve(tmp_path / "whole", rank)
        assert sorted(expected) == list(range(1, STEPS + 1)), "ranks take equal steps"
        assert curve(tmp_path / "killed", rank) == expected
        weights = [(tmp_path / name / f"weights-{rank}.json").read_text() for name in ("whole", "killed")]
        assert weights[0] == weights[1]


def test_states_of_other_numbers_of_ranks_go_on_where_a_service_can_deal_and_are_refused_where_a_sampler_cannot():
    with ps.LocalService(workers=1) as service:
        ranks = [
            tensors(
                ps.range(40).batch(4).distribute(service, job="dealt", ranks=ps.Ranks(2, rank), order="deterministic")
            )
            for rank in range(2)
        ]
        iterators = [iter(loader) for loader in ranks]
        seen = [int(x) for _ in range(2) for iterator in iterators for x in next(iterator)]
        saved = {"ranks": json.dumps([loader.state_dict() for loader in ranks])}
        for loader in ranks:
            loader.close()
        alone = tensors(ps.range(40).batch(4).distribute(service, job="dealt", order="deterministic"))
        RankStates(alone).load_state_dict(saved)
        seen += [int(x) for batch in alone for x in batch]
        alone.close()
    assert sorted(seen) == list(range(40))
    with pytest.raises(StateMismatchError, match=r"saved by 2 ranks, and there are 1: .* load it on as many ranks"):
        RankStates(DataLoader(range(4))).load_state_dict(saved)
    with pytest.raises(StateMismatchError, match="not the states of ranks"):
        RankStates(DataLoader(range(4))).load_state_dict({})
