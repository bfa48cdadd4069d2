"""What was learned about pipelines, kept in the journal: the next run of the same begins with it.

A key names what was measured, from the general to the particular, with slashes between (`scaling/<fingerprint>/...`);
its record is a few numbers by name. Whoever learns something emits `MetricLearned`, and whoever wants to know asks
`get`, which gives a record of a class: numbers that another release left, and that do not fit, are none.
The keys that were written longest ago are let go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

KEPT_KEYS = 4096

Known = TypeVar("Known")


class MetricStore:
    """Immutable: a change makes another."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self._values: dict[str, dict[str, float]] = {key: dict(each) for key, each in (values or {}).items()}

    def put(self, key: str, values: Mapping[str, float]) -> MetricStore:
        """
        >>> store = MetricStore().put("a", {"workers": 4.0}).put("b", {}).put("a", {"workers": 5.0})
        >>> list(store.items())
        [('b', {}), ('a', {'workers': 5.0})]
        """
        kept = {other: each for other, each in self._values.items() if other != key}
        while len(kept) >= KEPT_KEYS:
            del kept[next(iter(kept))]
        changed = MetricStore()
        changed._values = {**kept, key: dict(values)}
        return changed

    def get(self, key: str, kind: type[Known]) -> Known | None:
        """Return what is known as a record of that class; None: nothing is.

        >>> class Seen(msgspec.Struct):
        ...     workers: int
        >>> MetricStore({"a": {"workers": 4}}).get("a", Seen), MetricStore({"a": {"other": 4.5}}).get("a", Seen)
        (Seen(workers=4), None)
        """
        found = self._values.get(key)
        if found is None:
            return None
        try:
            return msgspec.convert(found, kind, strict=False)
        except msgspec.ValidationError:
            return None

    def items(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Go over all, those written longest ago first."""
        return iter(self._values.items())

    def __len__(self) -> int:
        return len(self._values)
