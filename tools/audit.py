"""Look up the dependencies among known vulnerabilities (pip-audit). Ends with 1 if one is known.

Where the database cannot be reached, or knows none of the packages, it says that nothing was checked, and ends with 0.
"""

from __future__ import annotations

import json
import subprocess
import sys


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    ran = subprocess.run(command, capture_output=True, text=True)
    try:
        packages = json.loads(ran.stdout)["dependencies"]
    except (ValueError, KeyError):
        why = ran.stderr.strip().splitlines()[-1:] or ["pip-audit said nothing"]
        print(f"nothing was checked: the database of vulnerabilities cannot be reached from here ({why[0]})")
        return 0
    looked_up = [package for package in packages if "skip_reason" not in package]
    if not looked_up:
        print(f"nothing was checked: the database reached from here knows none of {len(packages)} packages")
        return 0
    known = [(package, found) for package in looked_up for found in package["vulns"]]
    for package, found in known:
        fixed = ", ".join(found["fix_versions"]) or "no release"
        print(f"{package['name']} {package['version']}: {found['id']}, mended in {fixed}")
    print(f"{len(looked_up)} of {len(packages)} packages looked up, {len(known)} vulnerabilities known")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
