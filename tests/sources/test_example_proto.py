import numpy as np
import pytest

from penstock.core.errors import CorruptRecordError, DataError, InvalidArgumentError
from penstock.sources.example_proto import decode_example, encode_example


def field(number: int, content: bytes, wire: int = 2) -> bytes:
    """A field as the protobuf specification writes it; contents here stay below 128 bytes."""
    assert len(content) < 128
    return bytes([number << 3 | wire]) + (bytes([len(content)]) if wire == 2 else b"") + content


def example(*entries: bytes) -> bytes:
    return field(1, b"".join(field(1, entry) for entry in entries))


def entry(name: str, feature: bytes) -> bytes:
    return field(1, name.encode()) + field(2, feature)


LABEL = entry("label", field(3, field(1, b"\x07")))  # packed int64 [7]
MINUS_ONE = b"\xff" * 9 + b"\x01"  # int64 -1 as a varint
IMAGE = entry("image", field(1, field(1, b"jpeg") + field(1, b"")))
SCORES = entry("scores", field(2, field(1, b"\x00\x00\xc0\x3f\x00\x00\x00\xc0")))  # 1.5, -2.0


def test_every_kind_of_list_is_decoded() -> None:
    decoded = decode_example(example(LABEL, IMAGE, SCORES))
    np.testing.assert_equal(
        decoded, {"label": np.array([7]), "image": [b"jpeg", b""], "scores": np.array([1.5, -2.0], np.float32)}
    )
    assert decoded["label"].dtype == np.int64
    assert decoded["scores"].dtype == np.float32


def test_decoded_arrays_are_writable() -> None:
    decoded = decode_example(example(LABEL, SCORES))
    decoded["label"] += 1
    decoded["scores"] += 1
    assert decoded["label"][0] == 8 and decoded["scores"][0] == 2.5


@pytest.mark.parametrize(
    "values",
    [
        field(1, b"\x01" + MINUS_ONE + b"\x96\x01"),
        field(1, b"\x01", wire=0) + field(1, MINUS_ONE, wire=0) + field(1, b"\x96\x01", wire=0),
        field(1, b"\x01") + field(1, MINUS_ONE, wire=0) + field(1, b"\x96\x01"),
    ],
    ids=["packed", "unpacked", "mixed"],
)
def test_int64_lists_are_decoded_however_they_were_written(values: bytes) -> None:
    assert decode_example(example(entry("x", field(3, values))))["x"].tolist() == [1, -1, 150]


def test_unpacked_floats_are_decoded() -> None:
    values = field(1, b"\x00\x00\xc0\x3f", wire=5) + field(1, b"\x00\x00\x00\xc0", wire=5)
    assert decode_example(example(entry("x", field(2, values))))["x"].tolist() == [1.5, -2.0]


def test_empty_lists_keep_their_type() -> None:
    decoded = decode_example(example(entry("i", field(3, b"")), entry("f", field(2, b"")), entry("b", field(1, b""))))
    assert decoded["i"].dtype == np.int64 and decoded["f"].dtype == np.float32 and decoded["b"] == []
    assert len(decoded["i"]) == len(decoded["f"]) == 0


def test_unknown_fields_are_passed_over_and_a_value_may_stand_before_its_key() -> None:
    unknown = field(9, b"?") + field(10, b"\x96\x01", wire=0) + field(11, b"12345678", wire=1)
    swapped = field(2, field(3, field(1, b"\x07"))) + unknown + field(1, b"label")
    assert decode_example(unknown + example(swapped) + unknown)["label"].tolist() == [7]


def test_the_last_of_two_features_of_one_name_wins() -> None:
    assert decode_example(example(entry("label", field(3, field(1, b"\x05"))), LABEL))["label"].tolist() == [7]


def test_named_features_have_the_kind_asked_for() -> None:
    record = example(LABEL, IMAGE, SCORES)
    decoded = decode_example(record, {"scores": "floats", "label": "int"})
    assert list(decoded) == ["scores", "label"]
    assert type(decoded["label"]) is np.int64 and decoded["label"] == 7
    assert decode_example(record, {"image": "bytes_list"}) == {"image": [b"jpeg", b""]}
    assert decode_example(record, {"label": "ints"})["label"].tolist() == [7]
    assert decode_example(encode_example({"x": b"one"}), {"x": "bytes"}) == {"x": b"one"}
    assert type(decode_example(encode_example({"x": 0.5}), {"x": "float"})["x"]) is np.float32


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"id": "int"}, "no feature 'id'"),
        ({"empty": "ints"}, "no feature 'empty'"),
        ({"label": "float"}, "'label' is an int64 list, not a float list"),
        ({"image": "bytes"}, "'image' has 2 values, not one; read it as 'bytes_list'"),
        ({"scores": "float"}, "read it as 'floats'"),
    ],
)
def test_a_missing_or_mistyped_feature_is_named(features: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        decode_example(example(LABEL, IMAGE, SCORES, entry("empty", b"")), features)  # type: ignore[arg-type]


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match="'bytes', 'bytes_list', 'int'"):
        decode_example(example(LABEL), {"label": "long"})  # type: ignore[dict-item]


def test_a_record_cut_anywhere_but_at_a_field_is_an_error() -> None:
    record = example(LABEL, IMAGE, SCORES)
    for size in range(1, len(record)):
        with pytest.raises(CorruptRecordError):
            decode_example(record[:size])


def test_bytes_that_are_no_example_are_an_error() -> None:
    with pytest.raises(CorruptRecordError, match="at byte"):
        decode_example(b"\x0f not a message")


def test_encoding_gives_the_bytes_of_the_specification() -> None:
    assert encode_example({"label": 7}) == example(LABEL)
    assert encode_example({"image": [b"jpeg", ""], "scores": np.array([1.5, -2.0])}) == example(IMAGE, SCORES)
    assert encode_example({"x": [1, -1, 150]}) == example(
        entry("x", field(3, field(1, b"\x01" + MINUS_ONE + b"\x96\x01")))
    )


@pytest.mark.parametrize("length", [0, 1, 31, 33, 1_000])
def test_what_was_encoded_is_decoded(length: int) -> None:
    ints = np.random.default_rng(length).integers(-(1 << 62), 1 << 62, length) >> np.arange(length) % 63
    given = {"ints": ints, "floats": ints.astype(np.float32), "big": b"x" * length * 1_000, "text": ["ü"] * length}
    decoded = decode_example(encode_example(given))
    np.testing.assert_equal(decoded, given | {"big": [given["big"]], "text": ["ü".encode()] * length})


@pytest.mark.parametrize("wrong", [object(), None, np.array([1 << 63], np.uint64), 1j])
def test_values_that_no_list_can_hold_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError, match="feature 'x'"):
        encode_example({"x": wrong})
