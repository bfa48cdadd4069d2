"""Values of pixels: normalising, layout, colours."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.core.errors import InvalidArgumentError, choice
from penstock.image.arrays import Image, check_image, destination, load_cv2

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
LUMA = np.array([0.299, 0.587, 0.114])


def normalize(
    image: Image,
    mean: float | Sequence[float] = IMAGENET_MEAN,
    std: float | Sequence[float] = IMAGENET_STD,
    *,
    dtype: npt.DTypeLike = np.float32,
    layout: Literal["HWC", "CHW"] = "HWC",
    out: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """Return `(image / 255 - mean) / std` as floats (16, 32 or 64 bits, bfloat16 too).

    `mean` and `std` are for pixels from 0 to 1, one number or one per channel. Computed in float64 and rounded once.
    """
    height, width, channels = check_image(image).shape
    if layout not in ("HWC", "CHW"):
        raise choice("layout", layout, ["HWC", "CHW"])
    dtype = np.dtype(dtype)
    table = _table(_per_channel("mean", mean, channels), _per_channel("std", std, channels), dtype)
    result = destination(out, (height, width, channels) if layout == "HWC" else (channels, height, width), dtype)
    raw = result.view(table.dtype)
    cv2 = load_cv2()
    if layout == "HWC":
        cv2.LUT(image, table.T.reshape(1, 256, channels), dst=raw)
    else:
        for plane, values, target in zip(cv2.split(image), table, raw):
            cv2.LUT(plane, values, dst=target)
    return result


def to_chw(image: Image, *, out: Image | None = None) -> Image:
    """Copy to channels first: [channels, height, width]."""
    height, width, channels = check_image(image).shape
    result = destination(out, (channels, height, width))
    load_cv2().split(image, list(result))
    return result


def color_jitter(
    image: Image,
    rng: np.random.Generator,
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    out: Image | None = None,
) -> Image:
    """Change brightness, contrast and saturation of an RGB image by random factors; draws three numbers.

    Each factor is uniform over [max(0, 1 - x), 1 + x]: brightness scales the pixels, contrast their distance to the
    mean grey, saturation their distance to their own grey. All three are linear, so they are applied as one matrix,
    rounded and clipped once at the end.
    """
    height, width, channels = check_image(image).shape
    if channels != 3:
        raise InvalidArgumentError(f"color_jitter needs 3 channels, not {channels}")
    amounts = np.array([brightness, contrast, saturation])
    if (amounts < 0).any():
        raise InvalidArgumentError(f"{brightness=}, {contrast=}, {saturation=}: an amount is at least 0")
    low = np.maximum(0.0, 1 - amounts)
    bright, contrasted, saturated = low + (1 + amounts - low) * rng.random(3)
    cv2 = load_cv2()
    mean_grey = LUMA @ cv2.mean(image)[:3]
    matrix = np.empty((3, 4))
    matrix[:, :3] = bright * contrasted * (saturated * np.eye(3) + (1 - saturated) * LUMA)
    matrix[:, 3] = bright * (1 - contrasted) * mean_grey
    result = destination(out, (height, width, 3))
    cv2.transform(image, matrix, dst=result)
    return result


def _per_channel(name: str, value: float | Sequence[float], channels: int) -> tuple[float, ...]:
    values = np.atleast_1d(np.asarray(value, np.float64)).tolist()
    if len(values) not in (1, channels):
        raise InvalidArgumentError(f"{name}={value!r} has {len(values)} values for an image of {channels} channels")
    return tuple(values) if len(values) == channels else tuple(values) * channels


@functools.lru_cache(maxsize=64)
def _table(mean: tuple[float, ...], std: tuple[float, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the normalised value of every byte, [channels, 256]: 256 divisions instead of one per pixel."""
    if not (dtype.kind == "f" or dtype.name == "bfloat16") or dtype.itemsize > 8:
        raise InvalidArgumentError(f"dtype={dtype.name!r} is not a float of 16, 32 or 64 bits")
    if not all(std):
        raise InvalidArgumentError(f"std={std} contains 0")
    values = (np.arange(256) / 255 - np.array(mean)[:, None]) / np.array(std)[:, None]
    table: npt.NDArray[Any] = values.astype(dtype)
    # A lookup copies bits: opencv need not know what 16-bit floats are.
    if dtype.itemsize == 2:
        table = table.view(np.int16)
    table.setflags(write=False)
    return table
