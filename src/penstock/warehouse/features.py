"""The registry of a table's features: what each column is, whose it is, and how far it has come.

It is one JSON file beside the table. Changes are made under a lock of the file system and published by a rename, so
that a reader sees all of a change or nothing of it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias, get_args
from uuid import uuid4

import msgspec

from penstock.core.errors import CorruptRecordError, InvalidArgumentError, choice
from penstock.core.records import UserRecord

OWN_FOLDER = "_penstock"  # engines pass over folders whose name begins so
REGISTRY = "features.json"

StoredKind: TypeAlias = Literal["dense", "sparse", "scored"]
Lifecycle: TypeAlias = Literal["beta", "experimental", "active", "deprecated", "reaped"]
STORED_KINDS, LIFECYCLES = get_args(StoredKind), get_args(Lifecycle)
WRITTEN: frozenset[Lifecycle] = frozenset({"experimental", "active", "deprecated"})
_NEXT: Mapping[str, tuple[str, ...]] = {
    "beta": ("experimental", "active", "deprecated", "reaped"),
    "experimental": ("active", "deprecated", "reaped"),
    "active": ("deprecated", "reaped"),
    "deprecated": ("active", "reaped"),
    "reaped": (),
}


class Feature(UserRecord, frozen=True, kw_only=True):
    """One feature of a table: the column `f<id>`.

    `kind` is dense (a float32 a row), sparse (a list of ids) or scored (a list of ids with a score each). Of its
    `lifecycle`: a beta feature is not written with new rows, but filled in later or injected; experimental, active and
    deprecated ones are written; a reaped one is in no file any more.

    >>> Feature(id=7, name="age", kind="dense").column
    'f7'
    """

    id: int
    name: str = ""
    kind: StoredKind = "dense"
    owner: str = ""
    lifecycle: Lifecycle = "experimental"
    key: str = ""
    """The name of the key that encrypts its column; empty: the table's own, if that is encrypted."""

    def __post_init__(self) -> None:
        if self.id < 0:
            raise InvalidArgumentError(f"a feature's id is a number from 0 on, not {self.id}")
        if self.kind not in STORED_KINDS:
            raise choice("kind", self.kind, STORED_KINDS)
        if self.lifecycle not in LIFECYCLES:
            raise choice("lifecycle", self.lifecycle, LIFECYCLES)

    @property
    def column(self) -> str:
        """The column that has it."""
        return f"f{self.id}"

    @property
    def written(self) -> bool:
        """Whether new rows have it."""
        return self.lifecycle in WRITTEN


class FeatureIndex:
    """Features by id, by column and by name: a session asks for thousands of them, among tens of thousands.

    >>> index = FeatureIndex({7: Feature(id=7, name="age")})
    >>> index.get(7) is index.get("age") is index.get("f7"), index.get("f8")
    (True, None)
    """

    def __init__(self, features: Mapping[int, Feature]) -> None:
        self.by_id = features
        by_name = {feature.name: feature for feature in features.values() if feature.name}
        self.by_name = {**by_name, **{feature.column: feature for feature in features.values()}}
        """By name and by column; a name that is another feature's column is that column."""

    def get(self, wanted: int | str) -> Feature | None:
        """Return a feature; None: there is none."""
        return self.by_name.get(wanted) if isinstance(wanted, str) else self.by_id.get(wanted)


class Registry:
    """The features of one table, by id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / REGISTRY

    def read(self) -> dict[int, Feature]:
        """Return all features, reaped ones too."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        try:
            found = _features.decode(content)
        except msgspec.DecodeError as error:
            raise CorruptRecordError(str(self._path), f"not a registry of features: {error}") from error
        return {feature.id: feature for feature in found}

    def add(self, features: Iterable[Feature]) -> None:
        """Add features; one that is there already, and is another, is refused."""
        with self._changed() as known:
            names = {feature.name: feature.id for feature in known.values() if feature.name}
            for feature in features:
                found = known.get(feature.id)
                if found is not None and found.kind != feature.kind:
                    raise InvalidArgumentError(
                        f"feature {feature.id} is {found.kind} and cannot become {feature.kind}: take another id"
                    )
                if feature.name and names.get(feature.name, feature.id) != feature.id:
                    raise InvalidArgumentError(
                        f"feature {feature.id}: {feature.name!r} is the name of feature {names[feature.name]}"
                    )
                if found is None:
                    known[feature.id] = feature
                    names[feature.name] = feature.id

    def move(self, ids: Iterable[int], lifecycle: Lifecycle) -> None:
        """Let features go on to another lifecycle."""
        with self._changed() as known:
            for number in ids:
                found = known.get(number)
                if found is None:
                    raise InvalidArgumentError(f"feature {number} is not in the registry; add it first")
                if found.lifecycle != lifecycle and lifecycle not in _NEXT[found.lifecycle]:
                    raise InvalidArgumentError(
                        f"feature {number} is {found.lifecycle} and cannot become {lifecycle}; "
                        f"it may become {' or '.join(_NEXT[found.lifecycle]) or 'nothing else'}"
                    )
                known[number] = msgspec.structs.replace(found, lifecycle=lifecycle)

    @contextmanager
    def _changed(self) -> Iterator[dict[int, Feature]]:
        with locked(self._folder / "features.lock"):
            known = self.read()
            yield known
            publish(
                self._path,
                msgspec.json.format(msgspec.json.encode(sorted(known.values(), key=lambda f: f.id)), indent=0),
            )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; the lock ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def publish(path: Path, content: bytes) -> None:
    """Replace a file as a whole, on disk before it is seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    with open(draft, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


_features = msgspec.json.Decoder(list[Feature])
