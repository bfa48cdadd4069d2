"""Who is at the other end of a connection: a role and a name.

The guard says which principal a connection is, libzmq attaches it to every message as its user id, and both planes read
it there. A routing id, which the peer chooses, says where an answer goes and nothing else.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, get_args

import msgspec

from penstock.core.errors import InvalidArgumentError

Role: TypeAlias = Literal["operator", "agent", "provisioner", "runner", "trainer"]
ROLES: tuple[Role, ...] = get_args(Role)

_NAME = re.compile(r"[\w.@+-]{1,100}", re.ASCII)


def is_name(text: str) -> bool:
    """Whether a principal can have this name.

    >>> is_name("w0.3f"), is_name("a/b")
    (True, False)
    """
    return _NAME.fullmatch(text) is not None


class Principal(msgspec.Struct, frozen=True, array_like=True):
    """A role and a name. Two keys of one name and role are one principal.

    >>> Principal.parse("trainer/alice@example.org").name
    'alice@example.org'
    >>> str(Principal("runner", "w0.3f"))
    'runner/w0.3f'
    """

    role: Role
    name: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidArgumentError(f"role={self.role!r} must be one of {', '.join(ROLES)}")
        if not is_name(self.name):
            raise InvalidArgumentError(f"name={self.name!r} must be 1 to 100 letters, digits or any of ._@+-")

    @staticmethod
    def parse(text: str) -> Principal:
        """Return the principal that `str` wrote."""
        role, _, name = text.partition("/")
        if role not in ROLES:
            raise InvalidArgumentError(f"{text!r} is not a principal (role/name)")
        return Principal(role, name)

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"
