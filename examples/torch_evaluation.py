"""Evaluate a model over two ranks: equal steps, every element counted once, the accuracy exact.

pip install 'penstock[torch]'
python examples/torch_evaluation.py
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import penstock as ps
from penstock.torch import tensors

ELEMENTS, BATCH, RANKS = 1000, 64, 2


def element(index):
    """A point on a circle; the class says on which half."""
    angle = index * 2 * np.pi / ELEMENTS
    return {"x": np.array([np.cos(angle), np.sin(angle)], np.float32), "label": int(index < ELEMENTS // 2)}


def evaluate(rank, service, model):
    data = ps.range(ELEMENTS).map(element).evaluation(BATCH, service, ranks=ps.Ranks(RANKS, rank), job="evaluate")
    right = seen = steps = 0
    for batch in tensors(data):
        guessed = (model(batch["x"])[:, 0] > 0).long()
        right += int(((guessed == batch["label"]) & batch["mask"]).sum())
        seen += int(batch["mask"].sum())
        steps += 1
    data.close()
    return right, seen, steps


def main():
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.bias)
    model.weight.data = torch.tensor([[0.2, 1.0]])
    with ps.LocalService(workers=2) as service, ThreadPoolExecutor(RANKS) as ranks:  # threads stand in for ranks here
        found = list(ranks.map(lambda rank: evaluate(rank, service, model), range(RANKS)))
    right, seen, _ = map(sum, zip(*found))
    steps = {steps for _, _, steps in found}
    assert seen == ELEMENTS and len(steps) == 1
    print(f"{RANKS} ranks took {steps.pop()} steps each and saw {seen} elements once each; {right / seen:.1%} right")


if __name__ == "__main__":
    main()
