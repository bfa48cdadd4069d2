"""Print the oldest releases of the direct dependencies that pyproject.toml allows, as constraints for pip.

python tools/oldest.py > constraints.txt     or: make test-oldest
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

BOUND = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?>=([0-9][0-9.]*)")


def oldest(requirements: list[str]) -> list[str]:
    """Return each lower bound as the release it names.

    >>> oldest(["numpy>=1.26", "google-crc32c>=1.5"])
    ['numpy==1.26', 'google-crc32c==1.5']
    """
    found = [BOUND.match(requirement) for requirement in requirements]
    missing = [requirement for requirement, bound in zip(requirements, found) if bound is None]
    if missing:
        raise SystemExit(f"no lower bound in {', '.join(missing)}; give each direct dependency one in pyproject.toml")
    return [f"{bound.group(1)}=={bound.group(2)}" for bound in found if bound is not None]


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
    print("\n".join(oldest(project["dependencies"])))
