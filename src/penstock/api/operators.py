"""The operators, as methods: what a dataset and a loader have in common.

A thin face: each method builds one node of `graph.ops`, which checks its own arguments; nothing runs before iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from penstock.core.errors import InvalidArgumentError, choice
from penstock.graph import ops
from penstock.graph.expressions import Expression, col
from penstock.graph.functions import UserFunction
from penstock.graph.length import known_length
from penstock.graph.node import Node
from penstock.graph.randomized import is_shuffle, takes_rng
from penstock.graph.transforms import FeatureTransform
from penstock.graph.traverse import walk
from penstock.passes.filters import filtered_batches

if TYPE_CHECKING:
    from penstock.api.iteration import Plan

Function = Callable[..., Any]
Face = TypeVar("Face", bound="Operators")
OnError = Literal["raise", "skip"] | ops.SkipErrors


class Operators:
    """A pipeline that can be continued: every method returns the same kind of thing with one more operator."""

    LEADS: ClassVar[bool] = False
    """A pipeline that is made of several is of this kind, if one of them is."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def node(self) -> Node:
        """The operator this pipeline ends with."""
        return self._node

    @cached_property
    def _plan(self) -> Plan:
        # Imported here: describing a pipeline needs neither the engine nor the sources, and waits for neither.
        from penstock.api.iteration import Plan

        return Plan(self._node)

    # One output for one input, or fewer, or more

    def map(
        self,
        function: Function,
        *,
        batch_size: int | None = None,
        threads: int | None = None,
        on_error: OnError = "raise",
    ) -> Self:
        """Apply `function` to each element; one that takes `rng` gets its own generator per element.

        A class is constructed once per process and its instance called. With `batch_size` the function is called with
        a list of up to that many elements and returns a list of as many. `threads` fixes what is otherwise measured.
        """
        chosen = user_function("map", function)
        return self._with(
            ops.Map,
            function=chosen,
            batch_size=batch_size,
            threads=threads,
            on_error=skip_policy(on_error),
            salt=self._function_salt(chosen),
        )

    def filter(
        self, predicate: Function | Expression | str, *, threads: int | None = None, on_error: OnError = "raise"
    ) -> Self:
        """Keep the elements for which a function, a column expression (`ps.col("x") > 3`) or a column is true.

        Of column batches an expression keeps rows, and the reader makes full batches of them.
        """
        chosen: UserFunction | Expression
        if isinstance(predicate, str):
            chosen = col(predicate) == True  # noqa: E712
        else:
            chosen = predicate if isinstance(predicate, Expression) else user_function("filter", predicate)
        if isinstance(chosen, Expression) and (filtered := filtered_batches(self._node, chosen)) is not None:
            return self._over(filtered)
        salt = self._function_salt(chosen) if isinstance(chosen, UserFunction) else 0
        return self._with(ops.Filter, predicate=chosen, threads=threads, on_error=skip_policy(on_error), salt=salt)

    def holdout(self, fraction: float, *, seed: int = 0) -> tuple[Self, Self]:
        """Return two pipelines: the elements to train on, and a `fraction` of all that is held out for validation.

        Which they are follows from `seed` and their place in the source: the same in every epoch, on every worker and
        after a resume. Put it right after the reader, before `shuffle` and `distribute`.
        """
        train = self._with(ops.Holdout, fraction=fraction, seed=seed, part="train")
        return train, self._with(ops.Holdout, fraction=fraction, seed=seed, part="held out")

    def flat_map(self, function: Function) -> Self:
        """Replace each element by the elements of the iterable that `function` makes of it."""
        chosen = user_function("flat_map", function)
        return self._with(ops.FlatMap, function=chosen, salt=self._function_salt(chosen))

    def interleave(self, function: Function, *, cycle: int = 8, block: int = 1) -> Self:
        """Like `flat_map`, but the iterables of `cycle` inputs are read in turns of `block` elements."""
        chosen = user_function("interleave", function)
        salt = self._function_salt(chosen)
        return self._with(ops.Interleave, function=chosen, cycle=cycle, block=block, salt=salt)

    def resample(self, weight: Function) -> Self:
        """Give each element as often as `weight(element)` says, on average: 0 never, 0.5 every other epoch, 3 thrice.

        Copies follow each other: shuffle after it. Before what is expensive it costs little.
        """
        from penstock.api.resampling import Copies

        if not callable(weight):
            raise InvalidArgumentError(f"resample takes a function of an element, not {type(weight).__name__}")
        return self.flat_map(Copies(weight))

    def balanced(self, key: str | Function, *, counts: Mapping[Any, int] | None = None) -> Self:
        """Let all classes come equally often: `key` is the column of the class, or a function of an element.

        `counts` says how many elements each class has; of `read_images` the listing says it. Rare classes are repeated
        and common ones thinned out, another part in each epoch. An epoch has as many elements as before, on average.
        """
        from penstock.api.resampling import balancing

        return self.resample(balancing(self, key, counts))

    # Order and length

    def shuffle(self, size: int | None = None, *, seed: int | None = None, reshuffle: bool = True) -> Self:
        """Give the elements in a random order, another one in each epoch unless `reshuffle` is False.

        Where the source is indexable it is a permutation of everything. Otherwise splits are permuted and blocks of
        `size` elements shuffled.
        """
        return self._with(
            ops.Shuffle, size=size, seed=seed, reshuffle=reshuffle, salt=sum(map(is_shuffle, self._operators()))
        )

    def repeat(self, count: int = ops.NEVER_ENDS) -> Self:
        """Pass over the data `count` times, or for ever."""
        return self._with(ops.Repeat, count=count)

    def take(self, count: int) -> Self:
        """Keep the first `count` elements (-1: all)."""
        return self._with(ops.Take, count=count)

    def skip(self, count: int) -> Self:
        """Leave out the first `count` elements."""
        return self._with(ops.Skip, count=count)

    def enumerate(self, start: int = 0) -> Self:
        """Pair each element with its number."""
        return self._with(ops.Enumerate, start=start)

    def zip(self, *others: Operators) -> Self:
        """Pair elements of several datasets, up to the shortest."""
        return leading(self, *others)._over(ops.Zip(upstreams=nodes_of("zip", self, *others)))

    def concatenate(self, *others: Operators) -> Self:
        """Give all elements of this dataset, then those of the others."""
        upstreams = nodes_of("concatenate", self, *others)
        return leading(self, *others)._over(ops.Concatenate(upstreams=upstreams))

    def with_length(self, count: int) -> Self:
        """Declare how many elements there are, for `len()`; it is checked at the end of a pass."""
        return self._with(ops.WithLength, count=count)

    def with_epoch(self, count: int) -> Self:
        """Make epochs of `count` elements, each beginning where the last one ended."""
        return self._with(ops.WithEpoch, count=count)

    # Batches

    def batch(
        self, size: int, *, drop_last: bool = False, collate: Function | None = None, mask: str | None = None
    ) -> Self:
        """Join `size` elements of equal structure and shapes into arrays with a leading axis.

        With `collate` that function makes the batch, of the list of elements as they left the function before it. With
        `mask` a short batch is filled up with copies, and a column of that name says which rows are elements.
        """
        chosen = None if collate is None else user_function("batch", collate)
        return self._with(ops.Batch, size=size, drop_last=drop_last, collate=chosen, mask=mask)

    def padded_batch(
        self,
        size: int,
        *,
        drop_last: bool = False,
        value: Any = 0,
        length: int | None = None,
        multiple_of: int | None = None,
    ) -> Self:
        """Like `batch`, with arrays padded to the longest, to `length`, or to a multiple."""
        return self._with(
            ops.PaddedBatch, size=size, drop_last=drop_last, value=value, length=length, multiple_of=multiple_of
        )

    def ragged_batch(self, size: int, *, drop_last: bool = False) -> Self:
        """Like `batch`, with one-dimensional arrays of unequal lengths as `Ragged`."""
        return self._with(ops.RaggedBatch, size=size, drop_last=drop_last)

    def unbatch(self) -> Self:
        """Give the rows of each batch."""
        return self._with(ops.Unbatch)

    def rebatch(self, size: int, *, drop_last: bool = False) -> Self:
        """Cut and join batches to another size, by columns."""
        return self._with(ops.Rebatch, size=size, drop_last=drop_last)

    def bucket_by_length(
        self,
        length: Function,
        *,
        boundaries: Sequence[int],
        batch_size: int | Sequence[int],
        drop_last: bool = False,
        value: Any = 0,
        pad_to_boundary: bool = False,
    ) -> Self:
        """Make padded batches of elements of like length: bucket i holds lengths up to `boundaries[i]`."""
        buckets = len(boundaries) + 1
        sizes = (batch_size,) * buckets if isinstance(batch_size, int) else tuple(batch_size)
        return self._with(
            ops.BucketByLength,
            length=user_function("bucket_by_length", length),
            boundaries=tuple(boundaries),
            batch_sizes=sizes,
            drop_last=drop_last,
            value=value,
            pad_to_boundary=pad_to_boundary,
        )

    def group_by_window(
        self,
        key: Function,
        *,
        size: int,
        reduce: Function | None = None,
        drop_last: bool = False,
        max_pending: int = 65_536,
    ) -> Self:
        """Gather `size` elements of equal key and give the list, or what `reduce` makes of it."""
        return self._with(
            ops.GroupByWindow,
            key=user_function("group_by_window", key),
            size=size,
            drop_last=drop_last,
            reduce=None if reduce is None else user_function("group_by_window", reduce),
            max_pending=max_pending,
        )

    def pack(
        self,
        length: int,
        *,
        key: str | None = None,
        long: ops.PackLong = "split",
        lookahead: int = 1024,
        value: int = 0,
    ) -> Self:
        """Lay sequences side by side into rows of `length`: `{tokens, segment_ids, positions}`, segments from 1 on."""
        return self._with(ops.Pack, length=length, key=key, long=long, lookahead=lookahead, value=value)

    # Columns

    def select(self, *columns: str) -> Self:
        """Keep these keys of dict elements; columnar sources then read nothing else."""
        return self._with(ops.Select, columns=columns)

    def drop(self, *columns: str) -> Self:
        """Leave out these keys of dict elements."""
        return self._with(ops.Drop, columns=columns)

    def rename(self, names: Mapping[str, str]) -> Self:
        """Rename keys of dict elements, `{old: new}`."""
        return self._with(ops.Rename, names=tuple(names.items()))

    def transform_features(
        self,
        *transforms: FeatureTransform,
        within: Sequence[str] = (),
        columns: Sequence[str] = (),
        dense: Sequence[str] = (),
        sparse: Sequence[str] = (),
    ) -> Self:
        """Make features of others in batches of columns, by records of `ps.transforms`: no function is shipped.

        A feature is a column, an array or a `Ragged`. If keyed columns are named in `within`, features are theirs, but
        for those in `columns`. What is made becomes a column each; or name features, made or read, in `dense` and
        `sparse`: then they are gathered into a `KeyedDense` and a `KeyedRagged`, as the columns of these names.
        """
        return self._with(
            ops.TransformFeatures,
            transforms=tuple(transforms),
            within=tuple(within),
            columns=tuple(columns),
            dense=tuple(dense),
            sparse=tuple(sparse),
        )

    # Where and when it is made

    def cache(self, path: str | PathLike[str] | None = None, *, max_bytes: int | None = None) -> Self:
        """Compute what is above once, and read it back in later epochs: from memory, or from files below `path`."""
        return self._with(ops.Cache, path=None if path is None else fspath(path), max_bytes=max_bytes)

    def autocache(
        self,
        location: str | PathLike[str] | None = None,
        *,
        capacity_bytes: int | None = None,
        always: bool = False,
        frozen: bool = False,
        epochs: int | None = None,
        version: str | None = None,
    ) -> Self:
        """Let what is above be kept between epochs and runs, split by split, where measurements say that it pays.

        `location` is a folder or URL (None: a folder of the host's user), `always` keeps without asking whether it
        pays, `frozen` lets random numbers above be drawn once, `epochs` says how many are expected, and `version`
        names data that cannot tell by itself whether it changed.
        """
        return self._with(
            ops.Autocache,
            location=None if location is None else fspath(location),
            capacity_bytes=capacity_bytes,
            always=always,
            frozen=frozen,
            epochs=epochs,
            version=version,
        )

    def prefetch(self, size: int | None = None) -> Self:
        """Make up to `size` elements ahead on a thread. One is put at the end anyway, where it helps."""
        return self._with(ops.Prefetch, size=size)

    def shard(self) -> Self:
        """Mark where a job with `sharding="hint"` gives each worker its part of the elements; alone it does nothing."""
        return self._with(ops.Shard)

    def __len__(self) -> int:
        count = known_length(self._node, self._plan.source_length)
        if count is None:
            raise TypeError("the length of this dataset is not known before it is read; declare it with with_length()")
        return count

    # Looking at it

    def explain(
        self, *, analyze: bool = False, format: Literal["text", "mermaid"] = "text", duration_s: float = 2.0
    ) -> str:
        """Return the plan as written and as it will run; with `analyze`, run it for `duration_s`: what limits it."""
        if format not in ("text", "mermaid"):
            raise choice("format", format, ("text", "mermaid"))
        return self._plan.explain(analyze=analyze, mermaid=format == "mermaid", duration_s=duration_s)

    def fingerprint(self) -> str:
        """Return a hash of what this pipeline computes: code, captured values, parameters and source files."""
        return self._plan.fingerprint()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' → '.join(node.name for node in walk(self._node))})"

    def _with(self, operator: type[ops.Unary], **parameters: Any) -> Self:
        return self._over(operator(upstream=self._node, **parameters))

    def _over(self, node: Node) -> Self:
        return type(self)(node)

    def _function_salt(self, function: UserFunction) -> int:
        """Number the functions that draw random numbers, so that no two of a pipeline draw the same.

        Only those are counted: adding a map, or moving a shuffle, changes no other function's numbers.
        """
        return sum(map(takes_rng, self._operators())) if function.takes_rng else 0

    def _operators(self) -> Iterator[Node]:
        """Yield what the pipeline is made of so far, from the sources on."""
        return walk(self._node)


def skip_policy(on_error: OnError) -> ops.SkipErrors | None:
    if isinstance(on_error, ops.SkipErrors):
        return on_error
    if on_error not in ("raise", "skip"):
        raise choice("on_error", on_error, ("raise", "skip", "SkipErrors(budget=..., quarantine=...)"))
    return ops.SkipErrors() if on_error == "skip" else None


def user_function(operator: str, function: object) -> UserFunction:
    if not callable(function):
        raise InvalidArgumentError(f"{operator} takes a function, not {type(function).__name__}")
    return UserFunction.of(function)


def leading(first: Face, *others: Any) -> Face:
    """Return the one whose kind what is made of all of them has: with a loader among them it is one."""
    found: Any = (each for each in (first, *others) if isinstance(each, Operators) and each.LEADS)
    chosen: Face = next(found, first)
    return chosen


def nodes_of(operator: str, *datasets: object) -> tuple[Node, ...]:
    for dataset in datasets:
        if not isinstance(dataset, Operators):
            raise InvalidArgumentError(f"{operator} takes datasets, not {type(dataset).__name__}")
    return tuple(dataset.node for dataset in datasets if isinstance(dataset, Operators))
