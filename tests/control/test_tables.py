from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.control.tables import VersionedTable

CHANGES = st.dictionaries(st.integers(0, 5), st.integers(), max_size=3)
KEYS = st.lists(st.integers(0, 5), max_size=2)


@given(steps=st.lists(st.tuples(st.integers(0, 30), CHANGES, KEYS), max_size=20), look=st.lists(st.integers(0, 30)))
def test_every_version_stays_what_it_was(steps: list[tuple[int, dict[int, int], list[int]]], look: list[int]) -> None:
    versions: list[tuple[VersionedTable[int, int], dict[int, int]]] = [(VersionedTable({0: 0, 1: 1}), {0: 0, 1: 1})]
    for base, changes, dropped in steps:
        table, model = versions[base % len(versions)]
        versions.append((table.put(changes).drop(*dropped), {**model, **changes}))
        for key in dropped:
            versions[-1][1].pop(key, None)
    for at in (*look, *range(len(versions))):
        table, model = versions[at % len(versions)]
        other, others_model = versions[(at * 7) % len(versions)]
        assert dict(table) == model
        assert (len(table), sorted(table), 3 in table, table.get(4)) == (
            len(model),
            sorted(model),
            3 in model,
            model.get(4),
        )
        differing = {key for key in {*model, *others_model} if model.get(key) != others_model.get(key)}
        assert differing <= table.differing(other)


def test_what_did_not_change_is_the_same_table() -> None:
    table = VersionedTable({"a": 1})
    assert table.put({}) is table
    assert table.drop("b") is table


def test_tables_of_another_descent_differ_in_what_either_has() -> None:
    assert VersionedTable({"a": 1}).differing(VersionedTable({"b": 1})) == {"a", "b"}
