"""Into how many streams a pipeline can be cut so that each has something of every input that it needs.

A mix takes from all of its inputs, and an endless repeat goes on until its input gives something. A stream without a
split of one of them would mix in other proportions, end at once (`stop="first"`), or run through empty passes for ever.
Stream j of n is dealt splits j, j + n, ...: each has some of a source of c splits if n <= c.

Where splits are granted as streams ask for them, nobody knows who gets some of which source. A stream that goes through
passes for ever gets what it needs of a later one; of a mix that ends it may get too little, so its splits are dealt.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.readers import SourceNode
from penstock.graph.traits import Inputs
from penstock.graph.traverse import walk


class StreamLimit(msgspec.Struct, frozen=True):
    """`operator` can be cut into at most so many streams, because `source` has no more splits."""

    most: int
    source: str
    operator: str


class _Reach(msgspec.Struct, frozen=True):
    """How many streams get something of a source."""

    streams: int
    source: str


def stream_limit(root: Node, counts: Sequence[int | None]) -> StreamLimit | None:
    """Return the tightest limit, or None: there is none.

    `counts[i]` is how many streams can get something of source i; None: it sets no limit, because it is empty, say.
    """
    reached: dict[Node, _Reach | None] = {}
    limits: list[StreamLimit] = []
    numbers = iter(counts)
    for node in walk(root):
        inputs = [reach for upstream in node.inputs if (reach := reached[upstream]) is not None]
        if isinstance(node, SourceNode):
            count = next(numbers)
            reached[node] = None if count is None else _Reach(count, short_label(node))
            continue
        choose = max if node.traits.inputs is Inputs.ANY else min
        found = choose(inputs, key=lambda reach: reach.streams, default=None)
        reached[node] = found
        if found is not None and node.traits.inputs is Inputs.ALL_OR_WRONG:
            limits.append(StreamLimit(found.streams, found.source, short_label(node)))
    return min(limits, key=lambda limit: limit.most, default=None)


def ends_with_an_input(root: Node) -> bool:
    """Say whether a mix ends by what it gets of its inputs: then what each stream gets must not be left to chance."""
    return any(isinstance(node, ops.Mix) and node.stop != "never" for node in walk(root))
