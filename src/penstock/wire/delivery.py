"""How a job's outputs reach its readers, derived once from what the job is.

| | who reads a stream | which stream a consumer takes from next |
|---|---|---|
| by arrival | all consumers, each its output of a round | whichever has something |
| in turns | the same | the one with the lowest round; the tail comes last |
| owned | one consumer | whichever of its own has something |
| shared | trainers, each all of it, out of a window | either of the first two |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.wire.jobs import FeedSpec, JobSpec
from penstock.wire.modes import Share

DeliveryKind: TypeAlias = Literal["by arrival", "in turns", "owned", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    kind: DeliveryKind
    consumers: int
    width: int
    """Outputs in a round: one for each consumer, or one where a stream has an owner."""
    in_turn: bool
    """Consumers take rounds from the streams in turn, so that all of them read the same round in the same step."""
    sharing: Share | None
    streams: int | None
    """How many there are, where that is the job's to say; None: as workers join."""

    @property
    def owned(self) -> bool:
        return self.kind == "owned"

    @property
    def shared(self) -> bool:
        return self.kind == "shared"

    @property
    def skips(self) -> bool:
        """What a reader is too late for is gone."""
        return self.sharing is not None and not self.sharing.waits

    @property
    def window_bytes(self) -> int | None:
        """Of what trainers share, on each worker; None: it is left to the worker."""
        return None if self.sharing is None else self.sharing.window_bytes

    @property
    def alike(self) -> bool:
        """After the same number of steps all consumers stand at the same place: one state stands for all."""
        return self.in_turn

    @property
    def trails(self) -> bool:
        """Consumers of one stream stand apart, so that a state has to name splits that one of them is through with."""
        return self.kind == "by arrival" and self.consumers > 1

    def owner_of(self, number: int, feed: FeedSpec) -> int | None:
        """Return the one consumer of a stream, or None: all of them.

        By number, so that a checkpoint need not say. Relaxed streams are made one a consumer, with numbers in a row.
        """
        if not self.owned:
            return None
        return 0 if feed.kind == "tail" else number % self.consumers

    def seat_of(self, consumer: int) -> int:
        """Return which output of a round is that consumer's."""
        return consumer if self.width > 1 else 0


def delivery_of(spec: JobSpec) -> Delivery:
    ranks, shared = spec.ranks, spec.sharing is not None
    in_turn = spec.order == "deterministic" or ranks.coordinated
    owned = ranks.uneven == "allow" and not shared
    return Delivery(
        kind="shared" if shared else "owned" if owned else "in turns" if in_turn else "by arrival",
        consumers=ranks.count,
        width=1 if owned else ranks.count,
        in_turn=in_turn,
        sharing=spec.sharing,
        streams=_fixed_streams(spec, in_turn=in_turn),
    )


def _fixed_streams(spec: JobSpec, *, in_turn: bool) -> int | None:
    if spec.sharding.off:
        return None
    if spec.feeds:
        return len(spec.feeds)
    return (spec.sharding.streams or 1) if in_turn else None
