"""What passes without elements say of those to come."""

from __future__ import annotations

from collections.abc import Callable

MOST_EMPTY = 100  # passes in a row of which a stream read some splits, and all for nothing


class EmptyPasses:
    """Tells when passes without elements mean that no pass will have any.

    Alone, one of them says so. A stream reads a part of each pass: a filter may leave nothing of it, and something of
    the next one's, which comes in another order. There it takes many; those of which others got all the splits say
    nothing, and do not count.
    """

    def __init__(self, splits_read: Callable[[], int] | None = None) -> None:
        """`splits_read`, in a stream, is how many splits the input has begun so far."""
        self.alone = splits_read is None
        self._splits_read = splits_read
        self.gave()

    def gave(self) -> None:
        """The present pass has an element."""
        self._count = 0

    def begin_pass(self) -> None:
        if self._splits_read is not None:
            self._before = self._splits_read()

    def were_enough(self) -> bool:
        """Count a pass without elements that has ended; say whether to give up."""
        if self._splits_read is None:
            return True
        if self._splits_read() != self._before:
            self._count += 1
        return self._count >= MOST_EMPTY
