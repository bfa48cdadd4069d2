"""A model sharded over ranks (FSDP) whose checkpoints (DCP) carry the data's state; a rank may die once.

torchrun --nproc-per-node 2 --max-restarts 1 -m tests.torch.sharded_program FOLDER DIES_AT_STEP

Once it has come to its end, it is run again without any of that, for comparison.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data.distributed import DistributedSampler

from penstock.torch import DataLoader, RankStates

EPOCHS, BATCH, SAVE_EVERY = 2, 5, 3


class Noisy(torch.utils.data.Dataset):
    """Points with noise from torch's global generator."""

    def __len__(self):
        return 53  # uneven: the sampler fills up, so that ranks take equal steps

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 4) * index / 53
        return x, x.sum() + 0.1 * torch.randn(())


class Training:
    """Model and optimizer as one part of a checkpoint, as torch's own examples have it."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Counted:
    """How far the run has come."""

    def __init__(self):
        self.step = self.epoch = 0

    def state_dict(self):
        return {"step": self.step, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.step, self.epoch = state["step"], state["epoch"]


def latest(folder):
    return max(folder.glob("step-*/.metadata"), key=lambda path: int(path.parent.name[5:]), default=None)


def train(folder, dies_at=None):
    """Train from the newest checkpoint in the folder, or from the beginning."""
    folder.mkdir(exist_ok=True)
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(Noisy(), seed=5)
    loader = DataLoader(Noisy(), batch_size=BATCH, sampler=sampler, seed_samples=True)
    counted, seen = Counted(), folder / f"seen-{rank}.jsonl"
    parts = {"training": Training(model, optimizer), "data": RankStates(loader), "counted": counted}
    found = latest(folder)
    if found is not None:
        dcp.load(parts, checkpoint_id=found.parent)
    for epoch in range(counted.epoch, EPOCHS):
        counted.epoch = epoch
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x)[:, 0], y)
            loss.backward()
            optimizer.step()
            counted.step += 1
            with seen.open("a") as file:
                file.write(json.dumps([counted.step, loss.item(), x.sum().item()]) + "\n")
            if counted.step % SAVE_EVERY == 0:
                dcp.save(parts, checkpoint_id=folder / f"step-{counted.step}")
            if counted.step == dies_at and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    weights = [parameter.full_tensor().tolist() for parameter in model.parameters()]
    (folder / f"weights-{rank}.json").write_text(json.dumps(weights))


def main(folder, dies_at):
    torch.set_num_threads(1)
    # Gloo finds addresses of the first attempt in the store that torchrun keeps, so that each attempt meets in a file.
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{attempt}", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    train(folder / "killed", dies_at if attempt == "0" else None)
    train(folder / "whole")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
