"""A trainer that writes down every element it receives, and checkpoints: killed at any time, it goes on from there.

    python -m ours.trainer '{"service": ..., "job": ..., "folder": ..., "elements": n, "order": ..., "seed": n,
                             "work_s": x, "padding_bytes": n, "timeout_s": x}'

`received` has the ids, 8 bytes each, in the order of arrival. `checkpoint` has the loader's state and the length
`received` had with it: what came later is struck off on the way back, as a trainer's own steps would be. `finished` is
there when the epoch has ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from ours.interface import Reading, distribute

import penstock as ps

BATCH = 50
CHECKPOINT_EVERY = 10  # batches
SHUFFLE = 2_000


class Work:
    """Waits, and adds bytes: so that what is on its way is more than what the buffers hold."""

    def __init__(self, seconds: float, padding_bytes: int) -> None:
        self.seconds, self.padding_bytes = seconds, padding_bytes

    def __call__(self, number: int) -> dict[str, Any]:
        if self.seconds:
            time.sleep(self.seconds)
        return {"id": number, "padding": np.full(self.padding_bytes, number % 256, np.uint8)}


def dataset(elements: int, seed: int, work_s: float, padding_bytes: int) -> ps.Dataset:
    return ps.range(elements).shuffle(SHUFFLE, seed=seed).map(Work(work_s, padding_bytes)).batch(BATCH)


def save(path: Path, content: dict[str, Any]) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(content))
    os.replace(scratch, path)


def main() -> None:
    given = json.loads(sys.argv[1])
    folder = Path(given["folder"])
    source = dataset(given["elements"], given["seed"], given["work_s"], given["padding_bytes"])
    reading = Reading(
        job=given["job"],
        order=given["order"],
        timeout_s=given.get("timeout_s", 120.0),
        memory_bytes=given.get("memory_bytes", 16 << 20),
    )
    loader = distribute(source, given["service"], reading)
    checkpoint = folder / "checkpoint"
    with (folder / "received").open("ab") as received, loader:
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            loader.load_state_dict(saved["loader"])
            received.truncate(saved["received_bytes"])
        else:
            received.truncate(0)
        for step, batch in enumerate(loader, 1):
            if (batch["padding"] != (batch["id"] % 256).astype(np.uint8)[:, None]).any():
                raise RuntimeError(f"bytes of another element among {batch['id']}")
            received.write(batch["id"].astype(np.int64).tobytes())
            received.flush()
            if step % CHECKPOINT_EVERY == 0:
                save(checkpoint, {"loader": loader.state_dict(), "received_bytes": os.fstat(received.fileno()).st_size})
    (folder / "finished").touch()


if __name__ == "__main__":
    main()
