import copy
import json
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import CodecError, InvalidArgumentError
from penstock.graph.expressions import Expression, col

EXPRESSIONS: list[tuple[Expression, str]] = [
    (col("x") > 3, "col('x') > 3"),
    (3 < col("x"), "col('x') > 3"),  # noqa: SIM300
    (col("x") != "a", "col('x') != 'a'"),
    (col("flag"), "col('flag')"),
    (~col("flag"), "~col('flag')"),
    (col("x").isin([1, 2.5]), "col('x').isin([1, 2.5])"),
    (~col("x").is_null(), "~col('x').is_null()"),
    (~(col("x") == b"\xff"), "~(col('x') == b'\\xff')"),
    ((col("x") > 3) & (col("y") <= 4.5), "(col('x') > 3) & (col('y') <= 4.5)"),
    ((col("x") > 3) & (col("y") < 4) & col("z"), "(col('x') > 3) & (col('y') < 4) & col('z')"),
    ((col("x") > 3) | (col("y") < 4) & col("z"), "(col('x') > 3) | ((col('y') < 4) & col('z'))"),
    ((col("x") > 3) & (col("y") | col("z")), "(col('x') > 3) & (col('y') | col('z'))"),
    (col("x") < float("inf"), "col('x') < inf"),
    (col("x") == True, "col('x') == True"),  # noqa: E712
    (col("x") >= np.float32(0.5), "col('x') >= 0.5"),
]


@pytest.mark.parametrize(("expression", "text"), EXPRESSIONS, ids=[text for _, text in EXPRESSIONS])
def test_an_expression_reads_as_it_was_written(expression: Expression, text: str) -> None:
    assert repr(expression) == text
    again = eval(text, {"col": col, "inf": float("inf")})
    assert again.to_plain() == expression.to_plain()


@pytest.mark.parametrize("expression", [e for e, _ in EXPRESSIONS], ids=[text for _, text in EXPRESSIONS])
def test_an_expression_survives_json_and_copying(expression: Expression) -> None:
    plain = json.loads(json.dumps(expression.to_plain(), allow_nan=False))
    assert repr(Expression.from_plain(plain)) == repr(expression)
    assert Expression.from_plain(plain).to_plain() == expression.to_plain()
    assert copy.deepcopy(expression).to_plain() == expression.to_plain()


def test_plain_form_tells_types_apart() -> None:
    plain = [(col("x") == value).to_plain() for value in (1, 1.0, True, "1", b"1")]
    assert len({json.dumps(each) for each in plain}) == len(plain)


@pytest.mark.parametrize("plain", [None, [], ["="], ["==", "x"], ["==", "x", None], ["and", ["col", "x"]], ["col", 3]])
def test_what_is_no_expression_is_refused(plain: Any) -> None:
    with pytest.raises(CodecError):
        Expression.from_plain(plain)


def test_columns_are_those_it_looks_at() -> None:
    expression = (col("a") > 1) & ~(col("b").is_null() | col("c").isin([1])) & col("d")
    assert expression.columns() == {"a", "b", "c", "d"}


TRUTHS: list[tuple[Expression, Any, bool | None]] = [
    (col("x") == 1, 1, True),
    (col("x") == 1, 1.0, True),
    (col("x") == 1, True, True),
    (col("x") != 1, 2, True),
    (col("x") < 2, 2, False),
    (col("x") <= 2, 2, True),
    (col("x") > 0.5, np.int8(1), True),
    (col("x") == 0.1, np.float32(0.1), False),  # as the file holds it, not as numpy would round the literal
    (col("x") == 2**53 + 1, float(2**53), False),
    (col("x") > 3, float("nan"), False),
    (col("x") != 3, float("nan"), True),
    (col("x") == "a", "a", True),
    (col("x") < b"b", b"a", True),
    (col("x").isin([1, 2]), 2.0, True),
    (col("x").isin(["a"]), "b", False),
    (col("x").isin([]), 1, False),
    (col("x").is_null(), 1, False),
    (col("x").is_null(), None, True),
    (col("x"), np.bool_(True), True),
    (col("x") >= "2024-02-01", np.datetime64("2024-02-01T00:00:00"), True),
    (col("x") < "2024-02-01T00:00:00.5Z", np.datetime64("2024-02-01", "ns"), True),
    (col("x") < "9999-01-01", np.datetime64("2024-02-01", "ns"), True),  # beyond what ns can tell
    (col("x").isin(["2024-02-01"]), np.datetime64("2024-02-01T00:00", "us"), True),
    # unknown: neither it nor its opposite is true
    (col("x") == 1, None, None),
    (col("x") != 1, None, None),
    (~(col("x") == 1), None, None),
    (col("x").isin([1]), None, None),
    (~col("x").isin([1]), None, None),
    (col("x"), None, None),
    ((col("x") == 1) & col("yes"), None, None),
    ((col("x") == 1) & col("no"), None, False),
    (col("no") & (col("x") == 1), None, False),
    ((col("x") == 1) | col("yes"), None, True),
    ((col("x") == 1) | col("no"), None, None),
    (~((col("x") == 1) | col("no")), None, None),
]


@pytest.mark.parametrize(("expression", "value", "truth"), TRUTHS, ids=[f"{e} x={v!r}" for e, v, _ in TRUTHS])
def test_truth(expression: Expression, value: Any, truth: bool | None) -> None:
    row = {"x": value, "yes": True, "no": False}
    assert expression.truth(row) is truth
    assert expression.evaluate(row) is (truth is True)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: col("x") == None, "is_null"),  # noqa: E711
        (lambda: col("x") > [1], "list"),
        (lambda: col("x") == float("nan"), "NaN"),
        (lambda: col("x") == 2**70, "2\\*\\*64"),
        (lambda: col("x") > np.datetime64("2024-01-01"), "ISO text"),
        (lambda: col("x").isin("abc"), "list"),
        (lambda: col("x").isin([1, "a"]), "all text"),
        (lambda: col("x").isin([None]), "is_null"),
        (lambda: col(""), "not empty"),
        (lambda: (col("x") > 1) & True, "parentheses"),
        (lambda: col("x") > 1 & col("y"), "parentheses"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(build: Any, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        build()


@pytest.mark.parametrize("use", [lambda e: e and e, lambda e: not e, lambda e: 1 < e < 2, lambda e: 3 in [e]])
def test_and_or_not_and_chains_are_refused_with_the_remedy(use: Any) -> None:
    with pytest.raises(TypeError, match=r"& and \|"):
        use(col("x"))


@pytest.mark.parametrize(
    ("expression", "row", "told"),
    [
        (col("x") > 1, {"a": 1, "b": 2}, "the row has 'a', 'b'"),
        (col("x") > 1, {}, "empty"),
        (col("x") > 1, 7, "not a dict but int"),
        (col("x") > 1, {"x": "text"}, "holds str"),
        (col("x") == 1, {"x": "text"}, "holds str"),
        (col("x") == "1", {"x": 1}, "holds int"),
        (col("x").isin([1]), {"x": b""}, "holds bytes"),
        (col("x") == 1, {"x": np.zeros(2)}, "holds ndarray"),
        (col("x"), {"x": 1}, "compare it"),
        (col("x") > "today", {"x": np.datetime64("2024-01-01")}, "not one in UTC"),
        (col("x") > "2024-13-01", {"x": np.datetime64("2024-01-01")}, "not one in UTC"),
        (col("x") > "2024-01-01T00:00:00+01:00", {"x": np.datetime64("2024-01-01")}, "not one in UTC"),
    ],
)
def test_what_does_not_compare_is_an_error_and_not_false(expression: Expression, row: Any, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        expression.evaluate(row)
