"""Which code is installed, and so can be had elsewhere by name and version, and which is the user's own.

Installed is what lies in the standard library, in site-packages or dist-packages, and Penstock itself wherever it lies.
Everything else (scripts, notebooks, modules beside them, packages installed in place) is the user's own and changes
without a version. An extension module counts as installed: there is no source to ship.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType

_SITE_FOLDERS = ("site-packages", "dist-packages")
_OURS = __name__.partition(".")[0]


def is_installed(module_name: str | None) -> bool:
    """
    >>> is_installed("numpy"), is_installed("json.decoder"), is_installed("__main__"), is_installed(None)
    (True, True, False, False)
    """
    if not module_name or module_name == "__main__":
        return False
    if module_name.partition(".")[0] == _OURS or module_name in sys.builtin_module_names:
        return True
    module = sys.modules.get(module_name)
    return module is not None and is_installed_module(module)


def is_installed_module(module: ModuleType) -> bool:
    namespace = vars(module)  # `getattr` would wake modules that load themselves when touched
    name = str(namespace.get("__name__", ""))
    if name == "__main__":
        return False
    if name.partition(".")[0] == _OURS or name in sys.builtin_module_names:
        return True
    file = namespace.get("__file__")
    if isinstance(file, str):
        return is_installed_file(file)
    spec = namespace.get("__spec__")
    if spec is None:
        return False
    if spec.origin in ("built-in", "frozen"):
        return True
    folders = list(spec.submodule_search_locations or ())
    return bool(folders) and all(map(is_installed_file, folders))


def is_installed_file(path: str) -> bool:
    if path.endswith(tuple(EXTENSION_SUFFIXES)):
        return True
    path = os.path.abspath(path)
    return any(folder in path.split(os.sep) for folder in _SITE_FOLDERS) or path.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    stdlib = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
    folders = {os.path.abspath(path) for path in stdlib} | {os.path.realpath(path) for path in stdlib}
    return tuple(folder + os.sep for folder in sorted(folders))


def reference_of(value: object) -> str | None:
    """Return `module:qualname` if importing that from an installed package gives this very object.

    >>> import numpy
    >>> reference_of(len), reference_of(numpy.add), reference_of(lambda x: x)
    ('builtins:len', 'numpy:add', None)
    """
    name = getattr(value, "__qualname__", None)
    owner = getattr(value, "__objclass__", None)  # of `str.upper` and its like, which have no module of their own
    module = getattr(value, "__module__", None) or getattr(owner, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or not is_installed(module):
        return None
    try:
        found = look_up(module, name)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is value else None


def look_up(module: str, qualname: str) -> object:
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))


@functools.cache
def version_of(package: str) -> str:
    """Return the version of the distribution that a top-level module belongs to, "" where there is none.

    It is read from the distribution and not from `__version__`, so that it does not depend on what was imported.
    """
    from importlib import metadata  # slow to import, and needed only when user code refers to an installed package

    if package in sys.stdlib_module_names:
        return ""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(package, [])
        return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of all installed distributions, by their names in lower case with `-` (`opencv-python`).

    They are read from the names of folders alone, which takes a millisecond or two where reading each one's metadata
    would take a hundred. What is first on the path counts, as it does for imports.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue  # a zip file, or not there
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                distribution, version = _split_folder(name)
                if version:
                    found.setdefault(distribution, version)
    return found


def _split_folder(name: str) -> tuple[str, str]:
    """
    >>> _split_folder("opencv_python-4.9.0.80.dist-info"), _split_folder("ruamel.yaml-0.18-py3.11.egg-info")
    (('opencv-python', '4.9.0.80'), ('ruamel-yaml', '0.18'))
    """
    stem = name.rpartition(".")[0]
    if name.endswith(".egg-info"):
        stem = stem.partition("-py3")[0]
    distribution, _, version = stem.rpartition("-")
    return _normal(distribution), version


def distributions_of(package: str) -> dict[str, str]:
    """Return the distributions that a top-level module belongs to, and their versions."""
    installed = installed_versions()
    own = _normal(package)
    if own in installed:
        return {own: installed[own]}
    if package in sys.stdlib_module_names:
        return {}
    from importlib import metadata

    names = {_normal(name) for name in metadata.packages_distributions().get(package, [])}
    return {name: installed[name] for name in sorted(names) if name in installed}


def _normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")
