"""What is trained with Accelerate, on two ranks: `python -m tests.trainers.accelerate_program RANK FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import accelerate
import torch

import penstock as ps
from penstock.torch import DataLoader
from tests.trainers.rows import ROWS, rows

BATCH = 4


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x = torch.rand(4) + index / ROWS
        return {"x": x, "y": x.sum(), "index": index}


def make(accelerator, kind):
    if kind == "moved":
        return ps.accelerate.prepare(
            accelerator, DataLoader(Noisy(), batch_size=BATCH, shuffle=True, seed_samples=True)
        )
    ranks = ps.Ranks(accelerator.num_processes, accelerator.process_index)
    served = rows().batch(BATCH).distribute(os.environ["SERVICE"], job="accelerate", ranks=ranks, order="deterministic")
    return ps.accelerate.prepare(accelerator, served)


def train(accelerator, kind, folder, *, stops_at=None, resume=False, skip=0):
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = make(accelerator, kind)
    kept = accelerator.prepare(loader) is loader
    if resume:
        accelerator.load_state(folder / "at")
        loader = ps.accelerate.skip_first_batches(loader, skip)
    seen, ends, step = [], [], 0
    for _epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = ((model(batch["x"].float())[:, 0] - batch["y"].float()) ** 2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(batch["index"].tolist())
            ends.append(loader.end_of_dataloader)
            step += 1
            if step == stops_at:
                accelerator.save_state(folder / "at")
                accelerator.free_memory()
                return None
    weights = [float(x) for p in model.parameters() for x in p.detach().flatten()]
    accelerator._save_model_state_pre_hook.clear()
    accelerator._load_model_state_pre_hook.clear()
    accelerator.free_memory()
    return {
        "seen": seen,
        "weights": weights,
        "kept": kept,
        "class": type(loader.loader).__module__,
        "ends": [n for n, end in enumerate(ends) if end],
        "device": str(batch["x"].device),
    }


def fresh(accelerator):
    accelerator._save_model_state_pre_hook.clear()
    accelerator._load_model_state_pre_hook.clear()


def metrics(accelerator):
    class Ten(torch.utils.data.Dataset):
        def __len__(self):
            return 11

        def __getitem__(self, index):
            return torch.tensor(index)

    loader = ps.accelerate.prepare(accelerator, DataLoader(Ten(), batch_size=2))
    gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    fresh(accelerator)
    return sorted(x for step in gathered for x in step)


def main(folder):
    accelerator = accelerate.Accelerator(cpu=True)
    found = {"metrics": metrics(accelerator)}
    for kind in ("moved", "served"):
        where = folder / kind
        found[kind] = {"whole": train(accelerator, kind, where)}
        train(accelerator, kind, where, stops_at=5)
        fresh(accelerator)
        found[kind]["resumed"] = train(accelerator, kind, where, resume=True, skip=5)
    print(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1], "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    main(Path(sys.argv[2]))
