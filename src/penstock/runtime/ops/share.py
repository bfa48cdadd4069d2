"""A stream's share of a job, for the operators that take one. A tail changes it from leftover to leftover."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Share:
    """Read by operators when they are opened."""

    shuffle_parts: int = 1
    keep: tuple[int, int] | None = None

    def of(self, size: int) -> int:
        """Return the part of a shuffle's size.

        >>> [Share(shuffle_parts=4).of(size) for size in (1000, 10, 1)]
        [250, 3, 1]
        """
        return max(1, -(-size // self.shuffle_parts))
