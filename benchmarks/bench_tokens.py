"""JSON lines of text, tokenized and packed into rows of 2,048 with segment ids and positions, 16 rows a batch.

Twice: with byte-pair encoding in Rust, which releases the GIL, and with a tokenizer in plain Python, which holds it, so
that one process cannot use two cores for it: there ours has two, as the peers have.
"""

from __future__ import annotations

import inputs
from harness import Bench, main, ours, peer

CASES = {"byte pairs": ("bpe", 0), "words in Python": ("words", 2)}  # tokenizer, our processes


def run(bench: Bench) -> None:
    folder = str(inputs.text())
    for case, (tokenizer, processes) in CASES.items():
        given = {"folder": folder, "tokenizer": tokenizer}
        peers = [
            peer("DataLoader, 0 processes", "peers.torch_loader:packed_tokens", **given, processes=0),
            peer("DataLoader, 2 processes", "peers.torch_loader:packed_tokens", **given, processes=2),
            peer("Grain, in process", "peers.grain_loader:packed_tokens", **given, processes=0),
            peer("Grain, 2 processes", "peers.grain_loader:packed_tokens", **given, processes=2),
            peer("Ray Data", "peers.ray_data:packed_tokens", **given),
            peer("tf.data", "peers.tf_data:packed_tokens", **given),
        ]
        mine = ours("ours.text:packed_tokens", **given, processes=processes)
        bench.compare(case, mine, peers, unit="tokens/s", target=1.0)


if __name__ == "__main__":
    main("tokens", run, trees_by_case=True)
