"""A Python that every user of this host can read, for runners that are somebody else."""

from __future__ import annotations

import os
import shutil
import site
import sys
import sysconfig
from pathlib import Path

from penstock.processes.sandbox import Sandbox
from penstock.wire.addresses import Listening

LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "site-packages",
    "config-*",
    "__pycache__",
)


def readable_python(folder: Path, user: str) -> tuple[str, dict[str, str]]:
    """Return a Python that the user can read, and the environment it is started with: ours, or a copy in `folder`."""
    source = Path(__file__).parents[2] / "src"
    modules = [*site.getsitepackages(), *(each for each in sys.path if each.endswith("site-packages"))]
    try:
        Sandbox(user=user).check(Listening())
        return sys.executable, {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *modules])}
    except ValueError:
        pass
    home = folder / "python"
    _link_tree(Path(sysconfig.get_path("stdlib")), home / "lib" / Path(sysconfig.get_path("stdlib")).name)
    for library in Path(sys.base_prefix, "lib").glob("libpython*"):
        _link(str(library.resolve()), str(home / "lib" / library.name))
    (home / "bin").mkdir()
    binary = home / "bin" / "python3"
    _link(os.path.realpath(sys.executable), str(binary))
    _link_tree(source / "penstock", folder / "src" / "penstock")
    readable = [each for each in modules if Sandbox(user=user).reads(each)]
    if not readable:
        _link_tree(Path(modules[0]), folder / "modules", left_out=("torch", "nvidia", "__pycache__"))
        readable = [str(folder / "modules")]
    path = os.pathsep.join([str(folder / "src"), *dict.fromkeys(readable)])
    libraries = str(home / "lib")
    return str(binary), {**os.environ, "PYTHONHOME": str(home), "PYTHONPATH": path, "LD_LIBRARY_PATH": libraries}


def _link_tree(source: Path, target: Path, left_out: tuple[str, ...] = LEFT_OUT) -> None:
    shutil.copytree(source, target, copy_function=_link, ignore=shutil.ignore_patterns(*left_out), symlinks=False)
    for folder, _, _ in os.walk(target):
        os.chmod(folder, 0o755)


def _link(source: str, target: str) -> None:
    """A link costs no time and no room; a copy where that is another disk, or a file that not everybody may read."""
    try:
        if not os.stat(source).st_mode & 0o004:
            raise PermissionError(source)
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
        os.chmod(target, 0o755)
