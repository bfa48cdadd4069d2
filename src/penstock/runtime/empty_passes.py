"""What passes without elements say of those to come."""

from __future__ import annotations

from collections.abc import Callable

MOST_EMPTY = 100  # passes in a row of which a stream read some splits, and all for nothing


class EmptyPasses:
    """Tells when passes without elements mean that no pass will have any.

    Alone, one of them says so. A stream reads a part of each pass: a filter may leave nothing of it, and something of
    the next one's, which comes in another order. There it takes many; those of which others got all the splits say
    nothing, and do not count. One that the stream got whole says what it would say alone.
    """

    def __init__(self, splits_read: Callable[[], int] | None = None, splits: int | None = None) -> None:
        """`splits_read`, in a stream, is how many splits the input has begun so far, and `splits` how many a pass has;
        None: that does not follow, or another pass may give what this one did not.
        """
        self.certain = splits_read is None
        """Whether a pass that ended without elements was the whole of it, so that nobody gets anything of the input."""
        self._splits_read, self._splits = splits_read, splits
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
        read = self._splits_read() - self._before
        self.certain = read == self._splits
        self._count += read > 0
        return self._count >= MOST_EMPTY
