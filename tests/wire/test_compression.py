from __future__ import annotations

import numpy as np
import pytest

from penstock.core.errors import CodecError, InvalidArgumentError
from penstock.wire.compression import compress, decompress
from penstock.wire.runs import decode_run, encode_run


@pytest.mark.parametrize("kind", ["none", "lz4", "zstd"])
def test_runs_survive_compression(kind: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8)
    elements = [{"x": np.arange(5000) % 7, "y": noise, "z": np.empty(0), "w": b"", "s": "text"}]
    layout, buffers = encode_run(elements)
    sent = [bytearray(buffer) for buffer in compress(kind, buffers)]
    (got,) = decode_run(layout, decompress(kind, sent))
    assert (got["x"] == elements[0]["x"]).all() and (got["y"] == noise).all() and got["z"].shape == (0,)
    assert got["x"].flags.writeable and got["x"].flags.aligned and got["y"].flags.writeable
    if kind != "none":
        assert len(sent[0]) < 10_000 and len(sent[1]) == 10_008


@pytest.mark.parametrize("kind", ["lz4", "zstd"])
def test_what_is_cut_or_garbage_is_refused(kind: str) -> None:
    (packed,) = compress(kind, [bytes(10_000)])
    for content in (b"", b"abc", bytes(packed)[:-5], bytes(packed)[:8] + b"\xff" * 20, b"\xff" * 7 + b"\x00" + b"ab"):
        with pytest.raises(CodecError):
            decompress(kind, [content])


def test_an_unknown_kind_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(InvalidArgumentError, match="'none', 'lz4', 'zstd'"):
        compress("snappy", [])
