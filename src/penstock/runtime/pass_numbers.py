"""How often operators go over their inputs, and how those passes are numbered where such operators are nested.

A pass has one number: of the pass that the operator is in, `outer`, and of its own passes in it, `own`, it is
`outer * most + own`. So no two passes of an epoch have the same number, and later ones have higher numbers, as long as
an operator makes at most `most` passes. Numbers go over the wire in 64 bits, the epoch's with them. Therefore:

- An input that never ends is gone over once. What stands above it adds nothing to the numbers.
- The operators that pass for ever within each other have equal shares of the bits, and the epoch has one more: with one
  of them there are 2**32 passes, with two (`repeat().take(n).repeat()`) 2**21.
- A repeat of very many passes, such as `repeat(sys.maxsize)`, is numbered as one that passes for ever.
"""

from __future__ import annotations

import msgspec

from penstock.core.errors import InvalidPipelineError
from penstock.graph import ops
from penstock.graph.node import Node
from penstock.graph.parameters import short_label
from penstock.graph.traverse import walk

BITS = 64
VERY_MANY = 1 << 16  # more passes than this are numbered as if there were no end to them


class PassesOver(msgspec.Struct, frozen=True):
    """The passes of an operator over one of its inputs.

    >>> PassesOver(label="repeat(3)", count=3, most=3).number(outer=2, own=1)
    7
    """

    label: str
    count: int
    """How many there are in one pass of the operator's own; `NEVER_ENDS`: for ever."""
    most: int
    """How many there are numbers for."""

    def number(self, outer: int, own: int) -> int:
        if own >= self.most:
            raise InvalidPipelineError(
                f"{self.label}: its input was gone over {self.most} times, and there are no numbers for more passes; "
                "use fewer operators that never end within each other"
            )
        return outer * self.most + own


class PassNumbering:
    """Gives the operators of one graph the numbers of their passes."""

    def __init__(self, root: Node) -> None:
        self._endless: set[Node] = set()
        nested: dict[Node, int] = {}
        for node in walk(root):
            if self._never_ends(node):
                self._endless.add(node)
            nested[node] = max((nested[below] + _many(self._count(node, below)) for below in node.inputs), default=0)
        self._most = 1 << BITS // (nested[root] + 1)

    def passes(self, node: Node, upstream: Node) -> PassesOver:
        count = self._count(node, upstream)
        return PassesOver(label=short_label(node), count=count, most=self._most if _many(count) else max(1, count))

    def _never_ends(self, node: Node) -> bool:
        """Say whether it never ends, or is empty: an empty input is not repeated for ever.

        What of several inputs goes on for ever may be empty, so that only all of them say so.
        """
        inputs = [below if below in self._endless else None for below in node.inputs]
        cause = node.endless(inputs)
        return cause is node or (cause is not None and None not in inputs)

    def _count(self, node: Node, upstream: Node) -> int:
        return 1 if node.passes and upstream in self._endless else node.passes


def _many(count: int) -> bool:
    return count == ops.NEVER_ENDS or count > VERY_MANY
