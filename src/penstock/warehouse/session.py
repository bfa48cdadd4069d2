"""`ps.Session`: what a recommendation model reads of a feature table, declared: no code, and the same again later.

A session names features, transforms and a label, and says what batches consist of. It reads what its batches need and
nothing else: a feature or a transform that nothing leads to from there is *dead*, and `explain` names it.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import structs

from penstock.api.dataset import Dataset
from penstock.api.services import OwnedService
from penstock.core.errors import InvalidArgumentError, SnapshotGoneError
from penstock.graph import transforms as tr
from penstock.sources.delta_log import TableSnapshot
from penstock.warehouse.features import FeatureIndex
from penstock.warehouse.reading import features_node, known_features, not_reaped
from penstock.warehouse.session_reader import POLL_S, SessionReader
from penstock.warehouse.table import Table
from penstock.warehouse.writing import KINDS, ROW_COLUMNS

ValueKind: TypeAlias = Literal["float", "whole", "ids", "floats"]
"""What a feature has in a row: a number, a whole number, a list of ids, a list of numbers."""
_OF_TABLE: Mapping[str, ValueKind] = {"dense": "float", "sparse": "ids", "scored": "ids"}


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a training run reads of a feature table.

    `features` are read beside those that `transforms` and outputs name, by column (`f7`) or by name. A batch has
    `batch` rows of the days in `partitions` (None: all of them), as a dict: `dense`, a `KeyedDense`; `sparse`, a
    `KeyedRagged`; and `label`. `dense` and `sparse` say of which features, made or read; None: of all that no transform
    reads, numbers here, lists and whole numbers there. `sample` keeps a share of the rows. The table is read as it is
    at `version`; None: as it is when the session becomes a dataset, which `pinned()` settles. With `follow`, `open()`
    goes on with rows that are committed later, of whatever day.

    >>> import tempfile, pyarrow as pa, penstock as ps
    >>> table = ps.Table.create(tempfile.mkdtemp(), [ps.Feature(id=1), ps.Feature(id=2, kind="sparse")])
    >>> rows = pa.table({"key": [7, 8], "time": [0, 0], "label": [1.0, 0.0], "f1": [0.5, 0.25], "f2": [[3, 4], []]})
    >>> _ = table.append(rows, date="2026-01-31")
    >>> hashed = ps.transforms.SigridHash("f2", out="h2", max_value=100)
    >>> session = ps.Session(table=table, features=["f1"], transforms=[hashed], batch=2)
    >>> batch = next(iter(session.dataset()))
    >>> batch["dense"]["f1"].tolist(), batch["sparse"]["h2"].values.tolist(), batch["label"].tolist()
    ([0.5, 0.25], [54, 9], [1.0, 0.0])
    """

    table: Table | str | PathLike[str]
    features: Sequence[str] = ()
    transforms: Sequence[tr.FeatureTransform] = ()
    partitions: Sequence[str] | None = None
    dense: Sequence[str] | None = None
    sparse: Sequence[str] | None = None
    label: str = "label"
    batch: int = 1024
    sample: float = 1.0
    seed: int = 0
    version: int | None = None
    follow: bool = False

    def __post_init__(self) -> None:
        for name in ("features", "transforms", "partitions", "dense", "sparse"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise InvalidArgumentError(f"{name}={value!r} must be a list")
            object.__setattr__(self, name, None if value is None else tuple(value))
        for transform in self.transforms:
            if not isinstance(transform, tr.FeatureTransform):
                raise InvalidArgumentError(f"transforms takes records of ps.transforms, not {transform!r}")
            if isinstance(transform, tr.Sampling):
                raise InvalidArgumentError("a session samples rows with sample= and seed=, before they are decoded")
        if self.label not in ROW_COLUMNS:
            raise InvalidArgumentError(f"label={self.label!r} must be a column of rows: {', '.join(ROW_COLUMNS)}")
        if not self.features and not self.transforms and not self.dense and not self.sparse:
            raise InvalidArgumentError("a session needs features or transforms; Table.features has what there is")

    # As a file

    @staticmethod
    def from_file(path: str | PathLike[str]) -> Session:
        """Read a session from a TOML or JSON file; a table's path that is relative is looked for beside the file."""
        file = Path(path)
        try:
            text = file.read_text()
            plain = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"{file} is no session in TOML or JSON: {error}") from None
        table = plain.get("table") if isinstance(plain, dict) else None
        if isinstance(table, str) and "://" not in table:
            plain["table"] = str(file.parent / table)
        return Session.from_plain(plain)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Session:
        """Return the session that a table of TOML or JSON describes; `transforms` are tables with an `op` each."""
        names = [field.name for field in dataclasses.fields(Session)]
        unknown = sorted(set(plain) - set(names)) if isinstance(plain, Mapping) else ["no table"]
        if unknown:
            raise InvalidArgumentError(f"a session has no {', '.join(map(repr, unknown))}; it has {', '.join(names)}")
        if "table" not in plain:
            raise InvalidArgumentError("a session names its table: table = 'path'")
        made = [
            each if isinstance(each, tr.FeatureTransform) else tr.transform_from_plain(each)
            for each in plain.get("transforms", ())
        ]
        return Session(**{**plain, "transforms": made})

    def to_plain(self) -> dict[str, Any]:
        """Return the session as a table of JSON: what is at its default is left out."""
        plain: dict[str, Any] = {"table": self.opened_table.url}
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                plain[field.name] = list(value) if isinstance(value, tuple) else value
        if self.transforms:
            plain["transforms"] = [tr.transform_to_plain(each) for each in self.transforms]
        return plain

    # As a dataset

    @property
    def opened_table(self) -> Table:
        """The table, where the session names a folder."""
        return self.table if isinstance(self.table, Table) else Table(self.table)

    def pinned(self) -> Session:
        """Return the session at the table's version of now, or its own: it reads the same rows whenever it is run."""
        return replace(self, version=self.opened_table.version) if self.version is None else self

    def dataset(self) -> Dataset:
        """Return the session as a pipeline, which has no function: `distribute` it as any other."""
        if self.follow:
            raise InvalidArgumentError("a session that follows its table is read with open(): a dataset has an end")
        return dataset_of(self, plan_at(self, self.version))

    def open(
        self,
        to: int | str | PathLike[str] | OwnedService | None = None,
        *,
        idle_s: float | None = None,
        poll_s: float = POLL_S,
        **options: Any,
    ) -> SessionReader:
        """Read the batches, here or on a service, as `Dataset.distribute` takes it, while holding the table's version.

        With `follow` the reader waits for commits, looking every `poll_s` seconds, and ends when none has come for
        `idle_s`; None: never. `options` are those of `distribute`.
        """
        return SessionReader(self, to, options, idle_s=idle_s, poll_s=poll_s)

    def explain(self) -> str:
        """Return what is read, made, given and left out, and the plan."""
        plan = SessionPlan(self.pinned())
        read = [f"{len(names)} {kind}" for kind, names in plan.read_by_kind.items() if names]
        dead = [*(f"feature {name}" for name in plan.dead_features), *(f"transform {name}" for name in plan.dead_made)]
        lines = [
            f"session over {plan.table.url}, version {plan.version}",
            f"  reads   {', '.join(read) or 'no'} features",
            f"  makes   {len(plan.transforms)} features",
            f"  gives   {len(plan.dense)} dense, {len(plan.sparse)} sparse, {self.label}",
            f"  dead    {', '.join(dead) or 'nothing'}",
        ]
        return "\n".join(lines) + "\n\n" + dataset_of(self, plan).explain()


def plan_at(session: Session, version: int | None) -> SessionPlan:
    """Return what a session comes to at a version of its table."""
    return SessionPlan(replace(session, version=version).pinned())


def dataset_of(session: Session, plan: SessionPlan, *, appended: bool = False) -> Dataset:
    """Return the pipeline of a plan; `appended`: of the rows that came with the commit of its version alone."""
    node = features_node(
        plan.table,
        plan.version,
        plan.features,
        partitions=None if appended else session.partitions,
        columns=plan.columns,
        sample=session.sample,
        seed=session.seed,
        batch=session.batch,
        appended=appended,
    )
    made = Dataset(node).transform_features(
        *plan.transforms, within=plan.within, columns=plan.row_inputs, dense=plan.dense, sparse=plan.sparse
    )
    outputs = [name for name, keys in (("dense", plan.dense), ("sparse", plan.sparse)) if keys]
    return made.select(*outputs, session.label)


class SessionPlan:
    """What a session comes to, on its table."""

    def __init__(self, session: Session) -> None:
        self.table = session.opened_table
        snapshot = self.snapshot = self._snapshot(session)
        self.version = snapshot.version
        self._known = FeatureIndex(known_features(self.table, snapshot)).by_name
        made = {name for transform in session.transforms for name in transform.outputs}
        renamed = [self._with_columns(transform, made) for transform in session.transforms]
        kinds = self._kinds(renamed)
        asked = [self._column(name) for name in session.features]
        outputs = self._outputs(session, renamed, asked, kinds, made)
        self.dense, self.sparse = outputs
        self.transforms = _live(renamed, (*self.dense, *self.sparse))
        needed = dict.fromkeys(name for each in self.transforms for name in each.inputs if name not in made)
        needed.update(dict.fromkeys(name for name in (*self.dense, *self.sparse) if name not in made))
        self.row_inputs = tuple(name for name in needed if name in ROW_COLUMNS)
        self.columns = tuple(dict.fromkeys((*self.row_inputs, session.label)))
        self.read = [name for name in needed if name not in ROW_COLUMNS]
        self.features = [not_reaped(self.table, self._known[name]) for name in self.read]
        self.read_by_kind = {kind: [each.column for each in self.features if each.kind == kind] for kind in KINDS}
        self.within = tuple(kind for kind, names in self.read_by_kind.items() if names)
        self.dead_features = [name for name in asked if name not in needed]
        live = {name for each in self.transforms for name in each.outputs}
        self.dead_made = sorted(made - live)

    def _snapshot(self, session: Session) -> TableSnapshot:
        try:
            return self.table.snapshot(session.version)
        except SnapshotGoneError as error:
            days = "all days" if session.partitions is None else ", ".join(session.partitions)
            asked = ", ".join((*session.features, *(name for each in session.transforms for name in each.inputs)))
            raise SnapshotGoneError(
                self.table.url, f"{asked} of {days}: {error.what}", remedy="read the table's newest version"
            ) from error

    @property
    def told(self) -> str:
        """The features it reads, in a few words."""
        return ", ".join(self.read[:3]) + (f" and {len(self.read) - 3} more" if len(self.read) > 3 else "")

    @property
    def feature_ids(self) -> list[int]:
        """The features it reads, by id."""
        return [feature.id for feature in self.features]

    def _column(self, name: str) -> str:
        if name in ROW_COLUMNS:
            return name
        found = self._known.get(name)
        if found is None:
            raise InvalidArgumentError(
                f"{name!r} is no feature of {self.table.url} and no transform before makes it; Table.features has them"
            )
        return found.column

    def _with_columns(self, transform: tr.FeatureTransform, made: set[str]) -> tr.FeatureTransform:
        """Return a transform with the table's columns for features that are named otherwise."""

        def column(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(column, value))
            return value if value is None or value in made else self._column(value)

        named = [name for name in transform.__struct_fields__ if name in tr.NAMING_INPUTS]
        given = {name: getattr(transform, name) for name in named}
        renamed = {name: column(value) for name, value in given.items()}
        return transform if renamed == given else structs.replace(transform, **renamed)

    def _kinds(self, transforms: Iterable[tr.FeatureTransform]) -> dict[str, ValueKind | None]:
        kinds: dict[str, ValueKind | None] = {name: _OF_TABLE[each.kind] for name, each in self._known.items()}
        kinds.update({"key": "whole", "time": "whole", "label": "float"})
        for each in transforms:
            for name in each.inputs:
                if name not in kinds:
                    raise InvalidArgumentError(f"{each.OP} reads {name!r}, which is made after it; put it behind")
            kinds[each.out] = _kind_made(each, kinds[each.inputs[0]])
        return kinds

    def _outputs(
        self,
        session: Session,
        transforms: Sequence[tr.FeatureTransform],
        asked: Sequence[str],
        kinds: Mapping[str, ValueKind | None],
        made: set[str],
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if session.dense is not None or session.sparse is not None:
            chosen = (session.dense or (), session.sparse or ())
            dense, sparse = (tuple(name if name in made else self._column(name) for name in each) for each in chosen)
            return dense, sparse
        used = {name for each in transforms for name in each.inputs}
        last = [name for name in (*asked, *(each.out for each in transforms)) if name not in used]
        for name in last:
            if kinds[name] in (None, "floats"):
                raise InvalidArgumentError(
                    f"the feature {name!r} is neither a number nor a list of ids by what is known of it; name what "
                    "batches have in dense= and sparse="
                )
        return (
            tuple(dict.fromkeys(name for name in last if kinds[name] == "float")),
            tuple(dict.fromkeys(name for name in last if kinds[name] in ("whole", "ids"))),
        )


def _live(transforms: Sequence[tr.FeatureTransform], outputs: Iterable[str]) -> list[tr.FeatureTransform]:
    wanted = set(outputs)
    live: list[tr.FeatureTransform] = []
    for each in reversed(transforms):
        if not wanted.isdisjoint(each.outputs):
            live.append(each)
            wanted.update(each.inputs)
    return live[::-1]


def _kind_made(transform: tr.FeatureTransform, of: ValueKind | None) -> ValueKind | None:
    """Return what a transform makes of a feature of that kind; None: that is not known."""
    match transform:
        case tr.Bucketize():
            return "ids" if len(transform.border_sets) > 1 or of in ("ids", "floats") else "whole"
        case tr.BoxCox() | tr.Logit():
            return "floats" if of == "floats" else "float"
        case tr.ComputeScore():
            return "float"
        case tr.NGram():
            return "whole" if transform.vocabularies else "ids"
        case tr.Onehot():
            return "ids" if transform.form == "index" else "floats"
        case tr.EnumerateIds() | tr.IdListTransform() | tr.Cartesian():
            return "ids"
        case tr.CustomTransform():
            return None
    return of  # each item by itself: hashes, remainders, hours, bounds, other ids; and the first few of them
