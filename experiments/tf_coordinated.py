"""tf.data service with coordinated reads, in the peers' environment.

python tf_coordinated.py '{"consumers": n, "steps": n, "width": n, "workers": n, "rows": n}'    # one JSON line
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))  # its servers are started as there

from steps import BATCH, boundaries, run_ranks, sentence_lengths


def rank(consumer: int, consumers: int, *, address: str, width: int, rows: int) -> Iterator[Any]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    lengths = tf.constant(sentence_lengths(rows))
    limits = boundaries(width)

    def sentence(i: Any) -> Any:
        return tf.fill([lengths[i]], i + 1)

    def bucket(batch: Any) -> Any:
        longest = tf.cast(tf.shape(batch)[1], tf.int64)
        return tf.reduce_sum(tf.cast(longest > tf.constant(limits, tf.int64), tf.int64))

    dataset = tf.data.Dataset.range(rows).repeat().map(sentence)
    dataset = dataset.bucket_by_sequence_length(
        element_length_func=lambda row: tf.shape(row)[0],
        bucket_boundaries=[limit + 1 for limit in limits],  # they are exclusive here
        bucket_batch_sizes=[BATCH] * (len(limits) + 1),
        drop_remainder=True,
    )
    dataset = dataset.group_by_window(
        key_func=bucket, reduce_func=lambda _, batches: tf.data.Dataset.from_tensors(batches), window_size=consumers
    )
    dataset = dataset.flat_map(lambda batches: batches)
    dataset = dataset.apply(
        tf.data.experimental.service.distribute(
            "parallel_epochs",
            address,
            job_name="coordinated",
            consumer_index=consumer,
            num_consumers=consumers,
            compression=None,
        )
    )
    for batch in dataset.prefetch(tf.data.AUTOTUNE):
        yield batch.numpy()


def main() -> None:
    from peers.tf_service import Servers

    given = json.loads(sys.argv[1])
    servers = Servers(given["workers"])
    try:
        outcome = run_ranks(
            rank,
            given["consumers"],
            given["steps"],
            {"address": servers.address, "width": given["width"], "rows": given["rows"]},
        )
    finally:
        servers.close()
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
