"""What the image functions take and give: arrays, boxes, encoded bytes, and the optional packages behind them."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ImageDecodeError, InvalidArgumentError, MissingExtraError

Image: TypeAlias = npt.NDArray[np.uint8]
Encoded: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
Box: TypeAlias = tuple[int, int, int, int]
"""(y, x, height, width) in pixels from the upper left corner."""
Size: TypeAlias = int | tuple[int, int]


@functools.cache
def load_cv2() -> Any:
    """Import opencv and turn its thread pool off."""
    try:
        import cv2
    except ImportError as error:
        raise MissingExtraError("opencv-python-headless", "images") from error
    cv2.setNumThreads(0)
    return cv2


@functools.cache
def load_simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError as error:
        raise MissingExtraError("simplejpeg", "images") from error
    return simplejpeg


def check_encoded(data: Any) -> memoryview:
    """Return a view of encoded bytes."""
    try:
        view = memoryview(data)
    except TypeError:
        raise InvalidArgumentError(f"encoded images are bytes, not {type(data).__name__}") from None
    if view.ndim != 1 or view.itemsize != 1 or not view.c_contiguous:
        raise InvalidArgumentError(f"encoded images are flat, contiguous bytes, not {view.format}{view.shape}")
    if not len(view):
        raise ImageDecodeError("image", 0, "there are no bytes")
    return view if view.format == "B" else view.cast("B")


def check_image(image: Any) -> Image:
    """Return `image`, or say what an image is."""
    if (
        not isinstance(image, np.ndarray)
        or image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[2] not in (1, 3, 4)
    ):
        found = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise InvalidArgumentError(f"an image is a uint8 array [height, width, 1, 3 or 4], not {found}")
    if not image.size:
        raise InvalidArgumentError(f"an image has at least one pixel, not {list(image.shape)}")
    return image


def check_box(box: Box, height: int, width: int) -> Box:
    """Return `box`, which lies inside an image of that size."""
    y, x, box_height, box_width = box
    if not (0 <= y < y + box_height <= height and 0 <= x < x + box_width <= width):
        raise InvalidArgumentError(
            f"box (y, x, height, width) = {tuple(box)} does not lie in an image of {height}x{width}"
        )
    return box


def check_size(size: Size) -> tuple[int, int]:
    """Return (height, width); an int means a square."""
    height, width = (size, size) if isinstance(size, int | np.integer) else size
    if height < 1 or width < 1:
        raise InvalidArgumentError(f"size={size!r}: height and width must be at least 1")
    return int(height), int(width)


def destination(out: npt.NDArray[Any] | None, shape: tuple[int, ...], dtype: Any = np.uint8) -> npt.NDArray[Any]:
    """Return the array to write to: `out` if it fits, a new one if there is none."""
    if out is None:
        return np.empty(shape, dtype)
    # opencv would quietly write somewhere else if the shape differed.
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not out.flags.writeable:
        kind = ("" if out.flags.c_contiguous else "non-contiguous ") + ("" if out.flags.writeable else "read-only ")
        raise InvalidArgumentError(
            f"out is a {kind}{out.dtype}{list(out.shape)}; "
            f"the result needs a contiguous, writable {np.dtype(dtype)}{list(shape)}"
        )
    return out
