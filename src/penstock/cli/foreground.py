"""What commands that run until they are told to end have in common: signals to wait for, and a nursery to watch."""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from penstock.cli.main import UsageError
from penstock.cli.service_arguments import chosen_port
from penstock.control.scaling_rules import DEFAULT_RULES, ScalingRules, parse_rules
from penstock.core.errors import PenstockError
from penstock.processes.sandbox import Sandbox
from penstock.wire.addresses import Listening
from penstock.wire.credentials import REGISTRY, ServiceFile, ServiceKeys


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

    def wait_for_one(self) -> None:
        """Return when a signal came."""
        self.wait(None)

    def wait(self, descriptor: int | None, timeout_s: float | None = None) -> None:
        """Return when a signal came, or the descriptor can be read."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            if descriptor is not None:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.select(timeout_s)
        try:
            self._wake.recv(4096)
        except BlockingIOError:
            pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def listening_of(options: argparse.Namespace) -> Listening | None:
    """Return the TCP port that is asked for; None: Unix sockets, which is all that one host needs."""
    asked = (options.bind, options.advertise, options.port, options.port_range)
    if all(each is None for each in asked):
        return None
    if not options.keys:
        raise UsageError(
            "will not listen at a port without keys: whoever reaches it could read everything. Make keys with "
            "`penstock keys make DIR` and give --keys DIR/server.json; or leave out --bind, --advertise and --port: on "
            "this host the service file is enough"
        )
    return Listening(
        bind=options.bind or "127.0.0.1",
        advertise=options.advertise,
        port=chosen_port(options),
        port_range=options.port_range,
    )


def sandbox_of(options: argparse.Namespace, listening: Listening) -> Sandbox | None:
    """Return what runners give up, having said what that does and what it does not; None: nothing is asked for."""
    asked = (options.sandbox, options.sandbox_write, options.sandbox_read, options.sandbox_memory_bytes)
    if all(each is None for each in asked):
        return None
    sandbox = Sandbox(
        user=options.sandbox or "",
        write=_absolute(options.sandbox_write),
        read=_absolute(options.sandbox_read),
        memory_bytes=options.sandbox_memory_bytes,
    )
    say(f"sandbox: {sandbox.check(listening)}")
    return sandbox


def _absolute(paths: list[str] | None) -> tuple[str, ...] | None:
    return None if paths is None else tuple(os.path.abspath(path) for path in paths)


def scaling_rules(options: argparse.Namespace) -> ScalingRules:
    """Return what --scaling says; without it, what holds where nobody says anything."""
    if options.scaling is None:
        return DEFAULT_RULES
    try:
        text = Path(options.scaling).read_text()
    except OSError as error:
        raise UsageError(f"cannot read {options.scaling}: {error.strerror}; give --scaling a TOML file") from None
    return parse_rules(text, options.scaling)


def say(text: str) -> None:
    """Print at once, also into a pipe: others wait for these lines."""
    print(text, flush=True)


def registry_of(options: argparse.Namespace) -> str | None:
    """Return where `penstock keys` says who is let in; None: nobody but those whom the service made keys for."""
    return str(Path(options.keys).with_name(REGISTRY)) if options.keys else None


def service_keys(options: argparse.Namespace) -> ServiceKeys:
    """Return the keys that a service begins with: those it was given, or some made for it.

    A service file left by a dispatcher that was killed holds those its workers and trainers know: they are kept.
    """
    if options.keys:
        return ServiceKeys.read(options.keys)
    if options.service_file and Path(options.service_file).exists():
        try:
            kept = ServiceKeys.of_file(ServiceFile.read(options.service_file))
        except PenstockError:
            say(f"{options.service_file} is not a service file; it is written anew")
        else:
            if kept is not None:
                return kept
    return ServiceKeys.new()
