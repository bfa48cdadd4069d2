"""Turning a user's function or object into bytes, by value.

The user's own modules (see `graph.installed`) go along: their functions and classes with their code, the modules
themselves with the attributes that the code takes from them. What cannot go is named: the variable that holds it, its
type, and what to do.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import typing
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import cloudpickle

from penstock.core.errors import FunctionShippingError, LargeFunctionWarning
from penstock.core.host_memory import LEAST_BYTES
from penstock.graph.function_parts import Walk, defaults
from penstock.graph.installed import is_installed_module, reference_of
from penstock.graph.once import one_at_a_time
from penstock.graph.references import Import, references
from penstock.graph.user_modules import own_modules
from penstock.graph.value_digest import cell_contents, state_of

LARGE_BYTES = 64 << 20  # takes longer to send than most jobs take to start

_MARK = "__shipped_by_penstock__"
_NOT_SHIPPED = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__", "__path__", "__doc__"})
_turns: dict[int, Future[None]] = {}


KeepBuffer: TypeAlias = Callable[[memoryview], None]
"""Takes a large array's memory, which is then left out of the bytes. They are loaded with the buffers in this order."""


def dump(value: Any, name: str, walk: Walk, *, remedy: str, keep: KeepBuffer | None = None) -> bytes:
    """Return the pickled value, with the modules that its code imports when it runs.

    With `keep`, memory of large arrays is not in it. Raises `FunctionShippingError` with the name of what cannot go and
    the remedy.
    """
    modules: list[ModuleType] = []
    if walk.imports_own:
        walk = _ImportingWalk(value)
        modules = walk.modules
    with _own_modules_by_value():
        try:
            content = _pickle((value, modules), walk, keep)
        except Exception as error:
            trail, culprit, reason = _culprit(value, modules, error, walk)
        else:
            if len(content) >= LARGE_BYTES:
                _warn_of_size(value, name, len(content), walk)
            return content
    kind = type(culprit)
    what = f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
    where = f"{' → '.join(trail)} is {what}, which" if trail else f"it is {what}, which"
    raise FunctionShippingError(f"{name} cannot be shipped: {where} cannot be pickled ({reason}). {remedy}") from reason


def _warn_of_size(value: Any, name: str, size_bytes: int, walk: Walk) -> None:
    sizes = {words: size for words, inner in _captured(value, walk) if (size := _size(inner, walk))}
    largest = max(sizes, key=sizes.__getitem__, default="")
    why = f", {sizes[largest] >> 20:,} of them for {largest}" if largest else ""
    warnings.warn(
        f"{name} is sent to every worker process with {size_bytes >> 20:,} MiB{why}; have workers read it from files, "
        "or give the operator a class that loads it in __init__: a class is constructed once per worker process",
        LargeFunctionWarning,
        stacklevel=2,
    )


def _size(value: Any, walk: Walk) -> int:
    try:
        return len(_pickle(value, walk))
    except Exception:
        return 0  # some go only as a part of the whole


class _ImportingWalk(Walk):
    """Imports what the code will import when it runs, to see what it takes from there.

    A fingerprint must not depend on what is loaded, so its walk reads the files instead.
    """

    def __init__(self, root: Any) -> None:
        self.modules: list[ModuleType] = []
        super().__init__(root)

    def _import(self, prefix: str, statement: Import, module: str) -> None:
        if not own_modules(module, statement.names):
            return
        steps = module.split(".")
        for end in range(len(steps)):
            self._bring(".".join(steps[: end + 1]))
        for name in statement.names:
            if name != "*" and not hasattr(sys.modules[module], name):
                self._bring(f"{module}.{name}")
        start = sys.modules[module if statement.names or statement.uses is None else steps[0]]
        for chain in statement.uses if statement.uses is not None else ((),):
            taken, way = self._follow(start, (start.__name__, *chain))
            self._add(f"{prefix}import {way}", taken)

    def _bring(self, name: str) -> None:
        module = importlib.import_module(name)
        if not is_installed_module(module) and module not in self.modules:
            self.modules.append(module)
            self.module_uses.setdefault(name, set())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the user's modules with what is used of them; cloudpickle alone takes all, and cannot do cycles.

    Cached functions and new types would go by name, as parts of a module that is not there on the other side.
    """

    def __init__(self, file: io.BytesIO, walk: Walk, keep: KeepBuffer | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=None if keep is None else _large_only(keep))
        self._walk = walk
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None) if keep is not None else None

    def reducer_override(self, value: Any) -> Any:
        if self._tensor is not None and type(value) is self._tensor and _is_plain_memory(value):
            return _tensor_over, (value.numpy(),)
        if isinstance(value, functools._lru_cache_wrapper) and reference_of(value) is None:
            return _cached, (value.__wrapped__, value.cache_parameters())
        if isinstance(value, typing.NewType) and reference_of(value) is None:
            return typing.NewType, (value.__name__, value.__supertype__)
        if not isinstance(value, ModuleType) or is_installed_module(value):
            return super().reducer_override(value)
        state = {_MARK: True, **dict(_module_attributes(value, self._walk))}
        if hasattr(value, "__path__"):
            state["__path__"] = []
        return _make_module, (value.__name__,), state, None, None, _fill_module


def _pickle(value: Any, walk: Walk, keep: KeepBuffer | None = None) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, walk, keep).dump(value)
        return file.getvalue()


def _large_only(keep: KeepBuffer) -> Callable[[pickle.PickleBuffer], bool]:
    def kept(buffer: pickle.PickleBuffer) -> bool:
        """Say whether the pickler is to write it itself."""
        memory = buffer.raw()
        if memory.nbytes < LEAST_BYTES:
            return True
        keep(memory)
        return False

    return kept


def _is_plain_memory(tensor: Any) -> bool:
    """Say whether a tensor is all said by an array: large, on the host, in order, and of a type that numpy has."""
    return bool(
        tensor.nbytes >= LEAST_BYTES
        and tensor.device.type == "cpu"
        and tensor.layout is sys.modules["torch"].strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not vars(tensor)
        and tensor.dtype is not sys.modules["torch"].bfloat16
    )


def _tensor_over(array: Any) -> Any:
    return importlib.import_module("torch").from_numpy(array)


def _module_attributes(module: ModuleType, walk: Walk) -> Iterator[tuple[str, Any]]:
    used = walk.module_uses.get(module.__name__)
    for name, value in vars(module).items():
        if name not in _NOT_SHIPPED and (used is None or name in used or name.startswith("__")):
            yield name, value


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _make_module(name: str) -> ModuleType:
    """Return the module to fill where the function is loaded. It is importable there, unless one is there already."""
    present = sys.modules.get(name)
    if present is not None and hasattr(present, _MARK):
        return present
    module = ModuleType(name)
    if present is None:
        sys.modules[name] = module
    return module


def _fill_module(module: ModuleType, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name not in vars(module) or name.startswith("__"):  # another function may have brought a part of it before
            setattr(module, name, value)


@contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Have cloudpickle take the user's modules by value. Its registry is one for the process, hence the turns."""
    with one_at_a_time(_turns):
        registered = cloudpickle.list_registry_pickle_by_value()
        own = [
            module
            for name, module in sorted(sys.modules.items())
            if name not in registered and name != "__main__" and _is_own(name, module)
        ]
        try:
            for module in own:
                cloudpickle.register_pickle_by_value(module)
            yield
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)


def _is_own(name: str, module: object) -> bool:
    """Programs put all kinds of objects into `sys.modules`; only true modules can be the user's."""
    if not isinstance(module, ModuleType) or vars(module).get("__name__") != name:
        return False
    return not is_installed_module(module)


def _culprit(value: Any, modules: list[ModuleType], error: Exception, walk: Walk) -> tuple[list[str], Any, Exception]:
    """Follow what cannot be pickled down to the innermost value, trying everything captured on the way."""
    trail: list[str] = []
    for module in modules if _failure(value, walk) is None else ():
        reason = _failure(module, walk)
        if reason is not None:
            value, error = module, reason
            trail.append(f"imported module {module.__name__!r}")
            break
    seen = {id(value)}
    while True:
        for words, inner in _captured(value, walk):
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            reason = _failure(inner, walk)
            if reason is not None:
                trail.append(words)
                value, error = inner, reason
                break
        else:
            return trail, value, error


def _failure(value: Any, walk: Walk) -> Exception | None:
    try:
        _pickle(value, walk)
    except Exception as error:
        return error
    return None


def _captured(value: Any, walk: Walk) -> Iterator[tuple[str, Any]]:
    """Yield all that a value carries along, in the words a message uses."""
    match value:
        case FunctionType() if reference_of(value) is None:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                for content in cell_contents(cell):
                    yield f"captured variable {name!r}", content
            for name, default in defaults(value).items():
                yield f"default of {name!r}", default
            for name in dict.fromkeys(chain[0] for chain in references(value.__code__).chains):
                if name in value.__globals__:
                    yield f"global {name!r}", value.__globals__[name]
            for name, attribute in vars(value).items():
                yield f"attribute {name!r}", attribute
        case MethodType():
            yield f"the {type(value.__self__).__name__} it is bound to", value.__self__
            yield f"method {value.__name__!r}", value.__func__
        case functools._lru_cache_wrapper():
            yield "the function", value.__wrapped__
        case functools.partial():
            for key, argument in (*enumerate(value.args), *value.keywords.items()):
                yield f"argument {key!r}", argument
            yield "the function", value.func
        case type() if reference_of(value) is None:
            for name, attribute in vars(value).items():
                yield f"class attribute {name!r}", getattr(attribute, "__func__", attribute)
            for base in value.__bases__:
                yield f"base class {base.__name__}", base
        case ModuleType():
            for name, attribute in _module_attributes(value, walk):
                yield f"attribute {name!r}", attribute
        case dict():
            for key, item in value.items():
                yield f"item {key!r}", item
        case list() | tuple() | deque():
            for i, item in enumerate(value):
                yield f"item {i}", item
        case set() | frozenset():
            for item in value:
                yield "a member", item
        case _:
            yield from _state(value)


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object is made anew from: its class, the arguments of a call, its attributes."""
    reduced = state_of(value)
    if not isinstance(reduced, tuple):
        return
    arguments, *states = reduced[1:3]
    if type(value) in arguments[:1]:
        yield f"its class {type(value).__name__}", type(value)
        arguments = arguments[1:]
    for i, argument in enumerate(arguments):
        yield f"argument {i} of its constructor", argument
    for state in states:
        for part in state if isinstance(state, tuple) else (state,):  # with slots it is a pair
            if isinstance(part, dict):
                for name, attribute in part.items():
                    yield f"attribute {name!r}", attribute
            else:
                yield "its state", part
