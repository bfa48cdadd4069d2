"""What changes a fingerprint and what does not, as tables of a user's source before and after."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import pathlib
import re
import sys
import textwrap
import threading
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from graph_examples import OPERATORS, double, example, mapped, source

from penstock.core import element
from penstock.core.errors import InvalidArgumentError
from penstock.graph import ops, readers
from penstock.graph.expressions import col
from penstock.graph.fields import defaults_of
from penstock.graph.fingerprint import fingerprint, fingerprints, parts
from penstock.graph.functions import Payload, UserFunction

BASE = """
import re
from dataclasses import dataclass
import numpy as np

TABLE = {"a": 1, "b": 2}
UNUSED = 1
__file__ = "/one/user_code.py"
INSIDE = 1

class Config:
    scale = 2
    other = 3

class Base:
    def shift(self):
        return 1

class Augment(Base):
    "Augments."
    limit = 5
    def __init__(self, k=3):
        self.k = k
    def __call__(self, x):
        return x * self.k + self.shift()

@dataclass
class Options:
    width: int = 3
    def area(self):
        "The area."
        return self.width ** 2

options = Options()

def helper(x):
    "Help."
    return TABLE.get(x, 0) + odd(x)

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

def make(scale):
    def inner(x, y=2, *, z=3):
        try:
            a = x * scale
            b = a + 1
        except ValueError:
            b = 0
        return helper(b) + y + z + sum(INSIDE for _ in __file__) + Config.scale + options.area() in {1, 2, 3}
    return inner

f = make(10)
g = Augment()
"""

SAME = {
    "a comment": ("a = x * scale", "a = x * scale  # scaled"),
    "blank lines": ("def make", "\n\n\ndef make"),
    "a docstring added": ("def inner(x, y=2, *, z=3):", 'def inner(x, y=2, *, z=3):\n        "Doc."'),
    "a helper's docstring": ('"Help."', '"Help me."'),
    "a method's docstring": ('"The area."', '"It is the area."'),
    "a class's docstring": ('"Augments."', '"It augments."'),
    "argument annotations": ("def inner(x, y=2, *, z=3):", "def inner(x: int, y: int = 2, *, z: float = 3) -> bool:"),
    "a helper's annotations": ("def helper(x):", "def helper(x: str) -> int:"),
    "a variable annotation": ("a = x * scale", "a: int = x * scale"),
    "a field's annotation": ("width: int = 3", "width: float = 3"),
    "a global that is not used": ("UNUSED = 1", "UNUSED = 2"),
    "an attribute that is not read": ("other = 3", "other = 4"),
    "the order of a dict": ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),
    "the order of a set": ("{1, 2, 3}", "{3, 2, 1}"),
    "the file's path": ("/one/user_code.py", "/two/user_code.py"),
    "the function's name": ("inner", "renamed"),
    "future annotations": ("\nimport re", "from __future__ import annotations\nimport re"),
}
DIFFERENT = {
    "a constant": ("b = a + 1", "b = a + 2"),
    "a constant's type": ("b = a + 1", "b = a + 1.0"),
    "an operator": ("b = a + 1", "b = a - 1"),
    "a constant set": ("{1, 2, 3}", "{1, 2, 4}"),
    "what a try covers": ("        try:\n            a = x * scale\n", "        a = x * scale\n        try:\n"),
    "a global read by a function inside": ("INSIDE = 1", "INSIDE = 2"),
    "an exception": ("ValueError", "KeyError"),
    "a closure variable": ("make(10)", "make(11)"),
    "a closure variable's type": ("make(10)", "make(10.0)"),
    "a default": ("y=2", "y=3"),
    "a keyword default": ("z=3", "z=4"),
    "a helper's code": ("TABLE.get(x, 0)", "TABLE.get(x, 1)"),
    "a helper's global": ('"a": 1', '"a": 7'),
    "code in a recursion": ("n == 0 or", "n == 1 or"),
    "code at the other end of a recursion": ("n != 0 and", "n != 1 and"),
    "a class attribute that is read": ("scale = 2", "scale = 3"),
    "a captured object's attribute": ("Options()", "Options(width=4)"),
    "a captured object's method": ("self.width ** 2", "self.width ** 3"),
}
OBJECT_DIFFERENT = {
    "a method": ("x * self.k", "x + self.k"),
    "a base class's method": ("return 1", "return 2"),
    "an attribute of the object": ("g = Augment()", "g = Augment(k=4)"),
    "a class attribute": ("limit = 5", "limit = 6"),
}


def run(code: str) -> dict[str, Any]:
    module = sys.modules["user_code"] = ModuleType("user_code")  # dataclasses look their module up
    exec(compile(textwrap.dedent(code), "user_code.py", "exec", dont_inherit=True), vars(module))
    return vars(module)


def print_of(value: Any) -> str:
    return fingerprint(mapped(value))


def print_with(value: Any) -> str:
    """Return the fingerprint of a function that captured the value."""
    return print_of(lambda x: (x, value))


def edited(change: tuple[str, str]) -> str:
    assert change[0] in BASE
    return BASE.replace(*change)


@pytest.mark.parametrize("what", SAME)
def test_fingerprint_stays_with(what: str) -> None:
    after = run(edited(SAME[what]))
    assert print_of(after["f"]) == print_of(run(BASE)["f"])
    assert print_of(after["g"]) == print_of(run(BASE)["g"])


@pytest.mark.parametrize("what", DIFFERENT)
def test_fingerprint_changes_with(what: str) -> None:
    assert print_of(run(edited(DIFFERENT[what]))["f"]) != print_of(run(BASE)["f"])


@pytest.mark.parametrize("what", OBJECT_DIFFERENT)
def test_fingerprint_of_an_object_changes_with(what: str) -> None:
    assert print_of(run(edited(OBJECT_DIFFERENT[what]))["g"]) != print_of(run(BASE)["g"])


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: int) -> None:
        self.a = a


def cycle(last: int) -> list[Any]:
    ring: list[Any] = [1]
    ring.append([last, ring])
    return ring


def ring_of_objects(value: int) -> Point:
    first, second = Point(1), Point(value)
    first.y, second.y = second, first
    return first


VALUES = [
    0, 1, True, 1.0, 1j, "1", b"1", None, (), [], {}, set(), frozenset(), (1,), [1], {1}, [[1], 1], [1, [1]],
    {"a": 1}, {"a": 2}, {1: "a"}, 2**70, -(2**70), "x" * 100, "x" * 101, float("nan"), 0.0, -0.0,
    np.int8(1), np.int16(1), np.float32(1), np.arange(3), np.arange(3.0), np.arange(3).reshape(3, 1), np.arange(4),
    np.arange(9)[::2], np.array(["a", "b"]), np.array([{1}, None], object), np.array([{2}, None], object),
    np.ma.masked_array([1, 2], [True, False]), np.ma.masked_array([1, 2], [False, True]), np.dtype("int8"),
    re.compile("a"), re.compile("a", re.I), re.compile("b"), pathlib.PurePosixPath("/a"), pathlib.PurePosixPath("/b"),
    Point(1), Point(2), Point(1, 1), Slotted(1), Slotted(2), collections.OrderedDict(a=1), collections.deque([1]),
    functools.partial(double, 1), functools.partial(double, 2), functools.partial(double, x=2), range(3), slice(1, 2),
    cycle(1), cycle(2), ring_of_objects(1), ring_of_objects(2), len, abs, str.upper, "a".upper, "b".upper, np.add,
    np.multiply, int, Point, re, np, Ellipsis, ValueError("a"), ValueError("b"), np.random.PCG64(1), np.random.PCG64(2),
]  # fmt: skip


def test_captured_values_are_told_apart_by_type_and_content() -> None:
    prints = [print_with(value) for value in VALUES]
    for i, one in enumerate(prints):
        assert prints.index(one) == i, f"{VALUES[i]!r} looks like {VALUES[prints.index(one)]!r}"


def test_equal_content_has_one_fingerprint_whatever_is_shared() -> None:
    row = [1, 2]
    assert print_with([row, row]) == print_with([[1, 2], [1, 2]])
    assert print_with(ring_of_objects(3)) == print_with(ring_of_objects(3))


def test_what_has_no_lasting_identity_counts_by_type() -> None:
    def numbers() -> Any:
        yield 1

    for make in (threading.Lock, io.StringIO, numbers):
        assert print_with(make()) == print_with(make())
    assert print_with(threading.Lock()) != print_with(numbers())


def test_functions_that_changed_places_are_told_apart() -> None:
    def first(x: int) -> int:
        return x + 1

    def second(x: int) -> int:
        return x + 2

    assert print_with([first, second]) == print_with([first, second]) != print_with([second, first])
    assert print_with({"a": first, "b": second}) != print_with({"a": second, "b": first})


def test_penstock_itself_counts_by_its_version_wherever_it_lies() -> None:
    found = parts(lambda x: element.leaves(x))
    assert set(found) == {"code", "global element", "package penstock"}


def test_a_tensor_counts_by_its_values() -> None:
    torch = pytest.importorskip("torch")
    one, same, other = torch.arange(3), torch.arange(4)[:3], torch.arange(3).to(torch.bfloat16)
    assert print_with(one) == print_with(same) != print_with(other)


def test_a_cache_that_the_function_fills_itself_does_not_count() -> None:
    code = """
    model = None
    def f(x):
        global model
        if model is None:
            model = [1, 2, 3]
        return model
    """
    namespace = run(code)
    before = print_of(namespace["f"])
    namespace["f"](0)
    assert print_of(namespace["f"]) == before


def test_a_cached_property_does_not_count() -> None:
    class Lazy:
        @functools.cached_property
        def table(self) -> list[int]:
            return [1]

        def __call__(self, x: int) -> int:
            return self.table[0]

    lazy = Lazy()
    before = print_of(lazy), print_with(lazy)
    lazy(0)
    assert (print_of(lazy), print_with(lazy)) == before


def test_using_a_class_does_not_change_its_fingerprint() -> None:
    code = """
    import enum
    class Flags(enum.Flag):
        A = 1
        B = 2
    class Augment:
        def __call__(self, x):
            return Flags.A | Flags.B
    """
    namespace = run(code)
    before = print_of(namespace["Augment"])
    assert namespace["Augment"]()(0).value == 3
    namespace["Augment"]().__reduce_ex__(4)
    assert print_of(namespace["Augment"]) == before


def test_parts_are_named_as_a_reader_would_name_them() -> None:
    namespace = run(BASE)
    found = parts(namespace["f"])
    expected = {
        *("code", "closure scale", "default y", "default z", "global Config.scale"),
        *("global helper → code", "global helper → global TABLE", "global helper → global odd → code"),
    }
    assert expected <= set(found)
    assert "attribute k" in parts(namespace["g"]) and "class → __call__ → code" in parts(namespace["g"])
    assert set(parts(np.sqrt)) == {"reference", "package numpy"}
    assert parts(np.sqrt)["package numpy"] == np.__version__


def test_many_functions_that_call_each_other_cost_no_more_than_their_number() -> None:
    calls = "\n".join(f"def f{i}(x): return " + " + ".join(f"f{j}(x)" for j in range(60)) for i in range(60))
    assert sum(name.endswith("code") for name in parts(run(calls)["f0"])) == 60


def test_deep_data_is_refused_by_name() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"closure value .*nested too deeply"):
        print_with(deep)


@pytest.mark.parametrize("cls", OPERATORS, ids=lambda cls: cls.__name__)
def test_every_parameter_of_every_operator_counts_unless_private(cls: type[Any]) -> None:
    node = example(cls)
    whole = fingerprint(node)
    for name, _ in node.parameters():
        default = defaults_of(cls).get(name, msgspec.NODEFAULT)
        excepted = default is msgspec.NODEFAULT or name in ("steps", "threads")
        if excepted or getattr(node, name) == default:
            continue
        with contextlib.suppress(InvalidArgumentError):  # it needs one: nothing without it could be taken for it
            assert fingerprint(msgspec.structs.replace(node, **{name: default})) != whole, name
    for name in node.PRIVATE & {"storage_options"}:
        assert fingerprint(msgspec.structs.replace(node, **{name: (("key", "secret"),)})) == whole


def test_the_number_of_threads_does_not_count() -> None:
    assert fingerprint(mapped(double, threads=4)) == fingerprint(mapped(double))


def test_each_operator_has_its_own_fingerprint_and_covers_its_inputs() -> None:
    first = ops.Batch(upstream=mapped(double), size=2)
    other = ops.Batch(upstream=mapped(double, source(11)), size=2)
    found = fingerprints(first)
    assert len(set(found.values())) == 3
    assert found[first.upstream] == fingerprint(first.upstream)
    assert fingerprint(other) != fingerprint(first)


def test_order_of_inputs_counts() -> None:
    one, two = source(1), source(2)
    assert fingerprint(ops.Zip(upstreams=(one, two))) != fingerprint(ops.Zip(upstreams=(two, one)))


def test_files_count_by_their_digest_and_not_by_where_they_lie() -> None:
    here, there = readers.ReadText(paths=("/a/x.txt",)), readers.ReadText(paths=("/b/x.txt",))
    assert fingerprint(here) != fingerprint(there)
    assert fingerprint(here, source_digest=lambda _: "1") == fingerprint(there, source_digest=lambda _: "1")
    assert fingerprint(here, source_digest=lambda _: "1") != fingerprint(here, source_digest=lambda _: "2")
    batched = ops.Batch(upstream=here, size=1)
    assert fingerprint(batched, source_digest=lambda _: "1") != fingerprint(batched, source_digest=lambda _: "2")


def test_expressions_items_and_steps_count_by_content() -> None:
    def filtered(predicate: Any) -> str:
        return fingerprint(ops.Filter(upstream=source(), predicate=predicate))

    assert filtered(col("x") > 1) == filtered(col("x") > 1) != filtered(col("x") > 2)

    def items(*values: Any) -> str:
        return fingerprint(readers.FromItems(items=Payload(list(values))))

    assert items(1, np.zeros(2)) == items(1, np.zeros(2)) != items(1, np.ones(2))

    def fused(fn: Any) -> str:
        step = ops.Map(upstream=ops.Hole(), function=UserFunction.of(fn))
        return fingerprint(ops.Fused(upstream=source(), steps=(step,)))

    assert fused(double) == fused(double) != fused(abs)
