"""Real services with real processes. Those that no test harms are shared by a session: starting one takes time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import penstock as ps


@pytest.fixture(scope="session")
def one_worker() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=1) as service:
        yield service


@pytest.fixture(scope="session")
def three_workers() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=3) as service:
        yield service
