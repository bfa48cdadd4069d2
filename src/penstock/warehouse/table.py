"""`ps.Table`: a feature table, by its folder."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import InvalidArgumentError
from penstock.sources.delta_log import PARTITION, TableSnapshot, newest_version, read_snapshot
from penstock.sources.storage import is_remote, normal_path
from penstock.warehouse.committing import commit_append, deltalake, local_folder, log_exists
from penstock.warehouse.features import OWN_FOLDER, Feature, Lifecycle, Registry
from penstock.warehouse.leases import LEASE_S, SnapshotLease
from penstock.warehouse.writing import KINDS, ROW_COLUMNS, StripeSize, checked_rows, in_order, write_file

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.warehouse.encryption import FileEncryption

_CONFIGURATION = {
    "delta.dataSkippingNumIndexedCols": str(len(ROW_COLUMNS)),  # thousands of features have no statistics to look at
    "delta.checkpointInterval": "50",
}


class Table:
    """A table of features: Parquet files, partitioned by date, under a Delta log that other engines read too.

    Every row has `key`, `time` (seconds), `label` and the columns `f<id>` of its features. Naming one opens nothing.

    >>> import tempfile, pyarrow as pa
    >>> table = Table.create(tempfile.mkdtemp(), [Feature(id=1), Feature(id=2, kind="sparse")])
    >>> rows = {"key": [7], "time": [0], "label": [1.0], "f1": [0.5], "f2": [[3, 4]]}
    >>> table.append(pa.table(rows), date="2026-01-31")
    1
    >>> table.snapshot().partitions
    ['2026-01-31']
    """

    def __init__(
        self, url: str | PathLike[str], *, key: str | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """`key` says where the keys of encrypted files come from: `file:PATH` or `command:COMMAND`."""
        from penstock.warehouse.encryption import KeyRing

        self.url = normal_path(fspath(url)).rstrip("/")
        self.storage_options = tuple((storage_options or {}).items())
        self.key_source = key
        self._key = KeyRing.of(key) if key is not None else None

    def __repr__(self) -> str:
        return f"Table({self.url!r})"

    @staticmethod
    def create(
        url: str | PathLike[str],
        features: Iterable[Feature] = (),
        *,
        stripe: StripeSize | None = None,
        key: str | None = None,
    ) -> Table:
        """Make an empty table; `stripe` is how large the stripes of its files are, unless it is said otherwise."""
        module = deltalake()
        table = Table(url, key=key)
        if log_exists(table.url):
            raise InvalidArgumentError(f"{table.url} is a table already; ps.Table(url) names it")
        table.registry.add(features)
        columns = list(table.features.values())
        module.DeltaTable.create(
            table.url,
            module.Schema.from_arrow(_schema(columns)),
            partition_by=[PARTITION],
            configuration=_CONFIGURATION,
        )
        if stripe is not None:
            table.set_stripe(stripe)
        return table

    @property
    def is_remote(self) -> bool:
        """Whether it lies in an object store, where it is only read."""
        return is_remote(self.url)

    @property
    def folder(self) -> Path:
        """Where it is written."""
        return local_folder(self.url)

    @property
    def own_folder(self) -> Path:
        """Where the registry, the read log and the leases are."""
        return self.folder / OWN_FOLDER

    @property
    def version(self) -> int:
        """The number of the newest commit."""
        return newest_version(self.url, self.storage_options)

    def snapshot(self, version: int | None = None) -> TableSnapshot:
        """Return what the table is at a version; None: the newest."""
        return read_snapshot(self.url, version, self.storage_options)

    # Features

    @property
    def registry(self) -> Registry:
        """The features beside the table."""
        return Registry(self.own_folder)

    @property
    def features(self) -> dict[int, Feature]:
        """All features by id, reaped ones too."""
        return self.registry.read()

    def add_features(self, features: Iterable[Feature]) -> None:
        """Register features and add their columns; files that are there already have them empty."""
        module = deltalake()
        added = list(features)
        self.registry.add(added)
        there = self.snapshot().columns
        fields = [field for field in _schema(added) if field.name not in there and field.name not in _own_columns()]
        if fields:
            import pyarrow as pa

            module.DeltaTable(self.url).alter.add_columns(module.Schema.from_arrow(pa.schema(fields)).fields)

    def set_lifecycle(self, ids: Iterable[int], lifecycle: Lifecycle) -> None:
        """Let features go on: from beta to experimental, active, deprecated; `reap` is the way to reaped."""
        if lifecycle == "reaped":
            raise InvalidArgumentError("lifecycle='reaped' is what Table.reap leaves behind: it rewrites the files")
        self.registry.move(ids, lifecycle)

    # Rows

    def append(self, rows: pa.Table, *, date: str, progress: tuple[str, int] | None = None) -> int | None:
        """Commit rows as a new file and return the version.

        `progress` is a name and a number: the same number of a name is committed once, and None returned for it
        afterwards, so that a writer that was killed repeats what it was at.
        """
        check_date(date)
        if progress is not None and self.snapshot().progress.get(progress[0], -1) >= progress[1]:
            return None
        return commit_append(self.url, [self.write(rows, date)], progress=progress)

    def write(self, rows: pa.Table, date: str) -> tuple[Any, str]:
        """Write rows as a file that is not committed yet."""
        written = [feature for feature in self.features.values() if feature.written]
        ready = in_order(checked_rows(rows, written), self.order)
        return write_file(self.folder, date, ready, self.stripe, self.encryption)

    # Layout

    @property
    def stripe(self) -> StripeSize:
        """How large the stripes of new files are."""
        return StripeSize(**self._layout().get("stripe", {}))

    def set_stripe(self, stripe: StripeSize) -> None:
        """Change how large the stripes of new files are."""
        self._change_layout({"stripe": {"rows": stripe.rows, "bytes": stripe.bytes}})

    @property
    def order(self) -> Sequence[int]:
        """The features that stand first in new files, by id."""
        return tuple(self._layout().get("order", ()))

    def set_order(self, ids: Sequence[int]) -> None:
        """Change which features stand first in new files."""
        self._change_layout({"order": list(ids)})

    def _layout(self) -> dict[str, Any]:
        import msgspec

        try:
            return dict(msgspec.json.decode((self.own_folder / "layout.json").read_bytes()))
        except FileNotFoundError:
            return {}

    def _change_layout(self, change: Mapping[str, Any]) -> None:
        import msgspec

        from penstock.warehouse.features import locked, publish

        with locked(self.own_folder / "layout.lock"):
            publish(self.own_folder / "layout.json", msgspec.json.encode({**self._layout(), **change}))

    def lease(self, version: int | None = None, *, lease_s: float = LEASE_S) -> SnapshotLease:
        """Hold a version (None: the newest), so that `vacuum` removes nothing of it, until it is released."""
        held = self.snapshot(version).version
        return SnapshotLease(self.own_folder, held, lease_s)

    # Encryption

    @property
    def encryption(self) -> FileEncryption | None:
        """What new files are encrypted with; None: files are plain."""
        keyed = {feature.column: feature.key for feature in self.features.values() if feature.key}
        if self._key is None:
            if keyed:
                column, name = next(iter(keyed.items()))
                raise InvalidArgumentError(
                    f"{column} is encrypted with the key {name!r}; name where the keys are: "
                    "ps.Table(url, key='file:PATH')"
                )
            return None
        return self._key.encryption(keyed)

    def decryption(self, path: str) -> Any:
        """Return what a file is decrypted with; None: files are plain."""
        return None if self._key is None else self._key.decryption(path)

    def open_file(self, path: str | PathLike[str]) -> Any:
        """Open a file of the table's, or a copy of one, with all its columns."""
        from penstock.warehouse.encryption import open_whole

        return open_whole(Path(path), self._key)

    @property
    def private_options(self) -> tuple[tuple[str, Any], ...]:
        """Storage options and key, as readers take them; they are in no plan, state or log."""
        return self.storage_options if self._key is None else (*self.storage_options, self._key.option)


def check_date(date: str) -> None:
    """Raise unless it is a day."""
    try:
        datetime.date.fromisoformat(date)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"date={date!r} is no day; write it as 2026-01-31") from error


def _own_columns() -> tuple[str, ...]:
    return (PARTITION, *ROW_COLUMNS)


def _schema(features: Sequence[Feature]) -> pa.Schema:
    import pyarrow as pa

    own = [pa.field(name, kind) for name, kind in ROW_COLUMNS.items()]
    return pa.schema([*own, pa.field(PARTITION, pa.string()), *(pa.field(f.column, KINDS[f.kind]) for f in features)])
