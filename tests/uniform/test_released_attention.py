"""The released code of EVA and LARA: with the options for its deviations, its layers' outputs and gradients come back.

tests/data/released/attention holds layers of that code: weights, inputs and noise stored as float16, which they are
exactly; outputs and input gradients computed there in float64 and stored as float32; cases.json holds the largest
magnitudes, the errors that code itself makes in float32, and the norms of the parameters' gradients.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attention import create_attention
from models.convert import from_released

RELEASED = Path(__file__).parents[1] / "data" / "released" / "attention"
CASES = json.loads((RELEASED / "cases.json").read_text())

EVA = {"name": "eva", "mu_scale": 0.5, "position_bias": "table_released", "noise": "released"}
LARA = {"name": "lara", "noise": "released"}
LAYERS = {
    "softmax_2d": {"name": "softmax"},
    "local_2d_rpe": {"name": "local", "position_bias": "table_released"},
    "local_2d_norpe": {"name": "local", "position_bias": "none"},
    "eva_2d_rpe": EVA,
    "eva_2d_norpe": {**EVA, "position_bias": "none"},
    "train_eva_2d_rpe": EVA,
    "performer_favorp_64": {"name": "performer", "features": "favorp", "num_samples": 64},
    "ra_biased_m1": {"name": "ra", "proposal": "biased"},
    "lara_poolmixed_light_opt": LARA,
    "lara_poolmixed_dense_opt": {**LARA, "landmark_transform": "dense"},
    "scatterbrain_2d_norpe_64": {
        "name": "scatterbrain",
        "num_samples": 64,
        "complement": "released",
        "position_bias": "none",
    },
    "train_lara_poolmixed_opt": {**LARA, "num_landmarks": 16},
}


def ours(released: dict) -> dict:
    """State dict of a released layer under our names."""
    converted = from_released({f".{key}": value for key, value in released.items()})
    return {key.removeprefix("."): value for key, value in converted.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("file", LAYERS)
def test_numbers(file, dtype, monkeypatch):
    case, tensors = CASES[file], load_file(RELEASED / f"{file}.safetensors")
    released = {key.removeprefix("weight."): value for key, value in tensors.items() if key.startswith("weight.")}
    H, W, C = tensors["x"].shape[1:]
    attn = create_attention(**LAYERS[file], dim=C, num_heads=2, grid=(H, W)).to(dtype).train("noise" in tensors)
    attn.load_state_dict({key: value.to(dtype) for key, value in ours(released).items()}, strict=True)
    if "noise" in tensors:  # the released draw, in place of ours
        monkeypatch.setattr(torch, "randn", lambda shape, **_: tensors["noise"].to(dtype).view(shape))
    x = tensors["x"].to(dtype).flatten(1, 2).requires_grad_()

    y = attn(x, (H, W))
    (y * tensors["R"].to(dtype).view_as(y)).sum().backward()

    # float64: the rounding of what is stored. float32: five times the error of the released code, or a few units.
    tolerances = {
        torch.float64: [3e-7 * case[f"{k}_absmax"] for k in ("out", "grad")],
        torch.float32: [max(5 * case[f"f32_{k}_max_abs_err"], 1e-6 * case[f"{k}_absmax"]) for k in ("out", "grad")],
    }[dtype]
    for value, stored, tolerance in zip((y, x.grad), (tensors["out"], tensors["grad_x"]), tolerances, strict=True):
        torch.testing.assert_close(value.double(), stored.double().view_as(value), rtol=0, atol=tolerance)
    norms = {key: parameter.grad.norm().item() for key, parameter in attn.named_parameters()}
    expected = {next(iter(ours({key: released[key]}))): norm for key, norm in case["param_grad_l2"].items()}
    assert norms == pytest.approx(expected, rel=1e-5)  # stored with six digits
