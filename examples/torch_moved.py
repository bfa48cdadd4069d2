"""A PyTorch script that was moved by its import: the same losses with 1 and 2 workers, and after a resume.

pip install 'penstock[torch]'
python examples/torch_moved.py
"""

import random

import torch
from torch import nn
from torch.utils.data import Dataset

from penstock.torch import DataLoader  # was: from torch.utils.data import DataLoader

IMAGES, CLASSES, EPOCHS = 96, 3, 2


class Squares(Dataset):
    """Noisy pictures with a bright square; where it lies is the class."""

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        label = index % CLASSES
        image = torch.rand(1, 20, 20)  # draws from torch's global generator, and below from Python's
        image[:, 6 * label : 6 * label + 6, 6 * label : 6 * label + 6] += 1
        left, top = random.randrange(4), random.randrange(4)
        return image[:, top : top + 17, left : left + 17], label


def make_model():
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())
    model = nn.Sequential(features, nn.Linear(8 * 9, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def train(workers, leave_after=None, checkpoint=None):
    """Return the losses of all steps; left early, a checkpoint too."""
    model, optimizer = make_model()
    loader = DataLoader(Squares(), batch_size=16, shuffle=True, num_workers=workers)
    losses = []
    first = 0
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["data"])
        torch.set_rng_state(checkpoint["random"])
        losses, first = list(checkpoint["losses"]), checkpoint["epoch"]
    for epoch in range(first, EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == leave_after:
                data = loader.state_dict()
                loader.close()
                return {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "random": torch.get_rng_state(),
                    "data": data,
                    "losses": losses,
                    "epoch": epoch,
                }
    loader.close()
    return losses


def main():
    torch.set_num_threads(1)
    one = train(workers=1)
    checkpoint = train(workers=2, leave_after=8)
    two = train(workers=2, checkpoint=checkpoint)
    assert one == two, (one, two)
    print(f"loss {one[0]:.3f}, then {one[-1]:.3f} after {len(one)} steps")
    print("the same losses with 1 worker, and with 2 that were left in epoch 1 and resumed")


if __name__ == "__main__":
    main()
