"""A small DLRM over a session, as a program: `python -m tests.torch.dlrm TABLE FOLDER WORKERS DIE_AT`.

After each step it adds the loss to a file and saves model, optimizer and the loader's state; started again, it goes on
from there. It kills itself with SIGKILL after the step DIE_AT (0: never). With torchrec the embeddings are its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.torch import dense_tensor, keyed_jagged, keyed_tensors
from tests.warehouse.session_kit import make_session

DIM, ROWS = 8, 500
SPARSE = ("pages_id", "best_id", "hour")


class PlainBags(torch.nn.Module):
    """Sums of embeddings, of plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = torch.nn.ModuleDict({key: torch.nn.EmbeddingBag(ROWS, DIM, mode="sum") for key in SPARSE})

    def forward(self, column: ps.KeyedRagged) -> torch.Tensor:
        plain = keyed_tensors(column)
        return torch.stack([bag(*plain.feature(key)) for key, bag in self.bags.items()], dim=1)


class TorchrecBags(torch.nn.Module):
    """Sums of embeddings, of a `KeyedJaggedTensor`."""

    def __init__(self) -> None:
        import torchrec

        super().__init__()
        configs = [
            torchrec.EmbeddingBagConfig(name=key, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[key])
            for key in SPARSE
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables=configs)

    def forward(self, column: ps.KeyedRagged) -> torch.Tensor:
        found = self.bags(keyed_jagged(column))
        return torch.stack([found[key] for key in SPARSE], dim=1)


class Dlrm(torch.nn.Module):
    def __init__(self, bags: torch.nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.bottom = torch.nn.Sequential(torch.nn.Linear(3, DIM), torch.nn.ReLU())
        self.top = torch.nn.Linear(DIM + 6, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        dense = self.bottom(dense_tensor(batch["dense"]))
        parts = torch.cat([dense[:, None], self.bags(batch["sparse"])], dim=1)
        products = parts @ parts.transpose(1, 2)
        upper = torch.triu_indices(4, 4, offset=1)
        found: torch.Tensor = self.top(torch.cat([dense, products[:, upper[0], upper[1]]], dim=1))
        return found[:, 0]


def bags() -> torch.nn.Module:
    try:
        return TorchrecBags()
    except ImportError:
        return PlainBags()


def train(loader: Any, folder: Path, *, die_at: int = 0) -> list[float]:
    """Go on where the folder's checkpoint stands, if there is one; return the losses of all steps."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = Dlrm(bags())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses: list[float] = []
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = json.loads(saved["losses"])
        loader.load_state_dict(json.loads(saved["data"]))
    for batch in loader:
        wanted = torch.from_numpy(batch["label"].copy())
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved |= {"losses": json.dumps(losses), "data": json.dumps(loader.state_dict())}
        torch.save(saved, folder / "checkpoint.new")
        os.replace(folder / "checkpoint.new", checkpoint)
        if len(losses) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return losses


def main() -> None:
    table, folder, workers, die_at = sys.argv[1:]
    dataset = make_session(ps.Table(table)).dataset()
    with dataset.distribute(int(workers), order="deterministic") as loader:
        print(json.dumps(train(loader, Path(folder), die_at=int(die_at))))


if __name__ == "__main__":
    main()
