"""Configuration files are read back as written, and a mistake is refused in one line that names its place."""

import argparse
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
import yaml

from attention import AttentionFactory, OptionError
from engine.config.schema import SECTIONS, Augment, Optim, Run
from engine.config.yaml_files import dump_yaml, read_yaml
from engine.run.load import REMOVED, draft_run, dump_run, load_run, parse_run
from engine.runtime.arguments import find_config
from engine.runtime.errors import ConfigError, refuse_bad_input
from models import create_model, parse_model, split_name
from tests.support.launcher import ROOT

VALID = """\
model:
  name: deit_tiny_p16
attention:
  name: local
  window_size: 7
optim:
  lr: 5.0e-4
"""


def write(folder: Path, text: str | bytes, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path: Path, *overrides: str) -> str:
    """Returns the line with which `load_run` refuses, file names without their folder."""
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    message = str(caught.value)
    assert all(line.isprintable() and len(line) <= 500 for line in message.split("\n"))
    return message.replace(f"{path.parent}/", "")


def test_options_not_given_have_the_defaults_of_their_dataclass(tmp_path):
    run = load_run(write(tmp_path, VALID))
    assert (run.augment, run.optim) == (Augment(), Optim())
    assert run.model["num_heads"] == 3
    assert run.attention == {"name": "local", "window_size": 7} | run.attention
    assert len(run.attention) > 2


def test_a_pyramid_is_written_out_as_one_mechanism_per_stage(tmp_path):
    run = load_run(write(tmp_path, VALID), ["model.name=pvtv2_b0_2xheads"])
    assert [stage["name"] for stage in run.attention] == ["local", "local", "local", "softmax"]
    assert run.model["num_heads"] == [2, 4, 10, 16]


@pytest.mark.complete
def test_sizes_that_fit_small_grids_are_written_out(tmp_path):
    path = write(tmp_path, VALID)
    refused = refusal(path, "attention=eva", "model.name=pvtv2_b0", "model.img_size=[64, 96]")
    assert refused.endswith("attention(eva).window_size = 7: larger than the 4x6 grid; at most 6")
    run = load_run(path, ["attention={name: eva, fit: true}", "model.name=pvtv2_b0", "model.img_size=[64, 96]"])
    sizes = [(stage["window_size"], stage["num_landmarks"], stage["fit"]) for stage in run.attention[:3]]
    assert sizes == [(7, 49, True), (7, 49, True), (6, 24, True)]
    assert load_run(write(tmp_path, dump_yaml(dump_run(run)), "config.yaml")) == run
    written, given = (create_model(attention=x, **run.model) for x in (run.attention, {"name": "eva", "fit": True}))
    written.load_state_dict(given.state_dict())
    images = torch.randn(1, 3, 64, 96)
    assert torch.equal(written.eval()(images), given.eval()(images))
    one = load_run(path, ["attention={name: eva, fit: true}", "model.img_size=96"])
    assert (one.attention["window_size"], one.attention["num_landmarks"]) == (6, 36)
    larger = parse_run(dump_run(one), "checkpoint", ["model.img_size=224"])
    assert (larger.attention["window_size"], larger.attention["num_landmarks"]) == (6, 36)  # those of its weights


@pytest.mark.parametrize("model", ["deit_tiny_p16", "pvtv2_b0"])
def test_dump_and_parse_are_inverse_also_through_yaml(tmp_path, model):
    run = load_run(write(tmp_path, VALID), [f"model.name={model}", "augment.ratio=[0.5, 2]", "optim.clip_grad=null"])
    plain = yaml.safe_load(yaml.safe_dump(dump_run(run), sort_keys=False))
    assert parse_run(plain, "checkpoint") == run
    assert load_run(write(tmp_path, yaml.safe_dump(dump_run(run)), "again.yaml")) == run


def test_a_mechanism_is_parsed_once(monkeypatch):
    parsed, from_options = [], AttentionFactory.from_options
    monkeypatch.setattr(AttentionFactory, "from_options", lambda *given: (parsed.append(1), from_options(*given))[1])
    run = load_run(ROOT / "configs" / "deit_tiny_p16" / "eva.yaml")
    create_model("deit", run.attention, depth=1)
    assert len(parsed) == 2


def test_options_of_earlier_versions_without_an_effect_are_passed_over():
    options = {"model": {"name": "deit_tiny_p16"}, "attention": {"name": "efficient"}}
    former: dict = {}  # sections, from dotted paths
    for key, values in REMOVED.items():
        section, _, name = key.partition(".")
        former.setdefault(section, {})[name] = (values or ["any"])[-1]
    former |= {"model": former["model"] | options["model"], "report": {"wandb": "project"}}
    assert parse_run(options | former, "last.pt") == parse_run(options, "last.pt")
    assert former["distill"] == {"layers": None, "distance": "squared", "beside": "labels"}  # not changed
    with pytest.raises(ConfigError, match=r"^last\.pt: model\.patch_drop_rate = 'any': gone from this version; use"):
        parse_run(options | former, "last.pt", resumes=True)
    former["distill"]["layers"] = [1]
    with pytest.raises(ConfigError, match=r"^last\.pt: distill\.layers = \[1\]: gone from this version; use"):
        parse_run(options | former, "last.pt")


def test_base_holds_where_the_file_gives_nothing_and_attention_is_taken_as_a_whole(tmp_path):
    write(tmp_path, VALID + "augment:\n  mixup: 0.0\n  hflip: 0.25\n", "base.yaml")
    (tmp_path / "below").mkdir()
    run = load_run(write(tmp_path, "base: ../base.yaml\nattention: softmax\naugment: {hflip: 0}\n", "below/run.yaml"))
    assert (run.augment.mixup, run.augment.hflip, run.optim.lr) == (0.0, 0.0, 5e-4)
    assert run.attention["name"] == "softmax"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optim.lr=1.0e-3"], {"optim": {"lr": 1e-3}}),
        (["optim.lr=1e-3"], {"optim": {"lr": 1e-3}}),
        (["optim.lr=1.0E-3"], {"optim": {"lr": 1e-3}}),
        (["optim.lr=+.1e-2"], {"optim": {"lr": 1e-3}}),
        (["train.checkpoint_minutes=1.5e1"], {"train": {"checkpoint_minutes": 15.0}}),
        (['data.root="1e-3"'], {"data": {"root": "1e-3"}}),
        (["data.root=1e-3a"], {"data": {"root": "1e-3a"}}),
        (["optim.betas.1=0.95"], None),
        (["optim.betas=[0.9, 0.95]", "optim.betas.1=0.99"], {"optim": {"betas": (0.9, 0.99)}}),
        (["train.seed=1", "train.seed=2"], {"train": {"seed": 2}}),
        (["data.root=/data/a=b"], {"data": {"root": "/data/a=b"}}),
        (["optim.clip_grad=null"], {"optim": {"clip_grad": None}}),
        (["optim={lr: 1.0}"], {"optim": {"lr": 1.0}}),
    ],
)
def test_overrides(tmp_path, overrides, expected):
    path = write(tmp_path, VALID)
    if expected is None:
        assert refusal(path, *overrides).startswith(f"override '{overrides[-1]}': ")
        return
    run = load_run(path, overrides)
    for section, options in expected.items():
        assert getattr(run, section) == dataclasses.replace(getattr(load_run(path), section), **options)


HYBRID = """\
model: {name: deit_tiny_p16}
attention:
  - {blocks: 0-8, name: local, window_size: 7}
  - {blocks: [10, 9, 11], name: softmax}
"""


def test_a_hybrid_is_written_out_and_overridden_by_entry(tmp_path):
    path = write(tmp_path, HYBRID)
    run = load_run(path)
    assert [(entry["blocks"], entry["name"], entry.get("window_size")) for entry in run.attention] == [
        ("0-8", "local", 7),
        ("9-11", "softmax", None),
    ]
    assert parse_run(dump_run(run), "last.pt") == run
    changed = load_run(path, ["attention.0.window_size=4", "attention.0.blocks=0-9", "attention.1.blocks=[10, 11]"])
    assert (changed.attention[0]["window_size"], changed.attention[1]["blocks"]) == (4, "10-11")
    expected = {
        "attention.0.blocks=0-7": "run.yaml:2: attention: no entry has block 8; every block has one mechanism",
        "attention.1.blocks=12": "override 'attention.1.blocks=12': attention[1].blocks = 12: there is no block 12",
        "attention.1.window_size=4": "override 'attention.1.window_size=4': attention[1](softmax).window_size: unknown"
        " option; did you mean 'attention.0.window_size'?",
        "attention.0.blcks=1": "override 'attention.0.blcks=1': attention[0](local).blcks: unknown option; did you mean"
        " 'attention.0.blocks'?",
        "attention.0.name=softmax": "run.yaml:3: attention[0](softmax).window_size: unknown option;"
        " attention.0.name=softmax keeps the other options that the file gives: give it as a whole,"
        " attention.0={blocks: 0-8, name: softmax, ...}",
        "attention.0=softmax": "run.yaml:2: attention: deit_tiny_p16 takes one mechanism or a list of mappings",
    }
    for override, message in expected.items():
        assert refusal(path, override).removeprefix(f"{tmp_path}/").startswith(message)


def test_override_reaches_into_model_attention_and_a_list_of_stages(tmp_path):
    run = load_run(write(tmp_path, VALID), ["attention.window_size=5", "model.depth=2"])
    assert (run.attention["window_size"], run.model["depth"]) == (5, 2)
    stages = "model: {name: pvtv2_b0}\nattention: [{name: local}, {name: local}, softmax, softmax]\n"
    run = load_run(write(tmp_path, stages, "pvt.yaml"), ["attention.1.window_size=4", "attention.2=local"])
    assert [stage.get("window_size") for stage in run.attention] == [7, 4, 7, None]


REFUSED = {  # name: (text of VALID; text in its place, at the end or of all; the message after the file)
    "unknown section": ("", "optimizer: {}\n", "8: optimizer: unknown option; did you mean 'optim'?"),
    "unknown option": ("lr:", "learning_rate:", "7: optim.learning_rate: unknown option; known: betas, clip_grad,"),
    "mechanism": ("local", "locale", "4: attention.name: unknown mechanism 'locale'; did you mean 'local'?"),
    "model": ("p16", "p61", "2: model.name: unknown model 'deit_tiny_p61'; did you mean 'deit_tiny_p16'?"),
    "no name": ("name: deit_tiny_p16", "depth: 3", "1: model.name: expected the name of a model, got None"),
    "name of a wrong type": ("deit_tiny_p16", "[a]", "2: model.name: expected the name of a model, got ['a']"),
    "missing section": ("model:\n  name: deit_tiny_p16\n", "", "1: model: required"),
    "empty section": ("  lr: 5.0e-4\n", "", "6: optim: expected a mapping of options, got None"),
    "text for a number": ("5.0e-4", "'5e-4'", "7: optim.lr: expected float, got '5e-4', text to YAML; write 0.0005"),
    "no such choice": ("", "train: {amp: fp61}\n", "8: train.amp: 'fp61' is not a choice; did you mean 'fp16'?"),
    "duplicate key": ("", "  lr: 1.0\n", "8: optim.lr: duplicate key"),
    "duplicate section": ("", "optim: {}\n", "8: optim: duplicate key"),
    "key that is no text": ("", "  on: 1.0\n", "8: optim: expected text as a key, got 'on'"),
    "merge key": ("", "  <<: {eps: 1.0}\n", "8: optim: expected text as a key, got '<<'"),
    "tag": ("", "data: !!set {a}\n", "8: data: the tag 'tag:yaml.org,2002:set' has no use here"),
    "no such date": ("", "data: 2020-13-45\n", "8: data: month must be in 1..12"),
    "YAML error": ("", "data: [1\n", "9: expected ',' or ']'"),
    "empty": (None, "", " expected a mapping of options, got an empty file"),
    "list": (None, "- 1\n", " expected a mapping of options, got list"),
    "not UTF-8": (None, b"a: 1\nb: \xff\n", "2: not UTF-8 text"),
    "control character": ("", "# \x07\n", "8: the character '\\x07' is not allowed"),
    "nested too deeply": (None, "a: " + "[" * 5000, "1: nested too deeply"),
    "nested within bounds": ("", "data: " + "[" * 40 + "]" * 40 + "\n", "8: data: expected a mapping"),
    "many values": (None, "a: [" + "0," * 2500 + "]", "1: more than 2000 values"),
    "large": ("", "#" * 2**15, "1: larger than 32768 bytes"),
    "byte order mark": (None, "\ufeff" + VALID, "1: begins with a byte order mark"),
    "number in base 8": ("7", "010", "5: attention.window_size: 010 is a number in base 8"),
    "number of 65 bits": ("7", str(2**63), "5: attention.window_size: expected a number of at most 64 bits"),
    "number beyond torch": ("p16", f"p16\n  embed_dim: {3 * 2**60}", "1: model: cannot be built"),
    "landmarks beyond all": (
        "local\n  window_size: 7",
        f"eva\n  num_landmarks: {2**62}",
        f"5: attention(eva).num_landmarks = {2**62} does not divide the 14x14 grid into rows x columns of "
        "bins; nearest valid: 196",
    ),
    "not printable": (
        "",
        'data: {root: "a\\0b"}\n',
        "8: data.root: 'a\\x00b' holds a character that cannot be printed",
    ),
    "key that is not printable": ("", '"a\\nb": 1\n', "8: a\\nb: unknown option"),
    "key that looks like a path": ("", '"optim.lr": 1\n', "8: optim.lr: unknown option"),
    "escape that is no character": ("", 'data: "\\Uffffffff"\n', "8: an escape that is no character"),
    "long value": ("local", "l" * 9000, f"4: attention.name: unknown mechanism '{'l' * 300}"),
    "contains itself": ("", "data: &a\n  root: *a\n", "8: data.root contains itself"),
    "aliases that grow": (
        None,
        "a0: &a0 [0]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(10)),
        "1: more than 2000 values",
    ),
}

TAGS = (
    *("!!python/object/apply:os.system ['false']", "!!python/name:os.system ''"),
    *("!!python/object/new:type [x, [], {}]", "!!int abc", "!!int ''", "!!float x", "!!bool perhaps", "!!null x"),
    *("!!timestamp x", "!!binary AAA=", "!!set {a}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!seq x", "!!map x"),
    *("!local x", "!<tag:example.org,2000:x> x", "!!merge <<"),
)
SCALARS = (
    *("2020-13-45", "0x_", "0b_", "010", "1:30", "1" + ":59" * 3000, "0x" + "f" * 9000, "9" * 5000, '"\\Uffffffff"'),
    *('"\\ud800"', '"\\z"'),
)
SYNTAX = (
    *("x: [1", "x: {a: 1", "\tx: 1", "x", "x: 'open", "x: *nowhere", "- x", "--- \nx: 1", "? [a]\n: 1", "<<: {x: 1}"),
    *("x: &x [*x]", "1: 2", "true: 1", "null: 1", "x: @", "x: `", "x: %", "x: |3-9\n a", "%YAML 9.9", "x: \x07"),
    *("\ufeffx: 1", "x: 1: 2", "x: >\n\x85\x00", "\ud800"),
)


def test_no_tag_and_no_syntax_ends_in_a_traceback(tmp_path):
    for value in TAGS + SCALARS:
        assert refusal(write(tmp_path, f"{VALID}data:\n  workers: {value}\n")).startswith("run.yaml:9: "), value
    for text in SYNTAX:
        content = f"{VALID}{text}\n".encode("utf-8", "surrogatepass")
        assert re.match(r"run\.yaml:\d+: \S", refusal(write(tmp_path, content))), text
    for encoding in ("utf-16", "utf-32", "utf-16-le"):
        assert re.match(r"run\.yaml:\d+: \S", refusal(write(tmp_path, VALID.encode(encoding)))), encoding


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    old, new, expected = REFUSED[case]
    text = new if old is None else VALID.replace(old, new) if old else VALID + new
    assert refusal(write(tmp_path, text)).startswith(f"run.yaml:{expected}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=1e400", "optim.lr: inf is not a finite number"),
        ("data.root=1e-3", "data.root: expected str, got 0.001"),
        ("lr=1", "lr: unknown option; did you mean 'optim.lr'?"),
        ("batch_size=1", "batch_size: unknown option; did you mean 'train.total_batch_size'?"),
        ("window_sizes=1", "window_sizes: unknown option; did you mean 'attention.window_size'?"),
        ("attention.0.name=eva", "attention(local).0: unknown option..."),
        ("attention.mixup=1", "attention(local).mixup: unknown option; did you mean 'augment.mixup'?"),
        ("attention=qqqq", "attention.name: unknown mechanism 'qqqq'; `python -m attention` lists all..."),
        ("qqqq=1", "qqqq: unknown option; known: attention, ..."),
        ("model.name=DeiT_Tiny_P16", "model.name: unknown model 'DeiT_Tiny_P16'; did you mean 'deit_tiny_p16'?"),
        ("optim.lr_=1", "optim.lr_: unknown option; did you mean 'lr'?"),
        ("base=other.yaml", "base: unknown option..."),
        (
            "attention.name=softmax",
            "attention(softmax).window_size: unknown option; attention.name=softmax keeps the other options that the"
            " file gives: give it as a whole, attention=softmax or attention={name: softmax, ...}",
        ),
        ("model.name.x=1", "model.name is 'deit_tiny_p16', not a mapping..."),
        ("optim.lr", "expected key.path=value"),
        ("optim..lr=1", "expected key.path=value"),
        ("optim={lr: 1, lr: 2}", "optim.lr: duplicate key"),
        ("optim.lr=[", "expected the node content..."),
        ("a." * 60 + "b=1", "expected key.path=value"),
        ("train.seed=017", "train.seed: 017 is a number in base 8 or 60 to YAML; write it in base 10"),
        ("train={1: 2}", "train: expected text as a key, got '1'"),
        ("init.weights=", "has no value; write init.weights=null for none"),
        ("train.seed=# 1", "has no value; write train.seed=null for none"),
        ("train.amp=none", "train.amp: 'none' is text, and names nothing; write null for none"),
        ("train.amp=nul", "train.amp: 'nul' is not a choice; did you mean 'null'?"),
    ],
)
def test_a_refused_override_is_named_with_its_option(tmp_path, override, expected):
    """Messages that end in dots go on."""
    message = refusal(write(tmp_path, VALID), override)
    place = f"override {override!r}" if len(override) < 100 else f"override '{override[:97]}...'"
    if override == "attention.name=softmax":  # refused for the option that the file gives to another mechanism
        place = "run.yaml:5"
    whole = f"{place}: {expected}"
    assert message.startswith(whole[:-3]) if whole.endswith("...") else message == whole


def test_index_outside_a_list_is_refused(tmp_path):
    path = write(tmp_path, "model: {name: pvtv2_b0}\nattention: [softmax, softmax, softmax, softmax]\n")
    for index in ("4", "-1", "x"):
        expected = f"override 'attention.{index}=sra': attention is a list; expected an index from 0 to 3"
        assert refusal(path, f"attention.{index}=sra") == expected


CONTRADICTIONS = {
    **{
        f"train.total_batch_size={size} train.grad_accum_steps=3": f"train.total_batch_size = {size} is not divisible "
        f"by 1 ranks x 3 accumulation steps; nearest: {nearest}"
        for size, nearest in ((1024, 1023), (2, 3))
    },
    "train.total_batch_size=9": "train.total_batch_size = 9 leaves 9 images per rank and step",
    "schedule.epochs=5": "schedule.warmup_epochs = 10 is above schedule.epochs = 5",
    "schedule.warmup_lr=0.1": "schedule.warmup_lr = 0.1 is above the peak learning rate 0.001",
    "schedule.min_lr=0.1": "schedule.min_lr = 0.1 is above the peak learning rate 0.001 (lr 0.0005 scaled from 512"
    " images); lower it, or raise optim.lr",
    "train.total_batch_size=8": "schedule.min_lr = 1e-05 is above the peak learning rate 7.8125e-06 (lr 0.0005 scaled"
    " from 512 images); lower it, raise optim.lr, or set optim.lr_base_size = 8 to leave lr unscaled",
    "augment.scale=[0.5,0.2]": "augment.scale = [0.5, 0.2] is not in ascending order",
    "augment.ratio=[2,1]": "augment.ratio = [2.0, 1.0] is not in ascending order",
    "optim.betas=[0.9,1]": "optim.betas = 1.0 must be less than 1",
    "optim.opt=adamv": "optim.opt = 'adamv' is not an optimiser of timm; did you mean 'adam",
    **{f"model.in_chans={n}": f"model.in_chans = {n}: images have 3 channels (RGB) or 1 (grey)" for n in (2, 4)},
    "augment.auto_augment=rand-x9": "augment.auto_augment = 'rand-x9': no policy of timm; write",
}


@pytest.mark.parametrize("overrides", CONTRADICTIONS)
def test_contradictions_are_refused(tmp_path, overrides):
    assert f": {CONTRADICTIONS[overrides]}" in refusal(write(tmp_path, VALID), *overrides.split())


def test_every_refusal_comes_at_once(tmp_path):
    """Wrong options first, those of model and attention too, and then contradictions, a line each with its place."""
    path, wrong = write(tmp_path, VALID), ["data.rot=/x", "optim.lr=-1", "train.amp=fp8", "schedul.epochs=3"]
    lines = refusal(path, *wrong).split("\n       ")
    assert sorted(line.split("': ")[0] for line in lines) == sorted(f"override '{text}" for text in wrong)
    assert any(line.endswith("data.rot: unknown option; did you mean 'root'?") for line in lines)
    parts = ["model.num_heads=-1", "model.depth=x", "attention.windw=7", "attention.overlap=-3"]
    for given in (parts, [*wrong, *parts]):
        lines = refusal(path, *given).split("\n       ")
        assert sorted(line.split("': ")[0] for line in lines) == sorted(f"override '{text}" for text in given)
    lines = refusal(path, "train.total_batch_size=9", "attention.window_size=99").split("\n       ")
    keys = ["attention(local).window_size", "train.total_batch_size"]
    assert [line.partition(": ")[2].partition(" ")[0] for line in lines] == keys


def test_the_data_says_the_number_of_classes(tmp_path):
    path = write(tmp_path, VALID)
    given = draft_run(path, ["model.num_classes=auto", "data.subset=7"], 1, lambda data: data.subset).finish()
    assert given.model["num_classes"] == 7
    assert "model.num_classes: expected int, got 'auto'" in refusal(path, "model.num_classes=auto")


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "quickstart.yml": r"; did you mean configs/quickstart\.yaml\?",
        "configs/deit_tiny_16/eva.yaml": r"; did you mean configs/deit_tiny_p16/eva\.yaml\?",
        "/data/nothing.yaml": "",
    }.items(),
)
def test_a_file_that_is_not_there_is_refused_and_one_of_a_similar_name_named(name: str, meant: str):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{name}: no such file{meant}$"):
        find_config(name)


NONSENSE = {  # option: values that have no sense, each refused for itself; the test below has those beyond a bound
    "data.mean": ("[-0.1]", "[0.5, 0.5, 124]", "[0.5, 0.5]"),
    "data.std": ("[0]", "[58.0]", "[]"),
    "augment.ratio": ("[0.0, 1.0]", "[0.001, 1.0]", "[1, 1000]"),
    "augment.scale": ("[0.0, 1.0]", "[0.5, 2.0]"),
    "augment.interpolation": ("lanczos", "bicubc"),
    "augment.smoothing": ("-0.1", "1", "1.5"),
    "optim.betas": ("[-0.1, 0.9]", "[0.9, 1]"),
    "train.timeout_minutes": ("1.0e+300",),
    "model.proj_drop_rate": ("-0.1", "1"),
}


@pytest.mark.parametrize("key", NONSENSE)
def test_nonsense_is_refused(tmp_path, key):
    path = write(tmp_path, VALID)
    for value in NONSENSE[key]:
        assert refusal(path, f"{key}={value}").startswith(f"override '{key}={value}': {key}")


def beyond(field: dataclasses.Field, value: object) -> list[float]:
    """Numbers outside of each bound of an option."""
    low, high, above = (field.metadata.get(name) for name in ("low", "high", "above"))
    bounds = low is not None and low - 1, high is not None and high + 1, above
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [type(value)(bound) for bound in bounds if is_number and bound not in (None, False)]


@pytest.mark.complete
def test_every_option_refuses_another_name_and_another_value(tmp_path):
    """In the line where it is written."""
    run = load_run("configs/deit_tiny_p8/eva.yaml", ["model.depth=1"])
    write(tmp_path, dump_yaml(dump_run(run)), "base.yaml")
    sections = {name: getattr(run, name) for name in SECTIONS}
    sections["model"] = parse_model(*split_name(run.model))
    sections["attention"] = AttentionFactory.from_options(run.attention).config
    for section, options in sections.items():
        for field in dataclasses.fields(options):
            outside = beyond(field, getattr(options, field.name))
            for key, value in [(f"{field.name}_", 1), *((field.name, x) for x in ({"no": "such"}, *outside))]:
                given = {**(run.attention if section == "attention" else {}), key: value}
                text = f"base: base.yaml\n{section}: {json.dumps(given)}\n"
                assert refusal(write(tmp_path, text)).startswith(f"run.yaml:2: {section}"), text


WITHOUT_HIGH = {
    "data.max_broken": "of the images that there are",
    "data.subset": "of the images that there are; a class that has fewer refuses it",
    "data.val_fraction": "of the images that there are; a class that has as few refuses it",
    "data.subset_seed": "any number is one",
    "train.seed": "any number is one",
    "train.eval_every": "above the epochs: the last alone",
    "train.keep_checkpoints": "above the epochs: all of them",
    "train.checkpoint_minutes": "above the run's time: none",
    "train.checkpoint_steps": "above the epoch's steps: none",
    "train.log_every": "above the epoch's steps: one line at its end",
}
"""Options without an upper bound, and the meaning of large values."""


def test_every_number_has_bounds():
    for section in dataclasses.fields(Run):
        if section.name in ("model", "attention", "plugins"):
            continue
        types = typing.get_type_hints(section.default_factory)
        for field in dataclasses.fields(section.default_factory):
            key = f"{section.name}.{field.name}"
            if re.search(r"\b(int|float)\b", str(types[field.name])):
                limits = {name for name, limit in field.metadata.items() if limit is not None}
                assert limits & {"low", "above"}, key
                assert limits & {"high", "below"} or key in WITHOUT_HIGH, key


OPTIONAL_TEXTS = [
    f"{section.name}.{field.name}"
    for section in dataclasses.fields(Run)
    if section.name not in ("model", "attention", "plugins")
    for field in dataclasses.fields(section.default_factory)
    if {str, type(None)} <= {*typing.get_args(typing.get_type_hints(section.default_factory)[field.name])}
]
"""Options that are a text, such as a file or a model, or null."""


@pytest.mark.parametrize("text", ["''", "None"])
@pytest.mark.parametrize("key", OPTIONAL_TEXTS)
def test_a_text_that_names_nothing_is_not_taken_for_null(tmp_path, key, text):
    shown = text if text == "''" else f"'{text}'"
    problem = f": {key}: {shown} is text, and names nothing; write null for none"
    assert refusal(write(tmp_path, VALID), f"{key}={text}").endswith(problem)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("train", ["", "--output", "x"]),
        ("train", ["configs/quickstart.yaml", "--output", ""]),
        ("train", ["configs/quickstart.yaml", "--output="]),
        ("validate", [""]),
        ("engine.checkpoints.export", ["x", ""]),
        ("predict", ["", "x.png"]),
        ("predict", ["x", ""]),
        ("ablate", ["", "--output", "x"]),
        ("benchmark", ["--attention", "eva", "--output", ""]),
        ("analyze", ["oracle", "", "--output", "x"]),
        ("engine.data.prepare", ["", "x"]),
    ],
)
def test_an_empty_argument_is_refused(script, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(": '' is empty and names nothing; give a value, or leave it out\n")


def test_batch_must_divide_by_the_ranks(tmp_path):
    path = write(tmp_path, VALID + "train: {total_batch_size: 64}\n")
    assert load_run(path, world_size=8).train.total_batch_size == 64
    with pytest.raises(ConfigError, match=r"run\.yaml:8: train\.total_batch_size = 64 is not divisible by 3 ranks"):
        load_run(path, world_size=3)
    with pytest.raises(ConfigError, match=r"leaves 1 images per rank and step"):
        load_run(path, world_size=64)


def test_unreadable_files_are_refused(tmp_path):
    assert refusal(tmp_path / "absent.yaml") == "absent.yaml: No such file or directory"
    (tmp_path / "folder").mkdir()
    assert refusal(tmp_path / "folder") == "folder: a directory"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        assert refusal(tmp_path / name) == f"{name}: a pipe or device, not a regular file"


@pytest.mark.parametrize(
    ("base", "text", "expected"),
    [
        (None, "base: absent.yaml\n", "run.yaml:1: base: absent.yaml: No such file or directory"),
        (None, 'base: "a\\0b"\n', "run.yaml:1: base: a\\x00b: a name that no file has"),
        ("base: other.yaml\n", "base: base.yaml\n", "run.yaml:1: base: 'base.yaml' has a base itself"),
        (VALID, "base: [base.yaml]\n", "run.yaml:1: base: expected the name of a file, got ['base.yaml']"),
        (VALID.replace("5.0e-4", "-1.0"), "base: base.yaml\n", "base.yaml:7: optim.lr = -1.0 must be greater than 0"),
        (VALID, "base: base.yaml\noptim:\n  lr: -1.0\n", "run.yaml:3: optim.lr = -1.0 must be greater than 0"),
        (VALID + "optim: 1\n", "base: base.yaml\n", "run.yaml:1: base: base.yaml:8: optim: duplicate key"),
    ],
)
def test_refused_with_a_base(tmp_path, base, text, expected):
    if base is not None:
        write(tmp_path, base, "base.yaml")
    assert refusal(write(tmp_path, text)).startswith(expected)


BASE = """\
model: {name: deit_tiny_p16, patch_size: 8}
attention: {name: local, window_size: 7}
augment: {mixup: 0.0, hflip: 0.0}
optim: {lr: 1.0, clip_grad: 1.0}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("attention: null", "attention = null: name a mechanism"),
        ("model: {name: null}", "model.name: expected the name of a model, got None"),
        ("augment:", "run.yaml:2: augment: expected a mapping of options, got None"),
        ("augment: {smoothing: null}", "run.yaml:2: augment.smoothing: expected float, got None"),
        ("augment: {mixap: null}", "run.yaml:2: augment.mixap: unknown option; did you mean 'mixup'?"),
        ("simmim: null", "run.yaml:2: simmim: expected a mapping of options, got None"),
    ],
)
def test_null_in_the_place_of_a_bases_value_is_a_value(tmp_path, text, expected):
    write(tmp_path, BASE, "base.yaml")
    assert expected in refusal(write(tmp_path, f"base: base.yaml\n{text}\n"))


def test_a_sweep_is_no_run(tmp_path):
    path = write(tmp_path, "base: absent.yaml\ngrid: {optim.lr: [1.0]}\n")
    assert refusal(path) == "run.yaml: a sweep of several runs; give it to ablate.py"


@pytest.mark.parametrize("text", ["1e-3", "1.0e3", "-.5E+2", "1e", "e3", "1e-3x", "0.1", "true", "null", "a: b"])
def test_text_is_written_as_text(tmp_path, text):
    """And numbers are read back as numbers."""
    values = {"text": text, "items": [text, 1e-7, 3, None]}
    assert read_yaml(write(tmp_path, dump_yaml(values))).values == values


@pytest.mark.parametrize(
    ("rank", "key", "said"),
    [
        ("0", "model.name", "model.name: unknown"),
        ("8", "model.name", "rank 8: model.name: unknown"),
        ("8", "rank 1: data.root", "rank 1: data.root: unknown"),
    ],
)
def test_a_refusal_names_its_rank(rank, key, said, monkeypatch, capsys):
    monkeypatch.setattr("engine.runtime.errors.PATIENCE", 0.0)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended, refuse_bad_input():
        raise OptionError(key, "unknown")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [("print('text')", 141, ""), ("print('text' * 9999)", 141, ""), ("raise BrokenPipeError", 1, "BrokenPipeError")],
)
def test_a_reader_that_has_enough_ends_a_script_silently(body, status, said):
    """Text that Python writes at its end, and text that it writes at once; of another pipe, the error is a bug."""
    reading, writing = os.pipe()
    if not said:
        os.close(reading)
    code = f"from engine.runtime.errors import refuse_bad_input\nwith refuse_bad_input():\n    {body}"
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr.strip().rpartition("\n")[2]) == (status, said)
