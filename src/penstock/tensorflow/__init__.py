"""Penstock for TensorFlow: pipelines as `tf.data.Dataset`, and tf.data pipelines as sources."""

from penstock.tensorflow.converting import DatasetState, from_tf_dataset, to_tf_dataset

__all__ = ["DatasetState", "from_tf_dataset", "to_tf_dataset"]
