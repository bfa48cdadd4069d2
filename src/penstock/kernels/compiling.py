"""Kernels are compiled on first use, once a machine and user: what was compiled is kept in a directory of the user's.

What numba keeps there are pickles and machine code. So the directory is used only if it is the user's own and nobody
else may look into it; otherwise each process compiles for itself, and a warning says why. Its name has a digest of
these sources: numba notices a change of a kernel's own file, but not of what the kernel calls.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import MissingExtraError

try:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic
except ImportError:
    raise MissingExtraError("numba", "features") from None

CACHE_VARIABLE = "PENSTOCK_KERNEL_CACHE"
"""Names a directory for compiled kernels, in the place of one below the user's cache directory."""

_log = logging.getLogger(__name__)
_compiling = threading.RLock()

FLOATS, IDS, FLAGS, WORDS = (
    types.Array(kind, 1, "C", readonly=True) for kind in (types.float32, types.int64, types.boolean, types.uint64)
)
"""One-dimensional arrays that a kernel reads; arrays that can be written to are taken too."""
OUT_FLOATS, OUT_IDS, OUT_FLAGS = (types.Array(kind, 1, "C") for kind in (types.float32, types.int64, types.boolean))
DOUBLES = types.Array(types.float64, 1, "C", readonly=True)
NUMBER, WORD, DOUBLE, FLOAT = types.int64, types.uint64, types.float64, types.float32
VOID, FLAG = types.void, types.boolean


class Kernel:
    """A function over arrays, compiled for its signatures when it is first called or made ready."""

    def __init__(self, function: Callable[..., Any], signatures: Sequence[Any]) -> None:
        self.name = function.__name__
        self._function, self._signatures = function, list(signatures)
        self._compiled: Any = None
        self.made_in: int | None = None
        """The process that compiled or loaded it; None: it was not called for yet."""

    def ready(self) -> Any:
        """Compile it, or load what was compiled before; return the compiled function."""
        with _compiling:
            if self._compiled is None:
                self._compiled = _compile(self._function, self._signatures)
                self.made_in = os.getpid()
            return self._compiled

    def __call__(self, *arguments: Any) -> Any:
        return (self._compiled or self.ready())(*arguments)


def kernel(*signatures: Any) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a kernel of a function; each signature is a tuple of the types of its arguments and, first, its result."""
    made = [result(*arguments) for result, *arguments in signatures]
    return lambda function: Kernel(function, made)


def inlined(function: Callable[..., Any]) -> Any:
    """Make a function that kernels may call."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def _compile(function: Callable[..., Any], signatures: list[Any]) -> Any:
    directory = cache_directory()
    if directory is None:
        return numba.njit(signatures, nogil=True, error_model="numpy")(function)
    settings: Any = numba.config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(directory)  # read once, when the function is made: others keep theirs
    try:
        return numba.njit(signatures, nogil=True, error_model="numpy", cache=True)(function)
    finally:
        settings.CACHE_DIR = before


@cache
def cache_directory() -> Path | None:
    """Return where compiled kernels are kept; None: nowhere, since there is no directory that is safe."""
    named = os.environ.get(CACHE_VARIABLE)
    base = Path(named) if named else _user_cache() / "penstock"
    path = base / f"kernels-{_sources_digest()}"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        reason = unsafe(path)
    except OSError as error:
        reason = f"cannot be made: {error.strerror}"
    if reason is None:
        return path
    _log.warning(
        "compiled kernels are not kept: %s %s; make it a directory of your own of mode 0700, or name one in $%s",
        *(path, reason, CACHE_VARIABLE),
    )
    return None


def unsafe(path: Path) -> str | None:
    """Return why what lies in a directory may not be trusted; None: only its owner, who we are, writes there."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    if found.st_mode & 0o077:
        return f"has mode {found.st_mode & 0o777:04o}"
    return None


def _user_cache() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a user without a home directory
        return Path("/nonexistent")


def _sources_digest() -> str:
    digest = hashlib.blake2b(f"{sys.version_info[:2]} {numba.__version__}".encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _high_word(_: Any, __: Any, ___: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, words: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(word, wide) for word in words))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


high_word: Any = intrinsic(_high_word)
"""The upper half of the product of two words: one instruction, which numba has no name for."""


def reciprocal(divisor: int) -> np.uint64:
    """Return what `floor_mod` multiplies with, for a divisor of 2 or more."""
    return np.uint64((1 << 64) // divisor)


@inlined
def floor_mod(number: Any, divisor: Any, by: Any) -> Any:
    """Return the remainder of an int64, which is never negative; `by` is the divisor's reciprocal.

    The quotient by multiplication is the right one or 1 below it, since a word is less than 2**64. A negative number is
    turned into what is as far from -1 as it is from 0, and its remainder back again. Unlike a division this takes a few
    cycles on any processor.
    """
    sign = number >> 63
    word, part = np.uint64(number ^ sign), np.uint64(divisor)
    left = word - high_word(word, by) * part
    left = left - part if left >= part else left
    return (np.int64(left) ^ sign) + (divisor & sign)
