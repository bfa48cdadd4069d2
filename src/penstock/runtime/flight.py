"""What a stage's user function is working on, noted while it does; one by one where that once killed a process.

What was in flight is told as the first element of a chunk and a count. Chunks are cut elsewhere the next time, and a
shuffle has put other neighbours between; so a suspect means: that element, and as many as the count says that follow
it *at this stage*, one by one. What is in flight then is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from penstock.runtime.contract import Chunk, Marks, Origin, Stage
from penstock.runtime.streams import FlightRecorder

Suspects = Mapping[tuple[int, int, int], int]
"""(source, split, index) → count."""
Made = TypeVar("Made")


class Flight:
    """One stage's. `take` is called in order, `record` from any thread."""

    def __init__(self, recorder: FlightRecorder | None, suspects: Suspects) -> None:
        self._recorder = recorder
        self._suspects = suspects
        self.reset()

    def reset(self) -> None:
        """Forget what was taken ahead: the stage is opened anew."""
        self.rest: Chunk | None = None
        self._alone = 0

    def record(self, origin: Origin | None, count: int, work: Callable[[], Made]) -> Made:
        """Work, with a note of it for as long as it takes."""
        recorder = self._recorder
        if recorder is None:
            return work()
        token = recorder.begin(origin, count)
        try:
            return work()
        finally:
            recorder.end(token)

    def take(self, upstream: Stage, want: int) -> Chunk:
        """Return the next input, as one element where it is a suspect."""
        if not self._suspects:
            return upstream.pull(want)
        chunk = self.rest or upstream.pull(want)
        head, self.rest = chunk.head_and_rest(self.reach(chunk.marks, min(want, len(chunk.elements))))
        return head

    def suspects_split(self, source: int, split: int) -> bool:
        return any((source, split) == suspect[:2] for suspect in self._suspects)

    def reach(self, marks: Marks, count: int) -> int:
        """Return how many of `count` elements may be worked on together."""
        if not self._suspects:
            return count
        for k in range(count):
            suspected = self._suspect(marks.origin(k))
            if k and (suspected or self._alone):
                return k
            self._alone = max(self._alone, suspected)
            if self._alone:
                self._alone -= 1
                return 1
        return count

    def _suspect(self, origin: Origin | None) -> int:
        return 0 if origin is None else self._suspects.get((origin.source, origin.split, origin.index), 0)
