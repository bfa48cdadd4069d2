"""Mappings that never change, of which a changed copy costs what changed and not what is in it.

A decision tries events on a copy of the state and throws the copy away. With dicts every copy would cost as much as
there are workers and streams, and so would every event.

Rules: all versions that descend from one table share its rows, which show one version at a time. Every other version
knows what to change to get from its neighbour to itself. Reading a version makes the rows show it, which costs what the
two differ in. So versions that are read in turn should be close to each other, as a draft and the state it was made of
are. One thread at a time.

Rows that were dropped and come back, because an older version is read, come back last: the order of a table from which
rows are dropped says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T", bound="VersionedTable[Any, Any]")

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()


class Rows(Generic[K, V]):
    """What the versions of a table share. Subclasses keep an index up to date in `change`."""

    def __init__(self) -> None:
        self.values: dict[K, V] = {}

    def change(self, key: K, value: V) -> V:
        """Set a row, or drop it (`ABSENT`); return what it was."""
        before: V = self.values.get(key, ABSENT)
        if value is not ABSENT:
            self.values[key] = value
        elif before is not ABSENT:
            del self.values[key]
        return before


class VersionedTable(Generic[K, V]):
    """See the module.

    >>> one = VersionedTable({"a": 1, "b": 2})
    >>> two = one.put({"b": 3, "c": 4}).drop("a")
    >>> sorted(one.items()), sorted(two.items()), sorted(two.differing(one))
    ([('a', 1), ('b', 2)], [('b', 3), ('c', 4)], ['a', 'b', 'c'])
    """

    __slots__ = ("_changes", "_nearer", "_rows")

    def __init__(self, given: Mapping[K, V] | None = None) -> None:
        rows = self._new_rows()
        for key, value in (given or {}).items():
            rows.change(key, value)
        self._rows: Rows[K, V] | None = rows
        self._nearer: VersionedTable[K, V] | None = None
        """The neighbour on the way to the version that the rows show."""
        self._changes: list[tuple[K, V]] = []
        """What to change in that neighbour to get this version."""

    def _new_rows(self) -> Rows[K, V]:
        return Rows()

    def rows(self) -> Rows[K, V]:
        """Return the rows, having made them show this version. They are good until another version is looked at."""
        return self._shown() if self._rows is None else self._rows

    def put(self: T, rows: Mapping[K, V]) -> T:
        """Return the table with these rows instead of its own of the same keys."""
        return self._changed(rows.items())

    def drop(self: T, *keys: K) -> T:
        """Return the table without these rows. Those that are not there do not matter."""
        return self._changed([(key, ABSENT) for key in keys if key in self])

    def differing(self, other: VersionedTable[K, V]) -> set[K]:
        """Return the keys whose rows may differ from those of another version, at the cost of their number."""
        self.rows()
        found: set[K] = set()
        version = other
        while version is not self:
            if version._nearer is None:  # of another descent
                return {*self, *other}
            found.update(key for key, _ in version._changes)
            version = version._nearer
        return found

    def _changed(self: T, changes: Iterable[tuple[K, V]]) -> T:
        rows = self.rows()
        undone = [(key, rows.change(key, value)) for key, value in changes]
        if not undone:
            return self
        undone.reverse()
        new = type(self).__new__(type(self))
        new._rows, new._nearer, new._changes = rows, None, []
        self._rows, self._nearer, self._changes = None, new, undone
        return new

    def _shown(self) -> Rows[K, V]:
        path: list[VersionedTable[K, V]] = []
        version: VersionedTable[K, V] = self
        while version._nearer is not None:
            path.append(version)
            version = version._nearer
        rows = version._rows
        assert rows is not None
        for nearer in reversed(path):
            undone = [(key, rows.change(key, value)) for key, value in nearer._changes]
            undone.reverse()
            version._rows, version._nearer, version._changes = None, nearer, undone
            nearer._rows, nearer._nearer, nearer._changes = rows, None, []
            version = nearer
        return rows

    def __getitem__(self, key: K) -> V:
        return self.rows().values[key]

    def get(self, key: K) -> V | None:
        return self.rows().values.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self.rows().values

    def __len__(self) -> int:
        return len(self.rows().values)

    # Lists, so that whoever goes over one may look at other versions meanwhile.

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())

    def keys(self) -> list[K]:
        return list(self.rows().values)

    def values(self) -> list[V]:
        return list(self.rows().values.values())

    def items(self) -> list[tuple[K, V]]:
        return list(self.rows().values.items())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, VersionedTable) and dict(self.items()) == dict(other.items()))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows().values!r})"
