"""What `default_collate` takes: samples of many kinds, two and two."""

from __future__ import annotations

import collections
import types

import numpy as np
import torch

from tests.torch.datasets import Point

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
DTYPES += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
ARRAYS = ["?", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8", "c8", "c16"]
SCALARS = [np.bool_(True), np.int8(3), np.int64(4), np.uint8(5), np.float16(0.5), np.float32(1.5), np.float64(2.5)]

KINDS = {
    **{f"tensor {dtype}": torch.ones(2, 3).to(dtype) for dtype in DTYPES},
    **{f"array {dtype}": np.ones((2, 2), dtype) for dtype in ARRAYS},
    **{f"scalar {type(value).__name__}": value for value in SCALARS},
    "int": 3,
    "negative int": -(1 << 40),
    "bool": True,
    "float": 0.25,
    "nan": float("inf"),
    "str": "text",
    "empty str": "",
    "bytes": b"bytes",
    "tuple": (1, 2.0, "x"),
    "list": [1, [2, 3]],
    "empty list": [],
    "dict": {"a": 1, "b": {"c": torch.arange(3)}},
    "empty dict": {},
    "ordered dict": collections.OrderedDict(b=1, a=2),
    "named tuple": Point(1, torch.ones(2)),
    "nested named tuple": {"p": Point([1, 2], {"q": "r"})},
    "dict of lists": {"a": [1, 2], "b": ("x", "y")},
    "zero-dimensional tensor": torch.tensor(7),
    "zero-dimensional array": np.array(7.0),
    "empty tensor": torch.empty(0, 4),
    "transposed tensor": torch.arange(6).reshape(2, 3).t(),
    "strided array": np.arange(12)[::2],
    "Fortran array": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "mapping": types.MappingProxyType({"a": 1}),
}


def same(one, other):
    """Say whether two batches have equal types and values throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, collections.abc.Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
