"""Landlock: a Linux process gives up access to files, for itself and all it starts, without being root.

A process that is restricted is in a *domain*. Whatever the rules say, it cannot trace processes outside it or (unless
it has root's capabilities) read their memory; where the kernel knows how (6.12), it cannot signal them or reach their
abstract sockets either. There are no exceptions from a rule: what lies beneath an allowed folder is allowed.

The thread that calls `restrict` is restricted, and what it starts afterwards: there must be no others.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Mapping

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all architectures
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_PR_SET_NO_NEW_PRIVS = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_CHAR, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = (1 << bit for bit in range(6, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14

READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE = (_WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SOCK | _MAKE_FIFO | _MAKE_SYM) | (
    _REFER | _TRUNCATE
)
LISTEN = _MAKE_SOCK | _REMOVE_FILE
"""Make a Unix socket, and take away the one before."""
_DEVICES = (
    _MAKE_CHAR | _MAKE_BLOCK
)  # jobs make none: handled, so that there is a domain though nothing else is asked for
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE  # what a rule about a file may allow

SCOPES_SINCE = 6
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return which Landlock this kernel has; 0: none, or it is switched off."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)))


def restrict(handled: int, rules: Iterable[tuple[str, int]]) -> None:
    """Allow of `handled` (`READ`, `WRITE`) what the rules name, by path, and nothing else. It cannot be taken back.

    A path that is not there is left out. Raises `OSError` where the kernel refuses.
    """
    known = version()
    handled = _known(handled | _DEVICES, known)
    attributes = struct.pack("=QQQ", handled, 0, _ABSTRACT_SOCKETS | _SIGNALS if known >= SCOPES_SINCE else 0)
    size = 24 if known >= SCOPES_SINCE else 16 if known >= 4 else 8
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    try:
        for path, allowed in rules:
            _allow(ruleset, path, allowed & handled)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "this kernel does not keep processes from new privileges")
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _known(access: int, known: int) -> int:
    """Return what of this a kernel knows: it refuses a set with anything else."""
    since: Mapping[int, int] = {_REFER: 2, _TRUNCATE: 3}
    for right, first in since.items():
        if known < first:
            access &= ~right
    return access


def _allow(ruleset: int, path: str, allowed: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            allowed &= _OF_FILES
        if allowed:
            _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, descriptor), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
