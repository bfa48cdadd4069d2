"""A training script as it would be with torch's own loader, but for its import; it saves, and may be killed anywhere.

python -m tests.torch.curve_program FOLDER WORKERS [KILL_AFTER_STEP]
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from penstock.torch import DataLoader

IMAGES, CLASSES, EPOCHS, BATCH = 60, 3, 3, 10
SAVE_EVERY = 2


class Pictures(Dataset):
    """Pictures of which a random part is seen, as torchvision's transforms do it: from the global generators."""

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        label = index % CLASSES
        image = torch.zeros(1, 16, 16)
        image[:, 5 * label : 5 * label + 5] = 1
        image += 0.3 * torch.rand(1, 16, 16)
        top, left = random.randrange(4), int(np.random.randint(4))
        image = image[:, top : top + 12, left : left + 12]
        return (image.flip(-1) if random.random() < 0.5 else image), label


def main(folder, workers, kill_after):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(100, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Pictures(), batch_size=BATCH, shuffle=True, num_workers=workers)
    saved, losses, first = folder / "checkpoint.pt", [], 0
    if saved.exists():
        checkpoint = torch.load(saved, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(json.loads(checkpoint["data"]))
        losses, first = checkpoint["losses"], checkpoint["epoch"]
        torch.set_rng_state(checkpoint["random"])
    for epoch in range(first, EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % SAVE_EVERY == 0:
                content = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "data": json.dumps(loader.state_dict()),
                    "random": torch.get_rng_state(),
                    "losses": losses,
                    "epoch": epoch,
                }
                torch.save(content, folder / "unfinished")
                (folder / "unfinished").rename(saved)
            if len(losses) == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
    (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
