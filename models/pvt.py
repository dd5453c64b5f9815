"""PVT-v2 (Wang et al. 2022, arXiv:2106.13797): four stages, with overlapping patches and convolution in MLPs.

A layer's context tells the mechanism the spatial reduction R = 8, 4, 2, 1 that PVT-v2 assigns to the stages. Parameter
names are those of timm's PyramidVisionTransformerV2, except for the joint `qkv` projection (see
`models.convert.from_timm_pvt`).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from timm.layers import LayerNorm, to_2tuple
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from attention import Grid
from attention.options import Options, option
from models.assignment import LayerFactory
from models.base import (
    Backbone,
    check_heads,
    check_key_mask,
    check_tokens,
    drop_path_rates,
    fill_masked,
    intermediate_outputs,
)
from models.block import Block, run_blocks


class OverlapPatchEmbed(nn.Module):
    """Overlapping patches: (B, in_chans, height, width) -> (B, ceil(height / stride), ceil(width / stride), dim)."""

    def __init__(self, in_chans: int, dim: int, patch_size: int, stride: int):
        super().__init__()
        self.proj = _conv(in_chans, dim, patch_size, stride)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class ConvMlp(nn.Module):
    """MLP with an optional `relu` and a depthwise 3x3 convolution over the grid before its nonlinearity."""

    def __init__(self, dim: int, hidden_dim: int, drop: float, relu: bool):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.relu = nn.ReLU() if relu else nn.Identity()
        self.dwconv = _conv(hidden_dim, hidden_dim, 3, groups=hidden_dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        x = self.relu(self.fc1(x))
        if key_mask is not None:  # at the edge of an image, the convolution sees zeros, as at that of the grid
            x = x.masked_fill(~key_mask[..., None], 0)
        x = self.dwconv(x.mT.unflatten(2, grid))
        return self.drop(self.fc2(self.drop(self.act(x.flatten(2).mT))))


class Stage(nn.Module):
    """Patch embedding to half the resolution (all stages but the first), blocks, and LayerNorm."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[Block], dim: int):
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.norm = LayerNorm(dim)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Output of the stage before (B, C, H, W), or the embedded image (B, H, W, C) -> this stage's (B, C, H, W).

        key_mask: (B, H, W) of this stage's grid. Masked tokens of the output are zero, for the next stage.
        """
        x = self.downsample(x)
        _, H, W, _ = x.shape
        x, mask = x.flatten(1, 2), None if key_mask is None else key_mask.flatten(1)
        x = self.norm(run_blocks(self.blocks, x, (H, W), mask)).mT.unflatten(2, (H, W))
        return x if key_mask is None else x.masked_fill(~key_mask[:, None], 0)


class Pvt(Backbone):
    """PVT-v2; `attention` has a factory for every block of every stage."""

    feature_indices = (0, 1, 2, 3)
    published_attention = "sra"

    class Config(Options):
        img_size: int | tuple[int, int] = option(
            224,
            "image side, or height and width, that attention is built for; pixels. Others are accepted",
            low=1,
            high=4096,
        )
        in_chans: int = option(3, "image channels", low=1)
        num_classes: int = option(1000, "classes; 0: no classifier", low=0)
        embed_dims: tuple[int, int, int, int] = option((64, 128, 320, 512), "channels of a token, per stage", low=1)
        depths: tuple[int, int, int, int] = option((3, 4, 6, 3), "blocks per stage", low=1, high=100)
        num_heads: tuple[int, int, int, int] = option((1, 2, 5, 8), "attention heads of a block, per stage", low=1)
        mlp_ratios: tuple[float, float, float, float] = option(
            (8.0, 8.0, 4.0, 4.0), "width of the MLP over that of a token, per stage", above=0, high=64
        )
        mlp_relu: bool = option(False, "ReLU before an MLP's convolution, as in PVT-v2-Li (with attention linear_sra)")
        qkv_bias: bool = option(True, "bias of the query, key and value projections")
        global_pool: Literal["avg", ""] = option("avg", "classifier's input: mean over the grid, or '': the grid")
        drop_rate: float = option(0.0, "dropout rate before the classifier", low=0, below=1)
        proj_drop_rate: float = option(0.0, "dropout rate after attention and MLP layers", low=0, below=1)
        drop_path_rate: float = option(0.0, "stochastic depth: rate of the last block, linear from 0", low=0, below=1)

        def __post_init__(self) -> None:
            height, width = to_2tuple(self.img_size)
            check_tokens((math.ceil(height / 4), math.ceil(width / 4)))
            for dim, num_heads in zip(self.embed_dims, self.num_heads, strict=True):
                check_heads(dim, num_heads)

    def __init__(self, config: Config, attention: Sequence[LayerFactory]):
        super().__init__(config, config.embed_dims[-1], ("avg", ""))
        dims, depths = config.embed_dims, config.depths
        self.patch_embed = OverlapPatchEmbed(config.in_chans, dims[0], patch_size=7, stride=4)
        rates = drop_path_rates(config.drop_path_rate, sum(depths))
        stages = []
        where: dict[str, Any] = {"depth": sum(depths), "qkv_bias": config.qkv_bias, "shared": {}}
        for s in range(len(depths)):
            first, hidden_dim, drop = sum(depths[:s]), int(dims[s] * config.mlp_ratios[s]), config.proj_drop_rate
            where["grid"] = tuple(math.ceil(side / (4 * 2**s)) for side in to_2tuple(config.img_size))
            where |= {"dim": dims[s], "num_heads": config.num_heads[s], "reduction": (8, 4, 2, 1)[s]}
            blocks = []
            for layer in range(first, first + depths[s]):
                attn = attention[layer](**where, layer=layer, proj_drop=drop)
                mlp = ConvMlp(dims[s], hidden_dim, drop, config.mlp_relu)
                blocks.append(Block(dims[s], attn, mlp, rates[layer]))
            downsample = OverlapPatchEmbed(dims[s - 1], dims[s], patch_size=3, stride=2) if s else nn.Identity()
            stages.append(Stage(downsample, blocks, dims[s]))
        self.stages = nn.ModuleList(stages)
        self.feature_info = [
            {"module": f"stages.{s}", "num_chs": dim, "reduction": 4 * 2**s} for s, dim in enumerate(dims)
        ]
        self.reset_classifier(config.num_classes)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that group parameters by stage, as timm's do, for its layer-wise learning rates."""
        return {"stem": r"^patch_embed", "blocks": r"^stages\.(\d+)"}

    def forward_features(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Images -> the last stage's normalised grid (B, C, H, W); masked tokens are the mean of the others."""
        x = self.patch_embed(x)
        if key_mask is not None:
            check_key_mask(key_mask, (x.shape[0], x.shape[1], x.shape[2]))
        for s, stage in enumerate(self.stages):
            x = stage(x) if key_mask is None else stage(x, _halved(key_mask, s))
        if key_mask is None:
            return x
        mask = _halved(key_mask, len(self.stages) - 1).flatten(1)
        return fill_masked(x.flatten(2).mT, mask).mT.unflatten(2, x.shape[2:])

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW"] = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """Normalised grids (B, C, H, W) after the stages `indices` (the last n for an int n, all for None).

        Returns:
            The list of intermediates alone if `intermediates_only`, otherwise (final features, list); with
            `output_dict` the same under timm's keys, image_features and image_intermediates.
        """
        assert output_fmt == "NCHW", "the features of a pyramid are grids"
        taken, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        x = self.patch_embed(x)
        for s, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if s in taken:
                intermediates.append(x)
        return intermediate_outputs(None if intermediates_only else x, intermediates, as_dict=output_dict)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes modules that the intermediates `indices` do not need; returns the absolute indices."""
        taken, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head or last + 1 < len(self.config.depths):
            self.reset_classifier(0, "")
        return taken

    def pool(self, x: Tensor) -> Tensor:
        """Grid -> (B, C), or the grid itself without pooling."""
        return x.mean((2, 3)) if self.global_pool else x


def _halved(key_mask: Tensor, times: int) -> Tensor:
    """The mask of the stage that is `times` later; each stage keeps every second row and column, from the first on."""
    return key_mask[:, :: 2**times, :: 2**times]


def _conv(in_chans: int, dim: int, kernel_size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Padded convolution, initialised as in PVT: normal with a std from the fan-out, bias 0."""
    conv = nn.Conv2d(in_chans, dim, kernel_size, stride, kernel_size // 2, groups=groups)
    nn.init.normal_(conv.weight, std=(2 * groups / (kernel_size**2 * dim)) ** 0.5)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv
