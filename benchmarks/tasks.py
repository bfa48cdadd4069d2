"""The work itself, shared by all sides so that each does the same. Standard library, numpy and opencv only."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

BATCH = 256
IMAGE_BATCH = 64
SIDE_PX = 224
PACKED = 2048
PACKED_BATCH = 16


def add_one(x: int) -> int:
    return x + 1


def three_leaves(x: int) -> dict[str, Any]:
    return {"id": x, "half": x * 0.5, "class": x % 7}


def crop_box(height: int, width: int, rng: Any) -> tuple[int, int, int, int]:
    """Return y, x, height, width of a training crop: 8 to 100 % of the area, aspect ratio 3/4 to 4/3."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            draw = rng.randint if rng is np.random else rng.integers
            return int(draw(0, height - h + 1)), int(draw(0, width - w + 1)), h, w
    return 0, 0, height, width


def augment_with_opencv(jpeg: bytes, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Decode, crop, resize, flip: what a user writes who knows opencv and nothing of the loader."""
    import cv2

    image: Any = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
    y, x, h, w = crop_box(image.shape[0], image.shape[1], rng)
    image = cv2.resize(image[y : y + h, x : x + w], (SIDE_PX, SIDE_PX))
    result: np.ndarray[Any, Any] = cv2.flip(image, 1) if rng.random() < 0.5 else image
    return result


class ReadAndAugment:
    """The opencv function on the i-th file, for loaders that ask by index; each process draws its own numbers."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __call__(self, index: int) -> dict[str, Any]:
        import cv2

        cv2.setNumThreads(0)
        with open(self.files[index % len(self.files)], "rb") as file:
            jpeg = file.read()
        return {"image": augment_with_opencv(jpeg, _process_rng()), "label": index % 16}


class CropFromGlobals:
    """What torchvision's random crop and flip do: they draw from the global generator. Gives (image, label)."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __call__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        import cv2

        cv2.setNumThreads(0)
        with open(self.files[index % len(self.files)], "rb") as file:
            image: Any = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_COLOR_RGB)
        y, x, h, w = crop_box(image.shape[0], image.shape[1], np.random)
        image = cv2.resize(image[y : y + h, x : x + w], (SIDE_PX, SIDE_PX))
        return cv2.flip(image, 1) if random.random() < 0.5 else image, index % 16


@cache
def _process_rng() -> np.random.Generator:
    return np.random.default_rng()


def passes(n: int, epoch: int) -> int:
    """Return how many whole epochs come nearest to n elements: each side then sees the same mix of data."""
    return max(1, round(n / epoch))


def look_at(rows: Iterable[Any]) -> int:
    """Take each row in turn, as a training loop would, and return how many there were."""
    n = 0
    for _ in rows:
        n += 1
    return n
