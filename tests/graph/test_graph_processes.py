"""Claims about several processes: fingerprints, shipped functions, the user's modules."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PIPELINE = """
import enum, functools, pathlib, re, sys, typing
import numpy as np
import helpers, plain
from helpers import shift
from penstock.graph import ops, readers
from penstock.graph.codec import encode_graph
from penstock.graph.fingerprint import fingerprint
from penstock.graph.functions import Payload, UserFunction

class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"

NAMES = {"one", "two", "three", "four", "five"}
REGISTRY = {helpers.scale: {str, int, bytes, float}, Color.RED: {Color.BLUE, Color.RED}}
PATTERN = re.compile("a|b", re.I)

class Augment:
    names = frozenset(NAMES)
    def __init__(self, k):
        self.k = k
        self.where = {pathlib.PurePosixPath("/x"), pathlib.PurePosixPath("/y")}
    def __call__(self, x):
        return helpers.scale(x) * self.k

def local(x):
    from lazy import lift
    return lift(x)

UserId = typing.NewType("UserId", int)

@functools.lru_cache
def packaged(x: UserId) -> typing.Optional[UserId]:
    import pack.tools
    return pack.tools.grow(x) + pack.ONE

def f(x, y={"a", "b", "c"}):
    assert PATTERN and REGISTRY and "zero" not in {"one", "two", "three"}
    return shift(helpers.scale(x)) + len(NAMES) + len(y) + plain.zero()

node = readers.FromItems(items=Payload([1, 2, {"x": np.arange(3), "names": NAMES}]))
node = ops.Map(upstream=node, function=UserFunction.of(f))
node = ops.Map(upstream=node, function=UserFunction.of(functools.partial(Augment, 3)))
node = ops.Map(upstream=node, function=UserFunction.of(Augment(4)), batch_size=2)
node = ops.Map(upstream=node, function=UserFunction.of(local))
node = ops.Map(upstream=node, function=UserFunction.of(packaged))
"""
HELPERS = """
import lazy_base
FACTOR = 2
def scale(x):
    return x * FACTOR
def shift(x):
    return x + lazy_base.offset()
def unused(x):
    return lock
import threading
lock = threading.Lock()
"""
LAZY = "import lazy_base\ndef lift(x):\n    return x + 100 + lazy_base.offset()\n"
PLAIN = "def zero():\n    return 0\ndef unused():\n    return 1\n"
PACK = {
    "pack/__init__": "ONE = 1\n",
    "pack/tools": "def grow(x):\n    from .more import plus\n    return plus(x)\n",
    "pack/more": "def plus(x):\n    return x + 1000\n",
}
LAZY_BASE = "import helpers\nOFFSET = 7\ndef offset():\n    return OFFSET\n"


def write_user_code(folder: Path, **edits: str) -> None:
    files = {"helpers": HELPERS, "lazy": LAZY, "lazy_base": LAZY_BASE, "plain": PLAIN, "pipeline": PIPELINE, **PACK}
    (folder / "pack").mkdir(parents=True, exist_ok=True)
    for name, code in {**files, **edits}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code))


def python(code: str, folder: Path, *arguments: str, seed: str = "0") -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fingerprints_of(*folders: Path, seed: str = "0") -> list[str]:
    """Return the fingerprint of each folder's pipeline, each imported in a process of its own.

    The processes are forked after Penstock was imported and before any user code was, which saves most of the time.
    """
    code = """
        import os, sys
        import numpy, penstock.graph.codec, penstock.graph.fingerprint
        for folder in sys.argv[1:]:
            sys.stdout.flush()
            if os.fork() == 0:
                sys.path.insert(0, folder)
                import pipeline
                print(pipeline.fingerprint(pipeline.node))
                sys.exit()
            os.wait()
        """
    return python(code, folders[0], *map(str, folders), seed=seed).split()


def test_fingerprint_is_the_same_under_every_hash_seed_and_in_every_folder(tmp_path: Path) -> None:
    write_user_code(tmp_path / "one")
    write_user_code(tmp_path / "two")
    (one,) = fingerprints_of(tmp_path / "one", seed="1")
    assert fingerprints_of(tmp_path / "one", tmp_path / "two", seed="2") == [one, one]


def test_fingerprint_follows_the_users_modules_on_disk(tmp_path: Path) -> None:
    same = {
        "before": {},
        "comments and docstrings": {"helpers": "# moved\n\n" + HELPERS, "lazy": '"""Doc."""\n' + LAZY},
        "code that the pipeline does not use": {"plain": PLAIN.replace("return 1", "return 2")},
    }
    different = {
        "a global of a module": {"helpers": HELPERS.replace("FACTOR = 2", "FACTOR = 3")},
        "code two modules away": {"lazy_base": LAZY_BASE.replace("return OFFSET", "return OFFSET + 1")},
        "code imported when the function runs": {"lazy": LAZY.replace("100", "101")},
        "a package above an imported module": {"pack/__init__": "ONE = 2\n"},
        "a module imported by an imported one": {"pack/more": PACK["pack/more"].replace("1000", "2000")},
    }
    for what, edits in {**same, **different}.items():
        write_user_code(tmp_path / what, **edits)
    before, *unchanged = fingerprints_of(*(tmp_path / what for what in same))
    assert unchanged == [before] * 2
    changed = fingerprints_of(*(tmp_path / what for what in different))
    assert len({before, *changed}) == 1 + len(different)


def test_a_shipped_pipeline_runs_where_the_users_modules_are_missing(tmp_path: Path) -> None:
    write_user_code(tmp_path / "client")
    python("import pipeline as p; open('graph', 'wb').write(p.encode_graph(p.node))", tmp_path / "client")
    (tmp_path / "worker").mkdir()
    out = python(
        """
        import sys
        from penstock.graph.codec import decode_graph, encode_graph
        from penstock.graph.fingerprint import fingerprint
        from penstock.graph.traverse import walk

        data = open('../client/graph', 'rb').read()
        node = decode_graph(data)
        before = fingerprint(node)
        assert encode_graph(node) == data
        items, *maps = walk(node)
        value = 1
        for one in maps:
            value = one.function.resolve()(value)
        assert [len(item) if isinstance(item, dict) else item for item in items.items.value] == [1, 2, 2]
        assert fingerprint(node) == before
        assert "helpers" in sys.modules and not hasattr(sys.modules["helpers"], "lock")
        print(before, value)
        """,
        tmp_path / "worker",
    )
    expected = ((1 * 2 + 7 + 5 + 3) * 2 * 3) * 2 * 4 + 100 + 7 + 1000 + 1
    assert out == f"{fingerprints_of(tmp_path / 'client')[0]} {expected}"


def test_a_missing_module_is_named_where_the_function_is_loaded(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "only_here"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def twice(x):\n    return 2 * x\n")
    code = """
        import sys
        sys.path.insert(0, 'site-packages')
        import only_here
        from penstock.graph.functions import UserFunction
        import msgspec
        shipped = [UserFunction.of(fn).ship() for fn in (only_here.twice, lambda x: only_here.twice(x))]
        assert [one.kind for one in shipped] == ['ref', 'value'], shipped
        open('shipped', 'wb').write(msgspec.msgpack.encode(shipped))
    """
    python(code, tmp_path)
    out = python(
        """
        import msgspec
        from penstock.core.errors import FunctionShippingError
        from penstock.graph.functions import Shipped, UserFunction
        for shipped in msgspec.msgpack.decode(open('shipped', 'rb').read(), type=list[Shipped]):
            try:
                UserFunction.from_shipped(shipped).resolve()
            except FunctionShippingError as error:
                print('only_here' in str(error) and 'install' in str(error))
        """,
        tmp_path,
    )
    assert out.split() == ["True", "True"]
