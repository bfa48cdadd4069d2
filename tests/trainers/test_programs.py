"""The examples with frameworks run, each in a process of its own, and say what they promise."""

from __future__ import annotations

import pytest

from tests.test_examples import IN_TRAINERS, run_example


@pytest.mark.parametrize("name", sorted(IN_TRAINERS))
def test_example_runs(name, tmp_path):
    run_example(name, tmp_path)
