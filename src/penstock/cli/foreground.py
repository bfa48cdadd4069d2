"""What commands that run until they are told to end have in common: signals to wait for, and a nursery to watch."""

from __future__ import annotations

import argparse
import selectors
import signal
import socket
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from penstock.cli.main import UsageError
from penstock.cli.service_arguments import own_token
from penstock.core.errors import PenstockError
from penstock.wire.addresses import is_loopback
from penstock.wire.credentials import Credentials, ServiceFile


class StopSignals:
    """SIGTERM and SIGINT as something to wait for. To be entered in the main thread."""

    def __init__(self) -> None:
        self.count = 0
        """How many signals have come."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        self._wakeup_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._wake.close()
        self._waker.close()

    def wait(self, descriptor: int, timeout_s: float | None = None) -> None:
        """Return when a signal came, or the descriptor can be read."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(descriptor, selectors.EVENT_READ)
            selector.select(timeout_s)
        try:
            self._wake.recv(4096)
        except BlockingIOError:
            pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def refuse_open_bind(bind: str, *, keys: object) -> None:
    """Nobody listens to the network without keys."""
    if not keys and not is_loopback(bind):
        raise UsageError(
            f"will not listen at {bind!r} without keys: others on the network could read everything. Make keys with "
            "`penstock keys DIR`, give --keys DIR/server.json to the dispatcher and the workers, or bind to 127.0.0.1"
        )


def say(text: str) -> None:
    """Print at once, also into a pipe: others wait for these lines."""
    print(text, flush=True)


def service_credentials(options: argparse.Namespace) -> Credentials:
    """Return what a service lets others in with: its keys, the token the user chose, or one made for it.

    A service file left by a dispatcher that was killed holds the token its workers and trainers know: it is kept.
    """
    if options.keys:
        return Credentials.read(options.keys)
    if token := own_token():
        return Credentials(token=token)
    if options.service_file and Path(options.service_file).exists():
        try:
            return ServiceFile.read(options.service_file).credentials
        except PenstockError:
            say(f"{options.service_file} is not a service file; it is written anew")
    return Credentials.new_token()
