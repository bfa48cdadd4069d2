"""Train a small classifier on a folder of images with PyTorch, and save the position of the data with the model.

python examples/train_images.py [FOLDER]      # a folder per class; without one, a small one is made
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import simplejpeg
import torch

import penstock as ps

SIZE, BATCH, EPOCHS = 32, 16, 2


def make_images(folder: Path) -> None:
    """Two classes that a small model can tell apart: bright above, bright below."""
    rng = np.random.default_rng(0)
    for number in range(160):
        picture = rng.integers(0, 120, (48, 48, 3), dtype=np.uint8)
        half = slice(0, 24) if number % 2 else slice(24, 48)
        picture[half] += 120
        path = folder / ("above" if number % 2 else "below") / f"{number:03}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(simplejpeg.encode_jpeg(picture))


def augment(example, rng):
    image = ps.image.random_resized_crop(example["image"], SIZE, rng, scale=(0.8, 1.0))
    image = ps.image.flip(image, rng)
    return {"image": ps.image.normalize(image, layout="CHW"), "label": example["label"]}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    if len(sys.argv) == 1:
        make_images(folder)
    train = ps.read_images(folder).shuffle(seed=1).map(augment).batch(BATCH, drop_last=True)

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 5, stride=4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 7 * 7, 2),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(EPOCHS):
        correct = count = 0
        with train.iterator(epoch=epoch) as batches:
            for batch in batches:
                images, labels = torch.from_numpy(batch["image"]), torch.from_numpy(batch["label"])
                scores = model(images)
                loss = torch.nn.functional.cross_entropy(scores, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                correct += int((scores.argmax(1) == labels).sum())
                count += len(labels)
            checkpoint = {"model": model.state_dict(), "data": batches.state_dict()}
            waited = batches.statistics().wait_fraction
        print(f"epoch {epoch}: {correct / count:.0%} right, {waited:.0%} of the time spent waiting for data")
    torch.save(checkpoint, folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
