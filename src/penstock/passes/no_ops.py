"""What says nothing goes."""

from __future__ import annotations

from types import CodeType, FunctionType

from msgspec.structs import replace

from penstock.graph import ops
from penstock.graph.fingerprint import fingerprint
from penstock.graph.functions import UserFunction
from penstock.graph.node import Node
from penstock.graph.traverse import rewrite


def canonicalize(root: Node) -> Node:
    """Return the graph that both the runtime and the passes start from; the same object if it is one already.

    `take(-1)`, `skip(0)` and `repeat(1)` pass everything on. They cannot be left to an optional pass: `take` and
    `repeat` have a state of their own, and a shuffle does not reach through any of the three, so that removing them
    changes which order it asks of the source. So they mean nothing by definition, and that holds before a graph runs,
    with passes or without. The same goes for a `take` of a `take`, whose states would nest.
    """
    return rewrite(rewrite(root, lambda node: node.canonical()), _keyed)


def _keyed(node: Node) -> Node:
    """Name what a point keeps, before passes make one of operators, or ask for less of a source."""
    if not isinstance(node, ops.Autocache) or node.prefix_key:
        return node
    below = fingerprint(rewrite(node.upstream, _without_order), source_digest=lambda _: "")
    return replace(node, prefix_key=below if node.version is None else f"{below} {node.version}")


def _without_order(node: Node) -> Node:
    """Leave out what decides neither what an element is nor which there are: files have stamps of their own."""
    return node.inputs[0] if isinstance(node, (ops.Autocache, ops.Prefetch, ops.Shuffle)) else node


def remove_no_ops(root: Node) -> Node:
    """Remove maps of the identity and prefetches of prefetches. Neither has a state, and no shuffle minds them."""
    return rewrite(root, _without)


def _without(node: Node) -> Node:
    match node:
        case ops.Map(batch_size=None, on_error=None) if is_identity(node.function):
            return node.upstream
        case ops.Prefetch(size=None, upstream=ops.Prefetch(size=None)):
            return node.upstream
    return node


def _identity(x: object) -> object:
    return x


def is_identity(function: UserFunction) -> bool:
    """Return whether it is a plain function of one argument that does nothing but return it.

    Judged by its byte code, which for `return x` of the only argument is the same for every function.

    >>> is_identity(UserFunction.of(lambda row: row)), is_identity(UserFunction.of(lambda row: row[0]))
    (True, False)
    """
    given = function.here
    return type(given) is FunctionType and not function.takes_rng and _returns_its_argument(given.__code__)


def _returns_its_argument(code: CodeType) -> bool:
    # One argument and no other local leaves no room for *args; generators and coroutines have another byte code.
    return code.co_argcount == code.co_nlocals == 1 and code.co_code == _identity.__code__.co_code
