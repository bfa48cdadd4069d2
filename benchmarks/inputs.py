"""The benchmarks' data, made once below `.bench/`: seeded, so that every machine reads the same.

Each maker fills a folder beside its place and renames it when complete; an interrupted one is made again.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from pathlib import Path

import numpy as np
from harness import DATA, say
from layout import (
    CLASSES,
    DOCUMENTS,
    FILES_PER_CLASS,
    IMAGE_CLASSES,
    IMAGES,
    LINE_FILES,
    LINES,
    PARQUET_FILES,
    RECORD_FILES,
    ROW_GROUPS,
    ROWS_PER_GROUP,
    SAMPLE_BYTES,
    SAMPLES_PER_SHARD,
    SHARDS,
    TEXT_FILES,
)

MERGES = 1_500


def _made_once(make: Callable[[Path], None]) -> Callable[[], Path]:
    @wraps(make)
    def place() -> Path:
        folder = DATA / make.__name__
        if not folder.exists():
            say(f"making {folder} (once)")
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            make(unfinished)
            unfinished.rename(folder)
        return folder

    return place


@_made_once
def images(folder: Path) -> None:
    """1,024 JPEG files of ImageNet's usual size, about 95 KB, in class folders; and the same as TFRecords."""
    import cv2

    from penstock.sources.example_proto import encode_example
    from penstock.sources.tfrecord import TFRecordWriter

    rng = np.random.default_rng(0)
    writers = [TFRecordWriter(folder / f"train-{i:02d}.tfrecord") for i in range(RECORD_FILES)]
    for i in range(IMAGES):
        height, width = int(rng.integers(330, 520)), int(rng.integers(400, 600))
        blobs = rng.integers(0, 256, (12, 16, 3), np.uint8)
        smooth = cv2.resize(blobs, (width, height), interpolation=cv2.INTER_CUBIC)
        noisy = np.clip(smooth + rng.normal(0, 14, smooth.shape), 0, 255).astype(np.uint8)
        _, jpeg = cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, 90])
        label = i % IMAGE_CLASSES
        path = folder / "jpeg" / f"class-{label:02d}" / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg.tobytes())
        writers[i % RECORD_FILES].write(encode_example({"image": jpeg.tobytes(), "label": label}))
    for writer in writers:
        writer.close()


@_made_once
def parquet(folder: Path) -> None:
    """2,000,000 rows of a click log: six columns of numbers, a string of few values and one of many."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    words = np.array(_words(5_000), object)
    countries = np.array([f"country-{i:03d}" for i in range(200)], object)
    rows = ROW_GROUPS * ROWS_PER_GROUP
    for i in range(PARQUET_FILES):
        table = pa.table(
            {
                "id": np.arange(i * rows, (i + 1) * rows),
                "user": rng.integers(0, 1_000_000, rows).astype(np.int32),
                "day": rng.integers(0, 365, rows).astype(np.int16),
                "clicks": rng.poisson(2.0, rows).astype(np.int32),
                "price": rng.gamma(2.0, 30.0, rows),
                "score": rng.normal(size=rows).astype(np.float32),
                "country": pa.array(countries[rng.zipf(1.3, rows) % 200], pa.string()),
                "query": pa.array([" ".join(q) for q in words[rng.zipf(1.2, (rows, 3)) % 5_000]], pa.string()),
            }
        )
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=ROWS_PER_GROUP)


@_made_once
def text(folder: Path) -> None:
    """8,192 documents as JSON lines, lengths with a long tail, words by Zipf's law; and a BPE vocabulary."""
    rng = np.random.default_rng(0)
    words = np.array(_words(30_000), object)
    lengths = np.minimum(rng.lognormal(5.2, 1.1, DOCUMENTS), 20_000).astype(int) + 1
    seen: Counter[str] = Counter()
    files = [(folder / f"part-{i}.jsonl").open("w") for i in range(TEXT_FILES)]
    for i, length in enumerate(lengths):
        chosen = words[rng.zipf(1.15, length) % len(words)]
        chosen[:: max(2, int(rng.integers(8, 16)))] += "."
        document = {"id": i, "url": f"https://example.org/{i}", "text": " ".join(chosen)}
        files[i % TEXT_FILES].write(json.dumps(document) + "\n")
        if i < 512:
            seen.update(chosen)
    for file in files:
        file.close()
    (folder / "bpe.json").write_text(json.dumps([token.hex() for token in _learn_bpe(seen)]))


@_made_once
def lines(folder: Path) -> None:
    """1,000,000 short lines in 8 files."""
    for i in range(LINE_FILES):
        share = range(i * LINES // LINE_FILES, (i + 1) * LINES // LINE_FILES)
        (folder / f"part-{i}.txt").write_text("".join(f"{number} {number % 97:02d}\n" for number in share))


@_made_once
def shards(folder: Path) -> None:
    """32 WebDataset shards of 200 samples, 100 KB each: 640 MB. Random bytes: nothing here decodes them."""
    rng = np.random.default_rng(0)
    for i in range(SHARDS):
        with tarfile.open(folder / f"shard-{i:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for j in range(SAMPLES_PER_SHARD):
                key = f"{i:04d}{j:05d}"
                for name, content in ((f"{key}.jpg", rng.bytes(SAMPLE_BYTES)), (f"{key}.cls", str(j % 10).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


@_made_once
def class_folder(folder: Path) -> None:
    """100,000 tiny files in 100 class folders, which a reader meets sorted by class."""
    for i in range(CLASSES):
        below = folder / f"class-{i:03d}"
        below.mkdir()
        for j in range(FILES_PER_CLASS):
            handle = os.open(below / f"{j:04d}.png", os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(handle, f"{i} {j}".encode())
            os.close(handle)


def _words(n: int) -> list[str]:
    """Return n different made-up words, short ones first, as in any language."""
    rng = np.random.default_rng(1)
    syllables = [c + v + e for c in "bcdfghjklmnprstvwz" for v in "aeiou" for e in ("", "", "n", "r", "s", "st")]
    words: dict[str, None] = {}
    while len(words) < n:
        count = 1 + min(4, int(rng.poisson(0.5 + 2.0 * len(words) / n)))
        words["".join(rng.choice(syllables, count))] = None
    return list(words)


def _learn_bpe(counts: Counter[str]) -> list[bytes]:
    """Return a byte-pair vocabulary, by rank, learnt from the most frequent words."""
    vocabulary = [bytes([i]) for i in range(256)]
    pieces: list[tuple[list[bytes], int]] = [
        ([bytes([b]) for b in f" {word}".encode()], count) for word, count in counts.most_common(2_500)
    ]
    for _ in range(MERGES):
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts, count in pieces:
            for pair in pairwise(parts):
                pairs[pair] += count
        if not pairs:
            break
        (left, right), _count = pairs.most_common(1)[0]
        vocabulary.append(left + right)
        for parts, _count in pieces:
            i = 0
            while i + 1 < len(parts):
                if parts[i] == left and parts[i + 1] == right:
                    parts[i : i + 2] = [left + right]
                i += 1
    return list(dict.fromkeys(vocabulary))
