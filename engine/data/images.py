"""Decodes an image file to the RGB or grey pixels that a viewer shows, or raises `BrokenImage` with the reason.

Files are not trusted: pixels, frames and formats are bounded. Colour profiles are ignored, as in the published recipes.
"""

import errno
import os
import warnings
from contextlib import suppress
from typing import BinaryIO, Literal

import numpy as np
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, TiffImageFile

from engine.runtime.errors import UserError
from engine.runtime.text import describe_error

FORMATS = ("JPEG", "PNG", "PPM", "GIF", "BMP", "WEBP", "TIFF")
"""Formats that are decoded, whatever the name of the file. Pillow knows more; one starts a PostScript interpreter."""

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
"""Suffixes of files of these formats."""

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Pillow's pixel formats with a defined appearance; grey levels of more than 8 bits are handled apart."""

MAX_BYTES = 2**30
"""Size of a file that is decoded: 12 bytes for each of the largest number of pixels."""


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


def decode(file: BinaryIO, mode: Literal["RGB", "L"] = "RGB") -> Image.Image:
    """Decodes the picture in an open file to 8-bit RGB or grey levels (L), upright, over white where it is transparent.

    Grey levels of 16 bits are mapped linearly from 0 and 65535, as their formats define them, to 0 and 255. CMYK and
    palettes are converted; colours become grey by their luma (ITU-R 601-2), as in timm; a JPEG with further pictures
    after it (MPO) gives the first. The function refuses animations and multiple pages, 32-bit integer and
    floating-point levels (no file states their range), more than `Image.MAX_IMAGE_PIXELS` (89 million) pixels, more
    than `MAX_BYTES`, and anything that Pillow cannot decode completely.

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
            image = Image.open(file, formats=FORMATS)
            if getattr(image, "is_animated", False) and image.format != "MPO":  # counting frames may take minutes
                raise BrokenImage(f"{image.format} with several frames; an image has one")
            return convert(image, mode)
    except BrokenImage:
        raise
    except Image.UnidentifiedImageError:
        raise BrokenImage(f"not an image, or not one of {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BrokenImage(f"more than {Image.MAX_IMAGE_PIXELS:,} pixels, perhaps a decompression bomb") from None
    except Exception as error:  # decoders may raise anything on a damaged file
        pass_on(error)
        raise BrokenImage(describe_error(error)) from error


def convert(image: Image.Image, mode: Literal["RGB", "L"] = "RGB") -> Image.Image:
    """Converts `image` as `decode` does; `image` itself is turned upright in place.

    Raises:
        BrokenImage: the image has no defined appearance.
        Exception: any that Pillow raises for a damaged file.
    """
    levels = [getattr(tile, "args", "") for tile in getattr(image, "tile", [])]  # their layout in the file
    image.load()
    with suppress(Exception):  # a damaged orientation tag is ignored
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        image = _to_8_bits(image)
    if image.mode not in MODES:
        raise BrokenImage(f"{image.format} of mode {image.mode}, whose levels have no defined look")
    if isinstance(image, TiffImageFile) and {*image.tag_v2.get(SAMPLEFORMAT, ())} & {2, 3}:
        raise BrokenImage("TIFF of signed or floating-point levels")
    if "transparency" in image.info and {"L;2", "L;4", "RGB;16B"} & {*map(str, levels)}:  # Pillow compares 8 bits
        raise BrokenImage("PNG of 2, 4 or 16 bits with a transparent level")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    return image if mode == "RGB" else image.convert(mode)  # exact where the picture is grey


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Maps grey levels of 16 bits to 8 bits. BrokenImage: one of them is transparent, or white is zero."""
    if "transparency" in image.info:
        raise BrokenImage("16-bit grey levels with a transparent one")
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    if tags.get(PHOTOMETRIC_INTERPRETATION) == 0:  # Pillow inverts 8 bits
        raise BrokenImage("16-bit grey levels with white as zero")
    if (bits := tags.get(BITSPERSAMPLE, (16,))[0]) != 16:
        raise BrokenImage(f"grey levels of {bits} bits; convert them to 8 or 16")
    values = np.asarray(image).astype(np.float64) * 255 / 65535
    return Image.fromarray((values.clip(0, 255) + 0.5).astype(np.uint8))
