"""Of what is got, one split or element in a thousand is made all the same, and compared with what is kept.

What makes elements may have changed without a prefix showing it: a library, a file that a function reads, a machine.
What was made is handed on; what is kept stays, since nobody but the user knows which of the two is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator

from penstock.caching.entries import encode_frame
from penstock.core.element import Element
from penstock.core.errors import CodecError, ImpureFunctionWarning
from penstock.runtime.contract import Chunk
from penstock.runtime.kept_reader import KeptReader, LostEntryError

EVERY = 1000
_SPREAD, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
PREFIX_CHARACTERS = 12  # as `penstock cache` shows them

_named: set[str] = set()


def is_due(place: int, index: int = 0) -> bool:
    """Say whether a split, known by its place in a pass, or one of its elements is made though it is kept."""
    mixed = (place ^ (index + 1) * _SPREAD) * _SPREAD & _WORD
    return (mixed >> 24) % EVERY == 0


class Recheck:
    """What is kept, to be compared with what is made of the same. One that was left out now or then differs, too."""

    def __init__(self, kept: Generator[tuple[int, Element]]) -> None:
        """`kept` gives indices and elements, as far as they can be had."""
        self._kept = kept

    def compare(self, chunk: Chunk, label: str, prefix: str) -> None:
        assert chunk.idents is not None
        for element, index in zip(chunk.elements, chunk.idents[:, 1].tolist()):
            found = next(self._kept, None)
            if found is None:
                return
            if found[0] != index or not _is_same(found[1], element):
                _tell(label, prefix, index)
                self.close()

    def close(self) -> None:
        self._kept.close()


def read_on(reader: KeptReader) -> Generator[tuple[int, Element]]:
    """Give what a reader reads."""
    try:
        while len((records := reader.read(1)).elements):
            assert records.indices is not None
            yield int(records.indices[0]), records.elements[0]
    except LostEntryError:
        pass
    finally:
        reader.close()


def these(elements: list[tuple[int, Element]]) -> Generator[tuple[int, Element]]:
    """Give what was read before."""
    yield from elements


def _is_same(one: Element, other: Element) -> bool:
    try:
        return encode_frame([one]).tobytes() == encode_frame([other]).tobytes()
    except CodecError:
        return False


def _tell(label: str, prefix: str, index: int) -> None:
    if prefix in _named:
        return
    _named.add(prefix)
    warnings.warn(
        f"{label} does not give what autocache() keeps of it: element {index} of a split was made again, and is "
        "another. A function may draw or count, or what it uses has changed, a library or a file that it reads. "
        f"Remove what is kept (penstock cache rm {prefix[:PREFIX_CHARACTERS]}), or name what changes: "
        "autocache(version=...)",
        ImpureFunctionWarning,
        stacklevel=2,
    )
