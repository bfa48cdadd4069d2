"""Adding an operator takes five edits; this fails until all of them are there."""

from __future__ import annotations

import inspect

import pytest

import penstock as ps
from penstock.graph import ops, readers
from penstock.graph.node import Node
from penstock.graph.node import _snake_case as snake_case
from penstock.sources.registry import IMPLEMENTATIONS
from tests.cases import operator_cases, source_cases
from tests.passes.golden import GOLDEN_PLANS

MADE_BY_PASSES = {ops.Fused, ops.FusedBatch}
BASES = {ops.Unary, ops.Hole, readers.SourceNode, readers.FileSource, readers.RecordFile, readers.ColumnarSource}


def classes(module):
    found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Node)]
    return sorted({value for value in found if value.__module__ == module.__name__} - BASES, key=lambda c: c.__name__)


OPERATORS, SOURCES = classes(ops), classes(readers)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda c: c.__name__)
def test_operator_has_a_conformance_case(operator, tmp_path):
    assert operator in {kind for kind, _ in operator_cases(tmp_path).values()}


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda c: c.__name__)
def test_operator_runs(operator, tmp_path):
    make = next(make for kind, make in operator_cases(tmp_path).values() if kind is operator)
    with make().iterator(epoch=0) as iterator:
        assert next(iterator, None) is not None


@pytest.mark.parametrize("operator", [o for o in OPERATORS if o not in MADE_BY_PASSES], ids=lambda c: c.__name__)
def test_operator_has_a_method_or_function(operator):
    name = snake_case(operator.__name__)
    assert callable(getattr(ps.Dataset, name, None) or getattr(ps, name, None)), name


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda c: c.__name__)
def test_operator_has_a_golden_plan(operator):
    assert snake_case(operator.__name__) in GOLDEN_PLANS


@pytest.mark.parametrize("source", SOURCES, ids=lambda c: c.__name__)
def test_source_has_an_implementation_a_reader_and_a_case(source, tmp_path):
    assert source in IMPLEMENTATIONS
    assert callable(getattr(ps, snake_case(source.__name__), None)), snake_case(source.__name__)
    assert source in {kind for kind, _ in source_cases(tmp_path).values()}
