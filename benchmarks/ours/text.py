"""Penstock from JSON lines to packed rows of 2,048 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import layout
import tasks
import tokens
from side import Workload


def packed_tokens(folder: str, tokenizer: str) -> Workload:
    import penstock as ps

    encode = tokens.TOKENIZERS[tokenizer](folder)
    encode("made before the threads are")

    def tokenize(document: dict[str, Any]) -> Any:
        return encode(document["text"])

    def open_pipeline(n: int) -> Iterator[int]:
        lines = ps.read_jsonl(f"{folder}/*.jsonl").repeat(tasks.passes(n, layout.TOKENS[tokenizer]))
        rows = lines.map(tokenize).pack(tasks.PACKED)
        return (tokens.count_tokens(batch) for batch in rows.batch(tasks.PACKED_BATCH))

    return Workload(open=open_pipeline, first=layout.TOKENS[tokenizer], packages=("penstock", "numpy", "tiktoken"))
