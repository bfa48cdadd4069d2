"""Penstock for PyTorch: a `DataLoader` that a script moves to by its import, and pipelines as tensors.

>>> from penstock.torch import DataLoader
>>> [batch.tolist() for batch in DataLoader([1, 2, 3], batch_size=2)]
[[1, 2], [3]]
"""

from penstock.torch.checkpoints import RankStates
from penstock.torch.devices import OnDevice
from penstock.torch.features import KeyedTensors, dense_tensor, keyed_jagged, keyed_tensors
from penstock.torch.loader import DataLoader
from penstock.torch.pipelines import PipelineDataset, TensorLoader, tensors
from penstock.torch.repeating import NonDeterministicSampleError, NonDeterministicSampleWarning

__all__ = [
    "DataLoader",
    "KeyedTensors",
    "NonDeterministicSampleError",
    "NonDeterministicSampleWarning",
    "OnDevice",
    "PipelineDataset",
    "RankStates",
    "TensorLoader",
    "dense_tensor",
    "keyed_jagged",
    "keyed_tensors",
    "tensors",
]
