"""Sources that can leave out columns read only those that somebody above asks for.

The selects stay where they are: they also fix the order of the keys. `merge columns` removes them where the source's
own order has become the right one.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph.node import Node
from penstock.graph.readers import ColumnarSource, ReadCsv
from penstock.graph.traverse import rewrite
from penstock.passes.column_flow import Columns, masks_nulls, needed_columns

MASK_SUFFIX = "__mask"  # of the columns that nulls="mask" adds; they are not in the file


def push_projections(root: Node) -> Node:
    needed = needed_columns(root)

    def rule(node: Node) -> Node:
        if isinstance(node, (ColumnarSource, ReadCsv)) and _can_project(node, needed[node]):
            return replace(node, columns=needed[node])
        return node

    return rewrite(root, rule)


def _can_project(source: ColumnarSource | ReadCsv, needed: Columns) -> bool:
    if needed is None or needed == source.columns:
        return False
    if source.columns is not None and not set(needed) <= set(source.columns):
        return False  # an operator above asks for a column that the user did not: that is its error to raise
    if source.on_error is not None:
        return False  # a record that is bad in a column nobody reads would no longer be left out
    masked = isinstance(source, ColumnarSource) and masks_nulls(source)
    return not (masked and any(column.endswith(MASK_SUFFIX) for column in needed))
