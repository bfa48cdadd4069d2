"""`ps.read_features`: from a table, a few features of some partitions, as a dataset of feature-major batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike

from penstock.api.dataset import Dataset
from penstock.core.errors import InvalidArgumentError, SnapshotGoneError
from penstock.graph.expressions import Expression
from penstock.graph.readers import ReadFeatures
from penstock.sources.delta_log import TableSnapshot
from penstock.warehouse.features import Feature, FeatureIndex, StoredKind
from penstock.warehouse.read_log import ReadLog
from penstock.warehouse.table import Table, check_date
from penstock.warehouse.writing import KINDS, ROW_COLUMNS

_TYPES: Mapping[str, StoredKind] = {
    "float": "dense",
    "array<long>": "sparse",
    "array<struct<id:long,score:float>>": "scored",
}


def read_features(
    table: Table | str | PathLike[str],
    *,
    features: Iterable[int | str] | None = None,
    partitions: Sequence[str] | None = None,
    columns: Sequence[str] = ("label",),
    where: Expression | None = None,
    sample: float = 1.0,
    seed: int = 0,
    batch: int = 1024,
    version: int | None = None,
    inject: Sequence[Table] = (),
    tier: bool = True,
    session: str | None = None,
) -> Dataset:
    """Batches of a feature table, as they lie in memory when they are read: all rows of a feature side by side.

    A batch is a dict: `dense` is a `KeyedDense`, `sparse` and `scored` are `KeyedRagged`s (those of which there are
    features), and each of `columns` (`key`, `time`, `label`) an array. `features` are ids or names, None: all that are
    written. `partitions` are days, `where` keeps rows by `key`, `time`, `label`, `date` or dense features
    (`ps.col("f7") > 0`), `sample` keeps a share of the rows, by a hash of seed, file and row. `inject` are side tables
    whose features are joined by key and day. The table is read as it is at `version`; None: as it is now. With a name
    of the `session` the table's read log notes what it reads: `Table.reorder` and `tier` go by that.

    >>> import tempfile, pyarrow as pa
    >>> from penstock.warehouse.features import Feature
    >>> table = Table.create(tempfile.mkdtemp(), [Feature(id=1), Feature(id=2, kind="sparse")])
    >>> rows = pa.table({"key": [7, 8], "time": [0, 0], "label": [1.0, 0.0], "f1": [0.5, 0.25], "f2": [[3, 4], []]})
    >>> table.append(rows, date="2026-01-31")
    1
    >>> next(iter(read_features(table, batch=2)))["sparse"]["f2"].values.tolist()
    [3, 4]
    """
    opened = table if isinstance(table, Table) else Table(table)
    at, known = _version_and_features(opened, version)
    if features is None:
        chosen = [feature for feature in known.values() if feature.written]
    else:
        index = FeatureIndex(known)
        chosen = [_found(index, opened, wanted) for wanted in features]
    injected: list[tuple[str, int, tuple[str, ...]]] = []
    side_features: set[str] = set()
    for side in inject:
        side_version, own = _version_and_features(side, None)
        names = tuple(feature.column for feature in chosen if feature.id in own and feature.column not in side_features)
        side_features.update(names)
        injected.append((side.url, side_version, names))
    if session is not None:
        ReadLog(opened.own_folder).add((feature.id for feature in chosen), partitions, session=session)
    return Dataset(
        features_node(
            opened,
            at,
            chosen,
            partitions=partitions,
            columns=columns,
            where=where,
            sample=sample,
            seed=seed,
            batch=batch,
            injected=injected,
            tier=tier,
        )
    )


def features_node(
    table: Table,
    version: int,
    features: Sequence[Feature],
    *,
    partitions: Sequence[str] | None,
    columns: Sequence[str],
    where: Expression | None = None,
    sample: float,
    seed: int,
    batch: int,
    injected: Sequence[tuple[str, int, tuple[str, ...]]] = (),
    tier: bool = True,
    appended: bool = False,
) -> ReadFeatures:
    """Return the source of features that were found already, at a version that is known."""
    for day in partitions or ():
        check_date(day)
    for name in columns:
        if name not in ROW_COLUMNS:
            raise InvalidArgumentError(
                f"columns: {name!r} is no column of the rows; there are {', '.join(ROW_COLUMNS)}"
            )
    kinds = {kind: tuple(feature.column for feature in features if feature.kind == kind) for kind in KINDS}
    return ReadFeatures(
        paths=(table.url,),
        storage_options=table.private_options,
        version=version,
        dense=kinds["dense"],
        sparse=kinds["sparse"],
        scored=kinds["scored"],
        columns=tuple(columns),
        partitions=None if partitions is None else tuple(dict.fromkeys(partitions)),
        predicate=where,
        sample=sample,
        seed=seed,
        batch=batch,
        injected=tuple(injected),
        tier=tier,
        appended=appended,
    )


def _version_and_features(table: Table, version: int | None) -> tuple[int, dict[int, Feature]]:
    """Return which version is read, and its features; the log is replayed only where the registry does not tell."""
    newest = table.version
    wanted = newest if version is None else version
    if not 0 <= wanted <= newest or table.is_remote or not (found := table.features):
        snapshot = table.snapshot(version)
        return snapshot.version, known_features(table, snapshot)
    return wanted, found


def known_features(table: Table, snapshot: TableSnapshot) -> dict[int, Feature]:
    """Return the features of the registry, or, of a table of others, those that its columns show."""
    found = table.features if not table.is_remote else {}
    if found:
        return found
    return {
        int(name[1:]): Feature(id=int(name[1:]), kind=_TYPES[kind])
        for name, kind in snapshot.columns.items()
        if name[:1] == "f" and name[1:].isdigit() and kind in _TYPES
    }


def _found(index: FeatureIndex, table: Table, wanted: int | str) -> Feature:
    found = index.get(wanted)
    if found is None:
        raise InvalidArgumentError(f"features: {wanted!r} is no feature of {table.url}; Table.features has them")
    return not_reaped(table, found)


def not_reaped(table: Table, found: Feature) -> Feature:
    """Return the feature, unless it was reaped."""
    if found.lifecycle == "reaped":
        raise SnapshotGoneError(table.url, f"feature {found.column} ({found.name or 'without a name'}) was reaped")
    return found
