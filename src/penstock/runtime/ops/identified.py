"""Identities that travel with elements: from where they are made to a pipeline in another process.

An identity is an element's row of `Chunk.idents`, as 24 bytes. The reader takes the pairs apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.element import Element
from penstock.graph import ops
from penstock.runtime.building import Step, step_of
from penstock.runtime.calling import Calling
from penstock.runtime.contract import Chunk, Idents
from penstock.runtime.ordered import Outcome
from penstock.runtime.stats import StageMeter

_WORDS = 3
_BYTES = 8 * _WORDS
_LITTLE = np.dtype("<u8")  # hosts agree on it


class IdentifyStep:
    def run(self, chunk: Chunk) -> Outcome:
        return Outcome(Chunk(with_identities(chunk), chunk.marks, chunk.idents))


def with_identities(chunk: Chunk) -> list[tuple[Element, bytes]]:
    """Return each element of a chunk with its identity."""
    if chunk.idents is None:
        raise TypeError("these elements were made without identities")
    text = chunk.idents.astype(_LITTLE, copy=False).tobytes()
    return [(element, text[_BYTES * k : _BYTES * (k + 1)]) for k, element in enumerate(chunk.elements)]


def without_identities(pairs: Sequence[Any]) -> tuple[list[Element], Idents]:
    """Return the elements of pairs `(element, identity)`, and their identities as a chunk has them.

    >>> without_identities([("a", bytes(24)), ("b", bytes([7] + [0] * 23))])[1].tolist()
    [[0, 0, 0], [7, 0, 0]]
    """
    text = b"".join([identity for _, identity in pairs])
    idents = np.frombuffer(text, _LITTLE).astype(np.uint64).reshape(len(pairs), _WORDS)
    return [element for element, _ in pairs], idents


@step_of(ops.Identified)
def _identify(node: ops.Identified, calling: Calling, meter: StageMeter) -> Step:
    return IdentifyStep()
