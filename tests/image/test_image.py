"""Images: the pixels are those of decoding in full, cropping and resizing by hand."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import image as psi
from penstock.core.errors import ImageDecodeError, InvalidArgumentError, MissingExtraError
from penstock.image import arrays, jpeg

SAMPLING = {
    "444": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    "422": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    "420": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    "440": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    "411": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
}


def picture(height: int = 211, width: int = 307, channels: int = 3, seed: int = 0) -> np.ndarray:
    """A photo-like picture: smooth, with noise and hard edges."""
    rng = np.random.default_rng(seed)
    smooth = cv2.resize(rng.integers(0, 256, (6, 8, channels), dtype=np.uint8), (width, height))
    smooth = smooth.reshape(height, width, channels).astype(float)
    smooth[height // 3 : height // 2, width // 4 : width // 2] = (255, 0, 60, 128)[:channels]
    return np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)


def jpeg_of(image: np.ndarray, *flags: int, sampling: str = "420", quality: int = 90) -> bytes:
    settings_ = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLING[sampling], *flags]
    return bytes(cv2.imencode(".jpg", image[..., ::-1] if image.shape[2] == 3 else image, settings_)[1])


def file_of(suffix: str, image: np.ndarray, *flags: int) -> bytes:
    order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[image.shape[2]]
    return bytes(cv2.imencode(suffix, np.ascontiguousarray(image[..., order]), list(flags))[1])


def cmyk_jpeg(image: np.ndarray) -> bytes:
    return simplejpeg.encode_jpeg(image, colorspace="CMYK", colorsubsampling="444", quality=95)


JPEGS = {
    **{f"subsampled {name}": jpeg_of(picture(), sampling=name) for name in SAMPLING},
    "grey": jpeg_of(picture(channels=1)),
    "progressive": jpeg_of(picture(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "restart markers": jpeg_of(picture(), cv2.IMWRITE_JPEG_RST_INTERVAL, 7),
    "optimised": jpeg_of(picture(), cv2.IMWRITE_JPEG_OPTIMIZE, 1, quality=30),
    "cmyk": cmyk_jpeg(picture(channels=4)),
    "whole blocks": jpeg_of(picture(160, 320)),
    "tall": jpeg_of(picture(900, 40)),
    "bytes after the end": jpeg_of(picture()) + b"\0" * 100,
}


def scan_start(data: bytes) -> int:
    return data.index(b"\xff\xda") + 14


# Decoding


@pytest.mark.parametrize("data", JPEGS.values(), ids=JPEGS)
def test_jpeg_decodes_to_opencvs_pixels(data: bytes) -> None:
    expected = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    np.testing.assert_array_equal(psi.decode(data), expected)
    assert psi.jpeg_size(data) == expected.shape[:2]


@pytest.mark.parametrize("data", JPEGS.values(), ids=JPEGS)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_decoding_a_crop_gives_the_pixels_of_decoding_in_full(data: bytes, channels: int) -> None:
    full = psi.decode(data, channels=channels)
    height, width = full.shape[:2]
    rng = np.random.default_rng(0)
    for _ in range(40):
        y, x = int(rng.integers(height)), int(rng.integers(width))
        h, w = int(rng.integers(1, height - y + 1)), int(rng.integers(1, width - x + 1))
        np.testing.assert_array_equal(
            psi.decode(data, channels=channels, crop=(y, x, h, w)), full[y : y + h, x : x + w]
        )


@pytest.mark.parametrize("sampling", SAMPLING)
def test_every_last_row_of_a_crop_is_exact(sampling: str) -> None:
    """Chroma interpolation reaches across block rows: a decoder stopped a row too early shows here."""
    data = jpeg_of(picture(100, 48), sampling=sampling)
    full = psi.decode(data)
    for bottom in range(1, 101):
        np.testing.assert_array_equal(psi.decode(data, crop=(bottom - 1, 0, 1, 48)), full[bottom - 1 : bottom])


def test_rows_below_a_crop_are_not_decoded() -> None:
    data = JPEGS["subsampled 420"]
    half = data[: len(data) // 2] + b"\xff\xd9"
    np.testing.assert_array_equal(psi.decode(half, crop=(0, 0, 60, 307)), psi.decode(data)[:60])
    with pytest.raises(ImageDecodeError, match="premature end"):
        psi.decode(half)
    with pytest.raises(ImageDecodeError, match="premature end"):
        psi.decode(half, crop=(100, 0, 60, 307))


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tiff", ".webp"])
@pytest.mark.parametrize("stored", [1, 3, 4])
def test_lossless_formats_decode_exactly(suffix: str, stored: int) -> None:
    if (suffix, stored) in {(".webp", 1), (".bmp", 4)}:
        pytest.skip("WebP has no grey, and not every opencv writes alpha to BMP")
    image = picture(channels=stored)
    flags = (cv2.IMWRITE_WEBP_QUALITY, 101) if suffix == ".webp" else ()
    if suffix == ".webp" and stored == 4:
        image[..., 3] |= 1  # colours under full transparency are not kept
    data = file_of(suffix, image, *flags)
    rgb = image[..., :3] if stored != 1 else np.repeat(image, 3, axis=2)
    np.testing.assert_array_equal(psi.decode(data), rgb)
    alpha = image[..., 3:] if stored == 4 else np.full_like(image[..., :1], 255)
    np.testing.assert_array_equal(psi.decode(data, channels=4), np.concatenate([rgb, alpha], axis=2))
    grey = psi.decode(data, channels=1)
    assert grey.shape == (*image.shape[:2], 1)
    assert np.abs(grey[..., 0] - rgb @ [0.299, 0.587, 0.114]).max() <= 1
    np.testing.assert_array_equal(psi.decode(data, crop=(3, 5, 7, 11)), rgb[3:10, 5:16])


def test_sixteen_bit_png_keeps_the_upper_eight_bits() -> None:
    image = np.random.default_rng(0).integers(0, 1 << 16, (31, 17, 3), dtype=np.uint16)
    np.testing.assert_array_equal(psi.decode(file_of(".png", image)), image >> 8)


def test_float_pixels_are_refused_by_name() -> None:
    with pytest.raises(ImageDecodeError, match=r"3 x float32"):
        psi.decode(file_of(".tiff", picture().astype(np.float32)))


def test_gif_gives_its_first_frame() -> None:
    if not hasattr(cv2, "imdecodeanimation"):
        pytest.skip("this opencv reads no GIF")

    def frame(color: int) -> bytes:
        codes = 4 | color << 3 | 5 << 6  # clear, one pixel, end: three bits each
        return b",\0\0\0\0\x01\0\x01\0\0\x02\x02" + codes.to_bytes(2, "little") + b"\0"

    palette = b"\xff\x80\0" + b"\0\xff\0" + b"\0\0\xff" + b"\xff\xff\xff"
    gif = b"GIF89a\x01\0\x01\0\x91\0\0" + palette + frame(0) + frame(2) + b";"
    np.testing.assert_array_equal(psi.decode(gif), [[[255, 128, 0]]])


def test_cmyk_becomes_rgb_by_ink_times_black() -> None:
    data = JPEGS["cmyk"]
    ink = simplejpeg.decode_jpeg(data, "CMYK").astype(int)
    assert np.abs(psi.decode(data) - ink[..., :3] * ink[..., 3:] / 255).max() <= 2


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda d: np.frombuffer(d, np.uint8)])
def test_encoded_bytes_come_in_any_buffer(wrap: Callable[[bytes], Any]) -> None:
    for data in (JPEGS["grey"], file_of(".png", picture())):
        np.testing.assert_array_equal(psi.decode(wrap(data)), psi.decode(data))
        crop = psi.random_resized_crop(wrap(data), 16, np.random.default_rng(0))
        np.testing.assert_array_equal(crop, psi.random_resized_crop(data, 16, np.random.default_rng(0)))


def with_exif(data: bytes, orientation: int, order: str = "little") -> bytes:
    entry = b"".join(n.to_bytes(size, order) for n, size in [(0x0112, 2), (3, 2), (1, 4), (orientation, 2), (0, 2)])
    mark = b"II" if order == "little" else b"MM"
    tiff = mark + (42).to_bytes(2, order) + (8).to_bytes(4, order) + (1).to_bytes(2, order) + entry + bytes(4)
    segment = b"Exif\0\0" + tiff
    return data[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + data[2:]


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientation_is_applied_when_asked_for(orientation: int, order: str) -> None:
    plain = JPEGS["subsampled 420"]
    data = with_exif(plain, orientation, order)
    upright = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    np.testing.assert_array_equal(psi.decode(data, exif=True), upright)
    np.testing.assert_array_equal(psi.decode(data, exif=True, crop=(150, 20, 40, 50)), upright[150:190, 20:70])
    np.testing.assert_array_equal(psi.decode(data), psi.decode(plain))


# Damage


def entry_points(data: bytes) -> list[Callable[[], object]]:
    return [
        lambda: psi.decode(data),
        lambda: psi.decode(data, crop=(0, 0, 1, 1)),
        lambda: psi.random_resized_crop(data, 8, np.random.default_rng(0)),
    ]


@pytest.mark.parametrize("name", ["subsampled 420", "progressive", "grey", "restart markers", "cmyk"])
def test_a_jpeg_cut_anywhere_is_an_error(name: str) -> None:
    data = JPEGS[name]
    header = scan_start(data)
    for end in [*range(0, header, 3), *range(header, len(data), len(data) // 50), len(data) - 2]:
        for call in entry_points(data[:end]):
            with pytest.raises(ImageDecodeError, match=f"{end:,} bytes|no bytes"):
                call()


@pytest.mark.parametrize("suffix", [".png", ".webp", ".bmp", ".tiff"])
def test_other_formats_cut_anywhere_are_an_error(suffix: str) -> None:
    data = file_of(suffix, picture(64, 64))
    for end in range(0, len(data) - 16, len(data) // 12):
        for call in entry_points(data[:end]):
            with pytest.raises(ImageDecodeError):
                call()


def test_bytes_of_no_known_format_are_an_error_that_shows_them() -> None:
    with pytest.raises(ImageDecodeError, match=r"no known format begins with b'<htm'") as caught:
        psi.decode(b"<html>404</html>")
    assert caught.value.size_bytes == 16
    with pytest.raises(ImageDecodeError, match="does not start with a JPEG marker"):
        psi.jpeg_size(file_of(".png", picture()))


def test_a_header_that_claims_absurd_sizes_is_an_error() -> None:
    data = bytearray(JPEGS["grey"])
    at = jpeg.read_header(memoryview(data)).height_at
    for height_width in (b"\xff\xff\xff\xff", b"\0\0\0\0"):
        data[at : at + 4] = height_width
        for call in [*entry_points(bytes(data)), lambda: psi.jpeg_size(data)]:
            with pytest.raises(ImageDecodeError, match="header claims"):
                call()


@pytest.mark.parametrize("components,sampling", [(0, 0x11), (255, 0x11), (1, 0x00), (1, 0xFF)])
def test_a_header_with_impossible_components_is_an_error(components: int, sampling: int) -> None:
    data = bytearray(JPEGS["grey"])
    at = jpeg.read_header(memoryview(data)).height_at
    data[at + 4], data[at + 6] = components, sampling
    for call in entry_points(bytes(data)):
        with pytest.raises(ImageDecodeError):
            call()


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 700), st.binary(min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_damaged_header_gives_pixels_or_the_typed_error(at: int, junk: bytes, seed: int) -> None:
    data = bytearray(jpeg_of(picture(40, 40)))
    data[at : at + len(junk)] = junk
    try:
        height, width = psi.jpeg_size(data)
        if height * width < 1 << 22:
            psi.decode(data)
            psi.random_resized_crop(data, 8, np.random.default_rng(seed))
    except ImageDecodeError:
        pass


def test_warnings_that_leave_the_pixels_whole_are_no_error() -> None:
    """Bytes before the end marker and odd JFIF versions: common in public datasets, shown by every viewer."""
    data = JPEGS["subsampled 420"]
    assert data[6:10] == b"JFIF"
    for odd in (
        data[:-2] + b"\0" * 65 + data[-2:],
        data[:11] + b"\0" + data[12:],
        JPEGS["cmyk"][:-2] + b"\0\0\xff\xd9",
    ):
        whole = JPEGS["cmyk"] if b"Adobe" in odd[:20] else data
        np.testing.assert_array_equal(psi.decode(odd), psi.decode(whole))
        np.testing.assert_array_equal(psi.decode(odd, crop=(9, 8, 170, 50)), psi.decode(whole)[9:179, 8:58])
        crop = psi.random_resized_crop(odd, 32, np.random.default_rng(1))
        np.testing.assert_array_equal(crop, psi.random_resized_crop(whole, 32, np.random.default_rng(1)))


# Crops


@pytest.mark.parametrize("data", JPEGS.values(), ids=JPEGS)
@pytest.mark.parametrize("interpolation", ["linear", "area", "cubic", "nearest"])
def test_random_resized_crop_equals_decoding_cropping_and_resizing_by_hand(data: bytes, interpolation: Any) -> None:
    full = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    flag = getattr(cv2, f"INTER_{interpolation.upper()}")
    for seed in range(25):
        y, x, h, w = psi.random_crop_box(*full.shape[:2], np.random.default_rng(seed))
        expected = cv2.resize(np.ascontiguousarray(full[y : y + h, x : x + w]), (64, 48), interpolation=flag)
        for image in (data, full, psi.decode(data)):
            rng = np.random.default_rng(seed)
            crop = psi.random_resized_crop(image, (48, 64), rng, interpolation=interpolation)
            np.testing.assert_array_equal(crop, expected)


def test_other_formats_crop_the_same_way() -> None:
    image = picture()
    for seed in range(10):
        expected = psi.random_resized_crop(image, 50, np.random.default_rng(seed))
        crop = psi.random_resized_crop(file_of(".png", image), 50, np.random.default_rng(seed))
        np.testing.assert_array_equal(crop, expected)


ranges = st.tuples(st.floats(0.001, 3), st.floats(0.001, 3)).map(lambda pair: (min(pair), max(pair)))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6000), st.integers(1, 6000), st.integers(0, 2**32 - 1), ranges, ranges)
def test_random_crop_box_lies_in_the_image(height: int, width: int, seed: int, scale: Any, ratio: Any) -> None:
    y, x, h, w = psi.random_crop_box(height, width, np.random.default_rng(seed), scale=scale, ratio=ratio)
    assert 0 <= y < y + h <= height
    assert 0 <= x < x + w <= width


def test_random_crop_boxes_cover_the_asked_areas_ratios_and_positions() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([psi.random_crop_box(1000, 1000, rng, scale=(0.2, 0.6), ratio=(0.5, 2.0)) for _ in range(4000)])
    areas, log_ratios = boxes[:, 2] * boxes[:, 3] / 1e6, np.log2(boxes[:, 3] / boxes[:, 2])
    assert 0.199 < areas.min() < 0.21 and 0.55 < areas.max() < 0.601
    assert -1.01 < log_ratios.min() < -0.9 and 0.9 < log_ratios.max() < 1.01
    for start, length in ((boxes[:, 0], boxes[:, 2]), (boxes[:, 1], boxes[:, 3])):
        place = (start / np.maximum(1, 1000 - length))[length < 990]
        assert abs(place.mean() - 0.5) < 0.02 and place.min() < 0.01 and place.max() > 0.99


def test_strips_fall_back_to_the_largest_allowed_middle() -> None:
    rng = np.random.default_rng(0)
    assert psi.random_crop_box(30, 5000, rng) == (0, 2480, 30, 40)
    assert psi.random_crop_box(5000, 30, rng) == (2480, 0, 40, 30)


@pytest.mark.parametrize("height,width", [(1, 1), (1, 5000), (5000, 1), (2, 3)])
def test_extreme_sizes_pass_through_everything(height: int, width: int) -> None:
    image = picture(height, width)
    rng = np.random.default_rng(0)
    for data in (jpeg_of(image), file_of(".png", image)):
        assert psi.decode(data).shape == (height, width, 3)
        assert psi.random_resized_crop(data, 224, rng).shape == (224, 224, 3)
    assert psi.resize(image, (3, 5)).shape == (3, 5, 3)
    assert psi.resize(image, 2).shape == (height * 2 // min(height, width), width * 2 // min(height, width), 3)
    assert psi.center_crop(image, 1).shape == (1, 1, 3)
    assert psi.normalize(image, layout="CHW").shape == (3, height, width)
    np.testing.assert_array_equal(psi.flip(image, rng, p=1), image[:, ::-1])
    np.testing.assert_array_equal(psi.to_chw(image), image.transpose(2, 0, 1))


def test_the_generator_alone_decides_and_is_left_alike_by_every_image() -> None:
    small, large = jpeg_of(picture(1, 5000)), jpeg_of(picture())
    states = []
    for data in (small, large, picture(), file_of(".png", picture())):
        rng = np.random.default_rng(5)
        np.random.seed(len(data))  # the global generator must not matter
        first = psi.flip(psi.random_resized_crop(data, 20, rng), rng)
        states.append(rng.bit_generator.state)
        rng = np.random.default_rng(5)
        np.testing.assert_array_equal(first, psi.flip(psi.random_resized_crop(data, 20, rng), rng))
    assert all(state == states[0] for state in states)


def test_crop_and_center_crop_copy_the_asked_part() -> None:
    image = picture()
    part = psi.crop(image, (10, 20, 30, 40))
    np.testing.assert_array_equal(part, image[10:40, 20:60])
    assert not np.shares_memory(part, image)
    np.testing.assert_array_equal(psi.center_crop(image, (11, 7)), image[100:111, 150:157])
    with pytest.raises(InvalidArgumentError, match=r"does not lie in an image of 211x307"):
        psi.crop(image, (200, 0, 12, 1))
    with pytest.raises(InvalidArgumentError, match="resize it first"):
        psi.center_crop(image, 212)


@pytest.mark.parametrize("box", [(-1, 0, 1, 1), (0, 0, 0, 1), (0, 300, 1, 8), (0, 0, 212, 1)])
def test_a_box_outside_of_the_image_is_refused_by_decode(box: Any) -> None:
    for data in (JPEGS["grey"], file_of(".png", picture())):
        with pytest.raises(InvalidArgumentError, match="does not lie"):
            psi.decode(data, crop=box)


def test_files_are_resized_and_cropped_as_what_they_decode_to() -> None:
    data = file_of(".png", picture(40, 60))
    image = psi.decode(data)
    np.testing.assert_array_equal(psi.resize(data, 20), psi.resize(image, 20))
    np.testing.assert_array_equal(
        psi.resize(data, (8, 9), interpolation="area"), psi.resize(image, (8, 9), interpolation="area")
    )
    np.testing.assert_array_equal(psi.center_crop(data, 30), psi.center_crop(image, 30))
    np.testing.assert_array_equal(psi.crop(data, (1, 2, 3, 4)), psi.crop(image, (1, 2, 3, 4)))


def test_resize_takes_a_shorter_side_or_both() -> None:
    image = picture(200, 301)
    np.testing.assert_array_equal(psi.resize(image, 100), cv2.resize(image, (150, 100)))
    area = psi.resize(image, (50, 60), interpolation="area")
    np.testing.assert_array_equal(area, cv2.resize(image, (60, 50), interpolation=cv2.INTER_AREA))
    assert psi.resize(picture(channels=1), np.int64(30)).shape == (30, 43, 1)


def test_flip_follows_p_and_the_generator() -> None:
    image = picture()
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(psi.flip(image, rng, p=1), image[:, ::-1])
    np.testing.assert_array_equal(psi.flip(image, rng, p=1, vertical=True), image[::-1])
    assert psi.flip(image, rng, p=0) is image
    flips = sum(psi.flip(image, rng) is not image for _ in range(400))
    assert 160 < flips < 240
    mirrored = image[:, ::-1].copy()
    assert psi.flip(image, rng, p=1, out=image) is image
    np.testing.assert_array_equal(image, mirrored)


# Values


@pytest.mark.parametrize("dtype,tolerance", [("float32", 0), ("float64", 1e-12), ("float16", 0)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_normalize_is_the_plain_formula(dtype: str, tolerance: float, channels: int) -> None:
    image = picture(channels=channels)
    mean, std = [0.485, 0.456, 0.406, 0.5][:channels], [0.229, 0.224, 0.225, 0.3][:channels]
    expected = ((image / 255 - np.array(mean)) / np.array(std)).astype(dtype)
    for layout, wanted in (("HWC", expected), ("CHW", expected.transpose(2, 0, 1))):
        got = psi.normalize(image, mean, std, dtype=dtype, layout=layout)  # type: ignore[arg-type]
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)
        assert got.dtype == dtype and got.flags.c_contiguous and got.flags.writeable
    grey = psi.normalize(image, 0.5, 0.25, dtype=dtype)
    np.testing.assert_allclose(grey, ((image / 255 - 0.5) / 0.25).astype(dtype), rtol=0, atol=tolerance)


def test_normalize_makes_bfloat16() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    expected = ((picture() / 255 - np.array(psi.IMAGENET_MEAN)) / np.array(psi.IMAGENET_STD)).astype(bfloat16)
    np.testing.assert_array_equal(psi.normalize(picture(), dtype=bfloat16), expected)


@pytest.mark.parametrize(
    "bad,message",
    [
        ({"mean": (0.5, 0.5)}, "2 values for an image of 3 channels"),
        ({"std": (1, 0, 1)}, "contains 0"),
        ({"dtype": "int32"}, "not a float"),
        ({"layout": "NCHW"}, "is not one of 'HWC', 'CHW'"),
    ],
)
def test_normalize_says_what_is_wrong(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        psi.normalize(picture(), **bad)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_to_chw_moves_the_channels(channels: int) -> None:
    image = picture(channels=channels)
    np.testing.assert_array_equal(psi.to_chw(image), image.transpose(2, 0, 1))


def test_color_jitter_applies_brightness_contrast_and_saturation() -> None:
    image = picture()
    luma = np.array([0.299, 0.587, 0.114])
    for seed in range(20):
        b, c, s = 0.6 + 0.8 * np.random.default_rng(seed).random(3)
        plain = image * b
        plain = c * plain + (1 - c) * (plain @ luma).mean()
        plain = np.clip(s * plain + (1 - s) * (plain @ luma)[..., None], 0, 255)
        rng = np.random.default_rng(seed)
        jittered = psi.color_jitter(image, rng, brightness=0.4, contrast=0.4, saturation=0.4)
        assert np.abs(jittered - plain).max() <= 0.75  # opencv computes with ten fractional bits
    np.testing.assert_array_equal(psi.color_jitter(image, rng), image)
    in_place = image.copy()
    rngs = np.random.default_rng(3), np.random.default_rng(3)
    psi.color_jitter(in_place, rngs[0], brightness=0.4, saturation=0.4, out=in_place)
    np.testing.assert_array_equal(in_place, psi.color_jitter(image, rngs[1], brightness=0.4, saturation=0.4))


# Memory

RESULTS: dict[str, Callable[[np.ndarray | None], np.ndarray]] = {
    "crop": lambda out: psi.crop(picture(), (0, 0, 24, 24), out=out),
    "center_crop": lambda out: psi.center_crop(picture(), 24, out=out),
    "resize": lambda out: psi.resize(picture(), (24, 24), out=out),
    "random_resized_crop": lambda out: psi.random_resized_crop(
        JPEGS["subsampled 420"], 24, np.random.default_rng(0), out=out
    ),
    "flip": lambda out: psi.flip(picture(24, 24), np.random.default_rng(0), p=1, out=out),
    "no flip": lambda out: psi.flip(picture(24, 24), np.random.default_rng(0), p=0, out=out),
    "color_jitter": lambda out: psi.color_jitter(picture(24, 24), np.random.default_rng(0), contrast=0.5, out=out),
    "to_chw": lambda out: psi.to_chw(picture(24, 24), out=out),
    "normalize": lambda out: psi.normalize(picture(24, 24), out=out),
    "normalize CHW": lambda out: psi.normalize(picture(24, 24), layout="CHW", out=out),
}


@pytest.mark.parametrize("call", RESULTS.values(), ids=RESULTS)
def test_results_are_contiguous_writable_and_go_into_a_row_of_a_batch(call: Any) -> None:
    alone = call(None)
    assert alone.flags.c_contiguous and alone.flags.writeable
    batch = np.zeros((3, *alone.shape), alone.dtype)
    row = batch[1]
    assert call(row) is row
    np.testing.assert_array_equal(batch[1], alone)
    assert not batch[0].any() and not batch[2].any()


@pytest.mark.parametrize("call", RESULTS.values(), ids=RESULTS)
def test_an_out_that_does_not_fit_is_refused(call: Any) -> None:
    good = call(None)
    read_only = np.zeros_like(good)
    read_only.setflags(write=False)
    wide = np.zeros((*good.shape[:-1], good.shape[-1] * 2), good.dtype)
    for bad in (good[1:], good.astype(np.int16), read_only, wide[..., ::2]):
        with pytest.raises(InvalidArgumentError, match="the result needs a contiguous, writable"):
            call(bad)


def test_results_do_not_live_in_the_reused_buffer() -> None:
    first, second = jpeg_of(picture(seed=1)), jpeg_of(picture(seed=2))
    for make in (
        lambda data: psi.random_resized_crop(data, (211, 307), np.random.default_rng(0), scale=(1, 1), ratio=(0.1, 9)),
        lambda data: psi.decode(data, crop=(0, 0, 100, 307)),
        lambda data: psi.decode(data, crop=(0, 0, 211, 307)),
    ):
        kept = make(first)
        before = kept.copy()
        make(second)
        np.testing.assert_array_equal(kept, before)
        assert kept.flags.c_contiguous and kept.flags.writeable


def test_unflipped_read_only_or_strided_images_are_copied() -> None:
    image = picture()
    image.setflags(write=False)
    for given_ in (image, picture()[:, ::-1], picture()[:, 5:50]):
        result = psi.flip(given_, np.random.default_rng(0), p=0)
        assert result.flags.c_contiguous and result.flags.writeable
        np.testing.assert_array_equal(result, given_)


def test_inputs_may_be_strided_or_read_only() -> None:
    for given_ in (picture()[:, ::-1], picture().transpose(1, 0, 2), picture()[::2, 7:90], np.asarray(picture())):
        given_.setflags(write=False)
        plain = np.ascontiguousarray(given_)
        for call in (
            lambda image: psi.resize(image, 30),
            lambda image: psi.normalize(image),
            lambda image: psi.normalize(image, layout="CHW"),
            lambda image: psi.to_chw(image),
            lambda image: psi.flip(image, np.random.default_rng(0), p=1),
            lambda image: psi.color_jitter(image, np.random.default_rng(0), contrast=0.3),
            lambda image: psi.random_resized_crop(image, 30, np.random.default_rng(0)),
        ):
            np.testing.assert_array_equal(call(given_), call(plain))


def test_the_scratch_buffer_is_reused_lent_once_and_not_kept_when_huge() -> None:
    with jpeg.scratch(1000) as first, jpeg.scratch(1000) as second:
        assert not np.shares_memory(first, second)
    with jpeg.scratch(900) as again:
        assert np.shares_memory(again, first) or np.shares_memory(again, second)
    with jpeg.scratch(jpeg.MAX_KEPT_BYTES + 1) as huge:
        pass
    with jpeg.scratch(10) as small:
        assert not np.shares_memory(small, huge)


@pytest.mark.parametrize(
    "bad",
    [picture()[..., 0], picture().astype(np.float32), picture()[..., :2], picture()[:0], "path.jpg", None],
    ids=["2-D", "float", "2 channels", "empty", "str", "None"],
)
def test_what_is_no_image_is_refused(bad: Any) -> None:
    rng = np.random.default_rng(0)
    for call in (
        lambda: psi.resize(bad, 10),
        lambda: psi.crop(bad, (0, 0, 1, 1)),
        lambda: psi.flip(bad, rng, p=0),
        lambda: psi.flip(bad, rng, p=1),
        lambda: psi.normalize(bad),
        lambda: psi.random_resized_crop(bad, 10, rng),
    ):
        with pytest.raises(InvalidArgumentError, match=r"an image (is|has)|encoded images are"):
            call()


def test_arguments_outside_of_their_range_are_refused() -> None:
    rng = np.random.default_rng(0)
    for call in (
        lambda: psi.decode(JPEGS["grey"], channels=2),
        lambda: psi.resize(picture(), 0),
        lambda: psi.resize(picture(), 10, interpolation="lanczos"),  # type: ignore[arg-type]
        lambda: psi.random_resized_crop(picture(), 10, rng, scale=(0.5, 0.1)),
        lambda: psi.random_resized_crop(picture(), 10, rng, ratio=(0, 1)),
        lambda: psi.flip(picture(), rng, p=1.5),
        lambda: psi.color_jitter(picture(), rng, contrast=-0.1),
        lambda: psi.color_jitter(picture(channels=1), rng),
    ):
        with pytest.raises(InvalidArgumentError):
            call()


# Threads


@pytest.fixture
def switches_never() -> Iterator[None]:
    """No thread is asked to give up the GIL: another one runs only when it is released."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def another_thread_runs_during(work: Callable[[], object], deadline_s: float) -> bool:
    """Whether a waiting thread gets to count while this one does nothing but `work`."""
    gate, count = threading.Lock(), [0]
    gate.acquire()

    def run() -> None:
        gate.acquire()
        for _ in range(1000):
            count[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    gate.release()
    end = time.monotonic() + deadline_s
    while not count[0] and time.monotonic() < end:
        work()
    reached = count[0]
    thread.join()
    return reached == 1000


def test_the_gil_is_released_in_every_heavy_function(switches_never: None) -> None:
    image = np.tile(picture(500, 500), (4, 4, 1))
    data, png, rng = jpeg_of(image), file_of(".png", image), np.random.default_rng(0)
    assert not another_thread_runs_during(lambda: sum(range(10_000)), 0.3)
    for work in (
        lambda: psi.decode(data),
        lambda: psi.decode(png),
        lambda: psi.random_resized_crop(data, 224, rng),
        lambda: psi.resize(image, 2000),
        lambda: psi.flip(image, rng, p=1),
        lambda: psi.normalize(image),
        lambda: psi.normalize(image, layout="CHW"),
        lambda: psi.to_chw(image),
        lambda: psi.color_jitter(image, rng, contrast=0.5),
    ):
        work()
        assert another_thread_runs_during(work, 20)


def test_many_threads_give_what_one_gives() -> None:
    files = [jpeg_of(picture(60 + 7 * k, 200 - 5 * k, seed=k)) for k in range(24)]

    def augment(k: int) -> np.ndarray:
        rng = np.random.default_rng(k)
        return psi.normalize(psi.flip(psi.random_resized_crop(files[k % 24], 32, rng), rng), layout="CHW")

    with ThreadPoolExecutor(8) as pool:
        for k, result in enumerate(pool.map(augment, range(240))):
            np.testing.assert_array_equal(result, augment(k))


def test_opencv_is_set_to_one_thread() -> None:
    arrays.load_cv2.cache_clear()
    cv2.setNumThreads(2)
    psi.resize(picture(), 10)
    assert cv2.getNumThreads() == 1


# Packages


@pytest.mark.parametrize(
    "package,loader,call",
    [
        ("simplejpeg", arrays.load_simplejpeg, lambda: psi.decode(JPEGS["grey"])),
        ("cv2", arrays.load_cv2, lambda: psi.resize(picture(), 10)),
    ],
)
def test_a_missing_package_is_named_at_the_first_call(
    package: str, loader: Any, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader.cache_clear()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[images\]'"):
            call()
    call()


def test_importing_the_module_imports_no_image_package() -> None:
    code = "import sys, penstock.image; print(sorted({'cv2', 'simplejpeg'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
