"""TensorFlow's tf.data, parallelism and buffers left to AUTOTUNE."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import layout
import numpy as np
import tasks
import tensorflow as tf
import tokens
from side import Workload

PACKAGES = ("tensorflow-cpu", "numpy")
AUTO = tf.data.AUTOTUNE
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FEATURES = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}


def images(folder: str) -> Workload:
    def open_pipeline(n: int) -> Iterator[int]:
        return (tasks.IMAGE_BATCH for _ in image_batches(folder, tasks.passes(n, layout.IMAGES)))

    return Workload(open=open_pipeline, first=layout.IMAGES, packages=PACKAGES)


def image_batches(folder: str, passes: int | None, *, normalized: bool = False, batch: int = tasks.IMAGE_BATCH) -> Any:
    """Its own operations: only the crop is decoded. Without a number of passes there is no end.

    `normalized` gives floats as the Model Garden's ImageNet pipeline does; they are what `resize` returns.
    """
    mean, std = (tf.constant(values) * 255 for values in (IMAGENET_MEAN, IMAGENET_STD))

    def augment(record: Any) -> tuple[Any, Any]:
        example = tf.io.parse_single_example(record, FEATURES)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(example["image"]),
            tf.zeros([1, 0, 4]),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.concat([begin[:2], size[:2]], 0)
        crop = tf.image.decode_and_crop_jpeg(example["image"], window, channels=3)
        resized = tf.image.resize(crop, [tasks.SIDE_PX, tasks.SIDE_PX])
        flipped = tf.image.random_flip_left_right(resized)
        return (flipped - mean) / std if normalized else tf.cast(flipped, tf.uint8), example["label"]

    files = tf.data.Dataset.from_tensor_slices(layout.record_files(folder))
    records = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=AUTO)
    examples = records.repeat(passes).map(augment, num_parallel_calls=AUTO, deterministic=False)
    return examples.batch(batch).prefetch(AUTO)


def packed_tokens(folder: str, tokenizer: str) -> Workload:
    """The tokenizer in a `numpy_function`; `rebatch` cuts the joined sequences at 2,048."""
    files = layout.text_files(folder)
    encode = tokens.TOKENIZERS[tokenizer](folder)

    def on_line(line: bytes, number: int) -> tuple[Any, Any, Any]:
        sequence = encode(json.loads(line)["text"])
        return sequence, np.full(len(sequence), number + 1, np.int32), np.arange(len(sequence), dtype=np.int32)

    def tokenize(number: Any, line: Any) -> dict[str, Any]:
        parts = tf.numpy_function(on_line, [line, number], [tf.int32, tf.int32, tf.int32])
        for part in parts:
            part.set_shape([None])
        return dict(zip(("tokens", "segment_ids", "positions"), parts))

    def open_pipeline(n: int) -> Iterator[int]:
        lines = tf.data.Dataset.from_tensor_slices(files * tasks.passes(n, layout.TOKENS[tokenizer]))
        lines = lines.interleave(tf.data.TextLineDataset, cycle_length=1).enumerate()
        rows = lines.map(tokenize, num_parallel_calls=AUTO).rebatch(tasks.PACKED)
        dataset = rows.batch(tasks.PACKED_BATCH, drop_remainder=True).prefetch(AUTO)
        return (tokens.count_tokens(batch) for batch in dataset)

    return Workload(open=open_pipeline, first=layout.TOKENS[tokenizer], packages=(*PACKAGES, "tiktoken"))
