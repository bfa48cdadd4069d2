"""Cropping, resizing and flipping."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np

from penstock.core.errors import InvalidArgumentError, choice
from penstock.image import jpeg
from penstock.image.arrays import (
    Box,
    Encoded,
    Image,
    Size,
    check_box,
    check_encoded,
    check_image,
    check_size,
    destination,
    load_cv2,
)
from penstock.image.decoding import decode, decode_other

Interpolation: TypeAlias = Literal["linear", "area", "cubic", "nearest"]

INTERPOLATIONS = {"linear": "INTER_LINEAR", "area": "INTER_AREA", "cubic": "INTER_CUBIC", "nearest": "INTER_NEAREST"}
ATTEMPTS = 10  # as in torchvision: nearly every photo fits the first, and a strip would never


def crop(image: Image | Encoded, box: Box, *, out: Image | None = None) -> Image:
    """Copy (y, x, height, width) out of an image, or an image file's bytes; a copy, so that the rest can be freed."""
    pixels = _pixels(image)
    y, x, height, width = check_box(box, *pixels.shape[:2])
    result = destination(out, (height, width, pixels.shape[2]))
    np.copyto(result, pixels[y : y + height, x : x + width])
    return result


def center_crop(image: Image | Encoded, size: Size, *, out: Image | None = None) -> Image:
    """Copy the middle of an image, or of an image file's bytes; an int is a square's side."""
    image = _pixels(image)
    (height, width), (image_height, image_width) = check_size(size), image.shape[:2]
    if height > image_height or width > image_width:
        raise InvalidArgumentError(
            f"size={size!r} is larger than the image of {image_height}x{image_width}; resize it first"
        )
    return crop(image, ((image_height - height) // 2, (image_width - width) // 2, height, width), out=out)


def resize(
    image: Image | Encoded, size: Size, *, interpolation: Interpolation = "linear", out: Image | None = None
) -> Image:
    """Resize to (height, width), or to a shorter side of `size` pixels with the proportions kept.

    Takes an image, or an image file's bytes, which are decoded in colour.

    `"area"` averages what a pixel covers: the better picture when shrinking by more than half, at several times the
    cost. `"linear"` and `"cubic"` look at the nearest 2x2 and 4x4 pixels.
    """
    image = _pixels(image)
    height, width = image.shape[:2]
    target = check_size(size)
    if isinstance(size, int | np.integer):
        short = min(height, width)
        target = (height * target[0] // short, width * target[1] // short)
    return _resize(image, target, interpolation, out)


def random_crop_box(
    height: int,
    width: int,
    rng: np.random.Generator,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Draw the box that `random_resized_crop` would cut, for cropping an image and its mask alike.

    Area is uniform over `scale` (a fraction of the image's), width over height log-uniform over `ratio`. Where no
    attempt fits, it is the largest middle part whose ratio is allowed. Always draws 22 numbers, whatever the size.

    >>> random_crop_box(1, 1, np.random.default_rng(0))
    (0, 0, 1, 1)
    """
    if not (0 < scale[0] <= scale[1] and 0 < ratio[0] <= ratio[1]):
        raise InvalidArgumentError(f"scale={scale}, ratio={ratio}: each is (low, high) with 0 < low <= high")
    # One draw for all attempts, and plain floats after it: 2 µs, where arrays of ten would cost 15.
    draws = rng.random(2 * ATTEMPTS + 2).tolist()
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(ATTEMPTS):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[2 * attempt])
        width_per_height = math.exp(log_low + (log_high - log_low) * draws[2 * attempt + 1])
        box_height, box_width = round(math.sqrt(area / width_per_height)), round(math.sqrt(area * width_per_height))
        if 0 < box_height <= height and 0 < box_width <= width:
            y = int(draws[-2] * (height - box_height + 1))
            x = int(draws[-1] * (width - box_width + 1))
            return y, x, box_height, box_width
    box_height = min(height, max(1, round(width / ratio[0])))
    box_width = min(width, max(1, round(height * ratio[1])))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def random_resized_crop(
    image: Image | Encoded,
    size: Size,
    rng: np.random.Generator,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    interpolation: Interpolation = "linear",
    out: Image | None = None,
) -> Image:
    """Cut a random part out of an image (see `random_crop_box`) and resize it to `size`.

    Takes an image, or an image file's bytes, which is faster than `decode` before it: the full picture stays in a
    buffer that the thread reuses, and of a JPEG the rows below the crop are not decoded. The pixels are the same both
    ways; only damage below the crop goes unnoticed.
    """
    target = check_size(size)
    if not _is_encoded(image):
        return _resize(_random_part(check_image(image), rng, scale, ratio), target, interpolation, out)
    view = check_encoded(image)
    if jpeg.is_jpeg(view):
        header = jpeg.read_header(view)
        y, x, height, width = random_crop_box(header.height, header.width, rng, scale=scale, ratio=ratio)
        try:
            with jpeg.scratch(header.height * header.width * 3) as buffer:
                rows = jpeg.decode_rows(view, header, 3, y + height, buffer)
                return _resize(rows[y : y + height, x : x + width], target, interpolation, out)
        except jpeg.Warned:
            return _resize(decode_other(view, 3)[y : y + height, x : x + width], target, interpolation, out)
    return _resize(_random_part(decode_other(view, 3), rng, scale, ratio), target, interpolation, out)


def flip(
    image: Image, rng: np.random.Generator, p: float = 0.5, *, vertical: bool = False, out: Image | None = None
) -> Image:
    """Mirror left and right (or top and bottom) with probability `p`; draws one number.

    `out=image` flips in place. Without `out`, an image that is not to be flipped is returned itself if it is contiguous
    and writable, else as a copy.
    """
    if not 0 <= p <= 1:
        raise InvalidArgumentError(f"p={p}: a probability lies between 0 and 1")
    flipped = rng.random() < p
    if not flipped and out is None and check_image(image).flags.c_contiguous and image.flags.writeable:
        return image
    result = destination(out, check_image(image).shape)
    if flipped:
        load_cv2().flip(image, 0 if vertical else 1, dst=result)
    elif result is not image:
        np.copyto(result, image)
    return result


def _is_encoded(image: Any) -> bool:
    return image.ndim == 1 if isinstance(image, np.ndarray) else isinstance(image, (bytes, bytearray, memoryview))


def _pixels(image: Image | Encoded) -> Image:
    return decode(image) if _is_encoded(image) else check_image(image)


def _random_part(image: Image, rng: np.random.Generator, scale: Any, ratio: Any) -> Image:
    y, x, height, width = random_crop_box(image.shape[0], image.shape[1], rng, scale=scale, ratio=ratio)
    return image[y : y + height, x : x + width]


def _resize(image: Image, size: tuple[int, int], interpolation: str, out: Image | None) -> Image:
    if interpolation not in INTERPOLATIONS:
        raise choice("interpolation", interpolation, INTERPOLATIONS)
    cv2 = load_cv2()
    result = destination(out, (*size, image.shape[2]))
    cv2.resize(image, (size[1], size[0]), dst=result, interpolation=getattr(cv2, INTERPOLATIONS[interpolation]))
    return result
