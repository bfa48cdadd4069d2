"""Which kernels each transform calls, by what the transform is called."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.kernels import hashing, lists, single_values
from penstock.kernels.compiling import Kernel


def kernels_of(ops: Iterable[str]) -> list[Kernel]:
    """Return the kernels that some transforms call.

    >>> [kernel.name for kernel in kernels_of(["Clamp", "Logit"])]
    ['_clamp', '_log_odds']
    """
    asked = set(ops)
    tables = (hashing.KERNELS, lists.KERNELS, single_values.KERNELS)
    return [kernel for table in tables for op, kernels in table.items() if op in asked for kernel in kernels]
