"""Keys for tests: a server's, and a way to say whose are known."""

from __future__ import annotations

from collections.abc import Callable

from penstock.wire.credentials import Credentials
from penstock.wire.principals import Principal, Role

SERVER = Credentials.new("operator", "server")


def new_key(role: Role = "operator", name: str = "test") -> Credentials:
    """Return a key that `SERVER` is shown."""
    return Credentials.new(role, name, server=SERVER.public)


def knows(*keys: Credentials) -> Callable[[str], Principal | None]:
    """Return what a guard asks, if these keys are all there are."""
    return {key.public: key.principal for key in keys}.get
