"""What code refers to outside of itself, read from its instructions."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

import msgspec

_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NOISE = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL"})


class Import(msgspec.Struct, frozen=True):
    """An import statement inside a function; `names` is empty for `import module`."""

    module: str
    level: int
    names: tuple[str, ...]
    uses: tuple[tuple[str, ...], ...] | None
    """What the code takes: attributes of the module, for `import a.b` of `a`; None where that cannot be told."""


class References(msgspec.Struct, frozen=True):
    """What a piece of code, the functions inside it included, takes from around it."""

    chains: tuple[tuple[str, ...], ...]
    """Global names with the attributes read from them: `np.linalg.norm(x)` is `("np", "linalg", "norm")`."""
    imports: tuple[Import, ...]
    assigned: frozenset[str]
    """Globals that the code itself sets: its own state (a model loaded at the first call), not what it depends on."""


def references(code: CodeType) -> References:
    """
    >>> references(compile("math.sqrt(x) + math.pi", "", "eval")).chains
    (('math', 'pi'), ('math', 'sqrt'), ('x',))
    """
    chains: set[tuple[str, ...]] = set()
    imports: set[Import] = set()
    assigned: set[str] = set()
    for inner in nested(code):
        instructions = [one for one in dis.get_instructions(inner) if one.opname not in _NOISE]
        for i, one in enumerate(instructions):
            if one.opname in _LOADS:
                chains.add((one.argval, *_attributes(instructions, i + 1)))
            elif one.opname == "STORE_GLOBAL":
                assigned.add(one.argval)
            elif one.opname == "IMPORT_NAME":
                imports.add(_import(instructions, i))
    in_order = sorted(imports, key=lambda found: (found.module, found.level, found.names, found.uses or ()))
    return References(tuple(sorted(chains)), tuple(in_order), frozenset(assigned))


def nested(code: CodeType) -> Iterator[CodeType]:
    """Yield the code and that of every function, lambda, comprehension and class inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def _import(instructions: list[Any], i: int) -> Import:
    level, names = instructions[i - 2].argval, tuple(instructions[i - 1].argval or ())
    uses: tuple[tuple[str, ...], ...] | None
    if names:
        uses = None if "*" in names else tuple((name,) for name in names)
    else:
        uses = _uses_of_local(instructions, instructions[i + 1])
    return Import(instructions[i].argval, level, names, uses)


def _uses_of_local(instructions: list[Any], store: Any) -> tuple[tuple[str, ...], ...] | None:
    """Return the attributes read from the local variable that a module was just stored in."""
    if store.opname != "STORE_FAST":
        return None
    found: set[tuple[str, ...]] = set()
    for i, one in enumerate(instructions):
        if one.opname.startswith("LOAD_FAST") and store.argval in (one.argval, *_tuple(one.argval)):
            found.add(tuple(_attributes(instructions, i + 1)) if one.argval == store.argval else ())
    return None if () in found else tuple(sorted(found))


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def _attributes(instructions: list[Any], start: int) -> Iterator[str]:
    for i in range(start, len(instructions)):
        if instructions[i].opname not in _ATTRIBUTES:
            return
        yield instructions[i].argval
