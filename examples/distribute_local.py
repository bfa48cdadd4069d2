"""A tokenizer written in Python holds the GIL, so threads do not help: run the same pipeline in worker processes.

python examples/distribute_local.py
"""

import time
from typing import Any

import numpy as np

import penstock as ps

DOCUMENTS, BATCH, PROCESSES = 2000, 32, 2
WORDS = ["data", "flows", "through", "a", "pipe", "to", "the", "turbine"]


def document(number: int, rng: np.random.Generator) -> str:  # in place of a reader
    return " ".join(rng.choice(WORDS, 60))


class Tokenizer:
    """Merges pairs of neighbours, in plain Python. It is constructed once in each worker process."""

    def __init__(self) -> None:
        self.merges = {(97, 116): 256, (104, 101): 257, (116, 104): 258, (32, 116): 259}

    def __call__(self, text: str) -> dict[str, Any]:
        tokens = list(text.encode())
        for pair, merged in self.merges.items():
            out, at = [], 0
            while at < len(tokens):
                if tuple(tokens[at : at + 2]) == pair:
                    out.append(merged)
                    at += 2
                else:
                    out.append(tokens[at])
                    at += 1
            tokens = out
        return {"tokens": np.array(tokens, np.int32)}


def read(name: str, batches: ps.Dataset) -> int:
    began, documents, tokens = time.perf_counter(), 0, 0
    for batch in batches:  # tokens: int32[BATCH, the longest of them], padded with 0
        documents += len(batch["tokens"])
        tokens += int((batch["tokens"] > 0).sum())
    took_s = time.perf_counter() - began
    print(f"{name}: {documents} documents, {tokens} tokens, {documents / took_s:,.0f} documents/s")
    return tokens


def main() -> None:
    batches = ps.range(DOCUMENTS).shuffle(seed=5).map(document).map(Tokenizer).padded_batch(BATCH)

    here = read("threads", batches)
    with batches.distribute(PROCESSES) as loader:
        there = read(f"{PROCESSES} processes", loader)
        read(f"{PROCESSES} processes, now that they are started", loader)
        print(f"batches by worker: {loader.statistics().workers}")
    assert here == there
    print("the same tokens in both")


if __name__ == "__main__":
    main()
