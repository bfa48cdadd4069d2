"""Names of what is kept: keyed by a secret, so that who does not have it can neither ask for one nor tell what one is.

What is kept is *about* something: a prefix, by its key, and a source as it is, by its stamp. Sixteen bytes stand for
the two, its *subject*, and are the same on every host. Names are made of subjects and a secret, and are not.

The secret is 32 random bytes in a file that only its user reads, made at its first use. A *scope* is whose entries they
are: of the user who runs pipelines in his own process, or of the principal of a service whose jobs they are. Each has a
folder of its own in a location, closed to all other users of the host.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from hashlib import blake2b, sha256
from pathlib import Path

from penstock.core.errors import InvalidArgumentError

SECRET_BYTES = 32
SUBJECT_BYTES = 16
FOLDER_VARIABLE = "PENSTOCK_CACHE"
"""Names another folder than the user's own for what is kept on this host."""


def host_folder() -> Path:
    """Return the folder of this host for what a user keeps; made, and closed to all others, if it is not there."""
    given = os.environ.get(FOLDER_VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return private_folder(Path(given) if given else base / "penstock")


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner enters; raise where it is somebody else's."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise InvalidArgumentError(
            f"{folder} belongs to user {found.st_uid}: what is kept there could be read or replaced by him. Give "
            f"autocache(location=...), or ${FOLDER_VARIABLE}, a folder of your own"
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)
        if folder.stat().st_mode & 0o077:
            raise InvalidArgumentError(
                f"{folder} cannot be closed to other users, whose file system may not know of them: give "
                "autocache(location=...) a folder on another one"
            )
    return folder


class Secret:
    """What names are keyed by."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @staticmethod
    def of_host() -> Secret:
        """Return the user's own; of two processes that make it at once, one does."""
        path = host_folder() / "secret"
        with suppress(FileExistsError):
            made = path.with_name(f"secret.{secrets.token_hex(4)}")
            descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if not path.exists():
                    os.write(descriptor, secrets.token_bytes(SECRET_BYTES))
                    os.link(made, path)  # whole or not at all
            finally:
                os.close(descriptor)
                made.unlink()
        return Secret(path.read_bytes())

    def name(self, *parts: str) -> str:
        """Return a name that says nothing to who does not have the secret."""
        text = "\0".join(parts)
        return hmac.new(self._key, text.encode("utf-8", "surrogateescape"), sha256).hexdigest()[:40]

    def prefix_name(self, key: str) -> str:
        """Return the name of the folder of a prefix."""
        return self.name("prefix", key)

    def entry_name(self, key: str, subject: bytes) -> str:
        """Return the name of the entry of a split."""
        return f"{self.prefix_name(key)}/{self.name('split', subject.hex())}.entry"

    def id_of(self, subject: bytes) -> bytes:
        """Return the 16 bytes that an element or a split has in a pack."""
        return blake2b(subject, key=self._key[:64], digest_size=SUBJECT_BYTES).digest()


def subject_of(key: str, stamp: str, place: str = "") -> bytes:
    """Return what stands for a prefix and a source as it is, and for a place in it where random numbers were drawn.

    >>> subject_of("key", "1 2 3") == subject_of("key", "1 2 3"), len(subject_of("key", "1 2 4"))
    (True, 16)
    """
    text = f"{key}\0{stamp}\0{place}"
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=SUBJECT_BYTES).digest()
