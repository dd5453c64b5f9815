"""The released code of EVA and LARA: with options for its deviations, our layers reproduce its outputs and gradients.

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
from tests.support.facts import FACTS, rows

RELEASED = Path(__file__).parents[1] / "data" / "released" / "attention"
CASES = json.loads((RELEASED / "cases.json").read_text())


def ours(released: dict) -> dict:
    """State dict of a released layer under our names."""
    converted = from_released({f".{key}": value for key, value in released.items()})
    return {key.removeprefix("."): value for key, value in converted.items()}


def test_every_stored_layer_is_reproduced():
    assert sorted(file for _, file in rows("RELEASED")) == sorted(path.stem for path in RELEASED.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "file"), rows("RELEASED"))
def test_numbers(name, file, dtype, monkeypatch):
    case, tensors = CASES[file], load_file(RELEASED / f"{file}.safetensors")
    released = {key.removeprefix("weight."): value for key, value in tensors.items() if key.startswith("weight.")}
    H, W, C = tensors["x"].shape[1:]
    attn = create_attention(name, **FACTS[name].RELEASED[file], dim=C, num_heads=2, grid=(H, W))
    attn = attn.to(dtype).train("noise" in tensors)
    attn.load_state_dict({key: value.to(dtype) for key, value in ours(released).items()}, strict=True)
    if "noise" in tensors:  # the released noise replaces ours
        monkeypatch.setattr(torch, "randn", lambda shape, **_: tensors["noise"].to(dtype).view(shape))
    x = tensors["x"].to(dtype).flatten(1, 2).requires_grad_()

    y = attn(x, (H, W))
    (y * tensors["R"].to(dtype).view_as(y)).sum().backward()

    # float64: the rounding of stored values. float32: five times the error of the released code, or a few units.
    tolerances = {
        torch.float64: [3e-7 * case[f"{k}_absmax"] for k in ("out", "grad")],
        torch.float32: [max(5 * case[f"f32_{k}_max_abs_err"], 1e-6 * case[f"{k}_absmax"]) for k in ("out", "grad")],
    }[dtype]
    for value, stored, tolerance in zip((y, x.grad), (tensors["out"], tensors["grad_x"]), tolerances, strict=True):
        torch.testing.assert_close(value.double(), stored.double().view_as(value), rtol=0, atol=tolerance)
    norms = {key: parameter.grad.norm().item() for key, parameter in attn.named_parameters()}
    expected = {next(iter(ours({key: released[key]}))): norm for key, norm in case["param_grad_l2"].items()}
    assert norms == pytest.approx(expected, rel=1e-5)  # stored with six digits
