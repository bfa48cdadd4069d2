from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest
from graph_examples import double, mapped

from penstock.core.errors import FunctionShippingError, InvalidArgumentError, LargeFunctionWarning
from penstock.graph.fingerprint import fingerprint
from penstock.graph.functions import Payload, Shipped, UserFunction


class Scaler:
    """Called with its instance."""

    made = 0

    def __init__(self, by: int = 2) -> None:
        type(self).made += 1
        self.by = by

    def __call__(self, x: int, rng: Any) -> int:
        return x * self.by

    def plain(self, x: int) -> int:
        return x * self.by

    def random(self, x: int, *, rng: Any) -> int:
        return x

    @classmethod
    def of_class(cls, x: int) -> int:
        return x + 1

    @staticmethod
    def free(x: int, rng: Any) -> int:
        return x


class Row:
    """Not callable: the class itself is the function."""

    def __init__(self, x: int) -> None:
        self.x = x


def passing(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


def hiding(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(x: Any) -> Any:
        return fn(x, rng=None)

    return wrapper


def with_rng(x: int, rng: Any) -> int:
    return x


CALLABLES: list[tuple[Any, str, bool, Any]] = [
    (double, "double", False, 6),
    (with_rng, "with_rng", True, None),
    (lambda x: x + 1, "<lambda>", False, 4),
    (lambda x, *, rng: x, "<lambda>", True, None),
    (lambda x, *rng: x, "<lambda>", False, 3),
    (functools.partial(double), "double", False, 6),
    (functools.partial(with_rng), "with_rng", True, None),
    (functools.partial(with_rng, rng=1), "with_rng", False, 3),
    (functools.partial(pow, 2), "pow", False, 8),
    (Scaler, "Scaler", True, None),
    (functools.partial(Scaler, by=5), "Scaler", True, None),
    (Scaler(3), "Scaler", True, None),
    (Scaler(3).plain, "Scaler.plain", False, 9),
    (Scaler(3).random, "Scaler.random", True, None),
    (Scaler.of_class, "Scaler.of_class", False, 4),
    (Scaler.free, "Scaler.free", True, None),
    (passing(with_rng), "with_rng", True, None),
    (hiding(with_rng), "with_rng", False, 3),
    (abs, "abs", False, 3),
    (np.negative, "negative", False, -3),
    (str, "str", False, "3"),
    (int.bit_length, "int.bit_length", False, 2),
    (functools.lru_cache(double), "double", False, 6),
]


@pytest.mark.parametrize(("fn", "name", "takes_rng", "result"), CALLABLES)
def test_any_callable_is_named_called_and_shipped(fn: Any, name: str, takes_rng: bool, result: Any) -> None:
    function = UserFunction.of(fn)
    assert (function.name, function.takes_rng, function.fn) == (name, takes_rng, fn)
    arrived = UserFunction.from_shipped(function.ship())
    assert (arrived.name, arrived.takes_rng) == (name, takes_rng)
    for one in (function, arrived):
        called = one.resolve()
        assert (called(3, rng=None) == fn_result(fn)) if takes_rng else (called(3) == result)


def fn_result(fn: Any) -> int:
    if fn is Scaler:
        return 6
    return 15 if isinstance(fn, functools.partial) and fn.func is Scaler else 9 if isinstance(fn, Scaler) else 3


def test_a_class_whose_instances_are_not_called_is_called_itself() -> None:
    assert UserFunction.of(Row).resolve()(5).x == 5


def test_a_class_is_constructed_once_whatever_the_number_of_threads() -> None:
    entered = threading.Barrier(8)

    class Slow:
        made = 0

        def __init__(self) -> None:
            Slow.made += 1

        def __call__(self, x: int) -> int:
            return x

    function = UserFunction.of(Slow)

    def use() -> Any:
        entered.wait()
        return function.resolve()

    with ThreadPoolExecutor(8) as threads:
        instances = [one.result() for one in [threads.submit(use) for _ in range(8)]]
    assert Slow.made == 1 and len(set(map(id, instances))) == 1


def test_a_constructor_that_failed_is_tried_again() -> None:
    class Flaky:
        tries = 0

        def __init__(self) -> None:
            Flaky.tries += 1
            if Flaky.tries == 1:
                raise OSError("not yet")

        def __call__(self, x: int) -> int:
            return x

    function = UserFunction.of(Flaky)
    with pytest.raises(OSError, match="not yet"):
        function.resolve()
    assert function.resolve()(1) == 1


def test_making_a_user_function_constructs_and_ships_nothing() -> None:
    before = Scaler.made
    lock = threading.Lock()
    UserFunction.of(Scaler)
    assert UserFunction.of(lambda x: (lock, x)).resolve()(1)[0] is lock
    assert Scaler.made == before


def test_installed_functions_go_by_reference_and_others_by_value() -> None:
    kinds = [UserFunction.of(fn).ship().kind for fn in (np.add, abs, np.linalg.norm, functools.reduce, str, double)]
    assert kinds == ["ref", "ref", "ref", "ref", "ref", "value"]
    assert UserFunction.of(np.linalg.norm).ship().ref == "numpy.linalg:norm"


def test_a_class_arrives_as_a_class_and_is_constructed_where_it_is_called() -> None:
    before = Scaler.made
    arrived = UserFunction.from_shipped(UserFunction.of(Scaler).ship())
    assert Scaler.made == before
    assert arrived.resolve()(4, rng=None) == 8
    assert arrived.resolve() is arrived.resolve()
    assert arrived.fn.made == before + 1


def test_the_registry_of_cloudpickle_is_left_as_it_was() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    UserFunction.of(double).ship()
    lock = threading.Lock()
    with pytest.raises(FunctionShippingError):
        UserFunction.of(lambda x: lock).ship()
    assert cloudpickle.list_registry_pickle_by_value() == {__name__}
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_functions_can_be_shipped_by_several_threads_at_once() -> None:
    start = threading.Barrier(4)

    def ship(i: int) -> Shipped:
        start.wait()
        return UserFunction.of(functools.partial(double)).ship()

    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            payloads = {shipped.payload for shipped in threads.map(ship, range(4))}
            # By reference it would be the module's name and not the code.
            assert all(b"co_code" in payload or b"_make_function" in payload for payload in payloads)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="got a int"):
        UserFunction.of(5)  # type: ignore[arg-type]


LOCK = threading.Lock()


def uses_lock(x: int) -> int:
    with LOCK:
        return x


class Holder:
    def __init__(self) -> None:
        self.options = {"session": [threading.Lock()]}

    def method(self, x: int) -> int:
        return x


def closure() -> Any:
    handle = threading.Lock()

    def inner(x: int) -> Any:
        return handle

    return inner


def closure_of_closure() -> Any:
    helper = closure()

    def outer(x: int) -> Any:
        return helper(x)

    return outer


def capturing(value: Any) -> Any:
    return lambda x: value


@dataclass(slots=True)
class Slotted:
    handle: Any


class Reduced:
    def __reduce__(self) -> Any:
        return pow, (2, LOCK)


def local_class() -> Any:
    class Local:
        def __call__(self, x: int) -> Any:
            return LOCK

    return Local


UNSHIPPABLE: list[tuple[Any, str]] = [
    (closure(), "inner cannot be shipped: captured variable 'handle' is a _thread.lock"),
    (closure_of_closure(), "outer cannot be shipped: captured variable 'helper' → captured variable 'handle' is a"),
    (uses_lock, "uses_lock cannot be shipped: global 'LOCK' is a _thread.lock"),
    (lambda x, guard=LOCK: x, "default of 'guard' is a _thread.lock"),
    (lambda x, *, guard=LOCK: x, "default of 'guard' is a _thread.lock"),
    (functools.partial(pow, LOCK), "pow cannot be shipped: argument 0 is a _thread.lock"),
    (Holder().method, "the Holder it is bound to → attribute 'options' → item 'session' → item 0 is a _thread.lock"),
    (capturing(deque([LOCK])), "captured variable 'value' → item 0 is a _thread.lock"),
    (capturing(Slotted(LOCK)), "captured variable 'value' → attribute 'handle' is a _thread.lock"),
    (capturing(Reduced()), "captured variable 'value' → argument 1 of its constructor is a _thread.lock"),
    (capturing(local_class()()), "captured variable 'value' → its class Local → class attribute '__call__' → global"),
    (functools.partial(Holder().method, 1), "the function → the Holder it is bound to → attribute 'options'"),
]


@pytest.mark.parametrize(("fn", "message"), UNSHIPPABLE)
def test_what_cannot_be_shipped_is_named(fn: Any, message: str) -> None:
    with pytest.raises(FunctionShippingError) as caught:
        UserFunction.of(fn).ship()
    assert message in str(caught.value)
    assert "constructed once per worker process" in str(caught.value)


def test_a_function_with_much_data_is_warned_of() -> None:
    table = np.zeros(80 << 20, np.uint8)
    with pytest.warns(
        LargeFunctionWarning, match=r"look_up is sent .* 80 MiB, 80 of them for captured variable 'table'"
    ):
        UserFunction.of(looking_up(table)).ship()
    with pytest.warns(LargeFunctionWarning, match=r"list is sent .* 80 MiB, 80 of them for item 1"):
        Payload([1, table]).ship()


def looking_up(table: Any) -> Any:
    def look_up(x: int) -> Any:
        return table[x]

    return look_up


def test_an_item_that_cannot_be_shipped_is_named() -> None:
    with pytest.raises(FunctionShippingError, match="list cannot be shipped: item 1 → item 'a' is a generator"):
        Payload([1, {"a": (i for i in range(3))}]).ship()


def test_a_payload_is_loaded_when_asked_for() -> None:
    arrived = Payload.from_shipped(Payload([1, np.arange(3)]).ship())
    assert arrived.name == "list"
    assert arrived.value[1].tolist() == [0, 1, 2]
    assert arrived.value is arrived.value


def test_a_function_without_its_code_says_so_when_called() -> None:
    with pytest.raises(FunctionShippingError, match="double came without its code"):
        UserFunction.from_shipped(UserFunction.of(double).outline()).resolve()


def test_a_function_of_another_python_is_refused() -> None:
    shipped = UserFunction.of(double).ship()
    other = Shipped(kind="value", name="double", payload=shipped.payload, python="3.9")
    with pytest.raises(FunctionShippingError, match=r"shipped by Python 3\.9"):
        UserFunction.from_shipped(other).resolve()


def test_a_shipped_function_keeps_its_fingerprint() -> None:
    for fn in (double, Scaler, closure, np.add, functools.partial(Scaler, by=4)):
        function = UserFunction.of(fn)
        arrived = UserFunction.from_shipped(function.ship())
        assert fingerprint(mapped(fn)) == fingerprint(type(mapped(fn))(upstream=mapped(fn).upstream, function=arrived))
