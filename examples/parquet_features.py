"""Read a feature table in column batches: projection and filter in the file, ragged lists, nulls as masks.

python examples/parquet_features.py
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps

ROWS, BATCH = 50_000, 512


def make_table(folder: Path) -> None:
    """Two days of clicks, one folder a day, as a query engine would write them."""
    rng = np.random.default_rng(0)
    for day in (1, 2):
        lengths = rng.integers(0, 6, ROWS)
        items = [rng.integers(0, 1000, length).tolist() for length in lengths]
        age = [
            None if missing else int(age) for age, missing in zip(rng.integers(18, 80, ROWS), rng.random(ROWS) < 0.1)
        ]
        table = pa.table(
            {
                "clicked": rng.random(ROWS) < 0.2,
                "age": pa.array(age, pa.int32()),
                "items": pa.array(items, pa.list_(pa.int64())),
                **{f"unused{i}": rng.standard_normal(ROWS) for i in range(10)},
            }
        )
        (folder / f"day={day}").mkdir()
        pq.write_table(table, folder / f"day={day}" / "part.parquet", row_group_size=10_000)


def features(batch: dict) -> dict:
    """Work on whole columns: one numpy call for thousands of rows."""
    items = batch["items"]  # Ragged: values end to end, and where each row begins
    sums = np.zeros(len(items))
    np.add.at(sums, np.repeat(np.arange(len(items)), items.lengths), items.values)
    return {
        "age": np.where(batch["age__mask"], batch["age"] / 100.0, -1.0).astype(np.float32),
        "item_count": items.lengths.astype(np.float32),
        "item_sum": sums.astype(np.float32),
        "label": batch["clicked"],
    }


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    make_table(folder)
    dataset = (
        ps.read_parquet(
            folder, columns=["clicked", "age", "items"], filter=ps.col("day") == 2, batch=4096, nulls="mask"
        )
        .map(features)
        .rebatch(BATCH, drop_last=True)
    )
    count, clicks = 0, 0
    for batch in dataset:
        assert {key: value.shape for key, value in batch.items()} == dict.fromkeys(batch, (BATCH,))
        count += len(batch["label"])
        clicks += int(batch["label"].sum())
    print(f"{count} rows of day 2 in batches of {BATCH}, {clicks / count:.1%} clicked")


if __name__ == "__main__":
    main()
