"""Who may speak with a service: one shared token (PLAIN), or keys (CURVE), and the files that hold them.

A token is enough on one host, where nobody else can listen. Between hosts keys are needed: they encrypt too. Secrets
are written to files only their owner reads, and never show in a `repr`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import tempfile
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import zmq

from penstock.core.errors import InvalidArgumentError, ServiceFileMissingError
from penstock.wire.addresses import split_tcp

SERVICE_VARIABLE = "PENSTOCK_SERVICE"
TOKEN_VARIABLE = "PENSTOCK_TOKEN"
KEYS_VARIABLE = "PENSTOCK_KEYS"

LOOK_S = 2.0  # for a service of which no more is known than its address

_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")
_Record = TypeVar("_Record", bound=msgspec.Struct)


class Credentials(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process proves itself with. Keys are z85 text; only a service's own processes hold `server_secret`."""

    kind: Literal["plain", "curve"] = "plain"
    token: str = ""
    server_public: str = ""
    server_secret: str = ""
    client_public: str = ""
    client_secret: str = ""

    def __post_init__(self) -> None:
        if self.kind == "plain":
            if not 0 < len(self.token.encode()) < 256:
                raise InvalidArgumentError("a token has 1 to 255 bytes; leave it out to have one made")
            return
        keys = (self.server_public, self.client_public, self.client_secret)
        if not all(len(key) == 40 for key in keys) or len(self.server_secret) not in (0, 40):
            raise InvalidArgumentError("keys have 40 characters each; make a set with `penstock keys`")

    @staticmethod
    def new_token() -> Credentials:
        return Credentials(token=secrets.token_urlsafe(32))

    @staticmethod
    def new_keys() -> Credentials:
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return Credentials(
            kind="curve",
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
        )

    def as_client(self) -> Credentials:
        """Return what a client needs: enough to ask, not to pose as the service."""
        return msgspec.structs.replace(self, server_secret="")

    def write(self, path: str | os.PathLike[str]) -> None:
        _write_private(path, self)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Credentials:
        return _read(path, Credentials, "keys, as `penstock keys` writes them")

    def __repr__(self) -> str:
        return f"Credentials(kind={self.kind!r}, secret hidden)"


class ServiceFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a service is and what it takes to talk to it, as one file."""

    address: str
    credentials: Credentials

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it for its owner only, all at once: a reader sees the old file or the new one."""
        _write_private(path, self)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> ServiceFile:
        return _read(path, ServiceFile, "a service file, as `penstock dispatcher --service-file` writes it")


def find_service(text: str | None) -> ServiceFile:
    """Return the service an address or a path names; None: what $PENSTOCK_SERVICE names.

    An address comes with the token in $PENSTOCK_TOKEN or the keys in the file $PENSTOCK_KEYS names.
    """
    given = text if text is not None else os.environ.get(SERVICE_VARIABLE, "")
    if not given:
        raise InvalidArgumentError(
            f"no service is named: give an address or a service file, or set ${SERVICE_VARIABLE}"
        )
    if "://" not in given:
        if _HOST_AND_PORT.fullmatch(given) and not Path(given).exists():
            raise InvalidArgumentError(f"service {given!r}: an address begins with tcp://, as in 'tcp://{given}'")
        return ServiceFile.read(given)
    if not given.startswith("tcp://"):
        raise InvalidArgumentError(f"service {given!r}: an address is tcp://host:port, or the path of a service file")
    split_tcp(given)
    return ServiceFile(address=given, credentials=_from_environment(given))


def _from_environment(address: str) -> Credentials:
    if keys := os.environ.get(KEYS_VARIABLE):
        return Credentials.read(keys).as_client()
    if token := os.environ.get(TOKEN_VARIABLE):
        return Credentials(token=token)
    named = f"name the service's file instead of its address, or set ${TOKEN_VARIABLE}, or ${KEYS_VARIABLE} to its keys"
    if not _listens(address):
        raise InvalidArgumentError(f"no service runs at {address}: start one with `penstock serve`, and {named}")
    raise InvalidArgumentError(f"{address} asks for a token or keys, and there are none here: {named}")


def _listens(address: str) -> bool:
    """Say whether anybody listens there. Not whether it is a service: without credentials it would not tell."""
    try:
        socket.create_connection(split_tcp(address), timeout=LOOK_S).close()
    except OSError:
        return False
    return True


def _write_private(path: str | os.PathLike[str], record: msgspec.Struct) -> None:
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


def _read(path: str | os.PathLike[str], kind: type[_Record], what: str) -> _Record:
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
