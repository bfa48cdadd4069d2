"""Penstock from JSON lines to packed rows of 2,048 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import layout
import tasks
import tokens
from side import Workload


def packed_tokens(folder: str, tokenizer: str, processes: int) -> Workload:
    """In this process with 0 processes, else through a local service of so many workers."""
    import penstock as ps

    service = ps.LocalService(workers=processes) if processes else None
    encode = tokens.TOKENIZERS[tokenizer](folder)
    encode("made before the threads are")

    def tokenize(document: dict[str, Any]) -> Any:
        return encode(document["text"])

    def open_pipeline(n: int) -> Iterator[int]:
        lines = ps.read_jsonl(f"{folder}/*.jsonl").repeat(tasks.passes(n, layout.TOKENS[tokenizer]))
        batches = lines.map(tokenize).pack(tasks.PACKED).batch(tasks.PACKED_BATCH)
        if service is None:
            yield from map(tokens.count_tokens, batches)
            return
        with batches.distribute(service) as loader:
            yield from map(tokens.count_tokens, loader)

    return Workload(
        open=open_pipeline,
        first=layout.TOKENS[tokenizer] * max(1, processes),  # the files are one split: a pass for each process
        packages=("penstock", "numpy", "tiktoken"),
        notes={"how": f"distribute({processes})" if processes else "in one process"},
    )
