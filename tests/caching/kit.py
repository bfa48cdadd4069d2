"""What tests of kept splits share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import penstock as ps
from penstock.caching.store import CacheStore, open_store


def write_texts(folder: Path, files: int = 8, lines: int = 40) -> str:
    """Write files of which each is large enough for a split of its own; return a glob of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        text = "\n".join(f"{number}-{line} {'x' * 20}" for line in range(lines))
        (folder / f"{number:03}.txt").write_text(text + "\n")
    return str(folder / "*.txt")


def numbered(line):
    return {"line": str(line), "values": np.arange(30) + len(str(line))}


def is_kept(row):
    return "7 " not in row["line"]


def noisy(row, rng):
    row["values"] += 1  # in place, as functions may: what is kept must not change with it
    return {**row, "noise": float(rng.random())}


def split_texts(split):
    for line in range(20):
        yield f"{split}-{line} {'x' * 20}"


def in_splits(location: Path | None, **options) -> ps.Dataset:
    """A pipeline that is read split by split, kept at a location or computed."""
    made = ps.from_generator(split_texts, splits=range(6)).map(numbered).filter(is_kept)
    if location is not None:
        made = made.autocache(location, always=True, version="1", **options)
    return made.map(noisy).shuffle(7, seed=5)


def by_index(location: Path | None, **options) -> ps.Dataset:
    """The same, of a source that is read by index, in a full permutation."""
    made = ps.range(40).shuffle(seed=2).map(numbered)
    if location is not None:
        made = made.autocache(location, always=True, **options)
    return made.map(noisy)


def store_at(location: Path) -> CacheStore:
    """Return the store of a location in this process, when all that was offered to it is written."""
    store = open_store(str(location))
    assert store.flush(30)
    return store


def entry_files(location: Path) -> list[Path]:
    store_at(location)
    return sorted(location.glob("*/*/*.entry"))
