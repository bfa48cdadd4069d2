"""Graph to graph: the same elements, made with less work."""

from __future__ import annotations

from penstock.graph.node import Node


def optimize(root: Node) -> Node:
    return root
