"""The pages about frameworks tell the truth: their examples run."""

from __future__ import annotations

import pytest

from tests.pages import OF_FRAMEWORKS, ROOT, run_examples


@pytest.mark.parametrize("page", sorted(OF_FRAMEWORKS))
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(ROOT / page)
