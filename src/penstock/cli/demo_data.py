"""The files the demo works on, and the functions it calls on them. Everything is drawn from one seed."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.core.element import Array

IMAGES, CLASSES, HEIGHT, WIDTH = 640, 5, 240, 320
DAMAGED = 60
DOCUMENTS = 3000
ROWS = 200_000
CROP = 128
SEED = 7
BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoData:
    """Where the files lie, and what is true of them."""

    folder: Path
    images: Path
    damaged: Path
    """Images of which one is cut off."""
    damaged_name: str
    documents: Path
    tokens: int
    table: Path
    clicks: int
    """Rows of the table with a price above 50 and a click."""

    @property
    def quarantine(self) -> Path:
        return self.folder / "skipped.jsonl"


@functools.cache
def has_images_extra() -> bool:
    return find_spec("simplejpeg") is not None and find_spec("cv2") is not None


def make_data(folder: Path) -> DemoData:
    rng = np.random.default_rng(SEED)
    _make_images(folder / "images", IMAGES, rng)
    _make_images(folder / "damaged", DAMAGED, rng)
    victim = sorted((folder / "damaged").rglob("*.*"))[DAMAGED // 2]
    victim.write_bytes(victim.read_bytes()[:100])
    tokens = _make_documents(folder / "documents.jsonl", rng)
    clicks = _make_table(folder / "clicks.parquet", rng)
    return DemoData(
        folder=folder,
        images=folder / "images",
        damaged=folder / "damaged",
        damaged_name=victim.name,
        documents=folder / "documents.jsonl",
        tokens=tokens,
        table=folder / "clicks.parquet",
        clicks=clicks,
    )


def _make_images(folder: Path, count: int, rng: np.random.Generator) -> None:
    """Write smooth random pictures: JPEG, or plain PPM where the extra `images` is missing."""
    suffix = "jpg" if has_images_extra() else "ppm"
    ys, xs = np.arange(HEIGHT, dtype=np.float32)[:, None, None], np.arange(WIDTH, dtype=np.float32)[None, :, None]
    for number in range(count):
        down, across = rng.uniform(0.01, 0.1, (2, 3)).astype(np.float32)  # one wave a colour
        picture = (127 + 60 * (np.sin(down * ys + number) + np.cos(across * xs))).astype(np.uint8)
        path = folder / f"class{number % CLASSES}" / f"{number:04}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_encoded(picture))


def _encoded(picture: Array) -> bytes:
    if has_images_extra():
        import simplejpeg

        return bytes(simplejpeg.encode_jpeg(picture, quality=90))
    return f"P6 {WIDTH} {HEIGHT} 255\n".encode() + picture.tobytes()


def _make_documents(path: Path, rng: np.random.Generator) -> int:
    """Write texts of very unequal lengths; return how many tokens they have."""
    letters = np.frombuffer(b"etaoinshrdlu ", np.uint8)
    lengths = np.clip(rng.lognormal(5.0, 0.8, DOCUMENTS), 10, 2000).astype(int)
    texts = [rng.choice(letters, length).tobytes().decode() for length in lengths]
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return int(lengths.sum())


def _make_table(path: Path, rng: np.random.Generator) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    price = rng.uniform(0, 100, ROWS).astype(np.float32)
    clicked = rng.random(ROWS) < 0.1
    wide = {f"feature{i}": rng.standard_normal(ROWS).astype(np.float32) for i in range(8)}
    pq.write_table(pa.table({"price": price, "clicked": clicked, **wide}), path, row_group_size=ROWS // 8)
    return int(((price > 50) & clicked).sum())


# What the pipelines call. They live in a module, so that a quarantine file refers to them by name.


def augment(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Decode, crop at random, flip at random, normalise."""
    if example["image"].startswith(b"P6"):
        return {**example, "image": _augment_plainly(example["image"], rng)}
    cropped = ps.image.flip(ps.image.random_resized_crop(example["image"], CROP, rng), rng)
    return {**example, "image": ps.image.normalize(cropped)}


def _augment_plainly(content: bytes, rng: np.random.Generator) -> Array:
    header, _, pixels = content.partition(b"\n")
    width, height = map(int, header.split()[1:3])
    picture = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
    y, x = rng.integers(0, (height - CROP, width - CROP))
    cropped = picture[y : y + CROP, x : x + CROP][:, :: rng.choice((-1, 1))]
    return (cropped / np.float32(127.5) - 1).astype(np.float32)


def hold_the_gil(number: int) -> int:
    """Work in plain Python, as tokenizers and parsers often do."""
    for step in range(4000):
        number = (31 * number + step) & 0xFFFFFFFF
    return number


def tokenize(document: dict[str, Any]) -> dict[str, Any]:
    """Take a text's bytes for its tokens; 0 is left for padding."""
    return {"tokens": np.frombuffer(document["text"].encode(), np.uint8).astype(np.int32)}


def image_pipeline(data: DemoData) -> ps.Dataset:
    return ps.read_images(data.images).shuffle(seed=SEED).map(augment).batch(BATCH)
