"""One of several ranks that read length-bucketed sentences in step, and write down what they got.

    python -m ours.rank '{"service": ..., "job": ..., "folder": ..., "consumers": n, "consumer": n, "order": ...,
                          "steps": n, "seed": n, "timeout_s": x}'

`received` has a record of `RECORD` numbers, 8 bytes each, a step: the padded length and the ids, -1 where a last batch
is short. `finished` is there when the epoch has ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ours.interface import Reading, distribute

import penstock as ps

BATCH = 4
RECORD = 1 + BATCH
BOUNDARIES = (16, 32, 64, 128)
LONGEST = 400


def lengths(rows: int) -> np.ndarray[Any, Any]:
    """A long tail: half of the sentences are shorter than 30."""
    return np.clip(np.random.default_rng(3).lognormal(np.log(30), 0.9, rows).astype(np.int64), 1, LONGEST)


def dataset(rows: int, seed: int) -> ps.Dataset:
    all_lengths = lengths(rows)

    def sentence(i: int) -> dict[str, Any]:
        return {"id": i, "tokens": np.full(all_lengths[i], i)}

    return (
        ps.range(rows)
        .shuffle(seed=seed)
        .map(sentence)
        .bucket_by_length(lambda row: len(row["tokens"]), boundaries=BOUNDARIES, batch_size=BATCH)
    )


def main() -> None:
    given = json.loads(sys.argv[1])
    folder = Path(given["folder"])
    reading = Reading(
        job=given["job"],
        ranks=given["consumers"],
        rank=given["consumer"],
        coordinated=True,
        order=given["order"],
        timeout_s=given.get("timeout_s", 120.0),
        memory_bytes=4 << 20,
    )
    rows = given["steps"] * given["consumers"] * BATCH
    loader = distribute(dataset(rows, given["seed"]), given["service"], reading)
    with loader, (folder / "received").open("wb") as received:
        for batch in loader:
            record = np.full(RECORD, -1)
            record[0] = batch["tokens"].shape[1]
            record[1 : 1 + len(batch["id"])] = batch["id"]
            received.write(record.tobytes())
            received.flush()
    (folder / "finished").touch()


if __name__ == "__main__":
    main()
