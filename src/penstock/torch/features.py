"""Feature columns as PyTorch takes them: over the same memory, by torchrec's classes where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from penstock.core.errors import MissingExtraError
from penstock.core.keyed import KeyedDense, KeyedRagged

if TYPE_CHECKING:
    from penstock.core.element import Array


class KeyedTensors(NamedTuple):
    """A `KeyedRagged` as tensors: feature f of row b is `values[offsets[f * B + b] : offsets[f * B + b + 1]]`."""

    keys: tuple[str, ...]
    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None

    def feature(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a feature's values and where each row's begin, as `torch.nn.EmbeddingBag` takes them."""
        rows = (len(self.offsets) - 1) // len(self.keys)
        place = self.keys.index(key)
        offsets = self.offsets[place * rows : (place + 1) * rows + 1]
        return self.values[offsets[0] : offsets[-1]], offsets[:-1] - offsets[0]


def keyed_tensors(column: KeyedRagged) -> KeyedTensors:
    """Return the column's arrays as tensors, without a copy.

    >>> import numpy as np, penstock as ps
    >>> column = ps.KeyedRagged(("a", "b"), np.array([7, 8, 9]), np.array([0, 2, 2, 2, 3]))
    >>> keyed_tensors(column).feature("b")
    (tensor([9]), tensor([0, 0]))
    """
    weights = None if column.weights is None else _tensor(column.weights)
    return KeyedTensors(column.keys, _tensor(column.values), _tensor(column.offsets), weights)


def keyed_jagged(column: KeyedRagged) -> Any:
    """Return the column as torchrec's `KeyedJaggedTensor`, without a copy; torchrec has to be installed."""
    try:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    except ImportError:
        raise MissingExtraError("torchrec", "torch") from None
    plain = keyed_tensors(column)
    return KeyedJaggedTensor(
        keys=list(plain.keys), values=plain.values, offsets=plain.offsets, weights=plain.weights, stride=len(column)
    )


def dense_tensor(column: KeyedDense) -> torch.Tensor:
    """Return the column as a tensor of a row for each row and a column for each feature, without a copy.

    What is null is 0 there.

    >>> import numpy as np, penstock as ps
    >>> dense_tensor(ps.KeyedDense(("a", "b"), np.array([[1, 2, 3], [4, 5, 6]], np.float32)))
    tensor([[1., 4.],
            [2., 5.],
            [3., 6.]])
    """
    return _tensor(column.values).T


def _tensor(array: Array) -> torch.Tensor:
    # Torch has no tensors that cannot be written to: what others read too is copied.
    found: torch.Tensor = torch.from_numpy(array if array.flags.writeable else np.array(array))
    return found
