"""What a served stream says to its hands: whom to tell what, when to run, and who is to be given which rounds.

It is decided in `stream.serving` and `stream.sharing`, and done in `worker.streams` and `worker.shared`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from penstock.core.ids import AttemptId
from penstock.stream.checkpoint import Mixes
from penstock.wire.frames import StreamEnded, StreamFailed, StreamRefused
from penstock.wire.jobs import Cut, FeedSpec

FRAME_BYTES = 1 << 20


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What all openings of one binding have in common."""

    attempt: AttemptId
    epoch: int
    feed: FeedSpec
    share: int
    binding: int


class End(NamedTuple):
    """How many rounds there were, where the stream stands after them, and whether there is more than they took."""

    seq: int
    cut: Cut
    leftover: bool


class Send(NamedTuple):
    """A message to a reader."""

    peer: bytes
    message: StreamRefused | StreamEnded | StreamFailed


class StartRun(NamedTuple):
    """Begin to make rounds; who did so until now has been stopped."""

    number: int
    terms: Terms
    start: Cut
    start_round: int
    mixes: Mixes = ()
    frame_bytes: int = FRAME_BYTES


class StopRun(NamedTuple):
    number: int


Instruction: TypeAlias = Send | StartRun | StopRun


class Wanted(NamedTuple):
    """A reader needs rounds from `first` on, as its seat's output of each."""

    peer: bytes
    opening: int
    seat: int
    first: int
    slab: bool
    alone: bool
    """Whether no other reader gets the same rounds."""
