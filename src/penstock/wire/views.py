"""A view as a consumer holds it: begun with a whole one, kept up with changes."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec.structs import replace

from penstock.wire.jobs import JobView, StreamMove, StreamView, ViewChange

Fit: TypeAlias = Literal["taken", "known", "missed"]
"""taken: the view is newer now. known: it says nothing new. missed: something before it did not come; ask for it."""


class HeldView:
    """Takes what comes over, whatever comes twice, late or not at all.

    A change costs what changed. `view` is whole, and is put together only when it is asked for.
    """

    def __init__(self, view: JobView) -> None:
        self._view = view
        self._streams = {stream.number: stream for stream in view.streams}
        self._news: dict[int, None] = dict.fromkeys(self._streams)
        self._whole = True

    @property
    def version(self) -> int:
        return self._view.version

    @property
    def view(self) -> JobView:
        if not self._whole:
            self._view = replace(self._view, streams=tuple(self._streams.values()))
            self._whole = True
        return self._view

    def take_news(self) -> tuple[StreamView, ...]:
        """Return the streams that are new or changed since the last call, in the order they came."""
        news, self._news = self._news, {}
        return tuple(self._streams[number] for number in news)

    def take_view(self, view: JobView) -> Fit:
        if view.attempt != self._view.attempt or view.version <= self.version:
            return "known"
        for stream in view.streams:
            if stream != self._streams.get(stream.number):
                self._news[stream.number] = None
        self._view, self._whole = view, True
        self._streams = {stream.number: stream for stream in view.streams}
        return "taken"

    def take_change(self, change: ViewChange) -> Fit:
        if change.attempt != self._view.attempt or change.version <= self.version:
            return "known"
        if change.since > self.version or any(move.number not in self._streams for move in change.moved):
            return "missed"
        for stream in change.made:
            self._put(stream)
        for move in change.moved:
            self._put(_moved(self._streams[move.number], move))
        self._whole = False
        self._view = replace(
            self._view,
            version=change.version,
            finished=change.finished,
            failure=change.failure,
            waiting_for=change.waiting_for,
            dropped=self._view.dropped if change.dropped is None else change.dropped,
        )
        return "taken"

    def _put(self, stream: StreamView) -> None:
        self._streams[stream.number] = stream
        self._news[stream.number] = None


def _moved(stream: StreamView, move: StreamMove) -> StreamView:
    return replace(
        stream,
        binding=move.binding,
        runner=move.runner,
        worker=move.worker,
        address=move.address,
        ended=move.ended,
        lost=move.lost,
    )
