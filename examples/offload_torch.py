"""A torch loop whose input is too slow for it: a service helps, and the losses stay the same, bit for bit.

pip install penstock torch
python examples/offload_torch.py
"""

import time

import numpy as np
import torch

import penstock as ps


def row(number, rng):
    time.sleep(0.002)  # work that this host has too few processors for
    x = rng.normal(size=8).astype(np.float32)
    return {"x": x, "y": np.float32(np.sin(x).sum())}


DATASET = ps.range(4000).shuffle(seed=1).map(row, threads=1).batch(8)


def train(loader):
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in ps.torch.tensors(loader):
        loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    with ps.LocalService(workers=2, threads=1) as service:  # or the address of one on other hosts
        with DATASET.distribute(service, order="deterministic") as loader:
            plain = train(loader)
        offloading = ps.Offloading(guests=1, window_s=0.2)
        with ps.offload(DATASET, service, order="deterministic", offloading=offloading) as loader:
            losses = train(loader)
            print(f"{loader.decision.place}: {loader.decision.reason}")
    assert losses == plain
    print(f"{len(losses)} losses are the same, bit for bit")


if __name__ == "__main__":
    main()
