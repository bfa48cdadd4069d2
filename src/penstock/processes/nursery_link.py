"""The link over which a nursery (`processes.nursery`) is asked: a Unix socket that no other process has."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

import msgspec

from penstock.core.errors import NurseryGoneError
from penstock.processes.nursery_messages import (
    MAX_PACKET_BYTES,
    ChildLine,
    Children,
    FromNursery,
    ListChildren,
    Spawn,
    ToNursery,
)


class NurseryLink:
    """The asking end. Not thread-safe: one thread sends and receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._decoder: msgspec.msgpack.Decoder[FromNursery] = msgspec.msgpack.Decoder(FromNursery)
        self._number = 0
        self._kept: list[FromNursery] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: ToNursery, *, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            config: list[int] = []
            if isinstance(request, Spawn):
                config.append(_descriptor_of(request.config))
                undo.callback(os.close, config[0])
                request = msgspec.structs.replace(request, config=b"")
            packet = msgspec.msgpack.encode(request)
            while True:
                try:
                    socket.send_fds(self._socket, [packet], config)
                    return
                except BlockingIOError:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise TimeoutError(
                            f"the nursery took no request for {timeout_s:.0f} s; it is stopped"
                        ) from None
                    select.select([], [self._socket], [], left_s)
                except OSError:
                    raise NurseryGoneError from None

    def receive(self, timeout_s: float) -> FromNursery | None:
        """Return the next event, or None if there was none in time."""
        if self._kept:
            return self._kept.pop(0)
        return self._receive(time.monotonic() + timeout_s)

    def children(self, *, timeout_s: float = 10.0) -> tuple[ChildLine, ...]:
        """Return all children, whoever spawned them. Events that come meanwhile are kept for `receive`."""
        self._number += 1
        self.send(ListChildren(number=self._number), timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._receive(deadline)
            if event is None:
                raise TimeoutError(f"the nursery did not list its children in {timeout_s:.0f} s; it is stopped")
            if isinstance(event, Children):
                if event.number == self._number:
                    return event.children
                continue
            self._kept.append(event)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, deadline: float) -> FromNursery | None:
        while True:
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                select.select([self._socket], [], [], left_s)
                continue
            except OSError:
                raise NurseryGoneError from None
            if not packet:
                raise NurseryGoneError
            return self._decoder.decode(packet)


def _descriptor_of(content: bytes) -> int:
    """Return a descriptor from which these bytes are read."""
    descriptor = os.memfd_create("penstock-config", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor
