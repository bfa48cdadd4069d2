"""Adding an operator takes five edits; this fails until all of them are there, and every trait is stated and true."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.api.dataset import Dataset
from penstock.graph import ops
from penstock.graph.codec import RECORDS
from penstock.graph.fields import defaults_of
from penstock.graph.node import Node
from penstock.graph.node import _snake_case as snake_case
from penstock.graph.readers import SourceNode
from penstock.graph.regrouping import makes_rounds
from penstock.graph.traits import Flow, GroupedBy, Inputs, Traits
from penstock.graph.traverse import walk
from penstock.runtime.building import STAGES, STEPS
from penstock.runtime.contract import RegroupingStage
from penstock.runtime.lower import ROUNDS
from penstock.runtime.ops.transform import Transform
from penstock.sources.registry import IMPLEMENTATIONS
from tests.cases import operator_cases, source_cases
from tests.passes.golden import GOLDEN_PLANS

WITHOUT_A_METHOD = {ops.Fused, ops.FusedBatch, ops.Identified}
"""Passes make them, or `distribute` does."""
NODES = sorted((cls for cls in RECORDS.values() if issubclass(cls, Node)), key=lambda cls: cls.__name__)
OPERATORS = [cls for cls in NODES if not issubclass(cls, SourceNode) and cls is not ops.Hole]
SOURCES = [cls for cls in NODES if issubclass(cls, SourceNode)]
EACH_OPERATOR = pytest.mark.parametrize("operator", OPERATORS, ids=lambda c: c.__name__)


def test_operators_are_found():
    assert len(OPERATORS) > 25 and len(SOURCES) > 12


@EACH_OPERATOR
def test_operator_has_a_conformance_case(operator, tmp_path):
    assert operator in {kind for kind, _ in operator_cases(tmp_path).values()}


@EACH_OPERATOR
def test_operator_runs(operator, tmp_path):
    make = next(make for kind, make in operator_cases(tmp_path).values() if kind is operator)
    with make().iterator(epoch=0) as iterator:
        assert next(iterator, None) is not None


@pytest.mark.parametrize("operator", [o for o in OPERATORS if o not in WITHOUT_A_METHOD], ids=lambda c: c.__name__)
def test_operator_has_a_method_or_function(operator):
    name = snake_case(operator.__name__)
    assert callable(getattr(ps.Dataset, name, None) or getattr(ps, name, None)), name


@EACH_OPERATOR
def test_operator_has_a_golden_plan(operator):
    assert snake_case(operator.__name__) in GOLDEN_PLANS


@pytest.mark.parametrize("source", SOURCES, ids=lambda c: c.__name__)
def test_source_has_an_implementation_a_reader_and_a_case(source, tmp_path):
    assert source in IMPLEMENTATIONS
    assert callable(getattr(ps, snake_case(source.__name__), None)), snake_case(source.__name__)
    assert source in {kind for kind, _ in source_cases(tmp_path).values()}


# Traits


def test_no_trait_has_a_default():
    assert not defaults_of(Traits)
    assert not hasattr(Node, "TRAITS") and not hasattr(ops.Unary, "TRAITS")


def cases_of(operator, folder):
    """Yield each case's operator of that kind, over its own input; what passes make is found in what they made."""
    for kind, make in operator_cases(folder).values():
        if kind is operator:
            dataset = make()
            yield from (node for node in walk(dataset._plan.optimized) if type(node) is operator)
            yield from (node for node in walk(dataset.node) if type(node) is operator)


@pytest.mark.parametrize("node", NODES, ids=lambda c: c.__name__)
def test_every_trait_is_stated(node):
    if node is not ops.Hole:
        assert isinstance(node.TRAITS, Traits), f"{node.__name__} has no TRAITS of its own, nor has its base"


@EACH_OPERATOR
def test_operator_has_a_stage_or_a_step_and_rules_for_rounds(operator, tmp_path):
    nodes = list(cases_of(operator, tmp_path))
    assert nodes
    for node in nodes:
        assert operator in (STEPS if node.traits.fuses else STAGES)
        assert (operator in ROUNDS) == makes_rounds(node)


@EACH_OPERATOR
def test_traits_agree_with_each_other(operator, tmp_path):
    for node in cases_of(operator, tmp_path):
        traits = node.traits
        if traits.fuses:
            assert not traits.holds_back and not traits.order_bound, "a step holds nothing"
        if traits.regroups is not None:
            assert traits.flow is Flow.OWN, "groups do not stand in the places of elements"
            assert (traits.regroups.by is GroupedBy.KEY) <= traits.holds_back, "what waits is held"
        if isinstance(node, ops.Unary):
            assert traits.inputs is not Inputs.ANY
            given = dict(node.parameters())
            assert node.policy is given.get("on_error")
            assert node.drops_rest == given.get("drop_last", False)
        else:
            assert not traits.keeps_order


def elements_of(node, limit=300):
    with Dataset(node).iterator(epoch=0, threads=1, optimize=False) as iterator:
        return [element for element, _ in zip(iterator, range(limit))]


@EACH_OPERATOR
def test_what_keeps_order_gives_an_element_for_each_unless_it_may_skip(operator, tmp_path):
    for node in cases_of(operator, tmp_path):
        if node.traits.keeps_order:
            came, went = len(elements_of(node.upstream)), len(elements_of(node))
            assert went < came if node.traits.may_skip and not isinstance(node, ops.OfSteps) else went <= came
            assert node.traits.may_skip or went == came


@EACH_OPERATOR
def test_a_length_that_is_known_is_right(operator, tmp_path):
    for node in cases_of(operator, tmp_path):
        try:
            known = len(Dataset(node))
        except TypeError:
            continue
        assert known == len(elements_of(node))


@EACH_OPERATOR
def test_same_columns_are_the_same(operator, tmp_path):
    batches = ps.from_items([{"a": np.arange(3) + i, "b": np.arange(3) * i} for i in range(60)]).node
    for node in cases_of(operator, tmp_path):
        if node.traits.same_columns:
            over = node.with_inputs(*(batches for _ in node.inputs))
            for element in elements_of(over, limit=5):
                assert list(element) == ["a", "b"]


@EACH_OPERATOR
def test_stage_is_what_the_traits_say(operator, tmp_path):
    for node in cases_of(operator, tmp_path):
        with Dataset(node).iterator(epoch=0, threads=2, optimize=False) as iterator:
            stage = iterator._run._stage
            assert isinstance(stage, RegroupingStage) == (node.traits.regroups is not None)
            assert isinstance(stage, Transform) >= node.traits.fuses
