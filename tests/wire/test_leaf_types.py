"""The codecs and the table of leaf types, without processes."""

from __future__ import annotations

import datetime
import sys
from collections import OrderedDict
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core import leaves
from penstock.core.errors import CodecError, InvalidArgumentError
from penstock.testing.conformance import compare_all
from penstock.wire import elements as codec
from penstock.wire.elements import flatten, unflatten
from penstock.wire.runs import decode_run, encode_run
from tests.leaf_examples import LEAVES, Frozen, Pair, Plain


def received(run: list[Any]) -> list[Any]:
    layout, buffers = encode_run(run)
    return decode_run(layout, [bytearray(buffer) for buffer in buffers])


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("count", [1, 2, 30])
def test_elements_come_back_as_what_they_were(leaf: str, count: int) -> None:
    run = [LEAVES[leaf](i) for i in range(count)]
    assert compare_all(run, received(run)) is None
    assert compare_all(run, received(run)) is None  # by a plan that is there
    mixed = [*run, {"x": [*run, None, 2**70, "\ud800"]}]
    assert compare_all(mixed, received(mixed)) is None


def test_plans_are_made_once_for_a_structure_and_stay_few() -> None:
    codec._plans.forget(), codec._rebuilding.forget()
    for i in range(10):
        element = {"x": np.full(3, i), "n": i, "list": list(range(i)), "p": Plain(i, f"{i}"), "b": bytes(i)}
        assert compare_all([element], received([element])) is None
    assert len(codec._plans) == len(codec._rebuilding) == 1
    most = codec.MOST_LEAVES // 1000 + 2
    for i in range(2 * most):
        received([{f"{n}": np.zeros(i, np.uint8) for n in range(1000)}])
        assert len(codec._plans) <= most and len(codec._rebuilding) <= most


def test_keys_that_are_equal_but_not_the_same_keep_their_types() -> None:
    for element in ({1: "a"}, {True: "a"}, {1: "b"}):
        (got,) = received([element])
        assert [type(key) for key in got] == [type(key) for key in element] and got == element


def test_many_small_arrays_lie_in_one_aligned_buffer_and_are_written_to_apart() -> None:
    element = {f"{n}": np.full((n % 3, 2), n, ("u1", "<f8", ">i2", "M8[s]", "<c16")[n % 5]) for n in range(200)}
    element |= {"large": np.zeros(10_000), "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    header, buffers = flatten(element)
    assert len(buffers) == 2
    for shift in (0, 1, 8):
        arrived = []
        for buffer in buffers:
            memory = np.empty(len(buffer) + 64 + shift, np.uint8)
            start = -memory.ctypes.data % 64 + shift
            memory[start : start + len(buffer)] = np.frombuffer(buffer, np.uint8)
            arrived.append(memory[start : start + len(buffer)])
        got = unflatten(header, arrived)
        assert compare_all([element], [got]) is None
        assert all(array.flags.aligned and array.flags.writeable for array in got.values())
        for array in got.values():
            array.view(np.uint8)[...] = 1
        got["7"].view(np.uint8)[...] = 2
        assert all((array.view(np.uint8) == 1).all() for name, array in got.items() if name != "7")


def test_wide_elements_are_not_cut_into_columns() -> None:
    run = [{f"{n}": np.full(4, i) for n in range(1000)} for i in range(4)]
    _, buffers = encode_run(run)
    assert len(buffers) == 4 and compare_all(run, received(run)) is None


def test_a_torn_block_of_small_arrays_is_refused() -> None:
    header, (block,) = flatten({f"{n}": np.arange(n) for n in range(10)})
    for torn in (block[:-1], b"", bytes(len(block) + 8)):
        with pytest.raises(CodecError):
            unflatten(header, [torn])


def hidden(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[kind.__module__], kind.__name__)


@pytest.mark.parametrize("count", [1, 3])
def test_a_class_that_is_not_here_is_named_and_can_be_passed_on(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = [{"f": Frozen(i)} for i in range(count)]
    layout, buffers = encode_run(run)
    with monkeypatch.context() as patched:
        hidden(Frozen, patched)
        codec._rebuilding.forget()
        with pytest.raises(
            CodecError, match=r"leaf_examples.Frozen with the fields number, checked.*register_type\(Frozen\)"
        ):
            decode_run(layout, buffers)
        relayed = decode_run(layout, buffers, stand_ins=True)
        with pytest.raises(AttributeError, match=r"'doubled' of a value of the class .*Frozen"):
            relayed[0]["f"].doubled()
        layout, buffers = encode_run(relayed)
    assert compare_all(run, decode_run(layout, buffers)) is None


def test_a_class_with_other_fields_is_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, buffers = encode_run([Plain(1, 2)])
    codec._rebuilding.forget()
    monkeypatch.setattr(sys.modules[Plain.__module__], "Plain", make_dataclass("Plain", ["number"]))
    with pytest.raises(CodecError, match="the fields number, values, inner"):
        decode_run(layout, buffers)


def test_a_named_tuple_whose_class_is_not_here_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, buffers = encode_run([Pair(1, "a")])
    codec._rebuilding.forget()
    with monkeypatch.context() as patched:
        hidden(Pair, patched)
        (got,) = decode_run(layout, buffers)
        assert got == (1, "a") and got.left == 1 and type(got).__name__ == "Pair"
        layout, buffers = encode_run([got])
    assert type(decode_run(layout, buffers)[0]) is Pair


def test_nothing_is_imported_and_no_code_runs_for_a_name() -> None:
    assert "sched" not in sys.modules
    for module, qualname in (("sched", "scheduler"), ("os", "system"), ("subprocess", "Popen"), ("penstock", "col")):
        for style in ("objects", "parts", "dataclass", "enum"):
            assert leaves.find_type(leaves.TypeName(style, module, qualname)) is None
    assert "sched" not in sys.modules


def test_a_class_inside_a_function_is_registered_by_name() -> None:
    @dataclass
    class Local:
        x: int

    layout, buffers = encode_run([Local(3)])
    with pytest.raises(CodecError, match=r"register_type\(Local\)"):
        decode_run(layout, buffers)
    ps.register_type(Local)
    assert decode_run(layout, buffers) == [Local(3)]


def test_wrong_registrations_are_refused() -> None:
    class Own:
        pass

    for arguments in ((3,), (Own,), (Own, str), (dict, str, str)):
        with pytest.raises(InvalidArgumentError):
            ps.register_type(*arguments)
    with pytest.raises(InvalidArgumentError, match="'objects', 'parts'"):
        ps.register_type(Own, str, str, batch="rows")


def test_a_failing_unflatten_is_named() -> None:
    class Own:
        pass

    ps.register_type(Own, lambda own: 1, lambda content: content.nothing)
    for run in ([Own()], [Own(), Own()]):
        layout, buffers = encode_run(run)
        with pytest.raises(CodecError, match="Own cannot be made of what was sent"):
            decode_run(layout, buffers)


def test_tensors_share_memory_where_they_may_and_never_write_to_what_others_read() -> None:
    layout, buffers = encode_run([torch.arange(10_000)])
    own = bytearray(buffers[0])
    (tensor,) = decode_run(layout, [own])
    tensor[0] = 7
    assert np.frombuffer(own, np.int64)[0] == 7
    (copy,) = decode_run(layout, [memoryview(bytes(own)).toreadonly()])
    copy[0] = 8
    for odd in (torch.ones(3, requires_grad=True), torch.tensor([1 + 2j]).conj(), torch.zeros(0, 3), torch.tensor(2.0)):
        (got,) = received([odd])
        assert torch.equal(got, odd.detach()) and got.dtype == odd.dtype


def test_a_zone_that_cannot_be_named_is_refused() -> None:
    class Odd(datetime.tzinfo):
        pass

    with pytest.raises(CodecError, match=r"\['when'\] is a datetime.*astimezone"):
        encode_run([{"when": datetime.datetime(2024, 1, 1, tzinfo=Odd())}])


def test_dataclasses_are_taken_as_they_are_found() -> None:
    @dataclass
    class Output(OrderedDict[str, Any]):  # as some libraries have it: a dict first of all
        x: Any = None

    @dataclass
    class Unset:
        x: int
        y: int = field(init=False)

    ps.register_type(Unset)
    (got,) = received([{"o": Output(1), "u": Unset(3)}])
    assert type(got["o"]) is dict and got["u"].x == 3 and not hasattr(got["u"], "y")
    (batch,) = ps.range(2).map(Unset).batch(2)
    assert batch.x.tolist() == [0, 1]


def test_values_of_subclasses_arrive_as_what_they_are_made_of() -> None:
    class Text(str):
        pass

    class Ordered(OrderedDict[str, int]):
        pass

    (got,) = received([{"t": Text("a"), "o": Ordered(a=1), "m": np.arange(3).view(np.matrix)}])
    assert type(got["t"]) is str and type(got["o"]) is dict and type(got["m"]) is np.ndarray
