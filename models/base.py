"""The base of the model families, which has their common part of timm's model contract, and questions to all models."""

import math
from collections.abc import Collection
from typing import Any, ClassVar, cast

import torch
from timm.layers import calculate_drop_path_rates, register_notrace_module
from torch import Tensor, nn

from attention import Attention, Grid, OptionError
from models.block import INIT_STD, Block, compiled, init_linears
from models.host_layers import Replaced

MAX_TOKENS = 2**16
"""Largest number of tokens of a model's grid: masks and tables grow with it without showing in the weights."""

NO_DECAY = (
    *("pos_embed", "cls_token", "dist_token", "reg_token", "mask_token"),
    *("position_embeddings", "position_embedding.weight", "class_embedding", "register_tokens"),
    *("position_bias.table", "positions.table", "prefix_bias"),
)
"""Ends of the names of embeddings, here and in transformers, and of bias tables: parameters without weight decay."""

# fx cannot trace the geometry that mechanisms compute from a grid, so attention layers are leaves of its graphs.
register_notrace_module(Attention)


class Backbone(nn.Module):
    """Base of the model families.

    A family writes `Config`, `forward_features`, `forward_intermediates` and `pool`, and ends its construction with
    `reset_classifier`.

    Attributes:
        config: the family's options.
        num_features, head_hidden_size: channels of the features, and of the classifier's input.
        init_std: std of the initial weights of linear layers.
        poolings: valid values of `global_pool`, the default first; the empty string leaves features unpooled.
        feature_info: channels and reduction of every intermediate feature, for timm's feature extraction.
        pretrained_cfg: timm's description of the model, which timm sets.
    """

    Config: ClassVar[type]
    """Options of the family; `depths` has the number of blocks per stage."""
    feature_indices: ClassVar[int | tuple[int, ...]]
    """Indices of the intermediate features that timm's `features_only` returns by default; an int n for the last n."""
    published_attention: ClassVar[str]
    """Mechanism of the family's published weights."""
    head: nn.Module
    feature_info: list[dict[str, Any]]
    pretrained_cfg: dict[str, Any]

    def __init__(self, config: Any, num_features: int, poolings: tuple[str, ...]):
        super().__init__()
        self.config = config
        self.in_chans: int = config.in_chans
        self.init_std: float = getattr(config, "init_std", INIT_STD)
        self.poolings = poolings
        self.global_pool = poolings[0] if config.global_pool is None else config.global_pool
        self.num_features = self.head_hidden_size = num_features
        self.head_drop = nn.Dropout(config.drop_rate)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay in addition to biases and vectors: embeddings and bias tables."""
        return {name for name, _ in self.named_parameters() if name.endswith(NO_DECAY)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Makes the backward pass recompute the activations of blocks, under the random state of the forward pass."""
        for module in self.modules():
            if isinstance(module, Block):
                module.grad_checkpointing = enable

    def compile_blocks(self, batch_sizes: Collection[int], **options: Any) -> int:
        """Compiles the blocks for batches of these sizes. Other batches, and batches with a key mask, run uncompiled.

        Blocks that differ only in weights and in the rate of stochastic depth share graphs: one for each grid, batch
        size and mode, training or evaluation, and in training another for the first block of a grid (`run_blocks`).
        Operations that a graph cannot contain raise an error.

        Args:
            options: see `compiled`.
        Returns:
            The number of blocks.
        """
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        paths = [path for block in blocks for path in (block.drop_path1, block.drop_path2)]
        if any(path.drop_prob for path in paths):
            for path in paths:
                path.rate = torch.tensor(path.drop_prob, device=next(self.parameters()).device)
        layers, shifted = compiled(Block.layers, **options), compiled(Block.shifted_layers, **options)
        for block in blocks:
            block.compiled_layers, block.compiled_shifted = layers, shifted
            block.compiled_sizes = frozenset(batch_sizes)
        return len(blocks)

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Gives the model a new classifier (none for 0 classes), and another pooling unless `global_pool` is None."""
        if global_pool is not None:
            if global_pool not in self.poolings:
                raise OptionError("global_pool", f" = {global_pool!r} is not one of {self.poolings}")
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = self.create_head()

    def create_head(self) -> nn.Module:
        """A new classifier of `num_classes`, in the mode of the model."""
        like, head = next(self.parameters()), cast(nn.Module, nn.Identity())
        if self.num_classes:
            head = nn.Linear(self.num_features, self.num_classes, device=like.device, dtype=like.dtype)
        init_linears(head, self.init_std)
        return head.train(self.training)

    def forward_features(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Images -> features, the input of `forward_head`; for key_mask see `forward`.

        Features of masked patches are the mean of the others, so that a mean over all patches is that of the others.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define forward_features")

    def pool(self, x: Tensor) -> Tensor:
        """Features -> (B, C), or the features themselves without pooling."""
        raise NotImplementedError(f"{type(self).__name__} does not define pool")

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Features of `forward_features` -> logits (B, num_classes), or the classifier's input (B, C)."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Images (B, in_chans, height, width) -> logits (B, num_classes).

        Args:
            key_mask: (B, H, W) bool, true for the patches of the grid that count (in a pyramid: of the first stage).
                Images of several sizes make a batch if they are padded at the right and at the bottom, with zeros after
                normalisation; their masks are true for their own patches. The outputs equal those of each image alone,
                unless the mechanism depends on the shape of the grid, as by its groups (docs/integration.md).
        Raises:
            ValueError: an attention layer takes no key mask, or the mask is not bool of this shape.
        """
        if not isinstance(key_mask, Tensor):  # None, for which torch.fx has a placeholder while it traces
            key_mask = None
        return self.forward_head(self.forward_features(x, key_mask))


def intermediate_outputs(
    final: Tensor | None, intermediates: list[Tensor], prefixes: list[Tensor] | None = None, *, as_dict: bool
) -> Any:
    """The result of `forward_intermediates`, as in timm's models: a list, a pair (final, list), or a dict of these."""
    if as_dict:
        outputs = {"features": final, "intermediates": intermediates, "intermediates_prefix": prefixes}
        return {f"image_{key}": value for key, value in outputs.items() if value is not None}
    listed = intermediates if prefixes is None else list(zip(intermediates, prefixes, strict=True))
    return listed if final is None else (final, listed)


Layer = Attention | Replaced
"""Attention layer, tokens -> tokens, of our models or of other people's; its mechanism is `core`."""


def attention_layers(module: nn.Module) -> list[Layer]:
    """All attention layers of a model, or of a part of it, in the order of its blocks."""
    replaced = [layer for layer in module.modules() if isinstance(layer, Replaced)]
    return [*replaced] or [layer for layer in module.modules() if isinstance(layer, Attention)]


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Rates of stochastic depth of `depth` blocks, linear from 0 to `rate`."""
    return cast(list[float], calculate_drop_path_rates(rate, depth))  # timm's type includes lists by stages


def is_same_attention(layer: Layer, other: Layer) -> bool:
    """True if two layers have the same mechanism, options and sizes; their weights may differ."""
    return _kind(layer.core) == _kind(other.core)


def _kind(attn: Attention) -> Any:
    numbers = {name: x for name, x in vars(attn).items() if isinstance(x, int) and name != "training"}
    return type(attn), attn.config, frozenset(numbers.items())


def check_key_mask(key_mask: Tensor, shape: tuple[int, ...]) -> None:
    """Raises the ValueError for a key mask of a model that is not bool of `shape` (B, H, W)."""
    if key_mask.dtype != torch.bool or key_mask.shape != shape:
        raise ValueError(
            f"key_mask: got {key_mask.dtype} {tuple(key_mask.shape)}; give torch.bool {shape}, (B, H, W), true for the"
            " patches that count"
        )


def fill_masked(x: Tensor, key_mask: Tensor) -> Tensor:
    """Tokens (B, N, C), those for which the mask (B, N) is false replaced by the mean of the others; 0 without any."""
    counts = key_mask[..., None]
    mean = x.masked_fill(~counts, 0).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
    return torch.where(counts, x, mean)


def check_tokens(grid: Grid) -> None:
    """Raises an OptionError for a grid of more than `MAX_TOKENS`."""
    if math.prod(grid) > MAX_TOKENS:
        problem = f"makes {grid[0]} x {grid[1]} tokens, above the largest valid number {MAX_TOKENS}; lower it"
        raise OptionError("model.img_size", problem)


def check_heads(dim: int, num_heads: int) -> None:
    """Raises an OptionError for heads that do not divide the channels."""
    if dim % num_heads:
        raise OptionError("model.num_heads", f" = {num_heads} does not divide the width {dim}")
