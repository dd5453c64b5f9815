"""Checkpoints of the released code of EVA and LARA as checkpoints of this project.

The weights show sizes and layers, and the arguments in the file the rest (heads, windows, groups, feature maps). Every
deviation of that code becomes our option for it. An option that neither gives is `MISSING` and must be given by the
user: under wrong options weights load strictly and give wrong numbers. An argument for something that only that code
can do is refused by name. Options of training stay at their defaults. Models with other attention are described by a
configuration (`eav export --config`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageNetInfo
from timm.layers import to_2tuple
from torch import Tensor

from attention import Grid
from engine.checkpoints.format import ForeignObject
from engine.checkpoints.progress import Progress
from engine.run.load import MISSING
from engine.runtime.errors import UserError
from engine.runtime.text import one_line
from models import MODELS
from models.convert import from_released

CIFAR = [0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761]

NORMALISATION = {
    "IMAGENET": (list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD)),
    "CIFAR10": CIFAR,
    "CIFAR100": CIFAR,
}
"""Data set -> mean and standard deviation that normalise its images."""

PVT_SIZES = "nano", "tiny", "small", "medium", "base", "large"
"""Names of PVT-v2 b0 to b5 in that code; `pvt_tiny2` has twice the heads of `pvt_tiny`."""

State = Mapping[str, Tensor]


class Unsupported(UserError):
    """A model of the released code that this project does not have."""


class Arguments:
    """Command-line arguments of the released code in a checkpoint, under the names of that code."""

    def __init__(self, namespace: Any):
        self.values = _state_of(namespace)
        self.values |= _state_of(self.values.get("attn_args"))

    def take(self, name: str, kind: type) -> Any:
        """Returns the value of an argument, or `MISSING`."""
        value = self.values.get(name)
        if value is None:
            return MISSING
        if type(value) is not kind and not (kind is float and type(value) is int):
            refuse(name, value, f"that is no {kind.__name__}")
        return value

    def choose(self, name: str, choices: Mapping[Any, Any]) -> Any:
        """Returns the entry of `choices` for an argument, or `MISSING`."""
        value = self.values.get(name)
        if value is None:
            return MISSING
        if not isinstance(value, str | int) or value not in choices:
            refuse(name, value, f"this can be {', '.join(map(str, choices))} only")
        return choices[value]


def _state_of(value: Any) -> dict[str, Any]:
    return dict(value.state) if isinstance(value, ForeignObject) and isinstance(value.state, Mapping) else {}


def refuse(name: str, value: Any, reason: str) -> NoReturn:
    """Raises `Unsupported` for a value of the argument `name`."""
    shown = value if isinstance(value, str | int | float | None) else type(value).__name__
    option = f"--{name.replace('_', '-')} {shown}"
    raise Unsupported(f"weights of the released code of EVA and LARA, with {one_line(option, 100)}: {reason}")


def from_released_file(found: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the content of a file of the released code, or the weights of one of its models alone, to a checkpoint.

    Unknown options are `MISSING` in its `config`. Unsupported: this project does not have the model.
    """
    state = found["model"] if isinstance(found.get("model"), Mapping) else found
    args, is_deit = Arguments(found.get("args")), "norm_before_pooling.weight" in state
    model = _deit(state, args) if is_deit else _pvt(state, args)
    attention = _attention(state, args, model, is_deit)
    epoch = found.get("epoch")
    checkpoint = {
        "config": {"model": model, "attention": attention, "data": _data(args, model), "train": {"amp": None}},
        "processes": 1,
        "images": 0,
        "progress": asdict(Progress(epoch=epoch + 1 if isinstance(epoch, int) else 0)),
    }
    if args.values.get("data_set") == "IMAGENET" and model["num_classes"] == 1000:
        checkpoint["classes"] = ImageNetInfo().label_names()
    weights = {"model": state, "model_ema": found.get("model_ema")}
    return checkpoint | {key: from_released(value) for key, value in weights.items() if isinstance(value, Mapping)}


def _deit(state: State, args: Arguments) -> dict[str, Any]:
    """Returns the options of our DeiT."""
    if "patch_embed.proj.weight" not in state:
        refuse("patchify_stem", args.values.get("patchify_stem"), "this project has the default's and another one")
    if "pos_embed" not in state:
        refuse("no_pos_emb", True, "a DeiT of this project has position embeddings")
    _, in_chans, patch_size, _ = state["patch_embed.proj.weight"].shape
    block, name = _block_sizes(state, "blocks"), str(args.take("model", str)).replace("evit_", "deit_")
    return {
        "name": name if name in MODELS else "deit",
        "img_size": [side * patch_size for side in state["pos_embed"].shape[1:3]],
        "patch_size": patch_size,
        "in_chans": in_chans,
        "num_classes": len(state["head.weight"]),
        "embed_dim": block["dim"],
        "depth": block["depth"],
        "num_heads": args.take("num_heads", int),
        "mlp_ratio": block["mlp_ratio"],
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
    }


def _pvt(state: State, args: Arguments) -> dict[str, Any]:
    """Returns the options of our PVT-v2."""
    if "patch_embed1.proj.weight" not in state:
        refuse("use_conv_patchify", True, "this project has the default patch embedding only")
    size = re.fullmatch(rf"pvt_({'|'.join(PVT_SIZES)})(2?)", str(args.take("model", str)))
    blocks = [_block_sizes(state, f"block{stage}") for stage in (1, 2, 3, 4)]
    return {
        "name": f"pvtv2_b{PVT_SIZES.index(size[1])}{'_2xheads' if size[2] else ''}" if size else "pvtv2_b0",
        "img_size": args.take("input_size", int),
        "in_chans": state["patch_embed1.proj.weight"].shape[1],
        "num_classes": len(state["head.weight"]),
        "embed_dims": [block["dim"] for block in blocks],
        "depths": [block["depth"] for block in blocks],
        "num_heads": args.take("num_heads", list),
        "mlp_ratios": [block["mlp_ratio"] for block in blocks],
        "qkv_bias": "block1.0.attn.attn_fn.qkv.bias" in state,
    }


def _block_sizes(state: State, prefix: str) -> dict[str, Any]:
    """Returns the sizes and the number of the blocks ``prefix.0.``, ``prefix.1.``, ..."""
    dim, hidden_dim = state[f"{prefix}.0.mlp.fc2.weight"].shape
    if len(state[f"{prefix}.0.mlp.fc1.weight"]) == 2 * hidden_dim:
        refuse("use_glu", True, "a DeiT of this project has plain MLPs")
    depth = len({name.split(".")[1] for name in state if name.startswith(f"{prefix}.")})
    return {"dim": dim, "depth": depth, "mlp_ratio": hidden_dim / dim}


def _data(args: Arguments, model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options by which that code prepares images for evaluation: it does not resize small ones."""
    normalisation = args.choose("data_set", NORMALISATION)
    mean, std = (MISSING, MISSING) if normalisation == MISSING else normalisation
    is_small = model["img_size"] != MISSING and max(to_2tuple(model["img_size"])) <= 32
    return {"mean": mean, "std": std, "crop_pct": 1.0 if is_small else 0.875, "interpolation": "bicubic"}


def _attention(state: State, args: Arguments, model: Mapping[str, Any], is_deit: bool) -> Any:
    """Returns the options of attention: a mapping, a list if stages differ, or `MISSING` without a mechanism's name."""
    if is_deit:
        prefixes = ["blocks.0.attn."]
        height, width = model["img_size"]
        grids: list[Grid | None] = [(height // model["patch_size"], width // model["patch_size"])]
    else:
        prefixes, side = [f"block{stage}.0.attn.attn_fn." for stage in (1, 2, 3)], model["img_size"]
        sides = [None if side == MISSING else math.ceil(side / stride) for stride in (4, 8, 16)]
        grids = [None if side is None else (side, side) for side in sides]
    layers = [{name.removeprefix(p): x for name, x in state.items() if name.startswith(p)} for p in prefixes]
    name = args.choose("attn_name", {name: name for name in MECHANISMS})
    if name == MISSING:
        shown = {"adaptive_mu_k.0.weight": "eva", "q_bar_gen.2.weight": "lara"}
        name = next((shown[key] for key in shown if key in layers[0]), MISSING)
        if name == MISSING:
            return MISSING
    stages = [{"name": name, **MECHANISMS[name](layer, args, grid)} for layer, grid in zip(layers, grids, strict=True)]
    return stages[0] if all(stage == stages[0] for stage in stages) else [*stages, {"name": "softmax"}]


def _local(layer: State, args: Arguments, grid: Grid | None) -> dict[str, Any]:
    window_size, extended = args.take("window_size", int), args.take("overlap_window", bool)
    overlap = 0 if extended is False else MISSING
    if extended is True and window_size != MISSING:
        overlap = max(1, window_size // 2)
    tables = {
        "local_relative_position_bias_table": "table_released",
        "rel_pos_bias.relative_attention_bias.weight": "t5_released",
    }
    return {
        "released": True,
        "window_size": window_size,
        "layout": args.choose("attn_2d", {True: "2d", False: "1d"}),
        "overlap": overlap,
        "position_bias": next((tables[key] for key in tables if key in layer), "none"),
    }


def _eva(layer: State, args: Arguments, grid: Grid | None) -> dict[str, Any]:
    if args.values.get("attn_2d") is False:
        refuse("attn_2d", False, "it fails on images in that code too")
    return {
        **_local(layer, args, grid),
        "num_landmarks": _num_groups(args, grid),
        "mu": "qk" if "adaptive_mu_q.0.weight" in layer else "zero",
        "landmark_transform": "ln_linear" if "adaptive_mu_k.1.weight" in layer else "linear",
    }


def _num_groups(args: Arguments, grid: Grid | None) -> int | str:
    """Returns the number of square groups that this code makes of a grid: the argument only determines their size."""
    num_landmarks = args.take("num_landmarks", int)
    if grid is None or num_landmarks == MISSING:
        return MISSING
    side = math.isqrt(math.prod(grid) // num_landmarks)
    if side == 0 or grid[0] % side or grid[1] % side:
        refuse("num_landmarks", num_landmarks, f"squares of {side}x{side} tokens do not divide a grid of {grid}")
    return (grid[0] // side) * (grid[1] // side)


def _lara(layer: State, args: Arguments, grid: Grid | None) -> dict[str, Any]:
    num_landmarks, transform = args.take("num_landmarks", int), "none"
    if "q_bar_gen.2.weight" in layer:
        transform = "dense" if layer["q_bar_gen.2.weight"].shape == layer["proj.weight"].shape else "light"
    proposals = {"pool": "pool", "pool-mixed": "pool_mixed"}
    weighting = args.choose("mis_type", {"mis-opt": "decoupled", "mis-bh": "balance"})
    return {
        "released": True,
        "num_landmarks": num_landmarks if num_landmarks == MISSING else math.isqrt(num_landmarks) ** 2,
        "landmark_transform": transform,
        "proposal": args.choose("proposal_gen", proposals | {f"no-param-{key}": proposals[key] for key in proposals}),
        "weighting": weighting,
        **({} if weighting == "balance" else {"beta": args.take("alpha_coeff", float)}),
    }


MECHANISMS = {"softmax": lambda layer, args, grid: {}, "local": _local, "eva": _eva, "lara": _lara}
"""Mechanism, by the same name in that code -> function (layer's weights, arguments, (H, W) grid) -> our options."""
