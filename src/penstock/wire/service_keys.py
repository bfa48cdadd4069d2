"""The keys that a service starts with: its own, and one for each role that its host needs."""

from __future__ import annotations

import getpass
import os
import re

import msgspec

from penstock.wire.credentials import Credentials, ServiceFile, read_private, write_private
from penstock.wire.principals import Principal, Role

REGISTRY = "registry.json"
"""Beside a service's own keys: who else is let in. See `dispatcher.key_registry`."""
ROLES_AT_START: tuple[Role, ...] = ("trainer", "agent", "operator")


class KnownKey(msgspec.Struct, frozen=True, array_like=True):
    """Who has the key of this verifier."""

    verifier: str
    principal: Principal


class ServiceKeys(msgspec.Struct, frozen=True, kw_only=True):
    server: Credentials
    """What a dispatcher proves itself with over TCP."""
    trainer: Credentials
    agent: Credentials
    operator: Credentials

    @staticmethod
    def new() -> ServiceKeys:
        """Return keys in the name of this user."""
        server, name = Credentials.new("operator", "server"), user_name()
        made = {role: Credentials.new(role, name, server=server.public) for role in ROLES_AT_START}
        return ServiceKeys(server=server, **made)

    @staticmethod
    def of_file(file: ServiceFile) -> ServiceKeys | None:
        """Return the keys that a service file of this host has for its user; None: it has not all of them."""
        if len(file.others) != 3:
            return None
        agent, operator, server = file.others
        return ServiceKeys(server=server, trainer=file.credentials, agent=agent, operator=operator)

    @property
    def known(self) -> tuple[KnownKey, ...]:
        """What a dispatcher needs to know of them."""
        return tuple(KnownKey(key.public, key.principal) for key in (self.trainer, self.agent, self.operator))

    def file(self, address: str, *, all_roles: bool) -> ServiceFile:
        """Return the service file for trainers, and, on one host, for all that its user may do."""
        others = (self.agent, self.operator, self.server) if all_roles else ()
        return ServiceFile(address=address, credentials=self.trainer, others=others)

    def write(self, path: str | os.PathLike[str]) -> None:
        write_private(path, self)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> ServiceKeys:
        return read_private(path, ServiceKeys, "a service's own keys, as `penstock keys` writes them")

    def __repr__(self) -> str:
        return f"ServiceKeys({self.trainer.name}, secrets hidden)"


def user_name() -> str:
    """Return the user's name, as far as a principal may have it."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = ""
    return re.sub(r"[^\w.@+-]", "_", name, flags=re.ASCII)[:100] or f"uid{os.geteuid()}"
