"""Feature transforms over batches, as one operator: many records, no function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from msgspec.structs import replace

from penstock.core.errors import InvalidArgumentError
from penstock.graph.node import Node
from penstock.graph.ops.columns import ColumnOperator, check_names
from penstock.graph.traits import Columns, Traits, either, varied
from penstock.graph.transforms import FeatureTransform, Sampling
from penstock.graph.traverse import walk

DENSE, SPARSE = "dense", "sparse"


class TransformFeatures(ColumnOperator, frozen=True, kw_only=True, eq=False):
    """Features of a batch made of others, by transforms that each may read what those before it made.

    A feature is a column, or, if keyed columns are named in `within`, one of theirs. What is made becomes columns; or
    `dense` and `sparse` name features, made or read, and the columns of these names are made of them.
    """

    TRAITS: ClassVar[Traits] = replace(ColumnOperator.TRAITS, threads=None)

    transforms: tuple[FeatureTransform, ...]
    within: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    """Inputs that are columns by themselves, although others are searched for in `within`."""
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.transforms and not self.dense and not self.sparse:
            raise InvalidArgumentError("transform_features needs at least one transform, or features to gather")
        for transform in self.transforms:
            if not isinstance(transform, FeatureTransform):
                raise InvalidArgumentError(
                    f"transform_features takes records of ps.transforms, not {transform!r}; functions go into map()"
                )
        for names in (self.within, self.columns, self.dense, self.sparse):
            if names:
                check_names("transform_features", names)
        if self.columns and not self.within:
            raise InvalidArgumentError(
                "transform_features: columns= is for inputs that are not searched for in within="
            )
        made: set[str] = set()
        for transform in self.transforms:
            if isinstance(transform, Sampling) and not made.isdisjoint(transform.inputs):
                raise InvalidArgumentError("Sampling reads columns that were read, and not what other transforms make")
            for name in transform.outputs:
                if name in made:
                    raise InvalidArgumentError(
                        f"the feature {name!r} is made twice; give the second {transform.OP} another out="
                    )
                made.add(name)

    @property
    def traits(self) -> Traits:
        """Return that rows, and so whole batches, may be left out where there is a `Sampling`."""
        return varied(self.TRAITS, may_skip=True) if self.samples else self.TRAITS

    @property
    def samples(self) -> bool:
        """Return whether it changes how many rows there are."""
        return Sampling in map(type, self.transforms)

    @property
    def made(self) -> tuple[str, ...]:
        """Return the features that it makes."""
        return tuple(name for transform in self.transforms for name in transform.outputs)

    @property
    def read(self) -> tuple[str, ...]:
        """Return the features that it reads of its input."""
        made: set[str] = set()
        found: dict[str, None] = {}
        for transform in self.transforms:
            found.update(dict.fromkeys(name for name in transform.inputs if name not in made))
            made.update(transform.outputs)
        found.update(dict.fromkeys(name for name in (*self.dense, *self.sparse) if name not in made))
        return tuple(found)

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.within, *self.columns) if self.within else self.read

    @property
    def gives(self) -> tuple[str, ...]:
        if not self.dense and not self.sparse:
            return self.made
        return (*([DENSE] if self.dense else []), *([SPARSE] if self.sparse else []))

    def columns_needed(self, asked: Columns, below: Columns) -> Columns:
        if asked is None:
            return None
        lesser = self.narrowed(asked)
        own = lesser.needs if isinstance(lesser, TransformFeatures) else ()
        return either(tuple(column for column in asked if column not in self.gives), own)

    def narrowed(self, asked: Sequence[str]) -> Node:
        """Return it without the transforms of which nothing that is asked for is made; samplings stay."""
        packs = bool(self.dense or self.sparse)
        dense, sparse = (self.dense if DENSE in asked else ()), (self.sparse if SPARSE in asked else ())
        wanted = {*dense, *sparse} if packs else set(asked)
        kept: list[FeatureTransform] = []
        for transform in reversed(self.transforms):
            if isinstance(transform, Sampling) or not wanted.isdisjoint(transform.outputs):
                kept.append(transform)
                wanted.update(transform.inputs)
        if (len(kept), dense, sparse) == (len(self.transforms), self.dense, self.sparse):
            return self
        if not kept and not dense and not sparse:
            return self.upstream
        if packs and not dense and not sparse:  # only samplings are left, and they make nothing
            return replace(self, transforms=tuple(reversed(kept)), dense=(), sparse=())
        return replace(self, transforms=tuple(reversed(kept)), dense=dense, sparse=sparse)

    def names_below(self, columns: Iterable[str], below: Columns) -> dict[str, str] | None:
        named = {column: column for column in columns}
        return named if named.keys().isdisjoint(self.gives) else None


def transforms_in(root: Node) -> list[str]:
    """Return what the feature transforms of a pipeline are called, each once."""
    found = [node for node in walk(root) if isinstance(node, TransformFeatures)]
    return sorted({transform.OP for node in found for transform in node.transforms})
