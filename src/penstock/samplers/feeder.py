"""Client-fed jobs: the consumer's own sampler says which elements make which output, and in which order.

Unit u of an attempt is number u // S of stream u mod S, and the S streams are read in turn: so outputs arrive in the
sampler's order. Up to `ahead` units that the trainer has not received are drawn and sent ahead, while it is in
`next()`; they are kept until it has their outputs, so that a stream which is opened elsewhere gets the same ones again.

A loaded state starts a new attempt where the sampler stood: on any service, with any number of workers. Consumers do
not depend on each other; each is a job of its own.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.samplers.drawing import REFILL_AT, Drawing, KeptUnits, SamplerPlace
from penstock.stream.reading import StreamReader
from penstock.wire.frames import Units


class Feeder:
    """What has been drawn for one attempt and not received yet. Belongs to the thread that reads.

    The trainer's steps are counted over the whole epoch, from `begins_at` on in this attempt; they are units' numbers.
    """

    def __init__(self, drawing: Drawing, *, ahead: int, consumer: int, consumers: int) -> None:
        self.consumer, self.consumers = consumer, consumers
        """Which consumer of how many the loader is; the job itself has but one."""
        self._ahead = ahead
        self._kept = KeptUnits(drawing)
        self.begins_at = self._kept.first
        self._end_told = False
        self._streams = 1

    def deal_to(self, streams: int) -> None:
        """Deal units to so many streams, in turn."""
        self._streams = streams

    def places(self, step: int, count: int) -> list[SamplerPlace]:
        """Return where the sampler stood before each of the units from `step` on, and after the last of `count`."""
        return [self.place(step + k) for k in range(count + 1)]

    def place(self, step: int) -> SamplerPlace:
        """Return where the sampler stood before a unit that was not received before the last `refill`."""
        return self._kept.place(step)

    def refill(self, step: int, readers: Collection[StreamReader]) -> list[Units]:
        """Forget what was received, draw more if there is room; return what is to be sent to streams that are open."""
        kept = self._kept
        # Inside a frame a stream stands at the cut before it, and opened there it needs the units from there on.
        kept.forget(min([step, *(self._step(r.number, r.standing.cut_round) for r in readers if not r.standing.ended)]))
        before = kept.next
        if before - step <= REFILL_AT * self._ahead:
            while not kept.ended and kept.next - step < self._ahead:
                kept.draw()
        if kept.next == before and (not kept.ended or self._end_told):
            return []
        self._end_told = kept.ended
        return [self._units(reader, self._ordinal(reader.number, before)) for reader in readers if reader.is_open]

    def opened(self, reader: StreamReader) -> Units:
        """Return all that a stream which was just opened needs from there on."""
        return self._units(reader, reader.head.cut_round)

    def _step(self, stream: int, ordinal: int) -> int:
        return self.begins_at + ordinal * self._streams + stream

    def _ordinal(self, stream: int, step: int) -> int:
        """Return the number, in a stream, of its first unit at or after a step."""
        return max(0, -(-(step - self.begins_at - stream) // self._streams))

    def _units(self, reader: StreamReader, first: int) -> Units:
        steps = range(self._step(reader.number, first), self._kept.next, self._streams)
        return Units(
            stream=reader.stream,
            opening=reader.opening,
            first=first,
            units=tuple(map(self._kept.unit, steps)),
            ended=self._kept.ended,
            taken=reader.standing.cut_round,
            start=self.begins_at,
        )
