"""Lightning's `Trainer.fit` with `offload=`: workers of a service help where the input is too slow.

pip install 'penstock[lightning]'
python examples/offload_lightning.py
"""

import logging
import time
import warnings

import lightning
import numpy as np
import torch

import penstock as ps


def row(number, rng):
    time.sleep(0.002)  # work that this host has too few processors for
    x = rng.normal(size=8).astype(np.float32)
    return {"x": x, "y": np.float32(np.sin(x).sum())}


DATASET = ps.range(1600).shuffle(seed=1).map(row, threads=1).batch(16)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, number):
        return ((self.layer(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(data):
    model = Line()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
    trainer.fit(model, datamodule=data)
    return [weights.tolist() for weights in model.state_dict().values()]


def main():
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with ps.LocalService(workers=2, threads=1) as service:  # or the address of one on other hosts
        with DATASET.distribute(service, order="deterministic") as loader:
            plain = train(ps.lightning.DataModule(train=loader))
        weights = train(ps.lightning.DataModule(train=DATASET, offload=service))
    assert weights == plain
    print("the same weights with offload=, bit for bit")


if __name__ == "__main__":
    main()
