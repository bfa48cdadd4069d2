"""Lightning with a pipeline that worker processes run: stopped in mid-epoch, and resumed from its own checkpoint.

pip install 'penstock[lightning]'
python examples/lightning_resume.py
"""

import logging
import tempfile
import warnings
from pathlib import Path

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import penstock as ps

WORKERS = 2


def row(number, rng):
    x = rng.normal(size=8).astype(np.float32)
    return {"x": x, "y": np.float32(np.sin(x).sum())}


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, number):
        return ((self.layer(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(service, folder, stops_at=-1, resume=None):
    dataset = ps.range(320).shuffle(seed=1).map(row).batch(16)
    data = ps.lightning.DataModule(
        # One function for any number of ranks: `ranks` says how many there are, and which this is.
        train=lambda ranks: dataset.distribute(service, job=Path(folder).name, ranks=ranks, order="deterministic")
    )
    trainer = lightning.Trainer(
        max_epochs=2,
        max_steps=stops_at,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1), ps.lightning.DataState()],
    )
    model = Line()
    trainer.fit(model, data, ckpt_path=resume, weights_only=False)
    return model, trainer.global_step


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, ps.LocalService(WORKERS) as service:
        expected, steps = train(service, f"{folder}/whole")
        train(service, f"{folder}/stopped", stops_at=12)
        (checkpoint,) = Path(folder, "stopped").glob("*step=10.ckpt")
        resumed, again = train(service, f"{folder}/resumed", resume=checkpoint)
    assert steps == again
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), resumed.parameters()))
    print(f"resumed after step 10 of {steps}, in the first epoch: the weights are the same, bit for bit")


if __name__ == "__main__":
    main()
