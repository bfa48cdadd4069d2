"""The user's own modules that a function imports when it runs, found and read without importing anything.

They are described by the code in their files, loaded or not: what a module looks like in memory differs before and
after the function's first call.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from penstock.graph.code_digest import digest, digest_code
from penstock.graph.installed import is_installed, is_installed_file
from penstock.graph.references import Import, references


def absolute_name(statement: Import, namespace: dict[str, Any]) -> str:
    """Return the module that an import statement in this namespace names."""
    if statement.level == 0:
        return statement.module
    package = namespace.get("__package__") or str(namespace.get("__name__", "")).rpartition(".")[0]
    try:
        return resolve_name("." * statement.level + statement.module, package)
    except ImportError:  # a relative import outside of a package fails when it runs, not here
        return statement.module


def own_modules(name: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return the user's modules that `from name import names` loads, packages above and imports below included.

    Each comes with the digest of its code; nothing is returned for an installed module.
    """
    found: dict[str, str] = {}
    pending = [name, *(f"{name}.{part}" for part in names)]
    while pending:
        module = pending.pop()
        parent = module.rpartition(".")[0]
        if parent:
            pending.append(parent)
        file = _own_file(module)
        if file is None or module in found:
            continue
        source = file.read_bytes()
        try:
            code = compile(source, module, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):  # importing it fails when the function runs, with the proper message
            found[module] = digest("source", (source,)).hex()
            continue
        found[module] = digest_code(code).hex()
        package = module if file.name == "__init__.py" else parent
        for statement in references(code).imports:
            target = absolute_name(statement, {"__package__": package})
            pending.extend((target, *(f"{target}.{part}" for part in statement.names)))
    return found


def _own_file(module: str) -> Path | None:
    """Return the source file of a module that is the user's own."""
    if is_installed(module) or module.partition(".")[0] in sys.stdlib_module_names:
        return None
    spec: ModuleSpec | None = None
    folders: list[str] | None = None
    for end in range(len(module.split("."))):
        try:
            spec = PathFinder.find_spec(".".join(module.split(".")[: end + 1]), folders)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    if spec is None or not spec.origin or not spec.origin.endswith(".py") or is_installed_file(spec.origin):
        return None
    return Path(spec.origin)
