"""What runners of one job say to each other about what their hosts keep.

Hosts have names of their own for entries, so that an entry is asked for by what it is about: its prefix's key and the
subjects of splits or elements (`caching.names`), of 16 bytes each. A question that is not answered costs time and
nothing else: what is not had from elsewhere is computed.

Payloads are buffers behind a header, as on all of the data plane. Answers have a limit, so that whoever asks knows how
much memory they take.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.core.ids import JobName, RunnerId
from penstock.wire.jobs import Message

MOST_SUBJECTS = 1024  # in one question
PIECE_BYTES = 1 << 20  # in one answer, or one frame that is larger
NOT_KEPT = -1
BEING_MADE = -2


class FindFellows(Message, frozen=True, tag="find_fellows"):
    """A runner asks the dispatcher which others run its job on other hosts."""

    job: JobName


class FellowPlace(msgspec.Struct, frozen=True, array_like=True):
    """A runner of the same job on another host."""

    runner: RunnerId
    address: str


class FellowsFound(Message, frozen=True, tag="fellows"):
    """One of each host."""

    fellows: tuple[FellowPlace, ...]


class ReadSplit(Message, frozen=True, tag="read_split"):
    """Some bytes of the entry of a split; an offset below 0 counts from its end. `count` is `PIECE_BYTES` at most."""

    number: int
    """Pairs it with its answer."""
    key: str
    subject: bytes
    offset: int
    count: int


class ReadElements(Message, frozen=True, tag="read_elements"):
    """Those of some elements that are kept there, one by one."""

    number: int
    key: str
    subjects: bytes


class DoubtSplit(Message, frozen=True, tag="doubt_split"):
    """What came of this entry was damaged: whoever keeps it may look at it. There is no answer."""

    key: str
    subject: bytes


class SplitBytes(Message, frozen=True, tag="split_bytes"):
    """One buffer follows, where there is an entry."""

    number: int
    size: int
    """Of all of the entry; or `NOT_KEPT`, or `BEING_MADE`."""


class ElementFrames(Message, frozen=True, tag="element_frames"):
    """A buffer by element follows, of some of those that were asked for."""

    number: int
    found: bytes = b""
    """uint32, by buffer: the place of its subject in the question."""
    sums: bytes = b""
    """uint32, by buffer: what its bytes add up to, as it was written."""
    more: bool = False
    """Whether there are others of them, which did not fit in."""


FromFellow: TypeAlias = ReadSplit | ReadElements | DoubtSplit
ToFellow: TypeAlias = SplitBytes | ElementFrames
