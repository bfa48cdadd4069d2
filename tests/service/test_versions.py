"""Installed packages are compared by version before anything is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.errors import JobFailedError
from penstock.graph.installed import installed_versions, version_of


def install(folder: Path, version: str) -> Path:
    """Return a folder of packages in which there is one, in that version."""
    packages = folder / "site-packages"
    about = packages / f"fake_tokens-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-tokens\nVersion: {version}\n")
    (packages / "fake_tokens.py").write_text("def double(x):\n    return x * 2\n")
    return packages


@pytest.mark.parametrize("version", ["1.4.0", "1.5.0"])
def test_a_worker_with_another_version_is_refused_by_name(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "there", version)))
    monkeypatch.syspath_prepend(str(install(tmp_path / "here", "1.4.0")))
    monkeypatch.delitem(sys.modules, "fake_tokens", raising=False)
    for cached in (installed_versions, version_of):
        cached.cache_clear()
    try:
        import fake_tokens  # type: ignore[import-not-found]

        double = fake_tokens.double
        with ps.LocalService(workers=1) as service:
            service.wait_ready(60.0)
            loader = ps.range(10).map(lambda x: double(x)).distribute(service, limits=ps.Limits(timeout_s=60))
            if version == "1.4.0":
                assert sorted(loader) == list(range(0, 20, 2))
                return
            (worker,) = service.workers()
            with pytest.raises(JobFailedError) as refused:
                list(loader)
            assert f"worker {worker.worker!r} has fake-tokens 1.5.0 instead of 1.4.0" in str(refused.value)
    finally:
        for cached in (installed_versions, version_of):
            cached.cache_clear()
        sys.modules.pop("fake_tokens", None)
