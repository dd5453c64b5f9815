"""The JSON Schema that editors read agrees with the dataclasses and refuses typing mistakes."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from attention import ATTENTION
from models import MODELS

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = sorted(set(CONFIGS.rglob("*.yaml")) - set(CONFIGS.glob("ablation/*.yaml")))
SCHEMA = json.loads((CONFIGS / "schema.json").read_text())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def test_it_is_a_schema_and_every_shipped_configuration_is_valid():
    VALIDATOR.check_schema(SCHEMA)
    assert len(RUNS) > 50
    problems = {path.name: [*VALIDATOR.iter_errors(yaml.safe_load(path.read_text()))] for path in RUNS}
    assert not {name: found for name, found in problems.items() if found}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_known(name):
    assert VALIDATOR.is_valid({"model": {"name": name}})


@pytest.mark.parametrize("name", ATTENTION)
def test_every_mechanism_is_known_with_all_its_options_and_no_other(name):
    options = json.loads(json.dumps({"name": name, **ATTENTION[name].Config().__dict__}))
    assert VALIDATOR.is_valid({"attention": options})
    assert VALIDATOR.is_valid({"attention": [name, name, options, "softmax"]})
    assert VALIDATOR.is_valid({"attention": [{"blocks": "0-8", **options}, {"stage": 2, "blocks": [9, 10], **options}]})
    assert not VALIDATOR.is_valid({"attention": {**options, "windw_size": 7}})


@pytest.mark.parametrize(
    "options",
    [
        {"optm": {}},
        {"optim": {"learning_rate": 0.1}},
        {"optim": {"lr": "fast"}},
        {"optim": {"lr": 0}},
        {"optim": {"betas": [0.9]}},
        {"optim": {"betas": [0.9, 1.0]}},
        {"schedule": {"sched": "cosin"}},
        {"schedule": {"epochs": 1.5}},
        {"schedule": {"epochs": None}},
        {"train": {"compile": 1}},
        {"train": {"amp": "fp8"}},
        {"data": {"subset": 0}},
        {"data": []},
        {"model": {"name": "deit_huge"}},
        {"model": {"name": "pvtv2_b2", "patch_size": 8}},
        {"attention": "evaa"},
        {"attention": {"window_size": 7}},
        {"attention": {"name": "eva", "window_size": "7"}},
        {"attention": {"name": "eva", "num_samples": 0}},
        {"attention": {"name": "eva", "partition": "some"}},
        {"attention": ["eva", "eva", "softmax"]},
        {"attention": {"name": "eva", "blocks": "0-8"}},
        {"attention": [{"name": "eva", "blocks": 0.5}]},
        {"attention": [{"name": "eva", "blocks": "0-8"}, {"name": "softmax"}]},
        {"attention": [{"name": "eva", "stage": -1}]},
    ],
    ids=json.dumps,
)
def test_misspelt_keys_wrong_types_choices_and_ranges_are_invalid(options):
    assert not VALIDATOR.is_valid(options)


def test_an_editor_can_explain_an_option():
    lr = SCHEMA["properties"]["optim"]["properties"]["lr"]
    assert lr["type"] == "number"
    assert (lr["default"], lr["exclusiveMinimum"], lr["maximum"]) == (5e-4, 0, 100)
    assert lr["description"].startswith("learning rate at a total batch")
    assert SCHEMA["properties"]["train"]["properties"]["amp"]["anyOf"] == [{"enum": ["bf16", "fp16"]}, {"type": "null"}]
