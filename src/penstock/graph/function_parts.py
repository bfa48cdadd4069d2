"""What a user's function consists of, part by part: its code and all that it captured, through other user code too.

The walk is breadth first over functions, classes and modules of the user; each is described once, under the shortest
way to it, and is referred to by that way elsewhere. So recursion, mutual recursion and large modules cost no more than
their size, and a change is named by the way a reader would take: `global helper → global TABLE`.

Part names end in one of: `code`, `closure x`, `default y`, `global z` (or `global z.attribute`), `import m`,
`attribute a`, `argument n`, `bases`, `members`, `object`. They hold digests; `package p` and `reference` hold text.
No part are a global that the code itself assigns, which is its state, and attributes of a global that it does not read.
"""

from __future__ import annotations

import copyreg
import enum
import functools
from collections import deque
from types import FunctionType, MethodType, ModuleType
from typing import Any

from penstock.graph.code_digest import digest, digest_code
from penstock.graph.installed import is_installed, is_installed_module, reference_of, version_of
from penstock.graph.references import Import, references
from penstock.graph.user_modules import absolute_name, own_modules
from penstock.graph.value_digest import ValueDigester, cell_contents, lasting_state, state_of

ARROW = " → "
_CLASS_NOTES = frozenset(
    {
        *("__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__firstlineno__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__static_attributes__"),
        *("__orig_bases__", "__parameters__", "__type_params__"),
        "__slotnames__",  # added by the first pickling
    }
)
_MODULE_NOTES = frozenset(
    {
        *("__doc__", "__file__", "__cached__", "__loader__", "__spec__", "__builtins__", "__path__", "__package__"),
        *("__annotations__", "__annotate__", "__name__"),
    }
)


def parts(fn: Any) -> dict[str, str]:
    """Return the parts of a callable, or of any object, by name.

    >>> sorted(parts(functools.partial(pow, 2)))
    ['argument 0', 'reference']
    """
    return Walk(fn).parts


class Walk:
    """One walk through all that a value refers to. It also notes what shipping must know about modules."""

    def __init__(self, root: Any) -> None:
        self.parts: dict[str, str] = {}
        self.module_uses: dict[str, set[str] | None] = {}
        """User modules met as objects, with the attributes that code takes from them; None: any of them."""
        self.imports_own = False
        """Whether some code imports a module of the user's when it runs."""
        self._way = ""
        self._ways: dict[int, tuple[str, Any]] = {}
        """The way to each function, class and module met, which is kept so that its id stays its own."""
        self._taken: set[str] = set()
        self._pending: deque[tuple[str, Any]] = deque()
        self._values = ValueDigester(self._refer)
        self._root(root)
        while self._pending:
            self._describe(*self._pending.popleft())
        # The digester refers back to this, and the functions that were met to data of the user's: let go of both.
        del self._values
        self._ways.clear()

    def _root(self, value: Any) -> None:
        if (reference := self._installed(value)) is not None:
            self.parts["reference"] = reference
        elif isinstance(value, functools.partial):
            for key, argument in (*enumerate(value.args), *sorted(value.keywords.items())):
                self._add(f"argument {key}", argument)
            self._root(value.func)
        elif isinstance(value, MethodType):
            self._object(value.__self__)
            self._meet("", value.__func__)
        elif isinstance(value, (FunctionType, type, ModuleType)):
            self._meet("", value)
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        """Name the attributes of a plain object one by one; anything else is one part."""
        state = None if isinstance(value, (type, ModuleType)) else _plain_state(value)
        if state is None:
            self._add("object", value)
            return
        self._add("class", type(value))
        for name, attribute in sorted(lasting_state(type(value), state).items()):
            self._add(f"attribute {name}", attribute)

    def _add(self, way: str, value: Any) -> None:
        """Add a part. A function, class or module of the user that is first met here has parts of its own instead."""
        own = isinstance(value, (FunctionType, type, ModuleType)) and self._installed(value) is None
        if own and id(value) not in self._ways:
            self._meet(way, value)
            return
        self._way = way
        self.parts[way] = digest("part", (self._values.encode_part(way, value),)).hex()

    def _meet(self, way: str, value: Any) -> str:
        """Note where a function, class or module is described, and describe it when its turn comes."""
        free, tries = way, 1
        while free in self._taken:
            tries += 1
            free = f"{way} {tries}"
        self._taken.add(free)
        if isinstance(value, ModuleType):
            self.module_uses[value.__name__] = None
        self._ways[id(value)] = (free, value)
        self._pending.append((free, value))
        return free

    def _refer(self, value: Any) -> bytes | None:
        """Encode a function, class or module: by reference if installed, else by the way to its description."""
        if (reference := self._installed(value)) is not None:
            return f"@{reference}".encode()
        if not isinstance(value, (FunctionType, type, ModuleType)):
            return None
        if id(value) in self._ways:
            way = self._ways[id(value)][0]
        else:
            way = self._meet(f"{self._way}{ARROW}{value.__name__}", value)
        return f"@@{way}".encode()

    def _installed(self, value: Any) -> str | None:
        """Return the reference to an installed function, class or module, and note its package."""
        if isinstance(value, ModuleType):
            reference = value.__name__ if is_installed_module(value) else None
        else:
            reference = reference_of(value) or _type_reference(value)
        if reference is not None:
            self._package(reference.partition(":")[0])
        return reference

    def _package(self, module: str) -> None:
        package = module.partition(".")[0]
        if version := version_of(package):
            self.parts[f"package {package}"] = version

    def _describe(self, way: str, value: Any) -> None:
        prefix = way + ARROW if way else ""
        if isinstance(value, FunctionType):
            self._function(prefix, value)
        elif isinstance(value, ModuleType):
            self._module(prefix, value)
        else:
            self._class(prefix, value)

    def _function(self, prefix: str, function: FunctionType) -> None:
        code = function.__code__
        self.parts[f"{prefix}code"] = digest_code(code).hex()
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            for content in cell_contents(cell):
                self._add(f"{prefix}closure {name}", content)
        for name, value in defaults(function).items():
            self._add(f"{prefix}default {name}", value)
        if is_installed(function.__module__):  # made inside a package: the rest of it is known by its version
            self._package(function.__module__)
            return
        found = references(code)
        for chain in found.chains:
            if chain[0] in function.__globals__ and chain[0] not in found.assigned:
                value, used = self._follow(function.__globals__[chain[0]], chain)
                way, last = f"{prefix}global {used}", used.rpartition(".")[2]
                if last not in _MODULE_NOTES and way not in self.parts and way not in self._taken:
                    self._add(way, value)
        for statement in found.imports:
            self._import(prefix, statement, absolute_name(statement, function.__globals__))

    def _follow(self, value: Any, chain: tuple[str, ...]) -> tuple[Any, str]:
        """Follow `module.attribute` and `config.attribute` to what the code really takes from there."""
        used = [chain[0]]
        for attribute in chain[1:]:
            found = plain_attribute(value, attribute)
            if not found:
                break
            if (
                isinstance(value, ModuleType)
                and (uses := self.module_uses.setdefault(value.__name__, set())) is not None
            ):
                uses.add(attribute)
            value = found[0]
            used.append(attribute)
        return value, ".".join(used)

    def _import(self, prefix: str, statement: Import, module: str) -> None:
        own = own_modules(module, statement.names)
        self.imports_own |= bool(own)
        for name, code in own.items():
            self.parts[f"{prefix}import {name}"] = code
        if not own:
            self._package(module)

    def _class(self, prefix: str, cls: type) -> None:
        self._add(f"{prefix}bases", (type(cls), cls.__bases__))
        if isinstance(cls, enum.EnumMeta):
            members: dict[str, Any] = dict(cls.__members__)
            self._add(f"{prefix}members", {name: member.value for name, member in members.items()})
        for name, value in sorted(vars(cls).items()):
            if name not in _CLASS_NOTES and not (isinstance(cls, enum.EnumMeta) and _is_enum_note(name, value)):
                self._add(f"{prefix}{name}" if hasattr(value, "__get__") else f"{prefix}attribute {name}", value)

    def _module(self, prefix: str, module: ModuleType) -> None:
        for name, value in sorted(vars(module).items()):
            if name not in _MODULE_NOTES:
                self._add(f"{prefix}global {name}", value)


def _type_reference(value: Any) -> str | None:
    """Return a name for a type that an installed module does not export, such as that of locks."""
    if not isinstance(value, type) or "<" in value.__qualname__:
        return None
    module: object = value.__module__
    if not isinstance(module, str):  # some types written in C have a descriptor there
        return f"builtins:{value.__qualname__}"
    return f"{module}:{value.__qualname__}" if is_installed(module) else None


def _is_enum_note(name: str, value: Any) -> bool:
    """Whether it is a member or one of the tables that `enum` keeps, of which some grow with use."""
    return not isinstance(value, FunctionType) and (
        name.startswith("_") or isinstance(value, (enum.Enum, enum.property))
    )


def defaults(function: FunctionType) -> dict[str, Any]:
    """Return the default of each argument that has one."""
    code = function.__code__
    values = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values)), **(function.__kwdefaults__ or {})}


def plain_attribute(value: Any, attribute: str) -> tuple[Any, ...]:
    """Return `(content,)` if reading the attribute gives something stored and runs no code, else `()`.

    A method or property may look at the whole object, so there the object itself counts.
    """
    if isinstance(value, ModuleType):
        return () if is_installed_module(value) or attribute not in vars(value) else (vars(value)[attribute],)
    if isinstance(value, type):
        owners = [base for base in value.__mro__ if attribute in vars(base)]
        stored = bool(owners) and type(value) is type and reference_of(value) is None
        return (vars(owners[0])[attribute],) if stored and not hasattr(vars(owners[0])[attribute], "__get__") else ()
    kind: Any = type(value)
    if kind is not FunctionType and kind.__getattribute__ is not object.__getattribute__:
        return ()
    if hasattr(getattr(kind, attribute, None), "__get__"):
        return ()
    state = getattr(value, "__dict__", {})
    return (state[attribute],) if attribute in state else ()


def _plain_state(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that has nothing else; None for one with slots, items or its own pickling."""
    match state_of(value):
        case (make, (kind,), state, None, None) if make is copyreg.__newobj__ and kind is type(value):  # type: ignore[attr-defined]
            return {} if state is None else state if type(state) is dict else None
    return None
