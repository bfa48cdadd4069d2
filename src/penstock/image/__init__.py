"""Images: decode, crop, resize, flip, normalise (extra `images`).

Images are numpy `uint8` arrays of shape (height, width, channels), colours in the order RGB. Every function is safe to
call from many threads at once and releases the GIL in its heavy part. Randomness comes from the given generator only,
with a number of draws that does not depend on the image. Results are contiguous, writable and never share
memory with the input, except where `flip` has nothing to do. `out=` writes the result into an array of yours, such as a
row of a batch.

    def augment(example, rng):
        image = ps.image.random_resized_crop(example["jpg"], 224, rng)
        return {"image": ps.image.flip(image, rng), "label": int(example["cls"])}

The first call sets opencv to one thread (`cv2.setNumThreads(0)`, a setting of the whole process): the pipeline's
threads keep the cores busy, and opencv's own pool under them only adds waiting.
"""

from penstock.image.decoding import decode
from penstock.image.geometry import center_crop, crop, flip, random_crop_box, random_resized_crop, resize
from penstock.image.jpeg import jpeg_size
from penstock.image.pixels import IMAGENET_MEAN, IMAGENET_STD, color_jitter, normalize, to_chw

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "center_crop",
    "color_jitter",
    "crop",
    "decode",
    "flip",
    "jpeg_size",
    "normalize",
    "random_crop_box",
    "random_resized_crop",
    "resize",
    "to_chw",
]
