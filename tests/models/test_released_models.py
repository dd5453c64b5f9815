"""Models of the published EVA and LARA code: its weights load strictly and give its numbers, gradients included.

tests/data/released/models holds two small models of that code: weights and images stored as float16, which they are
exactly, and the logits computed there in float64 and stored as float32; cases.json holds gradients of sum(logits * R).
layouts holds the parameter names and shapes of four of its full-size models.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.run.load import load_run
from models import create_model
from models.convert import from_released
from tests.support.partition import chosen

CONFIGS = Path(__file__).parents[2] / "configs"
RELEASED = Path(__file__).parents[1] / "data" / "released"
CASES = json.loads((RELEASED / "models" / "cases.json").read_text())

EVA = {"name": "eva", "mu_scale": 0.5, "position_bias": "table_released", "noise": "released"}
LARA = {"name": "lara", "noise": "released"}
DEIT = {"img_size": 112, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}
PVT = {"embed_dims": (16, 32, 64, 128), "depths": (1,) * 4, "num_heads": (2, 4, 8, 16), "mlp_ratios": (2, 2, 1, 1)}
PVT["num_classes"] = 10

MODELS = {
    "evit_d64_p8_eva.safetensors": ("deit", EVA, DEIT),
    "pvt_16-32-64-128_lara.safetensors": ("pvtv2_b0", {**LARA, "landmark_transform": "dense"}, PVT),
}
LAYOUTS = {  # of the models of these configurations
    "evit_tiny_p16_eva.json": "deit_tiny_p16/eva.yaml",
    "evit_tiny_p8_lara.json": "deit_tiny_p8/lara.yaml",
    "pvt_medium2_eva.json": "pvtv2_b3_2xheads/eva.yaml",
    "pvt_medium2_lara_dense.json": "pvtv2_b3_2xheads/lara.yaml",
}


def assert_close(ours, released, tolerance):
    torch.testing.assert_close(ours.detach(), released.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("file", MODELS)
def test_numbers(file):
    case = CASES[file]
    name, attention, options = MODELS[file]
    tensors = load_file(RELEASED / "models" / file)
    released = {key.removeprefix("weight."): value for key, value in tensors.items() if key.startswith("weight.")}
    model = create_model(name, attention, **options).eval().double()
    model.load_state_dict(from_released(released), strict=True)
    images = load_file(RELEASED / "models" / case["images"])["x"].double().requires_grad_()

    logits = model(images)
    (logits * tensors["R"].double()).sum().backward()

    # The stored logits and gradients are float32: half a unit in the last place is 6e-8 of the value.
    assert_close(logits, tensors["logits"], 3e-7 * case["logits_absmax"])
    probed = images.grad.flatten()[case["grad_x_index"]]
    assert_close(probed, torch.tensor(case["grad_x_value"], dtype=torch.float64), 3e-7 * case["grad_x_absmax"])
    # Norms are stored with six digits.
    assert images.grad.norm().item() == pytest.approx(case["grad_x_l2"], rel=1e-5)
    norms = {key: parameter.grad.norm().item() for key, parameter in model.named_parameters()}
    expected = {name: x for key, x in case["param_grad_l2"].items() for name in from_released({key: released[key]})}
    assert norms == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("file", chosen(LAYOUTS, "evit_tiny_p8_lara.json".__eq__))
def test_full_size_layouts(file):
    layout = json.loads((RELEASED / "layouts" / file).read_text())
    run = load_run(CONFIGS / LAYOUTS[file])
    with torch.device("meta"):
        model = create_model(attention=run.attention, **run.model)
        released = {key: torch.empty(shape) for key, shape in layout["shapes"].items()}
    model.load_state_dict(from_released(released), strict=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == layout["num_parameters"]
