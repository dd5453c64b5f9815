"""Conversion of state dicts of other sizes and other code bases to state dicts that our models load strictly."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from attention import Grid, OptionError

StateDict = dict[str, Tensor]


def resample_weights(state_dict: StateDict, model: nn.Module) -> StateDict:
    """Adapts the state dict of a model for another image size to `model`: embeddings and tables of positions."""
    tables, _ = resample_bias_tables(state_dict, model)
    return resample_pos_embed(state_dict, model) | tables | resample_position_tables(state_dict, model)


def resample_pos_embed(state_dict: StateDict, model: nn.Module, grid: Grid | None = None) -> StateDict:
    """Adapts a state dict's position embeddings, if it has any, to the image size and prefix tokens of a DeiT.

    A prefix token that the state dict lacks keeps the model's position embedding.

    Args:
        state_dict: state dict of the same model built for another image size. model: the model that will load it.
        grid: (H, W) of the state dict's position embeddings; None: see `assume_grid`.
    Raises:
        OptionError: no grid is given and the number of position embeddings is not a square; clips on another grid.
    """
    pos_embed, deit = state_dict.get("pos_embed"), cast(Any, model)
    if pos_embed is None or not hasattr(model, "pos_embed"):
        return state_dict
    there, here = _count_prefix_tokens(state_dict), _count_prefix_tokens(dict(model.named_parameters()))
    num_prefix = sum(there.values())
    grid = grid or assume_grid(state_dict, deit.grid)
    if num_prefix and pos_embed.shape[1] == math.prod(grid):  # prefix tokens have no embeddings, as in DeiT III
        pos_embed = torch.cat([pos_embed.new_zeros(1, num_prefix, pos_embed.shape[2]), pos_embed], 1)
    if grid == deit.grid and there == here and pos_embed is state_dict["pos_embed"]:
        return state_dict
    if grid != deit.grid and deit.config.frames > 1:
        problem = f" = {deit.config.frames}: position embeddings of clips are not resampled from another img_size"
        raise OptionError("model.frames", f"{problem} or number of frames; take weights of the same")
    *rows, patches = pos_embed.split([*there.values(), math.prod(grid)], 1)
    *own_rows, _ = deit.pos_embed.detach().to(pos_embed).split([*here.values(), math.prod(deit.grid)], 1)
    prefix = dict(zip(here, own_rows, strict=True))
    prefix |= {name: row for name, row in zip(there, rows, strict=True) if here.get(name) == there[name]}
    patches = resample_abs_pos_embed(patches, deit.grid, grid, num_prefix_tokens=0)
    return {**state_dict, "pos_embed": torch.cat([*prefix.values(), patches], 1)}


def grid_of(model: nn.Module) -> Grid | None:
    """The (H, W) grid of the patches of a model, ours or timm's; None: not known."""
    return getattr(getattr(model, "patch_embed", None), "grid_size", None)


def assume_grid(state_dict: StateDict, own: Grid) -> Grid:
    """Returns the likely (H, W) grid of position embeddings: a model's `own` one if their number is the same, and a
    square otherwise.

    Raises:
        OptionError: it is neither.
    """
    count = state_dict["pos_embed"].shape[1]
    for number in (count - sum(_count_prefix_tokens(state_dict).values()), count):  # prefix tokens may have none
        side = math.isqrt(max(0, number))
        if number == math.prod(own) or side**2 == number:
            return own if number == math.prod(own) else (side, side)
    raise OptionError("grid", f"{count} position embeddings are no square; name their (H, W)")


def _count_prefix_tokens(tensors: StateDict) -> dict[str, int]:
    """Name -> number of tokens, for each kind of prefix tokens in the state dict, in their order."""
    names = "cls_token", "dist_token", "reg_token"
    return {name: tensors[name].shape[1] for name in names if name in tensors}


def resample_bias_tables(
    state_dict: StateDict, model: nn.Module, source: nn.Module | None = None
) -> tuple[StateDict, dict[str, str]]:
    """Adapts a state dict's relative position bias to the windows of `model`: tables of the kind table.

    Args:
        source: the model of the state dict, which may be on the meta device. None assumes that the tables have the same
            kind as the model's, and that tables with equal numbers of rows have the same windows.
    Returns:
        The names of the resampled tables, and name -> reason for the tables that `model` cannot use.
    """
    tables, reasons = {}, {}
    for name, layer in model.named_modules():
        table, bias = state_dict.get(key := f"{name}.position_bias.table"), getattr(layer, "position_bias", None)
        if table is None or bias is None or bias.table is None:
            continue
        (kind, windows), fits, rows = _bias_options(layer), table.shape == bias.table.shape, table.shape[1]
        other: Any = layer if source is None else source.get_submodule(name)
        their_kind, their_windows = _bias_options(other) if fits or source is not None else (kind, None)
        before = (
            other.position_bias.offsets if their_windows else (math.isqrt(rows),) * 2 if "2d" in kind else (1, rows)
        )
        if their_kind != kind:
            reasons[key] = f"there it is of {' '.join(their_kind)}"
        elif fits and their_windows == windows:
            continue
        elif kind[0] != "table" or len(bias.offsets) == 3:
            reasons[key] = f"of another window, and {' '.join(kind)} cannot be resampled"
        elif table.shape[::2] != bias.table.shape[::2] or math.prod(before) != rows:
            reasons[key] = f"{tuple(table.shape)} there is no such table"
        elif before != bias.offsets:  # as timm does
            images = table.float().mT.unflatten(2, before)  # (1, h, y, x)
            tables[key] = F.interpolate(images, bias.offsets, mode="bicubic", align_corners=False).flatten(2).mT
    return tables, reasons


def resample_position_tables(state_dict: StateDict, model: nn.Module, source: nn.Module | None = None) -> StateDict:
    """Adapts attention tables with a column for every token of a grid, or of a row or column, to the grids of `model`.

    Args:
        source: see `resample_bias_tables`. None assumes that tables with equal numbers of columns have the same grid,
            and that other tables have a square one.
    Returns:
        The tables that had to be resampled.
    Raises:
        RuntimeError: the number of columns does not match the grid.
    """
    tables = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for name, here in modules.items():
        table = state_dict.get(key := f"{name}.table")
        if table is None or not hasattr(here, "resampled") or table.shape[:-1] != here.table.shape[:-1]:
            continue
        grid, count = here.grid, table.shape[1]
        if table.shape != here.table.shape:
            grid = (1, count) if grid[0] == 1 else (count, 1) if grid[1] == 1 else (math.isqrt(count),) * 2
        if source is not None:
            there: Any = source.get_submodule(name)
            grid = there.grid
        if grid != here.grid:
            tables[key] = here.resampled(table, grid, here.grid)
    return tables


def _bias_options(layer: nn.Module) -> tuple[tuple[str, ...], tuple[Grid, Grid]]:
    """Returns the kind of a layer's bias table, and its windows' (rows, columns) and overlap.

    Both determine the rows of the table. A window is never larger than the grid, so that it may be no square.
    """
    here: Any = layer
    kind, size, overlap, causal = here.position_bias.index_arguments
    return (kind, here.config.layout, *["causal"] * causal), (size, overlap)


def from_timm_pvt(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Converts a state dict of timm's PyramidVisionTransformerV2: stacks the projections `q` and `kv` into one `qkv`.

    All other names are the same; `sr` and `norm` of an attention layer belong to spatial-reduction attention.
    """
    converted = {}
    for key, value in state_dict.items():
        if ".attn.q." in key:
            converted[key.replace(".q.", ".qkv.")] = torch.cat([value, state_dict[key.replace(".q.", ".kv.")]])
        elif ".attn.kv." not in key:
            converted[key] = value
    return converted


def from_released(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Converts state dicts of the published code of EVA and LARA (a checkpoint's `model`), of its DeiT and PVT-v2.

    Bias tables load with `position_bias: table_released` or `t5_released`; their index is dropped, because this code
    computes it. Outputs agree if the mechanism's options for the behaviour of the released code are set.
    """
    converted = {}
    for key, value in state_dict.items():
        if key.endswith(".local_relative_position_bias_table") and value.ndim == 3:
            value = value.permute(1, 2, 0).flatten(0, 1)  # (h, w, e) of blocks of the raster order
        for pattern, replacement in _RELEASED_NAMES:
            key = re.sub(pattern, replacement, key)
        if key == "pos_embed" and value.ndim == 4:
            value = value.flatten(1, 2)  # (1, H, W, C)
        elif key.endswith("position_bias.table") and value.ndim == 2:
            value = value[None]  # (rows, h): one table
        if not key.endswith(".relative_position_index"):
            converted[key] = value
    return converted


def is_released(names: Iterable[str]) -> bool:
    """Returns whether `names` contain names of weights that only models of the published code have."""
    return any(name == "norm_before_pooling.weight" or ".attn.attn_fn." in name for name in names)


_RELEASED_NAMES = [
    (r"^norm_before_pooling\.", "norm."),
    (r"\.attn\.attn_fn\.", ".attn."),
    (r"\.(local_relative_position_bias_table|rel_pos_bias\.relative_attention_bias\.weight)$", ".position_bias.table"),
    (r"\.adaptive_mu_([qk])\.0\.", r".landmarks.\1.linear."),
    (r"\.adaptive_mu_([qk])\.1\.", r".landmarks.\1.norm."),
    (r"\.([qk])_bar_gen\.2\.", r".landmark_\1.linear."),
    (r"\.([qk])_bar_gen\.3\.", r".landmark_\1.norm."),
    (r"\.(eval|random)_proj$", ".omega"),
    (r"^patch_embed1\.", "patch_embed."),
    (r"\.dwconv\.dwconv\.", ".dwconv."),
    *[(rf"^patch_embed{s + 1}\.", f"stages.{s}.downsample.") for s in (1, 2, 3)],
    *[(rf"^block{s + 1}\.", f"stages.{s}.blocks.") for s in range(4)],
    *[(rf"^norm{s + 1}\.", f"stages.{s}.norm.") for s in range(4)],
]
