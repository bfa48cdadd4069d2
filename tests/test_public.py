"""The public interface keeps its written rules.

1. What is public is in `penstock.__all__`, loads when it is asked for, and says in its docstring what it is.
2. Every exception that can reach a user, and every type that a public function returns, is public.
3. Times end in `_s`, sizes in `bytes`. One word for one idea.
4. A call has at most twelve parameters. What belongs together is a record, which checks itself and is frozen.
5. A loader has no method only to refuse it.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.core import errors
from penstock.submission.options import check_options

RECORDS = [ps.Ranks, ps.Sharding, ps.Share, ps.Feed, ps.Placement, ps.Limits, ps.Access]
MOST_PARAMETERS = 12
WITHOUT_A_UNIT = re.compile(r"(^|_)(timeout|seconds?|secs?|ms|duration|interval|delay|patience|memory|mb|mib|kb)$")
OTHER_WORDS = {"consumers": "ranks", "consumer": "rank", "world_size": "ranks", "n_workers": "workers"}
OF_PYTHON = {"Any", "Callable", "ClassVar", "Iterator", "Literal", "Mapping", "None", "Self", "Sequence"}
OF_USERS = {"Element", "Face"}
"""What a pipeline is made of: any value; and the kind of pipeline that was given."""


def public() -> Iterator[tuple[str, Any]]:
    for name in ps.__all__:
        yield name, getattr(ps, name)


def calls() -> Iterator[tuple[str, Any]]:
    """Give every public function and method, by name."""
    for name, value in public():
        if inspect.isclass(value):
            if not issubclass(value, BaseException):
                yield name, value
            for own, method in inspect.getmembers(value, inspect.isroutine):
                ours = getattr(method, "__module__", "") or ""
                if not own.startswith("_") and ours.startswith("penstock"):
                    yield f"{name}.{own}", method
        elif callable(value):
            yield name, value


def parameters_of(call: Any) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(call).parameters.values()
    except ValueError:
        return []
    return [each for each in found if each.name != "self"]


def fields_of(kind: type) -> list[str]:
    return list(getattr(kind, "__struct_fields__", ()) or getattr(kind, "__dataclass_fields__", ()))


@pytest.mark.parametrize("name", ps.__all__)
def test_what_is_public_loads_and_says_what_it_is(name: str) -> None:
    value = getattr(ps, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value), name


def test_every_method_says_what_it_does() -> None:
    assert [name for name, call in calls() if not inspect.getdoc(call)] == []


def test_every_exception_is_public() -> None:
    found = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert found - set(ps.__all__) == set()
    assert not [name for name in found if not (name.endswith(("Error", "Warning")))]


def test_every_type_that_is_returned_is_public() -> None:
    unknown: dict[str, set[str]] = {}
    for name, call in calls():
        text = re.sub(r"Literal\[[^\]]*\]", "", str(getattr(call, "__annotations__", {}).get("return", "")))
        named = {each.rpartition(".")[2] for each in re.findall(r"[\w.]*\b[A-Z]\w+", text)}
        strange = {each for each in named if each not in ps.__all__} - OF_PYTHON - OF_USERS
        if strange:
            unknown[name] = strange
    assert unknown == {}


def test_times_and_sizes_say_their_units() -> None:
    named = {f"{name}({each.name})": each.name for name, call in calls() for each in parameters_of(call)}
    named |= {f"{name}.{own}": own for name, kind in public() if inspect.isclass(kind) for own in fields_of(kind)}
    assert [where for where, own in named.items() if WITHOUT_A_UNIT.search(own)] == []


def test_one_word_is_used_for_one_idea() -> None:
    named = {f"{name}({each.name})": each.name for name, call in calls() for each in parameters_of(call)}
    assert {where: OTHER_WORDS[own] for where, own in named.items() if own in OTHER_WORDS} == {}


def test_no_call_has_more_than_twelve_parameters() -> None:
    long = {name: len(parameters_of(call)) for name, call in calls() if not inspect.isclass(call)}
    assert {name: count for name, count in long.items() if count > MOST_PARAMETERS} == {}
    assert len(parameters_of(ps.Dataset.distribute)) <= MOST_PARAMETERS


def test_what_distribute_takes_is_what_is_checked() -> None:
    documented = {each.name: each.default for each in parameters_of(ps.Dataset.distribute) if each.name != "to"}
    assert documented == {each.name: each.default for each in parameters_of(check_options)}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_is_frozen_and_its_example_runs(record: Any) -> None:
    made = record(*{ps.Share: ("wait",), ps.Feed: ([0],)}.get(record, ()))
    with pytest.raises(AttributeError):
        setattr(made, fields_of(record)[0], None)
    assert not isinstance(made, msgspec.Struct) or msgspec.convert(msgspec.to_builtins(made), record) == made
    module = inspect.getmodule(record)
    examples = doctest.DocTestFinder(recurse=False).find(record, record.__name__, globs={record.__name__: record})
    assert module is not None and sum(len(each.examples) for each in examples) > 0
    for each in examples:
        assert doctest.DocTestRunner().run(each).failed == 0


def test_a_loader_has_no_method_only_to_refuse_it() -> None:
    assert [name for name in ("distribute", "iterator", "save") if hasattr(ps.Loader, name)] == []
    assert issubclass(ps.Loader, ps.Dataset.__mro__[1]), "it has the operators of a dataset"
