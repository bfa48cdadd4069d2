"""Accelerate with the two ways in: a moved DataLoader and a pipeline, both resumed from its checkpoints in mid-epoch.

pip install 'penstock[accelerate]'
python examples/accelerate_resume.py    # accelerate launch, on several ranks, needs a service for the pipeline
"""

import tempfile
import warnings

import accelerate
import numpy as np
import torch

import penstock as ps
from penstock.torch import DataLoader

EPOCHS, STOPS_AT = 2, 7


class Noisy(torch.utils.data.Dataset):
    """Samples that draw from torch's global generator."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        x = torch.rand(8) + index / 160
        return {"x": x, "y": x.sum()}


def row(number, rng):
    x = rng.normal(size=8).astype(np.float32)
    return {"x": x, "y": np.float32(x.sum())}


def moved():
    return DataLoader(Noisy(), batch_size=16, shuffle=True, seed_samples=True)


def pipeline():
    return ps.range(160).shuffle(seed=1).map(row).batch(16).distribute()


def train(make_loader, folder, stops_at=None, resume=False):
    torch.manual_seed(1)
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    loader = ps.accelerate.prepare(accelerator, make_loader())
    epoch = step = 0
    if resume:
        accelerator.load_state(folder)
        epoch, step = divmod(stops_at, len(loader))
        stops_at = None
    for _ in range(epoch, EPOCHS):
        for batch in loader:
            loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == stops_at:
                accelerator.save_state(folder)
                return None
    return [parameter.detach().clone() for parameter in model.parameters()]


def main():
    warnings.simplefilter("ignore")
    for make_loader in (moved, pipeline):
        with tempfile.TemporaryDirectory() as folder:
            expected = train(make_loader, folder)
            train(make_loader, folder, stops_at=STOPS_AT)
            resumed = train(make_loader, folder, stops_at=STOPS_AT, resume=True)
        assert all(torch.equal(a, b) for a, b in zip(expected, resumed))
        print(f"{make_loader.__name__}: resumed after step {STOPS_AT}, the weights are the same, bit for bit")


if __name__ == "__main__":
    main()
