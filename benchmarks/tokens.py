"""Tokenizers and packing for the `tokens` benchmark, the same for every side that has none of its own."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tasks import PACKED

Array = np.ndarray[Any, Any]
VOCABULARY = 32_000
WORD = re.compile(r"\w+|[^\w\s]")
BPE_PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"


class BytePairTokenizer:
    """tiktoken, the BPE most language models are trained with: Rust, and the GIL released while it works."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.encoding: Any = None

    def __call__(self, text: str) -> Array:
        if self.encoding is None:  # made on first use: it does not travel to other processes
            self.encoding = self._load()
        return np.asarray(self.encoding.encode_to_numpy(text, disallowed_special=())).astype(np.int32)

    def _load(self) -> Any:
        import tiktoken

        vocabulary = json.loads((Path(self.folder) / "bpe.json").read_text())
        ranks = {bytes.fromhex(token): rank for rank, token in enumerate(vocabulary)}
        return tiktoken.Encoding("bench", pat_str=BPE_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "encoding": None}


class WordTokenizer:
    """Words hashed into a vocabulary, in plain Python: holds the GIL."""

    def __init__(self, folder: str) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, text: str) -> Array:
        ids = self.ids
        tokens = []
        for word in WORD.findall(text):
            number = ids.get(word)
            if number is None:
                number = ids[word] = 1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)
            tokens.append(number)
        return np.array(tokens, np.int32)


TOKENIZERS: dict[str, Callable[[str], Callable[[str], Array]]] = {"bpe": BytePairTokenizer, "words": WordTokenizer}


def documents(files: Iterable[str]) -> Iterator[str]:
    for path in files:
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]


def pack(sequences: Iterable[Array]) -> Iterator[dict[str, Array]]:
    """Lay sequences end to end and cut every 2,048 tokens: the cheapest packing there is, and no padding."""
    row, filled, segment = _new_row(), 0, 0
    for sequence in sequences:
        start = 0
        while start < len(sequence):
            count = min(PACKED - filled, len(sequence) - start)
            segment += 1
            row["tokens"][filled : filled + count] = sequence[start : start + count]
            row["segment_ids"][filled : filled + count] = segment
            row["positions"][filled : filled + count] = np.arange(start, start + count)
            start += count
            filled += count
            if filled == PACKED:
                yield row
                row, filled, segment = _new_row(), 0, 0
    if filled:
        yield row


def _new_row() -> dict[str, Array]:
    return {name: np.zeros(PACKED, np.int32) for name in ("tokens", "segment_ids", "positions")}


def count_tokens(row: dict[str, Any], segment_ids: str = "segment_ids") -> int:
    """Return how many tokens of a row, or of a batch of rows, are not padding."""
    return int(np.count_nonzero(row[segment_ids]))
