"""What each process loads before its work begins: a trainer waits for all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock as ps


def loaded_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "without"),
    [
        ("import penstock", {"numpy", "msgspec", "zmq", "penstock.api"}),
        (
            "import penstock as ps; ps.range(10).map(len).batch(2)",
            {"zmq", "pyarrow", "fsspec", "asyncio", "rich", "penstock.runtime.iterator", "penstock.sources.registry"},
        ),
        ("import penstock.processes.nursery_start", {"msgspec", "numpy", "zmq", "asyncio", "penstock.graph"}),
        ("import penstock.processes.nursery", {"numpy", "zmq", "asyncio", "penstock.graph"}),
        ("import penstock.dispatcher.main", {"numpy", "asyncio", "prometheus_client", "penstock.graph"}),
        ("import penstock.processes.agent", {"numpy", "asyncio", "penstock.graph.ops", "penstock.runtime.contract"}),
        ("import penstock.worker.runner", {"pyarrow", "fsspec", "asyncio", "rich", "penstock.api"}),
        ("import penstock.api.loader", {"pyarrow", "fsspec", "asyncio", "rich"}),
    ],
)
def test_only_what_is_needed_is_loaded(code: str, without: set[str]) -> None:
    assert not loaded_by(code) & without


def test_importing_takes_a_quarter_of_a_second_at_most() -> None:
    program = "import time; import penstock; print(time.process_time())"
    took_s = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60).stdout)
        for _ in range(3)
    ]
    assert min(took_s) <= 0.25


def test_every_public_name_is_found() -> None:
    assert all(getattr(ps, name) is not None for name in ps.__all__)
    assert set(ps.__all__) <= set(dir(ps))
    with pytest.raises(AttributeError, match="no attribute 'rnage'"):
        ps.rnage  # noqa: B018
