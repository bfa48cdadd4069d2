"""`penstock keys`: who is let in to a service that listens by TCP, changed while it runs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from penstock.cli.main import UsageError
from penstock.core.errors import PenstockError
from penstock.dispatcher.key_registry import KeyFile, KeyRecord, changed_keys
from penstock.wire.credentials import REGISTRY, ROLES_AT_START, Credentials, ServiceKeys
from penstock.wire.principals import Role

SERVER = "server.json"


def run_keys(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    actions: dict[str, Callable[[Path, argparse.Namespace], int]] = {
        "make": _make,
        "list": _list,
        "rotate": _rotate,
        "revoke": _revoke,
    }
    return actions[options.action](folder, options)


def _make(folder: Path, options: argparse.Namespace) -> int:
    if options.name is None:
        return _make_first(folder)
    keys = _service_keys(folder)
    role: Role = options.role or "trainer"
    path = folder / f"{role}-{options.name}.json"
    if path.exists():
        raise UsageError(f"{path} exists already; `penstock keys rotate` replaces a key")
    with changed_keys(folder / REGISTRY) as records:
        if any(record.principal.name == options.name and record.role == role and _valid(record) for record in records):
            raise UsageError(f"{role}/{options.name} has a key already; `penstock keys rotate` replaces it")
        _add(records, Credentials.new(role, options.name, server=keys.server.public), path)
    print(f"{path}  the key of {role}/{options.name}: give it to nobody else")
    return 0


def _make_first(folder: Path) -> int:
    server = folder / SERVER
    paths = {role: folder / f"{role}.json" for role in ROLES_AT_START}
    for path in (server, folder / REGISTRY, *paths.values()):
        if path.exists():
            raise UsageError(
                f"{path} exists already; keys in use are not overwritten: name another folder, or somebody to make a "
                "key for"
            )
    keys = ServiceKeys.new()
    keys.write(server)
    with changed_keys(folder / REGISTRY) as records:
        for role, path in paths.items():
            _add(records, getattr(keys, role), path)
    print(f"{server}  for the dispatcher: --keys {server}")
    print(f"{paths['agent']}  for workers: --keys {paths['agent']}")
    print(f"{paths['trainer']}  for trainers: export PENSTOCK_KEYS={paths['trainer']}")
    print(f"{paths['operator']}  for `penstock jobs` and `drain`: export PENSTOCK_KEYS={paths['operator']}")
    return 0


def _list(folder: Path, options: argparse.Namespace) -> int:
    for record in KeyFile.read(folder / REGISTRY).keys:
        state = "valid" if record.revoked is None else f"{'valid until' if _valid(record) else 'revoked'} "
        when = "" if record.revoked is None else _day(record.revoked)
        print(f"{record.principal}  {record.verifier}  made {_day(record.made)}  {state}{when}")
    return 0


def _rotate(folder: Path, options: argparse.Namespace) -> int:
    """Make a new key in the place of the old one, which stays valid for a while: connections have time to change."""
    keys, now = _service_keys(folder), time.time()
    with changed_keys(folder / REGISTRY) as records:
        old = _found(records, options)
        principals = {record.principal for record in old}
        if len(principals) > 1:
            raise UsageError(f"{options.name} has keys of several roles; say which with --role")
        (principal,) = principals
        made = Credentials.new(principal.role, principal.name, server=keys.server.public)
        path = _file_of(folder, old[-1]) or folder / f"{principal.role}-{principal.name}.json"
        for record in old:
            records[records.index(record)] = replace(record, revoked=now + options.keep_old_seconds)
        _add(records, made, path)
        if principal.role in ROLES_AT_START and getattr(keys, principal.role).public in {r.verifier for r in old}:
            replace(keys, **{principal.role: made}).write(folder / SERVER)
    print(f"{path}  the new key of {principal}; the old one is valid for {options.keep_old_seconds:g} s more")
    return 0


def _revoke(folder: Path, options: argparse.Namespace) -> int:
    now = time.time()
    with changed_keys(folder / REGISTRY) as records:
        for record in _found(records, options):
            records[records.index(record)] = replace(record, revoked=now)
            print(f"{record.principal}  {record.verifier}  revoked: its connections end within two seconds")
    return 0


def _found(records: list[KeyRecord], options: argparse.Namespace) -> list[KeyRecord]:
    if options.name is None:
        raise UsageError(f"penstock keys {options.action} needs a NAME; `penstock keys list` has them")
    found = [
        record
        for record in records
        if record.name == options.name
        and options.role in (None, record.role)
        and record.verifier.startswith(options.key or "")
        and _valid(record)
    ]
    if not found:
        raise UsageError(f"no valid key of {options.name!r} is there; `penstock keys list` has them")
    return found


def _add(records: list[KeyRecord], key: Credentials, path: Path) -> None:
    key.write(path)
    records.append(KeyRecord(name=key.name, role=key.role, verifier=key.public, made=time.time()))


def _file_of(folder: Path, record: KeyRecord) -> Path | None:
    """Return the file that has this key, if it is in the folder."""
    for path in sorted(folder.glob("*.json")):
        try:
            if Credentials.read(path).public == record.verifier:
                return path
        except PenstockError:
            continue
    return None


def _service_keys(folder: Path) -> ServiceKeys:
    return ServiceKeys.read(folder / SERVER)


def _valid(record: KeyRecord) -> bool:
    return record.valid(time.time())


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
