"""Ray Train: two ranks read one job, whose workers are actors of the same cluster.

pip install 'penstock[ray]' 'ray[train]' torch
python examples/ray_train.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
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
            metrics = {"epoch": epoch, "loss": float(np.mean(losses)), "steps": len(losses)}
            with tempfile.TemporaryDirectory() as folder:  # each rank's own part: where it stands in the data
                rank_file = Path(folder, f"rank-{ranks.rank}.pt")
                torch.save({"model": model.state_dict(), "data": loader.state_dict()}, rank_file)
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    ray.init(num_cpus=4)  # two ranks and two workers, whatever this machine has; in a cluster: ray.init()
    with tempfile.TemporaryDirectory() as storage, ps.RayService(workers=(1, 2)) as service:
        trainer = ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config={"service": str(service.service_file)},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=storage),
        )
        result = trainer.fit()
    print(f"loss {result.metrics['loss']:.3f} after {result.metrics['steps']} steps of each rank")
    assert result.metrics["loss"] < 0.4


if __name__ == "__main__":
    main()
