"""Buffers made smaller for a slow link. Arrow's codecs, which work without the GIL; loaded when first used.

Each compressed buffer says in front how large it was; one that would not get smaller goes as it is.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from penstock.core.errors import CodecError, choice
from penstock.wire.elements import Buffer, bytes_over

Compression: TypeAlias = Literal["none", "lz4", "zstd"]

_CODECS = {"lz4": "lz4_raw", "zstd": "zstd"}
_SIZE = struct.Struct("<Q")
_AS_IT_IS = 1 << 63


def compress(kind: str, buffers: Sequence[Buffer]) -> list[Buffer]:
    if kind in ("none", ""):
        return list(buffers)
    codec = _codec(kind)
    return [_compress(codec, bytes_over(buffer)) for buffer in buffers]


def decompress(kind: str, buffers: Sequence[Any]) -> list[Any]:
    """Return what was compressed, in memory that is writable."""
    if kind in ("none", ""):
        return list(buffers)
    codec = _codec(kind)
    return [_decompress(codec, bytes_over(buffer)) for buffer in buffers]


def _compress(codec: Any, content: np.ndarray[Any, Any]) -> Buffer:
    packed = codec.compress(content, asbytes=True) if content.nbytes else b""
    if len(packed) < content.nbytes:
        return _SIZE.pack(content.nbytes) + packed
    return _SIZE.pack(content.nbytes | _AS_IT_IS) + content.tobytes()


def _decompress(codec: Any, content: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if content.nbytes < _SIZE.size:
        raise CodecError("a compressed buffer without its size")
    (size,) = _SIZE.unpack(content[: _SIZE.size].tobytes())
    packed = content[_SIZE.size :]
    if size & _AS_IT_IS:
        return packed.copy()
    try:
        unpacked = np.frombuffer(codec.decompress(packed, size), np.uint8)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise CodecError(f"a compressed buffer cannot be read: {error}") from error
    if unpacked.nbytes != size:
        raise CodecError(f"a compressed buffer of {unpacked.nbytes} bytes that said {size}")
    return unpacked if unpacked.flags.writeable else unpacked.copy()


@functools.cache
def _codec(kind: str) -> Any:
    if kind not in _CODECS:
        raise choice("compression", kind, ["none", *_CODECS])
    import pyarrow

    return pyarrow.Codec(_CODECS[kind])
