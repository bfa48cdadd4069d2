"""Bytes to pixels, whatever the format."""

from __future__ import annotations

import numpy as np

from penstock.core.errors import ImageDecodeError, choice
from penstock.image import jpeg
from penstock.image.arrays import Box, Encoded, Image, check_box, check_encoded, load_cv2

# opencv's conversion from (channels it decoded, in the order BGR) to (channels wanted, in the order RGB).
CONVERSIONS = {
    (1, 3): "COLOR_GRAY2RGB",
    (1, 4): "COLOR_GRAY2RGBA",
    (3, 1): "COLOR_BGR2GRAY",
    (3, 3): "COLOR_BGR2RGB",
    (3, 4): "COLOR_BGR2RGBA",
    (4, 1): "COLOR_BGRA2GRAY",
    (4, 3): "COLOR_BGRA2RGB",
    (4, 4): "COLOR_BGRA2RGBA",
}
# How the stored image lies, by EXIF orientation: (swap rows and columns, then flip by opencv's code).
UPRIGHT = {2: (False, 1), 3: (False, -1), 4: (False, 0), 5: (True, None), 6: (True, 1), 7: (True, -1), 8: (True, 0)}
FORMATS = {
    b"\xff\xd8": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"RIFF": "WebP",
}


def decode(data: Encoded, *, channels: int = 3, crop: Box | None = None, exif: bool = False) -> Image:
    """Decode an image file's bytes to an array [height, width, channels].

    The format is found by the first bytes: JPEG, PNG, WebP, BMP, TIFF, and the first frame of a GIF, which needs
    opencv 4.11 (and whatever else the installed opencv reads).

    `channels` is 3 (RGB), 1 (grey) or 4 (RGBA). Grey is repeated to make colours; an alpha channel is dropped, not
    blended; a missing one is 255. CMYK becomes RGB without a colour profile. Of 16-bit samples the upper 8 bits stay.

    `crop` is (y, x, height, width) and gives the same pixels as decoding in full and cutting. Of a JPEG, rows below it
    are not decoded, so that damage there goes unnoticed. `exif=True` turns a JPEG upright as its EXIF orientation says,
    before the crop; by default the orientation is ignored, as torchvision and TensorFlow do.

    Raises `ImageDecodeError` for empty, truncated or corrupt data.
    """
    if channels not in jpeg.COLORSPACES:
        raise choice("channels", channels, jpeg.COLORSPACES)
    view = check_encoded(data)
    if not jpeg.is_jpeg(view):
        return _cut(decode_other(view, channels), crop)
    header = jpeg.read_header(view)
    orientation = jpeg.exif_orientation(view) if exif else 1
    try:
        if crop is None or orientation != 1:
            buffer = np.empty(header.height * header.width * channels, np.uint8)
            image = jpeg.decode_rows(view, header, channels, header.height, buffer)
        else:
            y, x, height, width = check_box(crop, header.height, header.width)
            with jpeg.scratch(header.height * header.width * channels) as buffer:
                rows = jpeg.decode_rows(view, header, channels, y + height, buffer)
                return rows[y : y + height, x : x + width].copy()
    except jpeg.Warned:
        image = decode_other(view, channels)
    return _cut(_turn_upright(image, orientation), crop)


def decode_other(view: memoryview, channels: int) -> Image:
    """Decode with opencv."""
    cv2 = load_cv2()
    head = bytes(view[:4])
    name = next((name for magic, name in FORMATS.items() if head.startswith(magic)), "image")
    try:
        image = cv2.imdecode(np.frombuffer(view, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise ImageDecodeError(name, len(view), str(error).strip()) from None
    if image is None:
        reason = "it is truncated or corrupt" if name != "image" else f"no known format begins with {head!r}"
        raise ImageDecodeError(name, len(view), reason)
    if image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    found = 1 if image.ndim == 2 else image.shape[2]
    if image.dtype != np.uint8 or found not in jpeg.COLORSPACES:
        raise ImageDecodeError(name, len(view), f"pixels of {found} x {image.dtype} are not supported")
    if (found, channels) != (1, 1):
        image = cv2.cvtColor(image, getattr(cv2, CONVERSIONS[found, channels]))
    result: Image = image.reshape(*image.shape[:2], channels)
    return result


def _turn_upright(image: Image, orientation: int) -> Image:
    if orientation == 1:
        return image
    swapped, code = UPRIGHT[orientation]
    shape = image.shape
    cv2 = load_cv2()
    turned = cv2.transpose(image) if swapped else image
    if code is not None:
        turned = cv2.flip(turned, code)
    result: Image = turned.reshape(*turned.shape[:2], shape[2])
    return result


def _cut(image: Image, crop: Box | None) -> Image:
    if crop is None:
        return image
    y, x, height, width = check_box(crop, *image.shape[:2])
    return image[y : y + height, x : x + width].copy()
