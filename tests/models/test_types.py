"""Types of models and layers, which mypy checks here as in the code of others."""

from typing import Any, assert_type, get_args

from torch import Tensor, nn, zeros
from torch.nn import ModuleList

from attention import Attention, create_attention
from models import MODELS, DeitName, PvtName, create_model
from models.deit import Deit
from models.pvt import Pvt


def test_a_model_has_the_type_of_its_family_and_a_layer_is_an_attention() -> None:
    options: dict[str, Any] = {"img_size": 32, "num_classes": 3}
    deit = assert_type(create_model("deit_tiny_p16", attention="linear", **options), Deit)
    assert_type(deit.forward_features(zeros(1, deit.in_chans, 32, 32)), Tensor)
    assert (assert_type(deit.in_chans, int), assert_type(deit.num_classes, int)) == (3, 3)
    assert len(assert_type(deit.blocks, ModuleList)) == 12
    pvt = assert_type(create_model("pvtv2_b0", {"name": "sra"}, **options), Pvt)
    assert len(assert_type(pvt.stages, ModuleList)) == 4
    name: str = "deit_tiny_p16"
    assert isinstance(assert_type(create_model(name, **options), nn.Module), Deit)
    assert assert_type(create_attention("eva", dim=8, num_heads=2, grid=(14, 14)), Attention).num_heads == 2


def test_the_names_of_types_are_those_of_the_models() -> None:
    families = {**dict.fromkeys(get_args(DeitName), Deit), **dict.fromkeys(get_args(PvtName), Pvt)}
    assert families == {name: family for name, (family, _) in MODELS.items()}
