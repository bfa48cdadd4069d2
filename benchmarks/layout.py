"""What lies where in the benchmarks' data, for both environments (`inputs` makes it, with packages the peers lack)."""

from __future__ import annotations

from pathlib import Path

IMAGES, IMAGE_CLASSES, RECORD_FILES = 1024, 16, 16
PARQUET_FILES, ROW_GROUPS, ROWS_PER_GROUP = 4, 8, 62_500
PARQUET_ROWS = PARQUET_FILES * ROW_GROUPS * ROWS_PER_GROUP
DOCUMENTS, TEXT_FILES = 8_192, 8
TOKENS = {"bpe": 4_807_622, "words": 2_956_108}  # by tokenizer
LINES, LINE_FILES = 1_000_000, 8
SHARDS, SAMPLES_PER_SHARD, SAMPLE_BYTES = 32, 200, 100_000
SAMPLES = SHARDS * SAMPLES_PER_SHARD
CLASSES, FILES_PER_CLASS = 100, 1000


def image_files(folder: str) -> list[str]:
    return _sorted(folder, "jpeg/*/*.jpg")


def record_files(folder: str) -> list[str]:
    return _sorted(folder, "*.tfrecord")


def parquet_files(folder: str) -> list[str]:
    return _sorted(folder, "*.parquet")


def text_files(folder: str) -> list[str]:
    return _sorted(folder, "*.jsonl")


def _sorted(folder: str, pattern: str) -> list[str]:
    return sorted(map(str, Path(folder).glob(pattern)))


def shard_names() -> list[str]:
    return [f"shard-{i:04d}.tar" for i in range(SHARDS)]
