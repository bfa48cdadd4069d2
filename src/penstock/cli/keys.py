"""`penstock keys`: what a service that listens by TCP needs."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.main import UsageError
from penstock.wire.service_keys import ROLES_AT_START, ServiceKeys


def write_keys(folder: str) -> int:
    server = Path(folder) / "server.json"
    paths = {role: Path(folder) / f"{role}.json" for role in ROLES_AT_START}
    for path in (server, *paths.values()):
        if path.exists():
            raise UsageError(f"{path} exists already; keys in use are not overwritten: name another folder")
    keys = ServiceKeys.new()
    keys.write(server)
    for role, path in paths.items():
        getattr(keys, role).write(path)
    print(f"{server}  for the dispatcher: --keys {server}")
    print(f"{paths['agent']}  for workers: --keys {paths['agent']}")
    print(f"{paths['trainer']}  for trainers: export PENSTOCK_KEYS={paths['trainer']}")
    print(f"{paths['operator']}  for `penstock jobs` and `drain`: export PENSTOCK_KEYS={paths['operator']}")
    return 0
