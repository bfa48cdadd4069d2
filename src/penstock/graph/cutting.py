"""Where a pipeline may be cut in two: what workers run, and what the trainer runs of what they send.

Rules:

1. The cut changes nothing that is read. Which elements there are, in which order, which of them make a batch, and what
   each draws, is the same at every legal cut; so is the state of a stream, because nothing that has a state crosses it.
2. So only operators without a state may stand after the cut: those that make one output of each input, in its place.
3. A batch is counted where the stream is. A cut before it sends its elements together, each as it is there, and the
   batch is put together here: no row moves from one batch to another, whatever the number of streams and ranks.

What is refused is refused with the operator that stands in the way. The third form, *read here, compute there*, leaves
the whole pipeline to workers but for reading: the trainer reads what the sources name, raw elements go up to workers,
and results come back. The graph that workers run is the whole one, so that a stream is what it is at every other cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.graph import ops
from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.randomized import takes_rng
from penstock.graph.readers import SourceNode
from penstock.graph.traits import GroupedBy, OnWorkers, RoundGrouping
from penstock.graph.traverse import walk

CutForm: TypeAlias = Literal["all there", "prefix there", "read here"]
"""all there: workers make what the trainer takes. prefix there: they make what the operators after the cut take. read
here: the trainer reads, and workers compute."""


class PipelineCut(msgspec.Struct, frozen=True, kw_only=True):
    """A legal one. `here` are the operators after it, the first one first."""

    name: str
    """For people and records: what stands right after it, or `all there`."""
    form: CutForm
    there: Node
    """The graph that workers run."""
    here: tuple[ops.Unary, ...] = ()
    group_rows: int = 0
    """Elements leave together, so many as make a batch here; 0: each output is what `there` gives."""

    def over(self, source: Node) -> Node:
        """Return the operators after the cut, over what stands for the outputs of `there`."""
        for operator in self.here:
            source = replace(operator, upstream=source)
        return source


class IllegalCut(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    form: CutForm
    why: str
    """A sentence."""


class Cuts(msgspec.Struct, frozen=True, kw_only=True):
    """All cuts of a pipeline: those with the least work here first, and reading here last."""

    legal: tuple[PipelineCut, ...]
    illegal: tuple[IllegalCut, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(cut.name for cut in self.legal)

    def named(self, name: str) -> PipelineCut | None:
        return next((cut for cut in self.legal if cut.name == name), None)


def cuts_of(root: Node, *, coordinated: bool = False) -> Cuts:
    """Return where the pipeline may be cut. `coordinated`: ranks read rounds of batches that are padded alike.

    Shuffles stand where they cost least (`passes.shuffles`): one that follows a map would hide it.
    """
    legal = [PipelineCut(name=ALL_THERE, form="all there", there=root)]
    here: list[ops.Unary] = []
    batch: ops.Batches | None = None
    node = root
    while isinstance(node, ops.Unary) and not _hindrance(node, batch, coordinated=coordinated):
        if node.traits.on_workers is OnWorkers.LEFT_TO_READER:
            node = node.upstream  # a declared length: nobody runs it where the reader is a service's
            continue
        here.insert(0, node)
        batch = node if isinstance(node, ops.Batches) else batch
        works = node.traits.threads != 0 and not isinstance(node, ops.Prefetch)
        if works or node is batch:
            legal.append(_cut_before(node, tuple(here), batch))
        node = node.upstream
    illegal = list(_refused(node, batch, coordinated=coordinated))
    if any(isinstance(each, SourceNode) and not each.IN_MEMORY for each in walk(root)):
        legal.append(PipelineCut(name=READ_HERE, form="read here", there=root))
    else:
        illegal.append(IllegalCut(name=READ_HERE, form="read here", why=NOTHING_READ))
    names = _distinct([*(cut.name for cut in legal), *(cut.name for cut in illegal)])
    return Cuts(
        legal=tuple(replace(cut, name=name) for cut, name in zip(legal, names)),
        illegal=tuple(replace(cut, name=name) for cut, name in zip(illegal, names[len(legal) :])),
    )


ALL_THERE = "all there"
READ_HERE = "read here, compute there"
NOTHING_READ = "all of the data is in the pipeline itself, and goes to workers with it: there is nothing to read here"


def rows_together(rows: Sequence[Any]) -> list[Any]:
    """Return the elements of a batch as they are."""
    return list(rows)


def _cut_before(operator: ops.Unary, here: tuple[ops.Unary, ...], batch: ops.Batches | None) -> PipelineCut:
    there, name = operator.upstream, f"before {short_label(operator)}"
    if batch is None:
        return PipelineCut(name=name, form="prefix there", there=there, here=here)
    drawing = any(takes_rng(each) for each in here)
    grouped = ops.Batch(
        upstream=ops.Identified(upstream=there) if drawing else there,
        size=batch.size,
        drop_last=batch.drop_last,
        collate=UserFunction.of(rows_together),
    )
    return PipelineCut(name=name, form="prefix there", there=grouped, here=here, group_rows=batch.size)


def _hindrance(node: Node, batch: ops.Batches | None, *, coordinated: bool) -> str:
    """Return why no cut may stand above an operator; empty: one may."""
    label = short_label(node)
    if isinstance(node, SourceNode):
        return f"{label} is where the data is read: before it there is nothing for workers to do"
    if not isinstance(node, ops.Unary):
        return f"{label} joins several inputs by the order of their elements, which only the stream has"
    regroups = node.traits.regroups
    if isinstance(node, ops.Batches) and batch is None:
        assert regroups is not None
        if coordinated and regroups.rounds is not RoundGrouping.ANY:
            return f"{label} pads the batches of all ranks alike, so that it has to see those of the whole round"
        return ""
    if regroups is not None:
        what = "by their key" if regroups.by is GroupedBy.KEY else "across the batches that follow"
        return f"{label} holds elements back and groups them {what}: what it holds is the stream's, and its state"
    if node.traits.may_skip:
        return f"{label} may leave elements out, and so decides which of them make a batch or whose turn it is"
    if isinstance(node, ops.Shuffle):
        return f"{label} gives the elements their order, and its state is a place in that order: it stays with them"
    if node.traits.on_workers is OnWorkers.LEFT_TO_READER or isinstance(node, ops.Prefetch):
        return ""
    if not node.traits.one_to_one:
        return f"{label} has a state or a meaning of its own in the stream, which does not move with the cut"
    return ""


def _refused(node: Node, batch: ops.Batches | None, *, coordinated: bool) -> Iterator[IllegalCut]:
    """Yield a cut for each operator from the first that stands in the way up to its source: that one hinders all."""
    why = _hindrance(node, batch, coordinated=coordinated)
    while isinstance(node, ops.Unary):
        yield IllegalCut(name=f"before {short_label(node)}", form="prefix there", why=why)
        node = node.upstream


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names, those that come again with a number.

    >>> _distinct(["before map(f)", "before batch", "before map(f)"])
    ['before map(f)', 'before batch', 'before map(f) (2)']
    """
    made: list[str] = []
    for name in names:
        count = sum(each == name or each.startswith(f"{name} (") for each in made)
        made.append(name if not count else f"{name} ({count + 1})")
    return made
