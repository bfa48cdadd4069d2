"""Which of a pipeline's caching points can keep splits, and what refuses the others.

What is kept is what a split-local prefix makes: a source, operators on single elements, and, of a source that is read
by index, its full permutation. An operator that groups, counts, joins or orders mixes what splits give; elements then
are not of one split, and have no place in an entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops, readers
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.randomized import takes_rng
from penstock.graph.readers import SourceNode

UNTOLD = (readers.FromGenerator, readers.FromTorch, readers.FromHuggingface)
"""Sources that read what nobody but they know of."""


class MarkedPoint(msgspec.Struct, frozen=True):
    """An autocache() that can keep what it stands above."""

    node: ops.Autocache
    prefix: tuple[Node, ...]
    """From the source up, without other points."""


def points_over(chain: Sequence[ops.Unary], base: Node, *, by_index: bool) -> list[MarkedPoint]:
    """Return the points of a chain of operators, given from the top down to what stands on `base`.

    Raises `InvalidPipelineError` for one that cannot keep anything, with the remedy.
    """
    found: list[MarkedPoint] = []
    prefix: list[Node] = [base]
    mixing: Node | None = None if isinstance(base, SourceNode) else base
    for node in reversed(chain):
        if isinstance(node, ops.Autocache):
            if mixing is not None:
                raise _refused(mixing)
            _check(node, prefix)
            found.append(MarkedPoint(node, tuple(prefix)))
        elif mixing is None:
            if not _is_split_local(node, by_index=by_index):
                mixing = node
            prefix.append(node)
    return found


def _is_split_local(node: ops.Unary, *, by_index: bool) -> bool:
    if isinstance(node, ops.Shuffle):
        return by_index
    # Where a job's shard() is more than a mark, elements of a split are shared out, and nothing is kept at all.
    return node.traits.fuses or isinstance(node, (ops.Fused, ops.Prefetch, ops.Shard))


def _refused(mixing: Node) -> InvalidPipelineError:
    label = short_label(mixing)
    if isinstance(mixing, ops.Shuffle):
        remedy = f"put {label}() after autocache(), or save() what comes after it"
    elif isinstance(mixing, ops.Unary):
        remedy = f"put autocache() before {label}, or save() what comes after it and read that"
    else:
        remedy = f"put autocache() before {label}, in each of the pipelines it reads"
    return InvalidPipelineError(
        f"autocache() keeps what single splits give, and {label} mixes what several give: {remedy}"
    )


def _check(node: ops.Autocache, prefix: Sequence[Node]) -> None:
    drawing = next(filter(takes_rng, prefix), None)
    if drawing is not None and not node.frozen:
        raise InvalidPipelineError(
            f"autocache() after {short_label(drawing)}, which draws random numbers: kept, every epoch would get the "
            "same ones. Put autocache() before it, or ask for that with autocache(frozen=True)"
        )
    source = prefix[0]
    if isinstance(source, UNTOLD) and node.version is None:
        raise InvalidPipelineError(
            f"autocache() after {short_label(source)}: it cannot be told whether it gives the same the next time. Name "
            "its content, and name it anew when that changes: autocache(version='2024-06')"
        )
