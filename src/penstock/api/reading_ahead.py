"""Batches that are taken before they are trained, and the state of the one that was trained last.

Frameworks fetch ahead of the step that trains. A state that counted what they hold would leave it out after a resume.
So the place after each batch is noted when it is taken, and made a state once the framework says it was trained.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, Self

Note = Callable[[], dict[str, Any]]
"""Makes the state of a place that was noted down."""


class Resumable(Protocol):
    """What is read epoch by epoch and knows where it stands: our loaders, and those made over them."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


class ReadAhead:
    """The rest of the epoch that a loader is to read next, for somebody who takes batches before training them.

    Batches may be taken in one thread, and said to be trained in another.

    >>> import penstock as ps
    >>> loader = ps.range(6).batch(2).distribute()
    >>> ahead = ReadAhead(loader)
    >>> taken = [next(ahead), next(ahead)]
    >>> ahead.trained()
    >>> loader.load_state_dict(ahead.state_dict())
    >>> [batch.tolist() for batch in loader]
    [[2, 3], [4, 5]]
    """

    def __init__(self, loader: Resumable) -> None:
        self._loader = loader
        self._last_trained = self._began_at = self._note()
        self._batches = iter(loader)
        self._lock = threading.Lock()
        self._waiting: deque[Any] = deque()
        """Taken from the loader to look at, and not handed out yet, each with its note."""
        self._notes: deque[Note] = deque()
        """Of batches that were handed out and are not trained."""
        self.count_trained = 0
        self._ended: Note | None = None

    def _note(self) -> Note:
        noting: Callable[[], Note] | None = getattr(self._loader, "note_state", None)
        return partial(_given, self._loader.state_dict()) if noting is None else noting()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._lock:
            batch, note = self._waiting.popleft() if self._waiting else self._take()
            self._notes.append(note)
            return batch

    def _take(self) -> tuple[Any, Note]:
        if self._ended is not None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended = self._note()
            raise
        return batch, self._note()

    def look(self, count: int) -> list[Any]:
        """Return the next batches, as many as there are of `count`, which stay the next ones."""
        with self._lock:
            while len(self._waiting) < count:
                try:
                    self._waiting.append(self._take())
                except StopIteration:
                    break
            return [batch for batch, _ in list(self._waiting)[:count]]

    def trained(self, count: int = 1) -> None:
        """Be told that the oldest batches that were handed out are trained."""
        for _ in range(min(count, len(self._notes))):
            self._last_trained = self._notes.popleft()
            self.count_trained += 1

    @property
    def exhausted(self) -> bool:
        """Whether all batches were handed out; it may wait for one, to learn that."""
        return not self.look(1)

    @property
    def all_trained(self) -> bool:
        """Whether all batches were handed out and trained. The state is then that of the ended epoch."""
        return not self._notes and self.exhausted

    def began_at(self) -> dict[str, Any]:
        """Return the state it began with."""
        return self._began_at()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the batch that was trained last; of the ended epoch, if it is known to be."""
        ended = self._ended
        return ended() if ended is not None and not self._notes and not self._waiting else self._last_trained()


def _given(state: dict[str, Any]) -> dict[str, Any]:
    return state
