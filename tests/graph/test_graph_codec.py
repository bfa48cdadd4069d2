from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from graph_examples import OPERATORS, double, example, mapped, source
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import CodecError, FunctionShippingError
from penstock.graph import ops, readers
from penstock.graph.codec import MAGIC, RECORDS, VERSION, decode_graph, encode_graph
from penstock.graph.expressions import col
from penstock.graph.fingerprint import fingerprint
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.node import Node
from penstock.graph.traverse import walk

HEAD = MAGIC + bytes((VERSION,))


def document(*operators: Any, functions: Any = (), payloads: Any = ()) -> bytes:
    return HEAD + msgspec.msgpack.encode([list(operators), list(functions), list(payloads)])


def as_compared(value: Any) -> Any:
    """Functions, payloads and expressions have no equality of their own."""
    if isinstance(value, (UserFunction, Payload)):
        return value.name
    if isinstance(value, tuple):
        return tuple(map(as_compared, value))
    return fingerprint(value) if isinstance(value, Node) else repr(value)


@pytest.mark.parametrize("cls", OPERATORS, ids=lambda cls: cls.__name__)
def test_every_operator_survives_the_journey(cls: type[Any]) -> None:
    node = example(cls)
    back = decode_graph(encode_graph(node))
    assert type(back) is cls
    for (name, value), (_, arrived) in zip(node.parameters(), back.parameters()):
        assert as_compared(arrived) == as_compared(value), name
    assert fingerprint(back) == fingerprint(node)
    assert encode_graph(back) == encode_graph(node)


VALUES = [
    *(None, True, 0, -1, 2**80, -(2**80), 2**63, 1.5, "text", b"bytes"),
    *((), (1, (2, "x")), [1, [2]], {"a": (1,), 2: None}),
    *(np.float32(1.5), np.int8(-3), np.datetime64("2020-01-01"), np.str_("abc"), np.arange(6).reshape(2, 3)),
    np.zeros(0, np.float16),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_kind_of_value_survives_the_journey(value: Any) -> None:
    node = ops.PaddedBatch(upstream=source(), size=1, value=value)
    back = decode_graph(encode_graph(node))
    assert isinstance(back, ops.PaddedBatch)
    assert type(back.value) is type(value)
    assert np.array_equal(back.value, value) if isinstance(value, np.ndarray) else back.value == value
    assert getattr(back.value, "dtype", None) == getattr(value, "dtype", None)


def test_a_value_that_cannot_travel_is_named() -> None:
    node = readers.FromGenerator(function=UserFunction.of(double), splits=(Path("a"),))
    with pytest.raises(CodecError, match="from_generator: splits holds a PosixPath"):
        encode_graph(node)


def test_shared_operators_functions_and_payloads_are_stored_once_and_stay_shared() -> None:
    shared = mapped(double)
    again = ops.Map(upstream=shared, function=shared.function)
    node = ops.Zip(upstreams=(again, shared))
    data = encode_graph(node)
    back = decode_graph(data)
    assert len(list(walk(back))) == 4
    assert back.inputs[0].inputs[0] is back.inputs[1]
    assert back.inputs[0].function is back.inputs[1].function  # type: ignore[attr-defined]
    assert data.count(b"double") < 2 * encode_graph(shared).count(b"double")


def test_private_fields_stay_at_home() -> None:
    node = readers.ReadText(paths=("x",), storage_options=(("secret", "hunter2"),))
    data = encode_graph(node)
    assert b"hunter2" not in data and b"storage_options" not in data
    assert decode_graph(data).storage_options == ()  # type: ignore[attr-defined]


class WritesWhenLoaded:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_decoding_loads_no_function_and_no_payload(tmp_path: Path) -> None:
    first, second = WritesWhenLoaded(tmp_path / "function"), WritesWhenLoaded(tmp_path / "payload")
    node = mapped(lambda x: (x, first), readers.FromItems(items=Payload([second])))
    data = encode_graph(node)
    back = decode_graph(data)
    assert fingerprint(back) == fingerprint(node)
    assert encode_graph(back) == data
    assert list(tmp_path.iterdir()) == []
    back.function.resolve()  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["function"]
    assert back.inputs[0].items.value == [None]  # type: ignore[attr-defined]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["function", "payload"]


def test_without_functions_a_graph_keeps_its_fingerprint_and_carries_no_code() -> None:
    unshippable = open(__file__, "rb")  # noqa: SIM115
    with unshippable:
        node = mapped(lambda x: unshippable)
        back = decode_graph(encode_graph(node, functions=False))
        assert fingerprint(back) == fingerprint(node)
        with pytest.raises(FunctionShippingError, match="unshippable"):
            encode_graph(node)


def test_a_missing_field_takes_its_default_and_an_unknown_one_is_refused() -> None:
    back = decode_graph(document(["Range", {"start": 0, "stop": 4}]))
    assert isinstance(back, readers.Range) and back.step == 1
    with pytest.raises(CodecError, match=r"operator 1 \(Range\) has a field 'stride'"):
        decode_graph(document(["Range", {"start": 0, "stop": 4, "stride": 2}]))
    with pytest.raises(CodecError, match=r"operator 1 \(Range\) lacks the field 'stop'"):
        decode_graph(document(["Range", {"start": 0}]))


RANGE = ["Range", {"start": 0, "stop": 4}]
REFUSED = [
    (b"", "not a graph"),
    (b"PST", "not a graph"),
    (b"garbage and more", "not a graph"),
    (MAGIC, "not a graph"),
    (MAGIC + b"\x63" + b"rest", "version 99; this release reads version 1"),
    (HEAD, "damaged"),
    (HEAD + b"\xc1", "damaged"),
    (HEAD + b"\x91" * 100_000, "damaged"),
    (document(), "without operators"),
    (document(["Teleport", {}]), "operator 1 is a 'Teleport', which this release does not know"),
    (document(["SkipErrors", {}]), "SkipErrors is not an operator"),
    (document(["Range", {"start": "a", "stop": 4}]), "field 'start' cannot hold a str"),
    (document(["Range", {"start": 0, "stop": 4, "step": 0}]), "step=0"),
    (document(RANGE, ["Batch", {"upstream": ["node", 0], "size": 0}]), "size=0 must be at least 1"),
    (document(RANGE, ["Batch", {"upstream": ["node", 1], "size": 1}]), "refers to entry 1 of 1"),
    (document(RANGE, ["Batch", {"upstream": ["node", -1], "size": 1}]), "refers to entry -1 of 1"),
    (document(RANGE, ["Batch", {"upstream": 3, "size": 1}]), "field 'upstream' cannot hold a int"),
    (document(RANGE, ["Map", {"upstream": ["node", 0], "function": ["function", 0]}]), "refers to entry 0 of 0"),
    (document(RANGE, ["Map", {"upstream": ["node", 0], "function": ["payload", 0]}]), "refers to entry 0 of 0"),
    (document(["ReadText", {"paths": ["tuple", [1]]}]), "field 'paths' cannot hold a tuple"),
    (document(["ReadText", {"paths": ["tuple", ["a"]], "storage_options": ["tuple", []]}]), "'storage_options'"),
    (document(["ReadText", {"paths": ["set", ["a"]]}]), "is not a value"),
    (document(["ReadParquet", {"paths": ["tuple", ["a"]], "predicate": ["expression", ["boom"]]}]), "expression"),
    (document(["PaddedBatch", {"value": ["array", "O", [1], b"12345678"]}]), "not a valid array"),
    (document(["PaddedBatch", {"value": ["scalar", "<f4", b"1"]}]), "not a valid scalar"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_bytes_that_are_no_graph_are_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(CodecError) as caught:
        decode_graph(data)
    assert message in str(caught.value)


def sample() -> bytes:
    node: Node = readers.ReadParquet(paths=("a", "b"), predicate=(col("x") > 3) & ~col("y").is_null(), batch=4)
    node = ops.Map(upstream=node, function=UserFunction.of(double), on_error=ops.SkipErrors(budget=0.5), salt=1)
    node = ops.Mix(upstreams=(node, readers.FromItems(items=Payload([1, 2]))), weights=(0.5, 0.5))
    return encode_graph(ops.PaddedBatch(upstream=node, size=3, value=np.float32(2)))


SAMPLE = sample()


def decodes_or_is_refused(data: bytes) -> None:
    try:
        node = decode_graph(data)
    except CodecError:
        return
    assert isinstance(node, Node)


def test_a_graph_cut_off_anywhere_is_refused() -> None:
    for length in range(len(SAMPLE)):
        with pytest.raises(CodecError):
            decode_graph(SAMPLE[:length])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_as_a_graph(data: bytes) -> None:
    decodes_or_is_refused(data)
    decodes_or_is_refused(HEAD + data)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_graph_with_flipped_bytes_decodes_or_is_refused(flips: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for place, value in flips:
        data[place] = value
    decodes_or_is_refused(bytes(data))


TAGS = ["tuple", "list", "dict", "node", "function", "payload", "record", "int", "expression", "scalar", "array"]
FIELDS = sorted({name for cls in RECORDS.values() for name in cls.__struct_fields__})
LEAVES = st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=4) | st.binary(max_size=8)
TAGGED = st.tuples(
    st.sampled_from(TAGS), LEAVES | st.lists(LEAVES | st.tuples(st.sampled_from(TAGS), LEAVES), max_size=2)
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(RECORDS)),
            st.dictionaries(st.sampled_from(FIELDS), LEAVES | TAGGED | st.lists(LEAVES, max_size=2), max_size=4),
        ),
        max_size=3,
    )
)
def test_a_well_formed_document_of_nonsense_decodes_or_is_refused(operators: list[Any]) -> None:
    decodes_or_is_refused(document(*operators))


def test_five_thousand_operators_are_encoded_and_decoded() -> None:
    node = source()
    for _ in range(5000):
        node = ops.Skip(upstream=node, count=1)
    assert len(list(walk(decode_graph(encode_graph(node))))) == 5001
