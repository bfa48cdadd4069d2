"""Digests of captured values: by type and content, the same in every process, whatever the hash seed.

Rules: containers and arrays count by content, dicts and sets in a canonical order; an object counts by its class and by
the state that pickling it would save (`__reduce_ex__`); functions, classes and modules are handed to the caller. What
has no lasting identity (locks, files, sockets, generators, weak references) counts by its type alone: there is nothing
in it that another process could compare. Nothing is ever hashed by its address. Sharing does not count, only content.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from operator import add
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np

from penstock.core.errors import InvalidArgumentError
from penstock.graph.code_digest import DIGEST_BYTES, digest, digest_code, encode_scalar

_SMALL_BYTES = 4096  # a larger array is hashed once and remembered
_LARGE_BYTES = 1 << 20  # hashed where it lies, by what processors have instructions for
_large: ContextVar[dict[int, tuple[Any, bytes]] | None] = ContextVar("large arrays", default=None)
_NO_CYCLE = sys.maxsize
_FIELD_PARTS = ("name", "default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")


@contextmanager
def arrays_unchanged() -> Iterator[None]:
    """Hash a large array once within: for several looks at values, between which nothing of the user's runs."""
    token = _large.set({}) if _large.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _large.reset(token)


class ValueDigester:
    """Encodes values.

    `refer` encodes a function, class or module, whose content is the caller's concern; for another callable it may
    return None.
    """

    def __init__(self, refer: Callable[[Any], bytes | None]) -> None:
        self._refer = refer
        self._open: dict[int, int] = {}
        """The depth of each value that is being encoded: meeting one again is a cycle."""
        self._lowest = _NO_CYCLE
        """How far up the cycles met so far reach."""
        self._done: dict[int, tuple[bytes, Any]] = {}
        """Values with other values inside, with the value itself so that its id stays its own."""
        self._done_here: dict[int, tuple[bytes, Any]] = {}
        """Values on a cycle: their encoding depends on where it was entered, so it holds for one `encode` only."""

    def encode_part(self, name: str, value: Any) -> bytes:
        """Return the encoding of one captured value; `name` is for the message if it cannot be had."""
        self._done_here.clear()
        try:
            return self.encode(value)
        except RecursionError:
            raise InvalidArgumentError(
                f"{name} ({type(value).__qualname__}) is nested too deeply to be fingerprinted; flatten it"
            ) from None
        finally:
            self._open.clear()

    def encode(self, value: Any) -> bytes:
        leaf = encode_scalar(value)
        if leaf is None:
            leaf = self._leaf(value)
        if leaf is not None:
            return leaf
        key = id(value)
        for known in (self._done, self._done_here):
            if key in known:
                return known[key][0]
        depth = self._open.get(key)
        if depth is not None:
            self._lowest = min(self._lowest, depth)
            return b"^" + str(len(self._open) - depth).encode()
        return self._structure_once(key, value)

    def _structure_once(self, key: int, value: Any) -> bytes:
        depth = self._open[key] = len(self._open)
        outer, self._lowest = self._lowest, _NO_CYCLE
        encoded = b"#" + self._structure(value)
        del self._open[key]
        if self._lowest >= depth:
            self._lowest = _NO_CYCLE
            self._done[key] = (encoded, value)
        else:
            self._done_here[key] = (encoded, value)
        self._lowest = min(self._lowest, outer)
        return encoded

    def _leaf(self, value: Any) -> bytes | None:
        """Encode what needs no cycle detection and is cheap enough to encode again."""
        kind = type(value)
        if kind is list or kind is tuple:
            flat = _flat(value)
            return None if flat is None else b"#" + digest(kind.__name__, flat)
        if kind is dict:
            keys, flat = _flat(value), _flat(value.values())
            return None if keys is None or flat is None else b"#" + digest("dict", sorted(map(add, keys, flat)))
        if kind is np.ndarray and value.nbytes < _SMALL_BYTES and not value.dtype.hasobject:
            return b"#" + self._array(value)
        if isinstance(value, np.generic):
            return b"#" + digest("scalar", (_dtype(value.dtype), value.tobytes()))
        if isinstance(value, (FunctionType, type, ModuleType, BuiltinFunctionType, np.ufunc)):
            return self._refer(value)
        return None

    def _structure(self, value: Any) -> bytes:
        kind = type(value)
        if kind is list or kind is tuple:
            return digest(kind.__name__, map(self.encode, value))
        if kind is dict or kind is MappingProxyType:
            return self._mapping(value)
        if kind is set or kind is frozenset:
            return digest(kind.__name__, sorted(map(self.encode, sorted(value, key=_rank))))
        if kind is bytearray or kind is memoryview:
            return digest("bytes", (bytes(value),))
        if isinstance(value, np.ndarray) and (kind is np.ndarray or kind is np.memmap):
            return self._array(value)
        callable_part = self._callable(value)
        if callable_part is not None:
            return callable_part
        special = _tensor(value) or _dataset(value)
        if special is not None:
            return digest("data", (self._class(kind), special))
        return self._object(value)

    def _mapping(self, value: Mapping[Any, Any]) -> bytes:
        return digest("dict", sorted(self.encode(key) + self.encode(value[key]) for key in sorted(value, key=_rank)))

    def _array(self, value: np.ndarray[Any, Any]) -> bytes:
        head = (_dtype(value.dtype), repr(value.shape).encode())
        if isinstance(value, np.memmap):  # as large as its file: the file stands for the content
            return digest("memmap", (*head, str(value.filename).encode(), str(value.offset).encode()))
        if value.dtype.hasobject:
            return digest("array", (*head, *map(self.encode, value.ravel().tolist())))
        if value.nbytes < _LARGE_BYTES:
            return digest("array", (*head, np.ascontiguousarray(value).tobytes()))
        remembered = _large.get()
        if remembered is None or id(value) not in remembered:
            content = hashlib.sha256(np.ascontiguousarray(value).data.cast("B")).digest()
            if remembered is None:
                return digest("large array", (*head, content))
            remembered[id(value)] = (value, content)
        return digest("large array", (*head, remembered[id(value)][1]))

    def _callable(self, value: Any) -> bytes | None:
        """Encode what stands for a function: methods, partials, properties, wrappers and code itself."""
        match value:
            case MethodType():
                return self._named("method", value.__func__, value.__self__)
            case functools.partial() if type(value) is functools.partial:
                return self._named("partial", value.func, value.args, value.keywords)
            case property():
                return self._named("property", value.fget, value.fset, value.fdel)
            case staticmethod() | classmethod():
                return self._named(type(value).__name__, value.__func__)
            case BuiltinFunctionType():
                owner = None if isinstance(value.__self__, ModuleType) else value.__self__
                return self._named("builtin", value.__module__, value.__qualname__, owner)
            case MethodDescriptorType() | WrapperDescriptorType() | MemberDescriptorType() | GetSetDescriptorType():
                return self._named("descriptor", value.__qualname__)
            case CellType():
                return self._named("cell", *cell_contents(value))
            case CodeType():
                return digest("code", (digest_code(value),))
            case dataclasses.Field():
                return self._named("field", *(getattr(value, part) for part in _FIELD_PARTS))
            case np.ufunc():
                return self._named("ufunc", value.__name__, value.nin, value.nout)
            case functools._lru_cache_wrapper():
                return self._named("lru_cache", value.__wrapped__, value.cache_parameters())
        return None

    def _class(self, kind: type) -> bytes:
        return self._refer(kind) or b""

    def _named(self, tag: str, *parts: Any) -> bytes:
        return digest(tag, map(self.encode, parts))

    def _object(self, value: Any) -> bytes:
        kind = type(value)
        reduced = state_of(value)
        if reduced is None or kind.__module__ in ("weakref", "_weakref", "_weakrefset"):
            return digest("opaque", (self._class(kind),))
        if isinstance(reduced, str):
            return digest("global", (self._class(kind), reduced.encode()))
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        return digest(
            "object",
            (
                self._class(kind),
                self.encode(make),
                self.encode(arguments),
                self.encode(lasting_state(kind, state)),
                self.encode(list(items or ())),
                self.encode(dict(pairs or ())),
            ),
        )


def _flat(parts: Iterable[Any]) -> list[bytes] | None:
    """Return the encodings if all parts are scalars: the rows of a large list are mostly flat, and this is quick."""
    encoded: list[bytes] = []
    for part in parts:
        scalar = encode_scalar(part)
        if scalar is None:
            return None
        encoded.append(scalar)
    return encoded


def cell_contents(cell: CellType) -> tuple[Any, ...]:
    """Return a closure cell's content, or nothing while the variable is not set yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def state_of(value: Any) -> Any:
    """Return what pickling would save of an object; None if it cannot be pickled, whatever the reason."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        return reduce(value) if reduce is not None else value.__reduce_ex__(4)
    except Exception:
        return None


def lasting_state(kind: type, state: Any) -> Any:
    """Return an object's state without its docstring and without what `cached_property` has added to it by now."""
    if state is None:
        return {}
    if type(state) is not dict:
        return state
    return {name: part for name, part in state.items() if name != "__doc__" and not _is_cached(kind, name)}


def _is_cached(kind: type, name: Any) -> bool:
    return isinstance(name, str) and isinstance(getattr(kind, name, None), functools.cached_property)


def _rank(value: Any) -> tuple[str, bytes]:
    """Return an order for the members of a set that does not depend on their hashes."""
    scalar = encode_scalar(value)
    if scalar is not None:
        return "", scalar
    if isinstance(value, FunctionType):
        return value.__qualname__, digest_code(value.__code__)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    parts: Iterable[Any] = value if isinstance(value, (tuple, frozenset)) else ()
    return str(name), digest("rank", sorted(tail for _, tail in map(_rank, parts)))


@functools.lru_cache(maxsize=256)
def _dtype(dtype: np.dtype[Any]) -> bytes:
    return repr((dtype.name, dtype.str, dtype.descr if dtype.fields else None)).encode()


def _tensor(value: Any) -> bytes | None:
    """Encode a PyTorch tensor by its values; pickling one would save its whole storage."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return digest("tensor", (str(value.dtype).encode(), str(tuple(value.shape)).encode(), content.tobytes()))


def _dataset(value: Any) -> bytes | None:
    """Encode a Hugging Face dataset by the fingerprint it keeps itself."""
    if str(type(value).__module__).partition(".")[0] != "datasets":
        return None
    own = getattr(value, "_fingerprint", None)
    return own.encode()[: 4 * DIGEST_BYTES] if isinstance(own, str) else None
