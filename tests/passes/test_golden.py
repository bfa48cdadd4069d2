"""The plan of every operator after all passes, and that it is final."""

from __future__ import annotations

from textwrap import dedent

import pytest

from penstock.graph.explain import explain_text
from penstock.passes import PASSES, optimize
from tests.passes.golden import GOLDEN_PLANS


@pytest.mark.parametrize("operator", GOLDEN_PLANS)
def test_plan_after_all_passes(operator):
    dataset, plan = GOLDEN_PLANS[operator]
    assert explain_text(optimize(dataset.node)) == dedent(plan).strip()


@pytest.mark.parametrize("operator", GOLDEN_PLANS)
def test_a_plan_is_final(operator):
    plan = optimize(GOLDEN_PLANS[operator][0].node)
    assert optimize(plan) is plan
    assert all(each.rewrite(plan) is plan for each in PASSES)
