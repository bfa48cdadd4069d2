"""JPEG: the header read in Python, the pixels by simplejpeg (libjpeg-turbo).

*Rows below a crop are not decoded.* simplejpeg has no partial decoding, but a sequential JPEG stores its rows from top
to bottom, so the same bytes under a header that claims fewer rows give the same pixels, and the decoder stops early.
The rows kept end one block row below the crop, because chroma is interpolated across block rows. The bytes left over
make libjpeg warn; the buffer is complete by then. Rejected: scaled decoding, which changes pixels.

*Which damage is an error?* Data that ends early or cannot be parsed. Not an error are warnings that leave the pixels
whole and that well-known datasets contain: bytes before a marker, an odd JFIF version, an odd Adobe colour transform.
There opencv decodes instead, as simplejpeg raises on any warning.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np

from penstock.core.errors import ImageDecodeError
from penstock.image.arrays import Encoded, Image, check_encoded, load_simplejpeg

MAX_PIXELS = 1 << 30  # opencv's own limit: beyond it a damaged header would make us ask for gigabytes
MAX_KEPT_BYTES = 16 << 20  # a thread keeps a scratch buffer for photos up to 5 megapixels, not for the odd giant

COLORSPACES = {1: "GRAY", 3: "RGB", 4: "RGBA"}
LEFT_OVER = "extraneous bytes before marker"
# Past these opencv decodes what other readers show too; the last is a rare layout, not a fault.
HARMLESS = (LEFT_OVER, "unknown JFIF revision", "Unknown Adobe color transform", "Could not determine subsampling")

SOI, EOI, EXIF = b"\xff\xd8", b"\xff\xd9", b"Exif\0\0"
SOS, APP1 = 0xDA, 0xE1
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
SEQUENTIAL_FRAMES = frozenset({0xC0, 0xC1})
WITHOUT_CONTENT = frozenset({0x00, 0x01, *range(0xD0, 0xD9)})
ORIENTATION_TAG = 0x0112


class JpegHeader(NamedTuple):
    height: int
    width: int
    components: int
    height_at: int
    """Position of the two bytes that hold the height."""
    block_rows: int
    """Pixel rows of one row of blocks (MCUs)."""
    one_scan: bool
    """Sequential with all components in one scan: rows follow each other from top to bottom."""


class Warned(Exception):
    """simplejpeg refused a file whose pixels are whole."""


def is_jpeg(data: memoryview) -> bool:
    return data[:2] == SOI


def jpeg_size(data: Encoded) -> tuple[int, int]:
    """Return (height, width) from the header; no pixel is decoded, and the data may end right after it."""
    view = check_encoded(data)
    if not is_jpeg(view):
        raise ImageDecodeError("JPEG", len(view), "it does not start with a JPEG marker")
    frame_at = next((start for marker, start, _ in _segments(view) if marker in FRAMES), len(view))
    return _frame_size(view, frame_at)


def read_header(view: memoryview) -> JpegHeader:
    """Read everything up to the first scan."""
    frame, frame_at = 0, len(view)
    for marker, start, _ in _segments(view):
        if marker in FRAMES:
            frame, frame_at = marker, start
        elif marker == SOS:
            break
    height, width = _frame_size(view, frame_at)
    components = view[frame_at + 5]
    vertical = max([1, *(factors & 15 for factors in view[frame_at + 7 : frame_at + 6 + 3 * components : 3])])
    one_scan = frame in SEQUENTIAL_FRAMES and view[start : start + 1] == bytes([components])
    return JpegHeader(height, width, components, frame_at + 1, 8 * vertical, one_scan)


def exif_orientation(view: memoryview) -> int:
    """Return how the picture lies, 1 (upright) to 8, as its EXIF data says; 1 if they say nothing that makes sense."""
    for marker, start, length in _segments(view):
        if marker == SOS:
            break
        if marker == APP1 and view[start : start + 6] == EXIF:
            return _tiff_orientation(bytes(view[start + 6 : start + length]))
    return 1


def decode_rows(view: memoryview, header: JpegHeader, channels: int, rows: int, buffer: Image) -> Image:
    """Decode at least the first `rows` rows into the flat `buffer`, which has room for the whole image.

    Raises `Warned` where opencv should be asked instead.
    """
    decode_jpeg, colorspace = load_simplejpeg().decode_jpeg, COLORSPACES[channels]
    row_bytes = header.width * channels
    kept = (-(-rows // header.block_rows) + 1) * header.block_rows
    # Without its end marker the file is cut short, and only decoding in full says so. CMYK passes through a temporary.
    if kept < header.height and header.one_scan and header.components < 4 and view[-2:] == EOI:
        shorter = bytearray(view)
        shorter[header.height_at : header.height_at + 2] = kept.to_bytes(2, "big")
        top = buffer[: kept * row_bytes]
        try:
            decode_jpeg(shorter, colorspace, buffer=top)
            return top.reshape(kept, header.width, channels)
        except ValueError as error:
            if LEFT_OVER in str(error):
                return top.reshape(kept, header.width, channels)
    whole = buffer[: header.height * row_bytes]
    try:
        decode_jpeg(view, colorspace, buffer=whole)
    except ValueError as error:
        if any(text in str(error) for text in HARMLESS):
            raise Warned from error
        raise ImageDecodeError("JPEG", len(view), str(error)) from None
    return whole.reshape(header.height, header.width, channels)


_kept = threading.local()


@contextmanager
def scratch(size_bytes: int) -> Iterator[Image]:
    """Lend this thread's scratch buffer: fresh memory for every image costs a page fault per 4 KB.

    The buffer is taken out while it is lent, so that a signal handler that decodes gets another one.
    """
    buffer: Image | None = getattr(_kept, "buffer", None)
    _kept.buffer = None
    if buffer is None or len(buffer) < size_bytes:
        buffer = np.empty(size_bytes, np.uint8)
    yield buffer
    if len(buffer) <= MAX_KEPT_BYTES:
        _kept.buffer = buffer


def _segments(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, length) of the content of each segment; the caller stops at the first scan."""
    position = 2
    try:
        while True:
            while view[position] != 0xFF:
                position += 1
            while (marker := view[position]) == 0xFF:
                position += 1
            position += 1
            if marker in WITHOUT_CONTENT:
                continue
            length = view[position] << 8 | view[position + 1]
            yield marker, position + 2, length - 2
            position += length
    except IndexError:
        raise ImageDecodeError("JPEG", len(view), "it ends inside its header") from None


def _frame_size(view: memoryview, frame_at: int) -> tuple[int, int]:
    if frame_at + 6 > len(view):
        raise ImageDecodeError("JPEG", len(view), "it ends inside its header")
    height = view[frame_at + 1] << 8 | view[frame_at + 2]
    width = view[frame_at + 3] << 8 | view[frame_at + 4]
    if not 0 < height * width <= MAX_PIXELS:
        raise ImageDecodeError("JPEG", len(view), f"its header claims {height}x{width} pixels")
    return height, width


def _tiff_orientation(tiff: bytes) -> int:
    order: Literal["little", "big"] = "little" if tiff[:2] == b"II" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)

    directory = number(4, 4)
    for entry in range(directory + 2, min(directory + 2 + 12 * number(directory, 2), len(tiff)), 12):
        if number(entry, 2) == ORIENTATION_TAG:
            value = number(entry + 8, 2)
            return value if 1 <= value <= 8 else 1
    return 1
