"""Operations of `augment.batched` on the images of a batch that need them, with arguments for each image.

Functions of torchvision take one factor for all images. All of these truncate as Pillow's do, so that only the
interpolating ones (rotation, shear, translation, blur) have other pixels than Pillow's.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample, pad
from torchvision.transforms.v2.functional import equalize

BLUR_TAPS = 6
"""Pixels on each side that a blur reaches: three times timm's largest radius."""


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Maps the levels of uint8 images (n, C, H, W) by tables of whole numbers (n, 256), or (n, C, 256) by channel."""
    tables = tables.to(torch.uint8).view(len(images), -1, 256).expand(-1, images.shape[1], -1)
    return tables.gather(2, images.flatten(2).long()).view_as(images)


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretches the levels of every channel to 0 and 255; in float64, and truncated, as Pillow."""
    low, high = images.flatten(2).double().aminmax(dim=2, keepdim=True)
    levels = torch.arange(256, device=images.device, dtype=torch.float64)
    scale = torch.full_like(high, 255) / (high - low)  # `255 / x` would multiply by the reciprocal
    tables = (levels * scale - low * scale).clamp(0, 255)
    return look_up(images, torch.where(high > low, tables, levels))


def luma(images: Tensor) -> Tensor:
    """Pillow's grey levels of images (n, C, H, W), (n, 1, H, W) int32: ITU-R 601-2 in fixed point."""
    if images.shape[1] == 1:
        return images.int()
    red, green, blue = images.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16


def blend(degenerate: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    """Pillow's enhancement: from `degenerate` (fp32) at factor 0 to `images` at 1 and beyond, truncated to uint8."""
    return (degenerate + factors * (images.float() - degenerate)).clamp_(0, 255).to(torch.uint8)


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blends images (n, C, H, W) with their mean grey level, by factors (n, 1)."""
    grey = luma(images)
    mean = (grey.sum((1, 2, 3), dtype=torch.int64).double() / grey[0].numel() + 0.5).floor().float()[:, None]
    return look_up(images, blend(mean, torch.arange(256, device=images.device), factors))


def color(images: Tensor, factors: Tensor) -> Tensor:
    """Blends images (n, C, H, W) with their grey levels, by factors (n, 1)."""
    return blend(luma(images).float(), images, factors[..., None, None])


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blends images (n, C, H, W) with smooth ones, by factors (n, 1).

    A smooth pixel is the mean of 3 x 3 pixels, where the middle one counts 5 times. Pixels at the edge stay.
    """
    smooth = images.float()
    rows = smooth[..., :-2, :] + smooth[..., 1:-1, :] + smooth[..., 2:, :]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = smooth[..., 1:-1, 1:-1]
    inner.copy_(box.add_(inner, alpha=4).div_(13).add_(0.5).floor_())
    return blend(smooth, images, factors[..., None, None])


def affine(images: Tensor, arguments: Tensor, mode: str) -> Tensor:
    """Pillow's affine map of images (n, C, H, W): places outside of the image get the fill.

    Args:
        arguments: 6 elements of a matrix from output places (pixels, centres at 0.5) to input places, and the fill of
            every channel, (n, 6 + C).
        mode: of `grid_sample`. Its cubic kernel has the parameter -0.75, and that of Pillow's maps -1.
    """
    height, width = images.shape[2:]
    a, b, c, d, e, f = arguments[:, :6, None, None].unbind(1)
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    x, y = a * x + (b * y + c), d * x + (e * y + f)
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    grid = torch.stack([x * (2 / width) - 1, y * (2 / height) - 1], dim=-1)
    found = grid_sample(images.float(), grid, mode, "border", align_corners=False)
    found.add_(0.01).clamp_(0, 255)  # whole levels, which rounding errors have made smaller, are not truncated
    return torch.where(is_inside[:, None], found, arguments[:, 6:, None, None]).to(torch.uint8)


def blur(images: Tensor, radii: Tensor) -> Tensor:
    """Gaussian blur of images (n, C, H, W) with standard deviations (n, 1), pixels; Pillow's has three box filters."""
    (n, channels), distance = images.shape[:2], torch.arange(-BLUR_TAPS, BLUR_TAPS + 1, device=images.device)
    weights = (-(distance**2) / (2 * radii**2)).softmax(1).repeat_interleave(channels, 0)[:, None]
    padded = pad(images.float(), (BLUR_TAPS,) * 4, mode="replicate").flatten(0, 1)[None]
    blurred = conv2d(padded, weights[..., None], groups=n * channels)
    blurred = conv2d(blurred, weights[:, :, None], groups=n * channels)
    return blurred.add_(0.5).clamp_(0, 255).to(torch.uint8).view_as(images)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "table": look_up,
    "autocontrast": autocontrast,
    "equalize": lambda images, _: equalize(images),
    "contrast": contrast,
    "color": color,
    "sharpness": sharpness,
    "bicubic": partial(affine, mode="bicubic"),
    "bilinear": partial(affine, mode="bilinear"),
    "blur": blur,
}
"""Name of a step -> function of the uint8 images (n, C, H, W) that need it and of their arguments (n, a)."""
