"""Objects of the user's own modules, named on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.cli.main import UsageError


def load_object(named: str) -> Any:
    """Return what `module:name` or `path/to/file.py:name` refers to. The module is found as `python` would find it."""
    module_name, colon, name = named.rpartition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{named!r} is not of the form module:name or file.py:name")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        public = sorted(each for each in vars(module) if not each.startswith("_"))
        raise UsageError(f"{module_name} has no {name!r}; it has {', '.join(public) or 'nothing'}") from None


def _import(name: str) -> ModuleType:
    _search_first(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        raise UsageError(f"there is no module {name!r}; modules are looked for in {Path.cwd()} first") from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    _search_first(path.resolve().parent)  # as `python file.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
