"""group_by_window and bucket_by_length: elements wait in a window per key until it is full.

At the end of the input the windows left over are given short, the one that waited longest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.element import Element
from penstock.runtime.blame import blame
from penstock.runtime.contract import Chunk, Fixed, Idents, Origin, Stage, State
from penstock.runtime.ops.pending import Moment, MomentMarks, OpenedAt, PendingInput, Waiting
from penstock.runtime.stats import StageMeter

INPUTS_PER_OUTPUT = 16  # how much is asked of the input at a time for each window wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRules:
    """What makes a window: its key, its size, and what is made of it."""

    label: str
    key: Callable[[Element], Any]
    size: Callable[[Any], int]
    finish: Callable[[Any, Sequence[Element]], Element]
    drop_last: bool
    max_pending: int | None = None


@dataclass(slots=True)
class _Given:
    """The windows of one chunk. `moments` has one entry more: the moment before the first."""

    moments: list[Moment]
    elements: list[Element] = field(default_factory=list)
    origins: list[Origin | None] = field(default_factory=list)
    idents: list[Idents] = field(default_factory=list)

    def chunk(self) -> Chunk:
        idents = np.concatenate(self.idents) if self.idents else None
        return Chunk(self.elements, MomentMarks(self.moments, self.origins), idents)


class Windows(Stage):
    def __init__(self, meter: StageMeter, upstream: Stage, rules: WindowRules) -> None:
        super().__init__(meter, upstream)
        self._rules = rules
        self._input = PendingInput(upstream)

    def open(self, pass_: int, state: State) -> None:
        self._windows: dict[Any, list[Waiting]] = {}
        self._ended = False
        self._error: Exception | None = None
        for waiting in self._input.open(pass_, state):
            self._windows.setdefault(self._key_of(waiting), []).append(waiting)
        self._now: Moment = OpenedAt(state)

    def _pull(self, want: int) -> Chunk:
        if self._error is not None:
            raise self._error
        given = _Given([self._now])
        while len(given.elements) < want and not (given.elements and not self._input.at_hand):
            try:
                if not self._advance(want, given):
                    break
            except Exception as error:
                if not given.elements:
                    raise
                self._error = error
                break
        if not given.elements:
            return Chunk((), Fixed(self._now.state()))
        return given.chunk()

    def _advance(self, want: int, given: _Given) -> bool:
        """Take one element, or at the end give one window; False when there is nothing left."""
        taken = None if self._ended else self._input.take(want * INPUTS_PER_OUTPUT)
        if taken is not None:
            key = self._key_of(taken)
            window = self._windows.setdefault(key, [])
            window.append(taken)
            if len(window) >= self._rules.size(key):
                self._give(key, given)
            elif self._rules.max_pending is not None and self._input.waiting > self._rules.max_pending:
                self._give(self._oldest(), given)
            return True
        self._ended = True
        if not self._windows or self._rules.drop_last:
            self._now = self._input.moment()
            return False
        self._give(self._oldest(), given)
        return True

    def _give(self, key: Any, given: _Given) -> None:
        window = self._windows[key]
        first = window[0]
        origin = first.origin
        try:
            element = self._rules.finish(key, [waiting.element for waiting in window])
        except Exception as error:
            raise blame(error, self._rules.label, origin) from None
        del self._windows[key]
        for waiting in window:
            self._input.give(waiting)
        self._now = self._input.moment()
        given.elements.append(element)
        given.moments.append(self._now)
        given.origins.append(origin)
        if first.ident is not None:
            given.idents.append(first.ident)

    def _oldest(self) -> Any:
        return min(self._windows, key=lambda key: self._windows[key][0].ordinal)

    def _key_of(self, waiting: Waiting) -> Any:
        try:
            return self._rules.key(waiting.element)
        except Exception as error:
            raise blame(error, self._rules.label, waiting.origin) from None
