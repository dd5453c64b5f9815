"""Decodes an image file to the RGB or grey pixels that a viewer shows, or raises `BrokenImage` with the reason.

Files are not trusted: pixels, frames and formats are bounded. Colour profiles are ignored, as in the published recipes.
"""

import errno
import math
import os
import warnings
from contextlib import suppress
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from engine.runtime.errors import UserError
from engine.runtime.text import describe_error

FORMATS = ("JPEG", "PNG", "PPM", "GIF", "BMP", "WEBP", "TIFF")
"""Formats that are decoded, whatever the name of the file. Pillow knows more; one starts a PostScript interpreter."""

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
"""Suffixes of files of these formats."""

Levels = tuple[float, float]
"""Grey levels that are shown as black and as white."""

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Pillow's pixel formats with a defined appearance; grey levels of more than 8 bits are handled apart."""

GIVE_LEVELS = "give the levels of black and white, data.levels=[BLACK, WHITE]"
"""Remedy for grey levels whose range no file states."""

PHOTOMETRIC = 262
"""TIFF tag whose value is 0 where white is zero; Pillow inverts such images for 8 bits only."""

MAX_BYTES = 2**30
"""Size of a file that is decoded: 12 bytes for each of the largest number of pixels."""

MAX_HEADER_READS = 100_000
"""Number of reads that may find the pixels of a file. Pillow looks for them byte by byte in a comment, or in a hole."""


class BrokenImage(UserError):
    """An image that cannot be used. The message is one line: the file, where it is known, and the reason."""


class DataError(UserError):
    """A failure of the store or of this machine, or data that has changed: it ends a run, and is no broken image."""

    def __init__(self, message: str):  # torch puts the traceback of a worker in front
        super().__init__(message.strip().rpartition(f"{type(self).__name__}: ")[2])


MACHINE = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV),
    *(errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ESTALE),
}
"""Errors of a machine and its storage. EIO (a bad sector), ENOENT and EACCES concern the file alone."""


def pass_on(error: Exception) -> None:
    """Raises DataError for an error, in reading an image, that is of the machine; the image is then not broken."""
    if isinstance(error, OSError) and error.errno in MACHINE:
        of_machine = "an error of this machine or its storage, and no broken image; the last checkpoint stands"
        raise DataError(f"{error.filename or 'data'}: {error.strerror}: {of_machine}") from error


def decode(file: BinaryIO, mode: Literal["RGB", "L"] = "RGB", levels: Levels | None = None) -> Image.Image:
    """Decodes the picture in an open file to 8-bit RGB or grey levels (L), upright, over white where it is transparent.

    Grey levels of 16 or 32 bits and floating-point ones are mapped linearly from `levels` to 0 and 255, clipped and
    rounded; without `levels`, 16 bits are from 0 to 65535, as their formats define them. CMYK and palettes are
    converted; colours become grey by their luma (ITU-R 601-2), as in timm; a JPEG with further pictures after it (MPO)
    gives the first. The function refuses animations and multiple pages, 32-bit integer and floating-point levels
    without `levels` (no file states their range), more than `Image.MAX_IMAGE_PIXELS` (89 million) pixels, more than
    `MAX_BYTES`, a header of more than `MAX_HEADER_READS`, and anything that Pillow cannot decode completely.

    Raises:
        BrokenImage: the image is refused; the message says why. DataError: the machine failed.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about metadata that does not affect the pixels
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            size = file.seek(0, os.SEEK_END)
            if size > MAX_BYTES:
                raise BrokenImage(f"{size:,} bytes, more than {MAX_BYTES:,}")
            file.seek(0)
            header = CountedReads(file)
            image = Image.open(cast(BinaryIO, header), formats=FORMATS)
            header.left = math.inf
            if getattr(image, "is_animated", False) and image.format != "MPO":  # counting frames may take minutes
                raise BrokenImage(f"{image.format} with several frames; an image has one")
            return convert(image, mode, levels)
    except BrokenImage:
        raise
    except Image.UnidentifiedImageError:
        raise BrokenImage(f"not an image, or not one of {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BrokenImage(f"more than {Image.MAX_IMAGE_PIXELS:,} pixels, perhaps a decompression bomb") from None
    except Exception as error:  # decoders may raise anything on a damaged file
        pass_on(error)
        raise BrokenImage(describe_error(error)) from error


class CountedReads:
    """An open `file` that raises `BrokenImage` after `MAX_HEADER_READS` reads."""

    def __init__(self, file: BinaryIO):
        self.file, self.left = file, float(MAX_HEADER_READS)

    def read(self, size: int = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise BrokenImage(f"no pixels within {MAX_HEADER_READS:,} reads of the file; its header is too long")
        return self.file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def convert(image: Image.Image, mode: Literal["RGB", "L"] = "RGB", levels: Levels | None = None) -> Image.Image:
    """Converts `image` as `decode` does; `image` itself is turned upright in place.

    Raises:
        BrokenImage: the image has no defined appearance.
        Exception: any that Pillow raises for a damaged file.
    """
    image.load()
    with suppress(Exception):  # a damaged orientation tag is ignored
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _map_levels(image, levels)
    if image.mode not in MODES:
        raise BrokenImage(f"{image.format} of mode {image.mode}, whose levels have no defined look")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    return image if mode == "RGB" else image.convert(mode)  # exact where the picture is grey


def _map_levels(image: Image.Image, levels: Levels | None) -> Image.Image:
    """Maps grey levels of more than 8 bits to 8 bits, see `decode`.

    Raises:
        BrokenImage: their range is not known, one of them is transparent, or one is not finite.
    """
    if "transparency" in image.info:
        raise BrokenImage("16-bit grey levels with a transparent one")
    if levels is None:
        if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
            raise BrokenImage(f"{image.format} of mode {image.mode}, whose levels have no defined look; {GIVE_LEVELS}")
        if isinstance(image, TiffImageFile) and image.tag_v2.get(PHOTOMETRIC) == 0:
            raise BrokenImage(f"16-bit grey levels with white as zero; {GIVE_LEVELS}")
        levels = 0, 65535
    black, white = levels
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise BrokenImage("grey levels that are not finite")
    values -= black
    values *= 255
    values /= white - black
    return Image.fromarray((values.clip(0, 255) + 0.5).astype(np.uint8))
