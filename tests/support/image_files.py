"""Image files of every kind, made on the spot: name -> content, and what a viewer shows or why it is refused.

Every file that can be shown is the same picture, 16 x 8 pixels of four flat quadrants, in the depth and colours of its
kind.
"""

import io
import struct
import zlib
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

RED, GREEN, BLUE, YELLOW = (200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0)
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


class ImageFile(NamedTuple):
    """An image file: the colours of its quadrants (left to right, top to bottom), or what its refusal says."""

    content: bytes
    shown: tuple | str


def quadrants(values, dtype=np.uint8) -> np.ndarray:
    """16 x 8 pixels of four values, left to right, top to bottom."""
    return np.array(values, dtype).reshape(2, 2, -1).repeat(4, 0).repeat(8, 1).squeeze()


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, depth: int, color: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG file by hand: header, `chunks`, compressed `rows`."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    body = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def greys(*levels: int) -> tuple:
    return tuple((level,) * 3 for level in levels)


def turned(orientation: int, kind: str) -> bytes:
    """The picture stored so that EXIF `orientation` (1-8) turns it upright."""
    exif = Image.Exif()
    exif[0x0112] = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}[orientation]  # of the opposite turn
    stored = PICTURE.copy()
    stored.getexif()[0x0112] = exif[0x0112]
    stored = ImageOps.exif_transpose(stored)
    exif[0x0112] = orientation
    return saved(stored, kind, exif=exif, **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}))


def frames(kind: str, **options) -> bytes:
    return saved(PICTURE, kind, save_all=True, append_images=[Image.new("RGB", PICTURE.size)], **options)


COLORS = (RED, GREEN, BLUE, YELLOW)
PICTURE = Image.fromarray(quadrants(COLORS))
GREY = Image.fromarray(quadrants([0, 90, 180, 255]))
DEEP = Image.fromarray(quadrants([0, 257 * 90, 257 * 180 + 128, 65535], np.uint16))
CLEAR = Image.fromarray(quadrants([(*RED, 255), (*GREEN, 0), (*BLUE, 255), (0, 0, 0, 51)]))
PALETTE = PICTURE.quantize(4)
CMYK = Image.fromarray(quadrants([(0, 255, 255, 55), (255, 0, 255, 55), (255, 255, 0, 55), (0, 0, 255, 55)]), "CMYK")
JPEG = saved(PICTURE, "JPEG", quality=95, subsampling=0)
PNG = saved(PICTURE, "PNG")

IMAGE_FILES = {
    "rgb.png": ImageFile(PNG, COLORS),
    "rgb.jpg": ImageFile(JPEG, COLORS),
    "progressive.jpg": ImageFile(saved(PICTURE, "JPEG", quality=95, subsampling=0, progressive=True), COLORS),
    "png_named.jpeg": ImageFile(PNG, COLORS),
    "grey.png": ImageFile(saved(GREY, "PNG"), greys(0, 90, 180, 255)),
    "grey.jpg": ImageFile(saved(GREY, "JPEG", quality=95), greys(0, 90, 180, 255)),
    "one_bit.png": ImageFile(saved(GREY.convert("1", dither=0), "PNG"), greys(0, 0, 255, 255)),
    "palette.png": ImageFile(saved(PALETTE, "PNG"), COLORS),
    "palette_clear.png": ImageFile(
        saved(PALETTE, "PNG", transparency=PALETTE.getpixel((12, 1))), (RED, WHITE, BLUE, YELLOW)
    ),
    "alpha.png": ImageFile(saved(CLEAR, "PNG"), (RED, WHITE, BLUE, (204, 204, 204))),
    "grey_alpha.png": ImageFile(
        saved(Image.fromarray(quadrants([(0, 255), (0, 0), (100, 255), (0, 51)]), "LA"), "PNG"), greys(0, 255, 100, 204)
    ),
    "clear_color.png": ImageFile(saved(PICTURE, "PNG", transparency=GREEN), (RED, WHITE, BLUE, YELLOW)),
    "alpha_webp.png": ImageFile(saved(CLEAR, "WEBP", lossless=True), (RED, WHITE, BLUE, (204, 204, 204))),
    "16_bit_grey.png": ImageFile(saved(DEEP, "PNG"), greys(0, 90, 180, 255)),
    "16_bit_grey_tiff.png": ImageFile(saved(DEEP, "TIFF"), greys(0, 90, 180, 255)),
    "16_bit_grey_pgm.png": ImageFile(saved(DEEP, "PPM"), greys(0, 90, 180, 255)),
    "16_bit_rgb.png": ImageFile(
        png(16, 8, 16, 2, b"".join(b"\0" + np.array(row, ">u2").tobytes() for row in np.asarray(PICTURE, int) * 257)),
        COLORS,
    ),
    "cmyk.jpg": ImageFile(saved(CMYK, "JPEG", quality=95, subsampling=0), COLORS),
    "cmyk_tiff.jpg": ImageFile(saved(CMYK, "TIFF"), COLORS),
    "ycbcr_tiff.jpg": ImageFile(saved(PICTURE.convert("YCbCr"), "TIFF", compression="tiff_lzw"), COLORS),
    "gif.png": ImageFile(saved(PICTURE, "GIF"), COLORS),
    "bmp.png": ImageFile(saved(PICTURE, "BMP"), COLORS),
    **{
        f"exif_{n}.{end}": ImageFile(turned(n, kind), COLORS)
        for n, end, kind in [(n, "png", "PNG") for n in range(1, 9)]
    },
    "exif_6.jpg": ImageFile(turned(6, "JPEG"), COLORS),
    "exif_damaged.jpg": ImageFile(
        saved(PICTURE, "JPEG", quality=95, subsampling=0, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01\x12"), COLORS
    ),
    "two_pictures.jpg": ImageFile(frames("MPO", quality=95, subsampling=0), COLORS),
    "text_after_it.jpg": ImageFile(JPEG + b"appended", COLORS),
    "truncated.jpg": ImageFile(JPEG[:-60], "truncated"),
    "truncated.png": ImageFile(PNG[:-30], "truncated|broken|Truncated"),
    "header_only.png": ImageFile(PNG[:33], "not an image"),
    "damaged.png": ImageFile(PNG.replace(b"IDAT", b"IDAT\xff"), "."),
    "empty.jpg": ImageFile(b"", "not an image"),
    "zeros.jpg": ImageFile(bytes(4096), "not an image"),
    "text.jpg": ImageFile(b"<html>404 Not Found</html>", "not an image"),
    "postscript.jpg": ImageFile(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "animated_gif.png": ImageFile(frames("GIF"), "GIF with several frames"),
    "animated.png": ImageFile(frames("PNG"), "PNG with several frames"),
    "animated_webp.png": ImageFile(frames("WEBP"), "WEBP with several frames"),
    "pages_tiff.jpg": ImageFile(frames("TIFF"), "TIFF with several frames"),
    "float_tiff.jpg": ImageFile(
        saved(Image.fromarray(quadrants([0, 0.2, 0.5, 1], np.float32)), "TIFF"), "TIFF of mode F"
    ),
    "int_tiff.jpg": ImageFile(saved(Image.fromarray(quadrants([0, 9, 99, 999], np.int32)), "TIFF"), "TIFF of mode I"),
    "lab_tiff.jpg": ImageFile(saved(Image.new("LAB", (16, 8)), "TIFF"), "TIFF of mode LAB"),
    "white_is_zero_tiff.jpg": ImageFile(
        saved(DEEP, "TIFF").replace(*[struct.pack("<HHIHH", 262, 3, 1, value, 0) for value in (1, 0)]), "white as zero"
    ),
    "16_bit_clear.png": ImageFile(png(16, 8, 16, 0, (b"\0" + bytes(32)) * 8, (b"tRNS", b"\0\0")), "transparent"),
    "clear_16_bit_color.png": ImageFile(png(16, 8, 16, 2, (b"\0" + bytes(96)) * 8, (b"tRNS", bytes(6))), "transparent"),
    "4_bit_clear.png": ImageFile(png(16, 8, 4, 0, (b"\0" + bytes(8)) * 8, (b"tRNS", b"\0\7")), "transparent level"),
    "12_bit_tiff.jpg": ImageFile(
        saved(DEEP, "TIFF").replace(*[struct.pack("<HHIHH", 258, 3, 1, bits, 0) for bits in (16, 12)]), "of 12 bits"
    ),
    "signed_tiff.jpg": ImageFile(saved(GREY, "TIFF", tiffinfo={339: 2}), "signed"),
    "bomb.png": ImageFile(png(20_000, 20_000, 1, 0, bytes(100)), "89,478,485 pixels, perhaps a decompression bomb"),
    "small_bomb.png": ImageFile(
        png(10_000, 10_000, 1, 0, bytes(100)), "89,478,485 pixels, perhaps a decompression bomb"
    ),
}
