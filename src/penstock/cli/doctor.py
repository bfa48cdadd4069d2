"""`penstock doctor`: what Penstock finds on this machine."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from penstock.runtime.budget import core_limits, default_budget, memory_limits

REQUIRED = ("numpy", "pyarrow", "msgspec", "cloudpickle", "fsspec", "google-crc32c", "pyzmq", "psutil", "rich")
EXTRAS = {
    "images": ("simplejpeg", "opencv-python-headless"),
    "s3": ("obstore",),
    "zstd": ("zstandard",),
    "huggingface": ("datasets",),
}
STANDS_FOR = {"opencv-python-headless": ("opencv-python", "opencv-contrib-python", "opencv-contrib-python-headless")}
"""Distributions that bring the same module."""


def print_report() -> int:
    """Print what there is; return 1 if something needed is missing."""
    missing = [package for package in REQUIRED if version_of(package) is None]
    print("versions")
    _line("penstock", metadata.version("penstock"))
    _line("python", f"{platform.python_version()} ({platform.python_implementation()}, {platform.platform()})")
    for package in REQUIRED:
        _line(package, version_of(package) or f"MISSING; run: pip install {package}")
    print("\nextras")
    for extra, packages in EXTRAS.items():
        _line(extra, _extra_report(extra, packages))
    _line("torch", version_of("torch") or "not installed (needed for from_torch's tensors only)")
    budget = default_budget()
    print("\ncores")
    for name, limit in core_limits().items():
        _line(name, str(limit))
    _line("threads used", f"{budget.threads} (PENSTOCK_THREADS or iterator(threads=) change it)")
    print("\nmemory")
    for name, limit in memory_limits().items():
        _line(name, _bytes(limit))
    _line("buffers", f"{_bytes(budget.memory_bytes)} (PENSTOCK_MEMORY_BYTES or iterator(memory_bytes=) change it)")
    print("\nbyte code")
    _line("written", _byte_code())
    if missing:
        print(f"\nmissing: {', '.join(missing)}")
    return 1 if missing else 0


def version_of(package: str) -> str | None:
    for name in (package, *STANDS_FOR.get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _extra_report(extra: str, packages: tuple[str, ...]) -> str:
    versions = [(package, version_of(package)) for package in packages]
    if all(version for _, version in versions):
        return ", ".join(f"{package} {version}" for package, version in versions)
    absent = ", ".join(package for package, version in versions if not version)
    return f"{absent} not installed; run: pip install 'penstock[{extra}]'"


def _byte_code() -> str:
    if sys.dont_write_bytecode:
        return "no: PYTHONDONTWRITEBYTECODE is set, so every start compiles all modules again; unset it"
    where = f"yes, below {sys.pycache_prefix}" if sys.pycache_prefix else "yes"
    return f"{where} (Python {sys.implementation.cache_tag})"


def _bytes(count: int) -> str:
    """
    >>> _bytes(1536 << 20)
    '1.50 GiB'
    """
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def _line(name: str, what: str) -> None:
    print(f"  {name:<24}{what}")
