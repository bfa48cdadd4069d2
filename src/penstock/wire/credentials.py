"""Keys, the files that hold them, and those that a service starts with.

A key is a CURVE pair. Over TCP its owner proves that it has the secret half, and everything is encrypted. Over a Unix
socket in a folder that only one user can enter it shows the secret half (PLAIN): whoever listens there is that user. In
both ways the other side keeps the public half alone, the *verifier*, and knows by it who asks.

Secrets are written to files only their owner reads, and never show in a `repr`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
from zmq.utils import z85

from penstock.core.errors import InvalidArgumentError, ServiceFileMissingError
from penstock.wire.addresses import is_unix, split_tcp
from penstock.wire.principals import Principal, Role

SERVICE_VARIABLE = "PENSTOCK_SERVICE"
KEYS_VARIABLE = "PENSTOCK_KEYS"

LOOK_S = 2.0  # for a service of which no more is known than its address
KEY_CHARACTERS = 40

_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")
_Record = TypeVar("_Record", bound=msgspec.Struct)


class Credentials(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key pair (z85 text), whose it is, and the public key of the server it is shown to, if that is reached by TCP.

    Whose it is, is for people: what counts is what the other side knows about `public`.
    """

    public: str
    secret: str
    server: str = ""
    role: Role = "trainer"
    name: str = ""

    def __post_init__(self) -> None:
        if not all(_is_key(key) for key in (self.public, self.secret)) or not (_is_key(self.server) or not self.server):
            raise InvalidArgumentError(f"keys have {KEY_CHARACTERS} characters each; make a set with `penstock keys`")

    @staticmethod
    def new(role: Role = "trainer", name: str = "", *, server: str = "") -> Credentials:
        public, secret = zmq.curve_keypair()
        return Credentials(public=public.decode(), secret=secret.decode(), server=server, role=role, name=name)

    @property
    def principal(self) -> Principal:
        return Principal(self.role, self.name)

    def toward(self, server: str) -> Credentials:
        """Return the same key, to be shown to another server (empty: one that is not reached by TCP)."""
        return msgspec.structs.replace(self, server=server)

    def write(self, path: str | os.PathLike[str]) -> None:
        write_private(path, self)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Credentials:
        return read_private(path, Credentials, "a key, as `penstock keys` writes it")

    def __repr__(self) -> str:
        return f"Credentials({self.role}/{self.name}, public={self.public!r}, secret hidden)"


def _is_key(text: str) -> bool:
    return len(text) == KEY_CHARACTERS


def verifier_of(mechanism: bytes, shown: list[bytes]) -> str | None:
    """Return the public half of the key that somebody has shown a guard; None: it showed none.

    >>> key = Credentials.new()
    >>> verifier_of(b"PLAIN", [b"", key.secret.encode()]) == key.public
    True
    """
    if mechanism == b"CURVE" and len(shown) == 1 and len(shown[0]) == 32:
        return z85.encode(shown[0]).decode()  # libzmq has seen that it has the secret half
    if mechanism == b"PLAIN" and len(shown) == 2 and len(shown[1]) == KEY_CHARACTERS:
        with contextlib.suppress(zmq.ZMQError, ValueError):
            return zmq.curve_public(shown[1]).decode()
    return None


class ServiceFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a service is and what it takes to talk to it, as one file."""

    address: str
    credentials: Credentials
    others: tuple[Credentials, ...] = ()
    """Keys of other roles, in a file of one user's own host: whoever reads it could do all that anyway."""

    def for_role(self, role: Role) -> ServiceFile:
        """Return the way to the service for this role; where the file has no key of it, the one that it has."""
        found = next((key for key in (self.credentials, *self.others) if key.role == role), self.credentials)
        return ServiceFile(address=self.address, credentials=found)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it for its owner only, all at once: a reader sees the old file or the new one."""
        write_private(path, self)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> ServiceFile:
        return read_private(path, ServiceFile, "a service file, as `penstock dispatcher --service-file` writes it")


def find_service(text: str | None, role: Role = "trainer") -> ServiceFile:
    """Return the service an address or a path names; None: what $PENSTOCK_SERVICE names.

    An address comes with the key in the file that $PENSTOCK_KEYS names.
    """
    given = text if text is not None else os.environ.get(SERVICE_VARIABLE, "")
    if not given:
        raise InvalidArgumentError(
            f"no service is named: give an address or a service file, or set ${SERVICE_VARIABLE}"
        )
    if "://" not in given:
        if _HOST_AND_PORT.fullmatch(given) and not Path(given).exists():
            raise InvalidArgumentError(f"service {given!r}: an address begins with tcp://, as in 'tcp://{given}'")
        return ServiceFile.read(given).for_role(role)
    if is_unix(given):
        raise InvalidArgumentError(f"service {given!r} is of this host alone: name its service file instead")
    if not given.startswith("tcp://"):
        raise InvalidArgumentError(f"service {given!r}: an address is tcp://host:port, or the path of a service file")
    split_tcp(given)
    return ServiceFile(address=given, credentials=_from_environment(given))


def _from_environment(address: str) -> Credentials:
    if keys := os.environ.get(KEYS_VARIABLE):
        return Credentials.read(keys)
    named = f"name the service's file instead of its address, or set ${KEYS_VARIABLE} to the file of your key"
    if not _listens(address):
        raise InvalidArgumentError(f"no service runs at {address}: start one with `penstock serve`, and {named}")
    raise InvalidArgumentError(f"{address} asks for a key, and there is none here: {named}")


def _listens(address: str) -> bool:
    """Say whether anybody listens there. Not whether it is a service: without a key it would not tell."""
    try:
        socket.create_connection(split_tcp(address), timeout=LOOK_S).close()
    except OSError:
        return False
    return True


def write_private(path: str | os.PathLike[str], record: msgspec.Struct) -> None:
    """Write a record for its owner only, all at once."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # mkstemp gives mode 0600 from the start: there is no moment at which others could open it.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_private(path: str | os.PathLike[str], kind: type[_Record], what: str) -> _Record:
    """Read a record; `what` says in an error what the file should be."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise ServiceFileMissingError(os.fspath(path), what) from None
    except OSError as error:
        raise InvalidArgumentError(
            f"{os.fspath(path)!r} cannot be read: {error.strerror}; it should be {what}"
        ) from None
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidArgumentError(f"{os.fspath(path)!r} is not {what}: {error}") from None


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
