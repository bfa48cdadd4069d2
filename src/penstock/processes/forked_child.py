"""What a nursery's child does between the fork and its own end.

It dies with the nursery, lets go of what is the nursery's, and calls the one function it was made for. It never returns
into the nursery's code, whatever that function does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from penstock.processes.nursery_link import NurseryLink, Spawn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
LINE_BYTES = 4000  # less than PIPE_BUF: a line is written as a whole or not at all

_libc = ctypes.CDLL(None, use_errno=True)


def be_child(
    spawn: Spawn,
    config: int,
    nursery_pid: int,
    let_go: Callable[[], None],
    *,
    pipe: int,
    record: mmap.mmap | None,
    link: socket.socket | None,
) -> NoReturn:
    """Be the child. `config` is read here alone. `let_go` closes what belongs to the nursery; `pipe` is for the lines
    the nursery reads."""
    code = 1
    try:
        _die_with(nursery_pid)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        content = os.pread(config, os.fstat(config).st_size, 0)
        let_go()  # its own config, too
        gc.enable()  # the nursery may be importing, with collections off
        _libc.prctl(PR_SET_NAME, f"ps-{spawn.id}".encode()[:15], 0, 0, 0)  # what `top` shows
        os.environ.update(spawn.environment)
        _log_to_stderr()
        if "numpy.random" in sys.modules:  # Python's own generator seeds itself after a fork; numpy's does not
            sys.modules["numpy.random"].seed(int.from_bytes(os.urandom(4), "little"))
        given: dict[str, Any] = {
            "ready": lambda text: _write_line(pipe, "+" + text),
            "report": lambda text: _write_line(pipe, "*" + text),
            "record": record,
        }
        if link is not None:
            given["nursery"] = NurseryLink(link)
        result = run_entry(spawn.entry, content, given)
        code = result if isinstance(result, int) else 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BaseException as error:
        traceback.print_exc()
        _write_line(pipe, "-" + "".join(traceback.format_exception_only(error)).strip())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        os._exit(code)


def run_entry(entry: str, config: bytes, given: dict[str, Any]) -> object:
    """Call `module:function` with its config and with those of `given` that it has parameters for."""
    module, _, name = entry.partition(":")
    function = getattr(importlib.import_module(module), name)
    code = function.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    kind = function.__annotations__.get(parameters[0], bytes)
    if isinstance(kind, str):
        kind = eval(kind, function.__globals__)
    argument = config if kind is bytes else msgspec.msgpack.decode(config, type=kind)
    return function(argument, **{each: given[each] for each in parameters[1:] if each in given})


def _die_with(nursery_pid: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != nursery_pid:  # it died before this was arranged
        os._exit(1)


class _LogLine(logging.Formatter):
    """Fixed message, then the values that came with it."""

    _USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message"}

    def format(self, record: logging.LogRecord) -> str:
        values = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in self._USUAL)
        return f"{super().format(record)} {values}".rstrip()


def _log_to_stderr() -> None:
    """Only what somebody should know: this may be a trainer's terminal. $PENSTOCK_LOG=INFO says more."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogLine("penstock %(name)s[%(process)d] %(levelname)s: %(message)s"))
    level = os.environ.get("PENSTOCK_LOG", "WARNING").upper()
    logging.basicConfig(level=level if level in logging.getLevelNamesMapping() else "WARNING", handlers=[handler])


def _write_line(pipe: int, text: str) -> None:
    try:
        os.write(pipe, text.replace("\n", " ").encode()[:LINE_BYTES] + b"\n")
    except OSError:
        pass  # nobody is left to read it, or nobody does
