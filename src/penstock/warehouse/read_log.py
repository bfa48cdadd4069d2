"""The read log of a table: which features of which partitions each session read, and what is popular by it.

One file for each session, named by when it began, so that sessions write beside each other without a lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

from penstock.core.errors import CorruptRecordError
from penstock.warehouse.features import publish

READS = "reads"


class LoggedRead(msgspec.Struct, frozen=True, kw_only=True):
    """One session's projection: the features by id, and the days, where they were named."""

    at_s: float
    features: tuple[int, ...]
    partitions: tuple[str, ...] | None = None
    session: str = ""


class ReadLog:
    """What was read of a table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / READS

    def add(
        self,
        features: Iterable[int],
        partitions: Sequence[str] | None = None,
        *,
        session: str = "",
        at_s: float | None = None,
    ) -> None:
        """Note that a session reads these features."""
        days = None if partitions is None else tuple(partitions)
        read = LoggedRead(
            at_s=time.time() if at_s is None else at_s, features=tuple(features), partitions=days, session=session
        )
        publish(self._folder / f"{read.at_s:017.3f}-{uuid4().hex[:8]}.json", msgspec.json.encode(read))

    def read(self) -> list[LoggedRead]:
        """Return all sessions, the oldest first: names tell milliseconds, what is inside tells more."""
        found: list[LoggedRead] = []
        for path in sorted(self._folder.glob("[0-9]*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=LoggedRead))
            except msgspec.DecodeError as error:
                raise CorruptRecordError(str(path), f"not a read: {error}") from error
        return sorted(found, key=lambda read: read.at_s)


def popularity(reads: Iterable[LoggedRead]) -> list[int]:
    """Return the features by how many sessions read them, the most popular first.

    Of features that equally many read, those that are read by the same sessions stand together.

    >>> reads = [LoggedRead(at_s=0, features=(1, 9)), LoggedRead(at_s=1, features=(9, 4))]
    >>> popularity(reads)
    [9, 1, 4]
    """
    log = list(reads)
    counts: Counter[int] = Counter()
    readers: dict[int, list[int]] = {}
    for number, read in enumerate(log):
        counts.update(read.features)
        for feature in read.features:
            readers.setdefault(feature, []).append(number)
    return sorted(counts, key=lambda feature: (-counts[feature], readers[feature], feature))


def popular_share(
    reads: Sequence[LoggedRead], bytes_of: Mapping[int, float], traffic: float
) -> tuple[list[int], float]:
    """Return the features that serve a share of all traffic with the fewest bytes, and their share of all bytes.

    A session's traffic is the bytes of the features that it reads; bytes are popular that many sessions read.

    >>> popular_share([LoggedRead(at_s=0, features=(1,))], {1: 10.0, 2: 30.0}, 0.8)
    ([1], 0.25)
    """
    counts: Counter[int] = Counter()
    for read in reads:
        counts.update(read.features)
    total = sum(count * bytes_of.get(feature, 0.0) for feature, count in counts.items())
    stored = sum(bytes_of.values())
    chosen: list[int] = []
    served = taken = 0.0
    for feature in popularity(reads):
        if served >= traffic * total:
            break
        chosen.append(feature)
        served += counts[feature] * bytes_of.get(feature, 0.0)
        taken += bytes_of.get(feature, 0.0)
    return chosen, taken / stored if stored else 0.0
