"""State dicts of other sizes and other codes -> state dicts that our models load strictly."""

import math
import re

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from attention import Grid, OptionError

StateDict = dict[str, Tensor]


def resample_pos_embed(state_dict: StateDict, model: nn.Module, grid: Grid | None = None) -> StateDict:
    """Adapts a state dict's position embeddings, where it has any, to the image size of a DeiT.

    Args:
        state_dict: of the same model built for another image size. model: to load it into.
        grid: (H, W) of the state dict's position embeddings; where not given they are taken for the model's own grid if
            their number is the same, and for a square otherwise.
    Raises:
        OptionError: no grid is given and the number of position embeddings is no square.
    """
    pos_embed = state_dict.get("pos_embed")
    if pos_embed is None:
        return state_dict
    if grid is None:
        tokens = pos_embed.shape[1] - model.num_prefix_tokens
        side = math.isqrt(tokens)
        if tokens == model.grid[0] * model.grid[1]:
            return state_dict
        if side * side != tokens:
            raise OptionError("grid", f"{tokens} position embeddings are no square; name their (H, W)")
        grid = side, side
    pos_embed = resample_abs_pos_embed(pos_embed, model.grid, grid, model.num_prefix_tokens)
    return {**state_dict, "pos_embed": pos_embed}


def from_timm_pvt(state_dict: StateDict) -> StateDict:
    """timm's PyramidVisionTransformerV2 -> ours: the projections `q` and `kv` become the rows of one, `qkv`.

    All other names are the same; `sr` and `norm` of an attention layer belong to spatial reduction attention.
    """
    converted = {}
    for key, value in state_dict.items():
        if ".attn.q." in key:
            converted[key.replace(".q.", ".qkv.")] = torch.cat([value, state_dict[key.replace(".q.", ".kv.")]])
        elif ".attn.kv." not in key:
            converted[key] = value
    return converted


def from_released(state_dict: StateDict) -> StateDict:
    """The published code of EVA and LARA (its `model` entry of a checkpoint) -> ours, for its DeiT and its PVT-v2.

    Bias tables load with `position_bias: table_released`; their index, which is computed here, is left out. Numbers
    agree under the mechanism's options for what the released code does otherwise.
    """
    converted = {}
    for key, value in state_dict.items():
        for pattern, replacement in _RELEASED_NAMES:
            key = re.sub(pattern, replacement, key)
        if key == "pos_embed":
            value = value.flatten(1, 2)  # (1, H, W, C)
        elif key.endswith("position_bias.table"):
            value = value[None]  # (rows, h): one table
        if not key.endswith(".relative_position_index"):
            converted[key] = value
    return converted


_RELEASED_NAMES = [
    (r"^norm_before_pooling\.", "norm."),
    (r"\.attn\.attn_fn\.", ".attn."),
    (r"\.local_relative_position_bias_table$", ".position_bias.table"),
    (r"\.adaptive_mu_([qk])\.0\.", r".landmarks.\1.linear."),
    (r"\.adaptive_mu_([qk])\.1\.", r".landmarks.\1.norm."),
    (r"\.([qk])_bar_gen\.2\.", r".landmark_\1.linear."),
    (r"\.([qk])_bar_gen\.3\.", r".landmark_\1.norm."),
    (r"\.eval_proj$", ".omega"),
    (r"^patch_embed1\.", "patch_embed."),
    (r"\.dwconv\.dwconv\.", ".dwconv."),
    *[(rf"^patch_embed{s + 1}\.", f"stages.{s}.downsample.") for s in (1, 2, 3)],
    *[(rf"^block{s + 1}\.", f"stages.{s}.blocks.") for s in range(4)],
    *[(rf"^norm{s + 1}\.", f"stages.{s}.norm.") for s in range(4)],
]
