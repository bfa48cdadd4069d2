"""Fingerprints: one per operator, over all that determines its output.

The fingerprint of an operator covers its parameters, the parts of its functions (`graph.function_parts`), and the
fingerprints of its inputs; that of a source also covers what there is to read, if `source_digest` tells. It is the same
in every process and under every hash seed. Not in it are `PRIVATE` parameters, parameters at their defaults, and the
number of threads, which changes no result: a state saved with four is good for one. A seed that nobody gave is not in
it either, because it is drawn later, by whoever creates the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from penstock.graph.code_digest import digest, encode_scalar
from penstock.graph.expressions import Expression
from penstock.graph.function_parts import parts
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.node import Node
from penstock.graph.ops import SkipErrors
from penstock.graph.parameters import given_parameters, short_label, text
from penstock.graph.readers import FileSource, SourceNode
from penstock.graph.transforms import FeatureTransform
from penstock.graph.traverse import numbered, walk

_NO_EFFECT = frozenset({"threads"})
SourceDigest: TypeAlias = Callable[[SourceNode], str]

__all__ = ["OperatorSummary", "ParameterSummary", "SourceDigest", "fingerprint", "fingerprints", "parts", "summary"]


class ParameterSummary(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A parameter: how it reads, its digest, and for a function or object the digests of its parts."""

    text: str
    digest: str
    parts: dict[str, str] = {}


class OperatorSummary(msgspec.Struct, frozen=True, array_like=True):
    """All that distinguishes one operator from another, without its inputs. Small, and serialisable."""

    number: int
    kind: str
    label: str
    parameters: dict[str, ParameterSummary]
    inputs: tuple[int, ...] = ()

    @property
    def digest(self) -> bytes:
        values = sorted((name, parameter.digest) for name, parameter in self.parameters.items())
        return digest(self.kind, (f"{name} {value}".encode() for name, value in values))


def fingerprint(node: Node, *, source_digest: SourceDigest | None = None) -> str:
    """Return 32 hexadecimal digits that stand for all that this operator yields, from the sources up."""
    return fingerprints(node, source_digest=source_digest)[node]


def fingerprints(node: Node, *, source_digest: SourceDigest | None = None) -> dict[Node, str]:
    """Return the fingerprint of this operator and of every one below it."""
    found: dict[Node, str] = {}
    known: dict[int, ParameterSummary] = {}
    for operator in walk(node):
        own = _parameters(operator, source_digest, known)
        inputs = (found[upstream].encode() for upstream in operator.inputs)
        kind = type(operator).__name__
        found[operator] = digest("node", (OperatorSummary(0, kind, "", own).digest, *inputs)).hex()
    return found


def summary(node: Node, *, source_digest: SourceDigest | None = None) -> list[OperatorSummary]:
    """Return a description of every operator that can be kept and compared later (see `graph.difference`)."""
    numbers = numbered(node)
    known: dict[int, ParameterSummary] = {}
    return [
        OperatorSummary(
            number,
            type(operator).__name__,
            short_label(operator),
            _parameters(operator, source_digest, known),
            tuple(numbers[upstream] for upstream in operator.inputs),
        )
        for operator, number in numbers.items()
    ]


def _parameters(
    node: Node, source_digest: SourceDigest | None, known: dict[int, ParameterSummary]
) -> dict[str, ParameterSummary]:
    given = [(name, value) for name, value, _ in given_parameters(node) if name not in _NO_EFFECT]
    found = {name: _parameter(value, known) for name, value in given}
    if isinstance(node, SourceNode) and source_digest is not None:
        content = source_digest(node)
        found["files" if isinstance(node, FileSource) else "content"] = ParameterSummary("", content)
        if isinstance(node, FileSource):
            del found["paths"]  # the same files under another root are the same source
    return found


def _parameter(value: Any, known: dict[int, ParameterSummary]) -> ParameterSummary:
    if not isinstance(value, (UserFunction, Payload)):
        return ParameterSummary(text(value), _value_digest(value).hex())
    if id(value) not in known:
        own = value.parts()
        known[id(value)] = ParameterSummary(text(value), _parts_digest(own).hex(), own)
    return known[id(value)]


def _value_digest(value: Any) -> bytes:
    scalar = encode_scalar(value)
    if scalar is not None:
        return digest("scalar", (scalar,))
    match value:
        case UserFunction() | Payload():
            return _parts_digest(value.parts())
        case Node():
            return bytes.fromhex(fingerprint(value))
        case Expression():
            return digest("expression", (_value_digest(value.to_plain()),))
        case SkipErrors():
            return digest(
                "skip_errors", (name.encode() + _value_digest(part) for name, part, _ in given_parameters(value))
            )
        case FeatureTransform():
            own = (name.encode() + _value_digest(part) for name, part, _ in given_parameters(value))
            return digest(f"transform {value.OP}", own)
        case tuple():
            return digest("tuple", map(_value_digest, value))
        case list():
            return digest("list", map(_value_digest, value))
    return _parts_digest(parts(value))


def _parts_digest(named: Mapping[str, str]) -> bytes:
    return digest("parts", (f"{name}\0{value}".encode() for name, value in sorted(named.items())))
