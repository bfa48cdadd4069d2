"""Training images: decode, random crop, resize to 224, flip, batch 64. 1,024 JPEGs of 95 KB, files and TFRecords."""

from __future__ import annotations

import inputs
from harness import Bench, main, ours, peer

SECONDS = 5  # tf.data's autotuning needs its second to settle


def run(bench: Bench) -> None:
    folder = str(inputs.images())
    unit = "images/s"
    tf_data = peer("tf.data", "peers.tf_data:images", folder=folder)
    bench.compare(
        "user's opencv function, files",
        ours("ours.images:opencv_on_files", folder=folder),
        [peer("DataLoader, 2 processes", "peers.torch_loader:images", folder=folder, processes=2)],
        unit=unit,
        target=1.0,
        per_cpu_target=1.0,
        seconds=SECONDS,
    )
    on_records = ours("ours.images:opencv_on_records", folder=folder)
    bench.compare("user's opencv function, records", on_records, [tf_data], unit=unit, target=1.1, seconds=SECONDS)
    with_ours = ours("ours.images:image_on_records", folder=folder)
    bench.compare("ps.image, records", with_ours, [tf_data], unit=unit, target=1.4, seconds=SECONDS)
    bench.compare(
        "ps.image, files",
        ours("ours.images:image_on_files", folder=folder),
        [ours("ours.images:bare_threads", name="bare loop, 2 threads", folder=folder, threads=2)],
        unit=unit,
        target=0.95,
        seconds=SECONDS,
    )


if __name__ == "__main__":
    main("images", run, trees_by_case=True)
