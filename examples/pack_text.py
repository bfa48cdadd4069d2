"""Turn JSON lines of text into packed rows of tokens, mixed from two sources, ready for a language model.

python examples/pack_text.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np

import penstock as ps

LENGTH, BATCH = 256, 8


def make_text(path: Path, word: str, documents: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for number, length in enumerate(rng.integers(3, 120, documents)):
            file.write(json.dumps({"id": number, "text": " ".join([word] * int(length))}) + "\n")


class Tokenizer:
    """Constructed once per process, however many elements it is called with: a place for vocabularies and models."""

    def __init__(self) -> None:
        self.end = 256

    def __call__(self, document: dict) -> dict:
        tokens = [*document["text"].encode(), self.end]
        return {"tokens": np.array(tokens, np.int32)}


def token_count(document: dict) -> int:
    return len(document["tokens"])


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    make_text(folder / "books.jsonl", "book", 400, seed=1)
    make_text(folder / "code.jsonl", "code", 400, seed=2)

    books = ps.read_jsonl(folder / "books.jsonl").shuffle(100, seed=5).map(Tokenizer)
    code = ps.read_jsonl(folder / "code.jsonl").shuffle(100, seed=5).map(Tokenizer)
    mixed = ps.mix([books, code], weights=[0.7, 0.3], unit=token_count)  # shares of tokens, not of documents
    batches = mixed.pack(LENGTH, key="tokens").batch(BATCH)

    rows = filled = 0
    for batch in batches:
        # tokens, segment_ids (0 is padding) and positions, each int32[BATCH, LENGTH]
        rows += len(batch["tokens"])
        filled += int((batch["segment_ids"] > 0).sum())
    print(f"{rows} rows of {LENGTH} tokens, {filled / (rows * LENGTH):.1%} filled")


if __name__ == "__main__":
    main()
