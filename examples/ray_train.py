"""Ray Train: two ranks read one job, whose workers are actors of the same cluster.

pip install 'penstock[ray]' 'ray[train]' torch
python examples/ray_train.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch

import penstock as ps
from penstock.torch import tensors

EPOCHS, ROWS, FEATURES = 2, 4096, 16


def make_rows(number: int, rng: np.random.Generator) -> dict[str, Any]:
    features = rng.standard_normal(FEATURES, dtype=np.float32)
    return {"features": features, "label": np.float32(features.sum() > 0)}


def make_dataset() -> ps.Dataset:
    return ps.range(ROWS).shuffle(seed=7).map(make_rows).batch(64, drop_last=True)


def train_loop(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    ranks = ps.Ranks(context.get_world_size(), context.get_world_rank())
    model = ray.train.torch.prepare_model(torch.nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with make_dataset().distribute(config["service"], job="train", ranks=ranks) as loader:
        for epoch in range(EPOCHS):
            losses = []
            for batch in tensors(loader):
                logits = model(batch["features"]).squeeze(1)
                loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            ray.train.report({"epoch": epoch, "loss": float(np.mean(losses)), "steps": len(losses)})


def main() -> None:
    ray.init(num_cpus=4)  # two ranks and two workers, whatever this machine has; in a cluster: ray.init()
    with ps.RayService(workers=(1, 2)) as service:
        trainer = ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config={"service": str(service.service_file)},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
        )
        result = trainer.fit()
    print(f"loss {result.metrics['loss']:.3f} after {result.metrics['steps']} steps of each rank")
    assert result.metrics["loss"] < 0.4


if __name__ == "__main__":
    main()
