"""What is trained with Lightning, on two ranks: `python -m tests.trainers.lightning_program RANK FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DistributedSampler

import penstock as ps
from penstock.torch import DataLoader
from tests.trainers.rows import ROWS, rows

BATCH, EPOCHS = 4, 2


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x = torch.rand(4) + index / ROWS
        return {"x": x, "y": x.sum(), "index": index}


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 1)
        self.seen, self.validated = [], 0

    def training_step(self, batch, number):
        self.seen.append(batch["index"].tolist())
        return ((self.layer(batch["x"].float())[:, 0] - batch["y"].float()) ** 2).mean()

    def validation_step(self, batch, number):
        self.validated += 1

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer(folder, steps=-1, **options):
    saving = ModelCheckpoint(folder, filename="at-{step}", every_n_train_steps=5, save_top_k=-1)
    defaults = {
        "accelerator": "cpu",
        "max_epochs": EPOCHS,
        "max_steps": steps,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [saving, ps.lightning.DataState()],
    }
    return lightning.Trainer(**{**defaults, **options})


def told(model, ran):
    loader = ran.fit_loop._combined_loader.flattened[0]
    sampler = getattr(loader, "sampler", None)
    return {
        "seen": model.seen,
        "weights": [float(x) for p in model.parameters() for x in p.detach().flatten()],
        "class": f"{type(loader).__module__}.{type(loader).__name__}",
        "sampler": isinstance(sampler, DistributedSampler),
        "validated": model.validated,
        "steps": ran.global_step,
    }


def fit(folder, make_data, *, steps=-1, resume=None, **options):
    torch.manual_seed(3)
    model, ran = Line(), trainer(folder, steps, **options)
    ran.fit(model, make_data(), ckpt_path=resume, weights_only=False)
    return told(model, ran)


def whole_and_resumed(folder, make_data, stops_at=7, from_step=5, **options):
    whole = fit(folder / "whole", make_data, **options)
    fit(folder / "stopped", make_data, steps=stops_at, **options)
    (saved,) = (folder / "stopped").glob(f"at-step={from_step}.ckpt")
    return {"whole": whole, "resumed": fit(folder / "resumed", make_data, resume=saved, **options)}


def on_two_ranks(rank, folder):
    os.environ |= {"MASTER_ADDR": "localhost", "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    both = {"strategy": "ddp", "devices": 2}

    def moved():
        return DataLoader(Noisy(), batch_size=BATCH, shuffle=True, seed_samples=True)

    found = {"moved": whole_and_resumed(folder / "moved", moved, **both)}

    def served():
        return ps.lightning.DataModule(
            train=lambda ranks: (
                rows()
                .batch(BATCH)
                .distribute(os.environ["SERVICE"], job="lightning", ranks=ranks, order="deterministic")
            )
        )

    found["served"] = whole_and_resumed(folder / "served", served, **both)
    return found


def alone(folder):
    def unsized():  # Lightning fetches one batch of it ahead
        return ps.lightning.DataModule(train=rows().filter(lambda row: True).batch(BATCH), val=rows().batch(BATCH))

    found = {"unsized": whole_and_resumed(folder / "unsized", unsized)}
    data = ps.lightning.DataModule(train=rows().batch(BATCH), val=rows().batch(BATCH))
    found["overfit"] = fit(folder / "overfit", lambda: data, overfit_batches=2, num_sanity_val_steps=2)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    kept = fabric.setup_dataloaders(DataLoader(Noisy(), batch_size=BATCH, shuffle=True))
    loader = ps.lightning.FabricLoader(fabric, rows().batch(BATCH))
    batches = iter(loader)
    head = [next(batches)["index"].tolist() for _ in range(3)]
    fabric.save(folder / "fabric.ckpt", {"data": loader})
    rest = [batch["index"].tolist() for batch in batches]
    again = ps.lightning.FabricLoader(fabric, rows().batch(BATCH))
    fabric.load(folder / "fabric.ckpt", {"data": again}, weights_only=False)
    found["fabric"] = {
        "class": type(kept._dataloader).__module__,
        "rest": rest,
        "again": [batch["index"].tolist() for batch in again],
        "head": head,
    }
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, where = int(sys.argv[1]), Path(sys.argv[2])
    found = on_two_ranks(rank, where)
    if rank == 0:
        os.environ.pop("WORLD_SIZE", None)
        torch.distributed.destroy_process_group()
    print(json.dumps({**found, **(alone(where) if rank == 0 else {})}))
