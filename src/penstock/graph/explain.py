"""A plan as people read it: text from the sources down to the last operator, or a Mermaid flowchart.

An operator with several inputs stands below them, each input in a bracket of its own:

    ┌ read_text('a.txt')
    │ map(clean)
    ├ read_text('b.txt')
    mix((0.7, 0.3))
    batch(32)

An operator that two others read is drawn once and marked `#1`; where it is read again stands `= #1`.
"""

from __future__ import annotations

from penstock.graph.node import Node
from penstock.graph.parameters import label
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import numbered, readers_of, walk


def explain_text(node: Node) -> str:
    """Return the plan, one operator a line."""
    shared = [operator for operator, readers in readers_of(node).items() if len(readers) > 1]
    marks = {operator: f"#{i}" for i, operator in enumerate(shared, 1)}
    lines: dict[Node, list[str]] = {}
    drawn_at = _first_readers(node)
    for operator in walk(node):
        branches = [
            lines.pop(upstream) if drawn_at[upstream] == (operator, i) else [f"= {marks[upstream]}"]
            for i, upstream in enumerate(operator.inputs)
        ]
        # The list of a single input is taken over, not copied: a plan may have thousands of lines.
        own = branches[0] if len(branches) == 1 else _bracketed(branches)
        own.append(f"{label(operator)}  {marks[operator]}" if operator in marks else label(operator))
        lines[operator] = own
    return "\n".join(lines[node])


def _first_readers(node: Node) -> dict[Node, tuple[Node, int]]:
    """Return for each operator the reader, and which of its inputs, that comes first from top to bottom."""
    found: dict[Node, tuple[Node, int]] = {}
    pending = [(node, enumerate(node.inputs))]
    while pending:
        reader, inputs = pending[-1]
        for i, upstream in inputs:
            if upstream not in found:
                found[upstream] = (reader, i)
                pending.append((upstream, enumerate(upstream.inputs)))
                break
        else:
            pending.pop()
    return found


def _bracketed(branches: list[list[str]]) -> list[str]:
    drawn: list[str] = []
    for i, branch in enumerate(branches):
        for j, line in enumerate(branch):
            corner = ("┌" if i == 0 else "├") if j == 0 else "│"
            drawn.append(f"{corner} {line}")
    return drawn


def explain_mermaid(node: Node) -> str:
    """Return the plan as a Mermaid flowchart."""
    numbers = numbered(node)
    boxes: list[str] = []
    arrows: list[str] = []
    for operator, number in numbers.items():
        left, right = ("[(", ")]") if isinstance(operator, SourceNode) else ("[", "]")
        boxes.append(f'    n{number}{left}"{_quoted(label(operator))}"{right}')
        arrows.extend(f"    n{numbers[upstream]} --> n{number}" for upstream in operator.inputs)
    return "\n".join(["flowchart TD", *boxes, *arrows])


def _quoted(shown: str) -> str:
    """Return text that is safe between Mermaid's quotes, where only entities like `#34;` can stand for quotes.

    >>> _quoted('a "b" <c>')
    'a #34;b#34; #60;c#62;'
    """
    return "".join(f"#{ord(letter)};" if letter in '"#<>&`\\\n\r\t' else letter for letter in shown)
