"""Which pipelines a sampler can feed: those that give one output a unit; and what is put where a list is a batch."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.readers import SourceNode
from penstock.graph.traits import OnWorkers
from penstock.graph.traverse import rewrite, walk
from penstock.passes import canonicalize
from penstock.samplers.drawing import Grouping

NOMINAL_BATCH = 256  # rows; of the operator put where each list is a batch: how long lists are is not known beforehand
INDEXABLE = "range, from_items, from_torch, from_huggingface, read_images, read_files or read_numpy"


def check_fed(root: Node) -> SourceNode:
    """Return the one source of a pipeline that gives one output a unit; refuse every other pipeline."""
    node = _check_chain(root, _gives_one_output, _ONE_OUTPUT)
    for each in walk(canonicalize(root)):
        _check_errors(each)
    return node


def check_fed_here(root: Node) -> tuple[SourceNode, bool]:
    """Return the one source of a pipeline that a sampler feeds here, and whether elements may be left out."""
    node = _check_chain(root, ops.passes_states, _ONE_BY_ONE)
    return node, any(
        each.traits.may_skip or (isinstance(each, (ops.Unary, SourceNode)) and each.policy is not None)
        for each in walk(canonicalize(root))
    )


_ONE_OUTPUT = (
    "every unit of the sampler must give one output, so that outputs come in the sampler's order; put it after "
    "distribute(), or leave feed= out"
)
_ONE_BY_ONE = (
    "without workers, what stands over the sampler's order takes elements one by one (map, filter, select, batch); "
    "give distribute() a number of worker processes and put it after that, or leave feed= out"
)


def _check_chain(root: Node, fits: Callable[[Node], bool], otherwise: str) -> SourceNode:
    node = canonicalize(root)
    batch: Node | None = None
    while not isinstance(node, SourceNode):
        if isinstance(node, ops.Batches):
            if batch is not None:
                raise InvalidPipelineError(
                    f"{short_label(node)} and {short_label(batch)} with feed=: a unit of the sampler becomes one "
                    "batch, once; leave one of them out, or put the second one after distribute()"
                )
            batch = node
        elif isinstance(node, ops.Shuffle):
            raise InvalidPipelineError(f"{short_label(node)} with feed=: the sampler says the order; leave it out")
        elif not fits(node):
            raise InvalidPipelineError(f"{short_label(node)} with feed=: {otherwise}")
        (node,) = node.inputs
    return node


def _gives_one_output(node: Node) -> bool:
    """Return whether each element gives one output, unless `on_error` leaves it out; or workers do not run it."""
    if node.traits.on_workers is OnWorkers.LEFT_TO_READER or isinstance(node, ops.Autocache):
        return True
    return ops.passes_states(node) and (node.policy is not None or not node.traits.may_skip)


def _check_errors(node: Node) -> None:
    if isinstance(node, (ops.Unary, SourceNode)) and node.policy is not None:
        raise InvalidPipelineError(
            f"{short_label(node)} with feed= and on_error='skip': every unit of the sampler must give its output "
            "whole; leave on_error out, and bad elements out of the sampler, or read without workers"
        )


def not_indexable(source: SourceNode) -> InvalidPipelineError:
    return InvalidPipelineError(
        f"feed= reads elements by their index, and those of {short_label(source)} can only be read in order: use "
        f"{INDEXABLE}, or leave feed= out and shuffle() the dataset"
    )


def grouping_of(root: Node) -> Grouping | None:
    """Return what the batch operator says, if there is one."""
    for node in walk(root):
        if isinstance(node, ops.Batches):
            return Grouping(size=node.size, drop_last=node.drop_last)
    return None


def with_batches(root: Node) -> Node:
    """Return the graph in which a list becomes one batch, however short; at the end, unless it says where."""
    if grouping_of(root) is None:
        return ops.Batch(upstream=root, size=NOMINAL_BATCH)
    return rewrite(root, lambda node: replace(node, drop_last=False) if isinstance(node, ops.Batches) else node)
