"""User functions and objects inside a graph: called as they are in this process, shipped only when asked to.

Shipping has two forms. A function of an installed package goes *by reference*, `module:qualname`. Everything else goes
*by value*, pickled with its code and all that it captured, the user's own modules included. What arrives is not loaded
until it is called: `_unpickle` below is the one place in Penstock that unpickles, and only `fn`, `resolve` and `value`
reach it.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from mmap import mmap
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.core.errors import FunctionShippingError, InvalidArgumentError, never_the_end
from penstock.core.host_memory import AttachedBuffer, AttachedMemory, HostBuffer, HostMemory, map_buffer
from penstock.core.leaves import REGISTERED, register_shipped
from penstock.graph.function_parts import Walk
from penstock.graph.installed import look_up, reference_of
from penstock.graph.once import once
from penstock.graph.shipping import dump

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_FUNCTION_REMEDY = (
    "Create it inside the function, or give the operator a class that creates it in __init__: "
    "a class is constructed once per worker process"
)
_TYPE_REMEDY = "Let flatten and unflatten be functions of a module, without anything captured"
_PAYLOAD_REMEDY = "Keep it out of what the source is made from, or read the data with one of the readers"
ShippingKind: TypeAlias = Literal["ref", "value", "absent"]
LargeMemory: TypeAlias = HostMemory | AttachedMemory
"""Where large arrays are put: for processes of this host, or behind the bytes of the graph."""


class Shipped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function or object on its way. `parts` stand for its content, so that nobody loads it to fingerprint it."""

    kind: ShippingKind
    name: str
    takes_rng: bool = False
    ref: str = ""
    payload: bytes = b""
    python: str = ""
    """The version that wrote the payload: byte code is good for one only."""
    parts: dict[str, str] = {}
    buffers: tuple[HostBuffer, ...] = ()
    """Memory of large arrays that is not in the payload: processes of this host map it."""
    attached: tuple[AttachedBuffer, ...] = ()
    """The same, where it lies behind the bytes of the graph."""
    types: bytes = b""
    """The classes that were registered where it was made, pickled: its elements may hold such values."""


class _Here(msgspec.Struct, frozen=True):
    """What was made in this process and was not shipped."""

    value: Any


class Payload:
    """A user's object (items, a dataset) that travels with the graph."""

    __slots__ = ("_attached", "_loaded", "_origin")

    def __init__(self, value: Any) -> None:
        self._origin: _Here | Shipped = _Here(value)
        self._attached: memoryview | None = None
        self._loaded: dict[int, Future[Any]] = {}

    @staticmethod
    def from_shipped(shipped: Shipped, attached: memoryview | None = None) -> Payload:
        """Return the object without loading it; `attached` is the memory behind the graph it came with."""
        payload = Payload(None)
        payload._origin, payload._attached = shipped, attached
        return payload

    @property
    def value(self) -> Any:
        return _value(self._origin, self._loaded, self._attached)

    @property
    def name(self) -> str:
        """The type of the object."""
        return self._origin.name if isinstance(self._origin, Shipped) else type(self._origin.value).__qualname__

    def parts(self) -> dict[str, str]:
        return _parts(self._origin)

    def ship(self, memory: LargeMemory | None = None) -> Shipped:
        """Return it in a form that leaves the process; `FunctionShippingError` names what stands in the way.

        With `memory` it stays on this host, and large arrays lie there.
        """
        if isinstance(self._origin, Shipped):
            return _sent_on(self._origin, self._attached, memory)
        return _by_value(self._origin.value, self.name, takes_rng=False, remedy=_PAYLOAD_REMEDY, memory=memory)

    def outline(self) -> Shipped:
        """Return what is known about it without its content."""
        return Shipped(kind="absent", name=self.name, parts=self.parts())

    def __repr__(self) -> str:
        return f"Payload({self.name})"


class UserFunction(msgspec.Struct, frozen=True, eq=False):
    """A user's callable.

    A class whose instances can be called, or a partial of one, is constructed once per process, at its first use,
    and the instance is what gets called. Any other class (`int`, a dataclass) is called like a function.
    """

    name: str
    takes_rng: bool
    _origin: _Here | Shipped
    _loaded: dict[int, Future[Any]] = {}
    _instance: dict[int, Future[Any]] = {}
    _attached: memoryview | None = None

    @staticmethod
    def of(fn: Callable[..., Any]) -> UserFunction:
        if not callable(fn):
            raise InvalidArgumentError(f"a function is needed here, or another callable; got a {type(fn).__qualname__}")
        return UserFunction(_name(fn), _takes_rng(fn), _Here(fn))

    @staticmethod
    def from_shipped(shipped: Shipped, attached: memoryview | None = None) -> UserFunction:
        """Return the function without loading it; `attached` is the memory behind the graph it came with."""
        return UserFunction(shipped.name, shipped.takes_rng, shipped, _attached=attached)

    @property
    def fn(self) -> Callable[..., Any]:
        """What the user gave; loads it if it was shipped."""
        fn: Callable[..., Any] = _value(self._origin, self._loaded, self._attached)
        return fn

    @property
    def here(self) -> Callable[..., Any] | None:
        """What the user gave, if that was in this process; unlike `fn`, it never loads what was shipped."""
        return self._origin.value if isinstance(self._origin, _Here) else None

    def resolve(self) -> Callable[..., Any]:
        """Return what to call: the function, or this process's instance of a class."""
        fn = self.fn
        if _made_by(fn) is None:
            return fn
        try:
            instance: Callable[..., Any] = once(self._instance, fn)
        except StopIteration as error:
            raise never_the_end(error, self.name) from error
        return instance

    def parts(self) -> dict[str, str]:
        """Return the digests of what it consists of (see `graph.function_parts`)."""
        return _parts(self._origin)

    def ship(self, memory: LargeMemory | None = None) -> Shipped:
        """Return it in a form that leaves the process; `FunctionShippingError` names what stands in the way.

        With `memory` it stays on this host, and large arrays lie there.
        """
        if isinstance(self._origin, Shipped):
            return _sent_on(self._origin, self._attached, memory)
        fn = self._origin.value
        reference = reference_of(fn)
        if reference is None:
            return _by_value(fn, self.name, takes_rng=self.takes_rng, remedy=_FUNCTION_REMEDY, memory=memory)
        types = _dump_types()
        python = PYTHON if types else ""
        return Shipped(
            kind="ref",
            name=self.name,
            takes_rng=self.takes_rng,
            ref=reference,
            python=python,
            parts=self.parts(),
            types=types,
        )

    def outline(self) -> Shipped:
        """Return what is known about it without its code: enough to fingerprint and explain, not to run."""
        return Shipped(kind="absent", name=self.name, takes_rng=self.takes_rng, parts=self.parts())

    def __repr__(self) -> str:
        return f"UserFunction({self.name})"


def _by_value(value: Any, name: str, *, takes_rng: bool, remedy: str, memory: LargeMemory | None) -> Shipped:
    walk = Walk(value)
    buffers: list[HostBuffer] = []
    attached: list[AttachedBuffer] = []

    def keep(content: memoryview) -> None:
        if isinstance(memory, HostMemory):
            buffers.append(memory.put(content))
        elif memory is not None:
            attached.append(memory.put(content))

    payload = dump(value, name, walk, remedy=remedy, keep=None if memory is None else keep)
    return Shipped(
        kind="value",
        buffers=tuple(buffers),
        attached=tuple(attached),
        name=name,
        takes_rng=takes_rng,
        payload=payload,
        python=PYTHON,
        parts=dict(walk.parts),
        types=_dump_types(),
    )


def _sent_on(shipped: Shipped, attached: memoryview | None, memory: LargeMemory | None) -> Shipped:
    """Return what came with a graph as it goes with another one, behind which other memory lies."""
    if not shipped.attached or attached is None:
        return shipped
    contents = [attached[buffer.offset :][: buffer.nbytes] for buffer in shipped.attached]
    if isinstance(memory, AttachedMemory):
        return msgspec.structs.replace(shipped, attached=tuple(map(memory.put, contents)))
    if isinstance(memory, HostMemory):
        return msgspec.structs.replace(shipped, attached=(), buffers=tuple(map(memory.put, contents)))
    value = _load(shipped, attached)
    return _by_value(value, shipped.name, takes_rng=shipped.takes_rng, remedy=_FUNCTION_REMEDY, memory=None)


def _dump_types() -> bytes:
    """Return the classes that were registered in this process, with their functions."""
    types = list(REGISTERED.values())
    return dump(types, "register_type", Walk(types), remedy=_TYPE_REMEDY) if types else b""


def _parts(origin: _Here | Shipped) -> dict[str, str]:
    return dict(origin.parts) if isinstance(origin, Shipped) else Walk(origin.value).parts


def _value(origin: _Here | Shipped, loaded: dict[int, Future[Any]], attached: memoryview | None) -> Any:
    return origin.value if isinstance(origin, _Here) else once(loaded, lambda: _load(origin, attached))


def _load(shipped: Shipped, attached: memoryview | None) -> Any:
    if shipped.kind == "absent":
        raise FunctionShippingError(
            f"{shipped.name} came without its code and cannot run here; encode the graph with functions=True"
        )
    if shipped.kind == "ref":
        module, _, qualname = shipped.ref.partition(":")
        try:
            _register_types(shipped)
            return look_up(module, qualname)
        except (ImportError, AttributeError) as error:
            raise FunctionShippingError(
                f"{shipped.name} is {shipped.ref}, which cannot be imported here ({error}); "
                "install the same packages here as where the pipeline was made"
            ) from error
    if shipped.python != PYTHON:
        raise FunctionShippingError(
            f"{shipped.name} was shipped by Python {shipped.python} and cannot run on Python {PYTHON}; "
            "use the same minor version in both places"
        )
    try:
        buffers: list[mmap | memoryview] = [map_buffer(buffer) for buffer in shipped.buffers]
    except OSError as error:
        raise FunctionShippingError(
            f"{shipped.name} has large arrays in memory of the process that made the pipeline, which cannot be mapped "
            f"here ({error}); make the pipeline in a process that lives as long as its workers"
        ) from error
    if attached is not None:
        buffers += [attached[buffer.offset :][: buffer.nbytes] for buffer in shipped.attached]
    try:
        _register_types(shipped)
        return _unpickle(shipped.payload, buffers)
    except (ImportError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise FunctionShippingError(
            f"{shipped.name} cannot be loaded here ({error}); install the same packages here as where the pipeline was "
            "made, or move the code beside the pipeline's so that it is shipped along"
        ) from error


def _register_types(shipped: Shipped) -> None:
    if shipped.types and shipped.python == PYTHON:
        register_shipped(_unpickle(shipped.types))


def _unpickle(payload: bytes, buffers: Sequence[mmap | memoryview] = ()) -> Any:
    """Load a shipped value. Nothing else in Penstock unpickles anything."""
    value, _modules = pickle.loads(payload, buffers=buffers)
    return value


def _made_by(fn: Any) -> type | None:
    """Return the class if calling `fn` constructs an object that is itself called for each element."""
    made = fn.func if isinstance(fn, functools.partial) else fn
    if not isinstance(made, type) or not any("__call__" in vars(base) for base in made.__mro__):
        return None
    return made


def _called(fn: Any) -> Any:
    """Return the callable whose arguments count: of a class, what its instances are called with."""
    made = _made_by(fn)
    return fn if made is None else functools.partial(made.__call__, None)


def _takes_rng(fn: Any) -> bool:
    fn = _called(fn)
    if isinstance(fn, functools.partial) and "rng" in fn.keywords:
        return False  # the user has given it already
    try:
        named = inspect.signature(fn).parameters.get("rng")
        outer = inspect.signature(fn, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # some builtins do not tell their arguments
        return False
    if named is None or named.kind not in (named.POSITIONAL_OR_KEYWORD, named.KEYWORD_ONLY):
        return False
    # A decorated function shows the inner one's arguments: the wrapper must let this one through.
    return any(one.name == "rng" or one.kind is one.VAR_KEYWORD for one in outer)


def _name(fn: Any) -> str:
    """Return the name a user knows it by.

    >>> _name(len), _name(functools.partial(print, 1)), _name(str.upper), _name(lambda x: x)
    ('len', 'print', 'str.upper', '<lambda>')
    """
    if isinstance(fn, functools.partial):
        return _name(fn.func)
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__qualname__
    return str(name).rpartition("<locals>.")[2]
