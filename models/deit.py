"""DeiT (Touvron et al. 2021, arXiv:2012.12877): a plain vision transformer over one grid of patches.

The default follows the papers of EVA and LARA: no class token, and the mean over tokens after the final LayerNorm.
`class_token: true` gives stock DeiT. `dist_token: true` adds the distillation token (section 4); evaluation then takes
the mean of two heads. Parameter names are those of timm's VisionTransformer and VisionTransformerDistilled.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from timm.layers import LayerNorm, Mlp, global_pool_nlc, resample_abs_pos_embed, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from attention import Grid, OptionError
from models.assignment import LayerFactory
from models.base import Backbone, check_key_mask, drop_path_rates, fill_masked, intermediate_outputs
from models.block import Block, run_blocks
from models.deit_options import DeitConfig
from models.patches import Patches, conv_stem, pad_positions, unmasked_parts


class TokenMlp(Mlp):
    """timm's Mlp, which has no use for the grid."""

    def forward(  # type: ignore[override]  # as `Block` calls it
        self, x: Tensor, grid: Grid, key_mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(x)


class Deit(Backbone):
    """DeiT; `attention` has a factory for every block."""

    feature_indices = 3
    published_attention = "softmax"

    Config = DeitConfig

    def __init__(self, config: DeitConfig, attention: Sequence[LayerFactory]):
        poolings = ("token",) if config.dist_token else ("token", "avg") if config.class_token else ("avg",)
        super().__init__(config, config.embed_dim, (*poolings, ""))
        dim = self.embed_dim = config.embed_dim
        sizes, strict = (config.img_size, config.patch_size, config.in_chans, dim), not config.dynamic_img_size
        self.patch_embed = Patches(*sizes, output_fmt="NHWC", strict_img_size=strict)
        if (stem := self.create_stem()) is not None:
            self.patch_embed.proj = stem  # type: ignore[assignment]  # timm takes any module
        self.num_prefix_tokens = config.class_token + config.dist_token + config.reg_tokens
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if config.class_token else None
        self.dist_token = nn.Parameter(torch.empty(1, 1, dim)) if config.dist_token else None
        self.distilled_training = False
        self.reg_token = nn.Parameter(torch.empty(1, config.reg_tokens, dim)) if config.reg_tokens else None
        self.create_parts()
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_prefix_tokens + self.patch_embed.num_patches, dim))
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        where: dict[str, Any] = {"dim": dim, "num_heads": config.num_heads, "grid": self.of_frames(self.grid)}
        where |= {"num_prefix_tokens": self.num_prefix_tokens, "qkv_bias": config.qkv_bias, "depth": config.depth}
        where |= {"shared": {}}
        hidden_dim = int(dim * config.mlp_ratio)
        blocks = []
        for layer, drop_path in enumerate(drop_path_rates(config.drop_path_rate, config.depth)):
            attn = attention[layer](**where, layer=layer, proj_drop=config.proj_drop_rate)
            mlp = TokenMlp(dim, hidden_dim, drop=config.proj_drop_rate)
            blocks.append(Block(dim, attn, mlp, drop_path, self.init_std))
        self.blocks = nn.ModuleList(blocks)
        self.norm: nn.Module = LayerNorm(dim)
        info = {"num_chs": dim, "reduction": config.patch_size}
        self.feature_info = [{"module": f"blocks.{layer}", **info} for layer in range(config.depth)]
        self.reset_classifier(config.num_classes)
        self.init_weights()

    def create_stem(self) -> nn.Module | None:
        """Creates the patch embedding (B, in_chans, height, width) -> (B, C, H, W). None: timm's linear one."""
        config = self.config
        return conv_stem(config.in_chans, config.embed_dim, config.patch_size) if config.stem == "conv" else None

    def create_parts(self) -> None:
        """Creates what an objective adds to the model, before the position embeddings and the blocks."""

    def init_weights(self) -> None:
        """Initialises position embeddings and prefix tokens; linear layers are initialised when they are built."""
        trunc_normal_(self.pos_embed, std=0.02)
        for token in self.prefix_tokens():
            nn.init.normal_(token, std=1e-6)
        if self.dist_token is not None:
            trunc_normal_(self.dist_token, std=0.02)

    @property
    def grid(self) -> Grid:
        """The (H, W) of patches that the position embeddings are for."""
        return self.patch_embed.grid_size

    def of_frames(self, grid: Grid) -> Grid:
        """The grid that attention has for a grid (H, W) of patches: of clips (T, H / T, W)."""
        T = self.config.frames
        return grid if T == 1 else (T, grid[0] // T, grid[1])

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that group parameters by depth, for timm's layer-wise learning rates."""
        return {
            "stem": r"^cls_token|^dist_token|^reg_token|^mask_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def embed(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Grid]:
        """Images -> tokens (B, prefix + N, C) with position embeddings, and the patches' grid; see `add_positions`."""
        return self.add_positions(*self.embed_patches(x), key_mask)

    def embed_patches(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Images -> tokens (B, H W, C) of their patches, and the grid (H, W)."""
        x = self.patch_embed(x)
        _, H, W, _ = x.shape
        return x.flatten(1, 2).contiguous(), (H, W)  # else all blocks inherit the convolution's channel-first strides

    def add_positions(self, x: Tensor, grid: Grid, key_mask: Tensor | None = None) -> tuple[Tensor, Grid]:
        """Adds prefix tokens and position embeddings to the tokens (B, N, C) of a grid.

        With `dynamic_img_size` and a key mask, each image has the embeddings of its own part of the grid.
        """
        pos_embed: Tensor = self.pos_embed
        if key_mask is not None:
            check_key_mask(key_mask, (x.shape[0], *grid))
            if self.config.stem == "conv":
                raise ValueError("key_mask: model.stem = conv sees the padding beside a patch; use stem: linear")
        if self.config.dynamic_img_size and key_mask is not None:
            parts = unmasked_parts(key_mask)
            own = {part: pad_positions(self._positions(part), part, grid) for part in set(parts)}
            pos_embed = torch.cat([own[part] for part in parts])
        elif self.config.dynamic_img_size:
            pos_embed = self._positions(grid)
        prefix = [token.expand(x.shape[0], -1, -1) for token in self.prefix_tokens()]
        return self.pos_drop(torch.cat([*prefix, x], dim=1) + pos_embed), grid

    def _positions(self, grid: Grid) -> Tensor:
        """Position embeddings (1, prefix + H W, C), resampled for an (H, W) grid."""
        return resample_abs_pos_embed(self.pos_embed, grid, self.grid, self.num_prefix_tokens)

    def prefix_tokens(self) -> list[nn.Parameter]:
        """Existing prefix tokens, each (1, tokens, C), in order: class, distillation, registers."""
        return [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]

    def key_mask_of(self, x: Tensor) -> Tensor | None:
        """The key mask (B, H, W) that images have by themselves; None: all their patches count."""
        return None

    def forward_features(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Images -> normalised tokens (B, prefix + N, C); those of masked patches are the mean of the others."""
        tokens, grid = self.embed(x, key_mask)
        return self.encode(tokens, grid, self.key_mask_of(x) if key_mask is None else key_mask)

    def encode(self, x: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, prefix + N, C) -> normalised tokens after all blocks; key_mask (B, H, W)."""
        mask = None if key_mask is None else key_mask.flatten(1)
        return self.normalise(run_blocks(self.blocks, x, self.of_frames(grid), mask), mask)

    def normalise(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, prefix + N, C) of a block, or of all -> normalised ones; for key_mask (B, N) see `fill_masked`."""
        x = self.norm(x)
        if key_mask is None:
            return x
        P = self.num_prefix_tokens
        return torch.cat([x[:, :P], fill_masked(x[:, P:], key_mask)], 1)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """Outputs of the blocks `indices` (the last n for an int, all for None), as in timm's VisionTransformer.

        Returns:
            The list of intermediates alone if `intermediates_only`, else (final features, list). An intermediate is
            (B, C, H, W) or (B, N, C), in a pair with its prefix tokens if `return_prefix_tokens` and there are any.
            With `output_dict` the same under timm's keys: image_features, image_intermediates and, where they were in
            pairs, image_intermediates_prefix.
        """
        assert output_fmt in ("NCHW", "NLC"), "the features of a DeiT are grids or tokens"
        taken, last = feature_take_indices(len(self.blocks), indices)
        intermediates, prefixes = [], []
        key_mask = self.key_mask_of(x)
        mask = None if key_mask is None else key_mask.flatten(1)
        x, (H, W) = self.embed(x)
        for layer, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = block(x, self.of_frames((H, W)), mask)
            if layer in taken:
                y = self.normalise(x, mask) if norm else x
                prefix, y = y[:, : self.num_prefix_tokens], y[:, self.num_prefix_tokens :]
                if output_fmt == "NCHW":
                    y = y.mT.unflatten(2, (H, W)).contiguous()
                intermediates.append(y)
                prefixes.append(prefix)
        final = None if intermediates_only else self.normalise(x, mask)
        in_pairs = prefixes if return_prefix_tokens and self.num_prefix_tokens else None
        return intermediate_outputs(final, intermediates, in_pairs, as_dict=output_dict)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes what the intermediates `indices` do not need; returns their absolute indices."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def pool(self, x: Tensor) -> Tensor:
        """Tokens -> (B, C), or all tokens where nothing is pooled."""
        return global_pool_nlc(x, self.global_pool, self.num_prefix_tokens)

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """The head; with a distillation token both heads."""
        return self.head if self.dist_token is None else (self.head, self.head_dist)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Gives the model a new classifier (0 classes: none), and another pooling where one is named."""
        super().reset_classifier(num_classes, global_pool)
        if self.dist_token is not None:
            self.head_dist = self.create_head()

    def set_distilled_training(self, enable: bool = True) -> None:
        """Makes the outputs in training the logits of both heads, for a loss with a teacher, instead of their mean.

        Raises:
            OptionError: the model has no distillation token.
        """
        if self.dist_token is None:
            raise OptionError("model.dist_token", " = false: there is no second head to train")
        self.distilled_training = enable

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Features of `forward_features` -> logits (B, num_classes), or the classifier's input (B, C).

        With a distillation token they are means over the class and the distillation token. In distilled training the
        two logits are returned separately.
        """
        if self.dist_token is None or self.global_pool == "":
            return super().forward_head(x, pre_logits)
        x, x_dist = self.head_drop(x[:, 0]), self.head_drop(x[:, 1])
        if pre_logits:
            return (x + x_dist) / 2
        x, x_dist = self.head(x), self.head_dist(x_dist)
        return (x, x_dist) if self.training and self.distilled_training else (x + x_dist) / 2
