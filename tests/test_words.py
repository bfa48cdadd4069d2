"""A name of a class means one thing in the whole package.

1. A public name (without an underscore) of a class or of a type alias is defined in one module of `penstock` only. A
   reader who meets `Cut` or `Ledger` anywhere need not ask which one. Whoever needs the same alias imports it.
2. A name with an underscore is a module's own, and may come again in another package, but not in the same one: a
   package is read in one go.

Type variables are not counted: they mean something only where they stand.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
CAMEL_CASE = re.compile(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")


def names_defined(tree: ast.Module) -> Iterator[str]:
    """Give the name of every class, wherever it stands, and of every type alias of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for statement in tree.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if CAMEL_CASE.fullmatch(name):
                if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "TypeVar"):
                    yield name


def homes() -> dict[str, list[str]]:
    """Return the modules that define each name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in set(names_defined(ast.parse(path.read_text()))):
            found[name].append(module)
    return found


def test_a_public_name_means_one_thing() -> None:
    assert {name: where for name, where in homes().items() if not name.startswith("_") and len(where) > 1} == {}


def test_a_private_name_means_one_thing_in_its_package() -> None:
    several = {}
    for name, where in homes().items():
        packages = [module.partition(".")[0] for module in where]
        if name.startswith("_") and len(set(packages)) < len(packages):
            several[name] = where
    assert several == {}


def test_classes_and_aliases_are_found_and_type_variables_are_not() -> None:
    text = "class One: ...\nTwo: TypeAlias = int\nThree = Callable[[], None]\nFour = TypeVar('Four')\nFIVE = 5\n"
    assert sorted(names_defined(ast.parse(text))) == ["One", "Three", "Two"]
