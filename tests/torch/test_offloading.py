"""A training that measures where to read is, bit for bit, the one that does not: nothing of it reaches the model."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch

import penstock as ps

EPOCHS = 4  # on a fast machine one epoch ends before all ways have had their window


def row(number: int, rng: np.random.Generator) -> dict[str, Any]:
    time.sleep(0.002)
    x = rng.normal(size=8).astype(np.float32)
    return {"x": x, "y": np.float32(np.sin(x).sum())}


DATASET = ps.range(800).shuffle(seed=1).map(row, threads=1).batch(4)


def train(loader: Any) -> list[dict[str, Any]]:
    """Train with a network, an optimizer and an augmentation that draw; return all states, epoch by epoch."""
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    states, losses = [], []
    for _ in range(EPOCHS):
        for batch in ps.torch.tensors(loader):
            noise = 1e-3 * (random.random() + np.random.random())
            loss = ((model(batch["x"] + noise)[:, 0] - batch["y"]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        states.append(
            {
                "losses": list(losses),
                "model": {name: value.clone() for name, value in model.state_dict().items()},
                "optimizer": [
                    value.clone() if isinstance(value, torch.Tensor) else value
                    for moments in optimizer.state_dict()["state"].values()
                    for value in moments.values()
                ],
                "schedule": schedule.state_dict(),
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "torch": torch.get_rng_state(),
            }
        )
        if getattr(loader, "decision", None) is not None:
            break
    return states


def equal(one: Any, other: Any) -> bool:
    """Compare to the bit, through whatever holds the arrays."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_losses_weights_moments_and_every_generator_are_those_of_a_training_that_measured_nothing() -> None:
    options: dict[str, Any] = {"order": "deterministic", "sharding": ps.Sharding(streams=4), "seed": 5}
    with ps.LocalService(workers=2, threads=1) as service:
        asked = ps.Offloading(guests=1, window_s=0.15)
        with ps.offload(DATASET, service, **options, offloading=asked) as loader:
            measured = train(loader)
            assert loader.decision is not None, f"nothing was decided in {EPOCHS} epochs"
            assert loader.decision.cut is not None, "it changed its way in mid-epoch"
        with DATASET.distribute(service, **options) as loader:
            plain = train(loader)
    for name in measured[-1]:
        assert equal(measured[-1][name], plain[len(measured) - 1][name]), name


def test_the_comparison_sees_a_bit() -> None:
    numpy = np.random.RandomState(3)
    before = {"numpy": numpy.get_state(), "torch": [torch.zeros(3)]}
    assert equal(before, {"numpy": np.random.RandomState(3).get_state(), "torch": [torch.zeros(3)]})
    assert not equal(before, {"numpy": np.random.RandomState(3).get_state(), "torch": [torch.tensor([0, 0, 1e-45])]})
    numpy.random()
    assert not equal(before, {"numpy": numpy.get_state(), "torch": [torch.zeros(3)]})
