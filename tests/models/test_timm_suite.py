"""timm's own tests of models, on ours with several attentions: `pytest -m timm`, with the index at hand.

They are those of timm's source distribution, of the installed version: configurations of all models, the others of the
smallest, since sizes differ in numbers alone. Not run are, of timm's tests/test_models.py:

* `test_model_forward_torchscript`, `test_model_forward_fx_torchscript`: TorchScript is not a goal, torch deprecates it.
* `test_model_inference`, `test_model_load_pretrained`, `test_model_features_pretrained`: our models have no weights to
  download.
* those that name models of timm.
"""

import importlib.util
import inspect
import subprocess
import sys
import tarfile

import pytest
import timm

from models import MODELS, create_model

pytestmark = [pytest.mark.timm, pytest.mark.filterwarnings("default")]

ATTENTION = ["softmax", *({"name": name, "fit": True} for name in ("local", "eva", "lara"))]
DEIT = [name for name in MODELS if name.startswith("deit")]
PVT = [name for name in MODELS if name.startswith("pvt")]
SMALLEST = ["deit_tiny_p16", "deit_tiny_p8", "pvtv2_b0", "pvtv2_b0_2xheads"]
TESTS = {  # timm's tests -> models; timm's `NON_STD_FILTERS` tell by a name which of the first two is for it
    "test_model_default_cfgs": PVT,
    "test_model_default_cfgs_non_std": DEIT,
    "test_model_forward": SMALLEST,
    "test_model_backward": SMALLEST,
    "test_model_forward_features": SMALLEST,
    "test_model_forward_intermediates_features": SMALLEST,
    "test_model_forward_intermediates": SMALLEST,
    "test_prune_intermediate_layers_params_used": SMALLEST,
    "test_prune_intermediate_layers_contract": SMALLEST,
    "test_model_forward_fx": SMALLEST,
    "test_model_backward_fx": SMALLEST,
}


@pytest.fixture(scope="session")
def timm_tests(request, tmp_path_factory):
    """The module tests/test_models.py of timm's source distribution."""
    marks = "base cfg cfg_nonstd forward backward features fxforward fxbackward torchscript timeout"
    for mark in marks.split():
        request.config.addinivalue_line("markers", f"{mark}: of timm's tests")
    folder = tmp_path_factory.mktemp("timm")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", folder]
    subprocess.run([*pip, f"timm=={timm.__version__}"], check=True)
    source = f"timm-{timm.__version__}"
    with tarfile.open(folder / f"{source}.tar.gz") as sdist:
        sdist.extractall(folder, filter="data")
    spec = importlib.util.spec_from_file_location("timm_tests", folder / source / "tests" / "test_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("test", "name"), [(test, name) for test, names in TESTS.items() for name in names])
def test_timm(timm_tests, monkeypatch, test, name, attention):
    def create(name, **options):
        return timm.create_model(name, **{"attention": attention, **options})

    monkeypatch.setattr(timm_tests, "create_model", create)
    # timm's registry knows a model's name, not its attention
    monkeypatch.setattr(
        timm_tests,
        "get_pretrained_cfg_value",
        lambda name, key: create_model(name, attention, device="meta").pretrained_cfg.get(key),
    )
    function = getattr(timm_tests, test)
    given = {"model_name": name, "batch_size": 2 if "backward" in test else 1, "cfg_device": "meta"}
    function(**{key: given[key] for key in inspect.signature(function).parameters})
