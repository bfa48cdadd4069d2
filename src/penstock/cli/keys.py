"""`penstock keys`: what a service that listens beyond this host needs."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.main import UsageError
from penstock.wire.credentials import Credentials


def write_keys(folder: str) -> int:
    server, client = Path(folder) / "server.json", Path(folder) / "client.json"
    for path in (server, client):
        if path.exists():
            raise UsageError(f"{path} exists already; keys in use are not overwritten: name another folder")
    keys = Credentials.new_keys()
    keys.write(server)
    keys.as_client().write(client)
    print(f"{server}  for the dispatcher and the workers: --keys {server}")
    print(f"{client}  for trainers: export PENSTOCK_KEYS={client}")
    return 0
