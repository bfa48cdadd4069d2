"""Processes of one host: whether one is still there, and how it is handed a file descriptor.

A lease of shared memory may be taken back only from a process that is known to be gone. A lost connection does not
prove that: the process may just have made another. Its end does. So processes have names that can be asked for later.

A descriptor is handed to processes of the same host and user that know a secret. It can only be read through, unless
somebody asks for more and writers are allowed. (A process of the same user could still open the file anew, as it could
attach to ours: this keeps mistakes and other users out.) What it is asked by is an abstract Unix address and a secret,
`name.secret`. Abstract addresses are of this host and network namespace and vanish with their process; that the
descriptor arrives is the proof that both are on one host.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import select
import socket as sockets
import struct
import threading
import time

from penstock.core.errors import PenstockError


def process_name() -> str:
    """Return a name of this process which no other has: where its number counts, the number, and when it started.

    >>> is_gone(process_name())
    False
    """
    return _named(os.getpid())


def is_gone(name: str) -> bool:
    """Say whether the process of that name is known to have ended. One of another container is never known to.

    >>> is_gone(""), is_gone("elsewhere:1:1")
    (False, False)
    """
    space, _, rest = name.partition(":")
    number, _, started = rest.partition(":")
    if not started or space != _number_space():
        return False
    found = _started(int(number)) if number.isdigit() else None
    return found != started


@functools.lru_cache(maxsize=2)
def _named(pid: int) -> str:
    return f"{_number_space()}:{pid}:{_started(pid) or ''}"


@functools.cache
def _number_space() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot[:8]}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return when a process started, in ticks since boot; None if it is gone (a zombie is: its memory is)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]


_SECRET_CHARACTERS = 32
_PATIENCE_S = 2.0  # for somebody who connected to show the secret
_STOP_DEADLINE_S = 5.0
_FULL_S = 0.005
_MAX_WAITING = 64  # who have connected and not shown the secret yet: friends do so at once
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer, as the kernel knows them
_SIZE = struct.Struct("<Q")
_READ, _WRITE = b"r", b"w"  # follows the secret


def name_for(content: str) -> str:
    """Return the name of the server of a content, for all who know what identifies that.

    >>> name_for("a") == name_for("a") != name_for("b")
    True
    """
    digest = hashlib.blake2b(content.encode(), digest_size=8 + _SECRET_CHARACTERS // 2).hexdigest()
    return f"penstock-{digest[:16]}.{digest[16:]}"


class DescriptorServer:
    """Sends a descriptor of a file, and its size, to whoever shows the secret. The given one stays the caller's."""

    def __init__(self, descriptor: int, size_bytes: int, name: str | None = None) -> None:
        """`name` is one that others know already (see `name_for`); `OSError` with `EADDRINUSE`: another has it."""
        self._writable, self._size_bytes = descriptor, size_bytes
        self._writers_allowed = False
        self.name = name or f"penstock-{secrets.token_hex(8)}.{secrets.token_hex(_SECRET_CHARACTERS // 2)}"
        address, _, self._secret = self.name.partition(".")
        self.refused = 0
        self._readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self._listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK)
        try:
            self._listener.bind(f"\0{address}")
            self._listener.listen(128)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            os.close(self._readable)
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="penstock-slabs", daemon=True)
        self._thread.start()
        self._closed = False

    def allow_writers(self) -> None:
        self._writers_allowed = True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_STOP_DEADLINE_S)
        if self._thread.is_alive():
            raise PenstockError(f"the thread that hands out slabs did not end within {_STOP_DEADLINE_S:.0f} s")
        os.close(self._wake)
        os.close(self._readable)
        self._listener.close()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        waiting: dict[int, tuple[sockets.socket, float]] = {}
        try:
            while True:
                for number, _ in poller.poll(200 if waiting else None):
                    if number == self._wake:
                        return
                    if number == self._listener.fileno():
                        with contextlib.suppress(OSError):
                            peer = self._listener.accept()[0]
                            if len(waiting) >= _MAX_WAITING or not _is_friend(peer):
                                peer.close()
                                self.refused += 1
                                continue
                            peer.setblocking(False)
                            waiting[peer.fileno()] = peer, time.monotonic() + _PATIENCE_S
                            poller.register(peer, select.POLLIN)
                    elif number in waiting:
                        poller.unregister(number)
                        with waiting.pop(number)[0] as peer:
                            self._answer(peer)
                now = time.monotonic()
                for number in [number for number, (_, deadline) in waiting.items() if deadline < now]:
                    poller.unregister(number)
                    waiting.pop(number)[0].close()
                    self.refused += 1
        finally:
            for peer, _ in waiting.values():
                peer.close()

    def _answer(self, peer: sockets.socket) -> None:
        try:
            shown = peer.recv(_SECRET_CHARACTERS + 2)
            secret, wanted = shown[:-1], shown[-1:]
            known = hmac.compare_digest(secret, self._secret.encode())
            if known and (wanted == _READ or (wanted == _WRITE and self._writers_allowed)):
                descriptor = self._readable if wanted == _READ else self._writable
                sockets.send_fds(peer, [_SIZE.pack(self._size_bytes)], [descriptor])
                return
        except OSError:
            pass
        self.refused += 1


def _is_friend(peer: sockets.socket) -> bool:
    """Whether a peer is this user's process, or root's."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size))
    return user in (os.geteuid(), 0)


def receive_descriptor(name: str, deadline_s: float, *, writable: bool = False) -> tuple[int, int] | None:
    """Return (descriptor, size) from the server of that name; None: it is not on this host, or refuses.

    The descriptor is the caller's to close.
    """
    address, _, secret = name.partition(".")
    give_up_at = time.monotonic() + deadline_s
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as peer:
        peer.settimeout(deadline_s)
        try:
            while True:
                try:
                    peer.connect(f"\0{address}")
                    break
                except BlockingIOError:  # others wait in front of us
                    if time.monotonic() > give_up_at:
                        return None
                    time.sleep(_FULL_S)
            if not _is_friend(peer):
                return None  # somebody else has taken the name: the secret is not for him
            peer.sendall(secret.encode() + (_WRITE if writable else _READ))
            content, descriptors, _, _ = sockets.recv_fds(peer, _SIZE.size, 1, sockets.MSG_CMSG_CLOEXEC)
        except OSError:
            return None
    if len(content) == _SIZE.size and len(descriptors) == 1:
        return descriptors[0], _SIZE.unpack(content)[0]
    for descriptor in descriptors:
        os.close(descriptor)
    return None
