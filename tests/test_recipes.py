"""Every shipped configuration is read, opens with its command and expected result, and has the papers' recipe."""

import csv
import dataclasses
import functools
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import nn

import predict
import train
import validate
from ablation.match import TOLERANCE
from ablation.names import short_names
from ablation.sweep import read_ablation
from attention import ATTENTION, AttentionFactory
from engine.checkpoints.initial_weights import create_initial_model
from engine.config.papers import read_papers
from engine.config.schema import Augment, Run
from engine.config.yaml_files import read_yaml
from engine.run.load import load_run
from engine.runtime.distributed import World
from engine.training.optim import create_optimizer
from models import create_model
from tests.support.partition import chosen

CONFIGS = Path(__file__).parent.parent / "configs"
BASES = [CONFIGS / "deit.yaml", CONFIGS / "pvtv2.yaml", CONFIGS / "lra.yaml"]
ABLATIONS = sorted(CONFIGS.glob("ablation/*.yaml"))
OWN = CONFIGS / "finetune/own_images.yaml"
RUNS = sorted(set(CONFIGS.rglob("*.yaml")) - {*BASES, *ABLATIONS, OWN})
FINETUNE = sorted(set(CONFIGS.glob("finetune/*.yaml")) - {OWN})
DISTILL = sorted(CONFIGS.glob("distill/*.yaml"))
TRANSFER = sorted(CONFIGS.glob("transfer/*.yaml"))
ALIGN = [path for path in TRANSFER if not path.stem.endswith("_tune")]
DATA = {
    "configs": ("digits", 10),
    "copy_task": ("copy", 16),
    "fashion_mnist": ("idx", 10),
    "listops": ("idx", 10),
    "lra_image": ("torch/cifar10", 10),
    "lra_listops": ("idx", 10),
    "lra_pathfinder": ("idx", 2),
    "moving_digits": ("idx", 10),
    "pathfinder": ("idx", 2),
    "tiny_imagenet": ("folder", 200),
}
"""Folder of configurations that are named for their data -> its format and number of classes."""
IMAGENET = sorted(path for path in set(RUNS) - {*FINETUNE, *DISTILL, *TRANSFER} if path.parent.name not in DATA)
ROWS = read_papers()
OURS = [row for row in ROWS if row.config.endswith(".yaml")]

load = functools.cache(load_run)


def some(paths: list[Path]) -> list[Any]:
    """Parameters of a test; the default suite has the mechanisms of the papers, hybrids, and data of every format."""
    ours = "eva", "lara", "softmax", "hybrid_eva_softmax", "quickstart", "deit_tiny_p8_eva", "pvtv2_b1_eva_tune"
    return chosen(paths, lambda path: path.stem in ours and path.parent.name not in ("deit_small_p8", "deit_small_p16"))


def stages(run: Run) -> list[dict[str, Any]]:
    """Options of the attention of every stage; one for all where the model has no stages."""
    return run.attention if isinstance(run.attention, list) else [run.attention]


def name(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def header(path: Path) -> str:
    """The comment a file opens with."""
    return re.match(r"(#.*\n)*", path.read_text())[0]


@pytest.mark.parametrize("path", [*RUNS, *ABLATIONS, OWN], ids=name)
def test_a_file_opens_with_its_command_and_the_expected_result(path):
    script = "ablate.py" if path in ABLATIONS else "train.py"
    assert f"{script} configs/{path.relative_to(CONFIGS)} " in header(path)
    line = re.search("^# Expected top-1: .*", header(path), re.MULTILINE)[0]
    assert path in ABLATIONS or line.endswith(".")  # train.py prints the line


@pytest.mark.parametrize("path", some(RUNS), ids=name)
def test_a_configuration_is_read_and_its_model_built(path):
    run = load(path)
    if path in IMAGENET:
        assert (run.model["name"], run.model["num_classes"]) == (path.parent.name, 1000)
        assert run.data.dataset == "folder"
    elif path in FINETUNE + DISTILL + TRANSFER:
        mechanism = stages(run)[0]["name"]
        assert f"{path.stem}_".startswith(f"{run.model['name']}_{mechanism}_")
        assert run.init.weights or path in DISTILL
        assert bool(run.distill.teacher) is (path in DISTILL + ALIGN)
    else:
        dataset, num_classes = DATA[path.parent.name]
        assert run.data.dataset == dataset
        assert run.model["num_classes"] == (0 if run.model.get("mask_token") else num_classes)
    if path in IMAGENET:
        names = [stage["name"] for stage in stages(run)]
    if path in IMAGENET and path.stem.startswith("hybrid_"):
        assert path.stem == "_".join(["hybrid", *dict.fromkeys(names)])
    elif path in IMAGENET:
        (mechanism,) = set(names[:3])
        assert f"{path.stem}_".startswith(f"{mechanism}_")
        assert names[3:] in ([], ["focused_linear" if mechanism == "focused_linear" else "softmax"])  # FLatten's LLLL


@pytest.mark.parametrize("path", some([path for path in RUNS if path.parent.name in DATA] + TRANSFER), ids=name)
def test_the_overrides_a_configuration_opens_with_are_valid(path):
    commands = re.findall(r"train\.py configs/\S+ (.*?)--output", re.sub(r"\\\n#", "", header(path)))
    assert commands
    for overrides in commands:
        load(path, tuple(shlex.split(overrides)))


def test_figures_quoted_are_those_of_the_papers_tables():
    """A configuration's first lines quote exactly the figures that papers.yaml has for it."""
    quoted = set()
    for path in RUNS:
        expected = re.search(r"# Expected top-1: (.*)\.\n", header(path))[1]
        figures = re.findall(r"(\d+\.\d+) \((.*?)\)", expected)
        quoted |= {(f"{name(path)}.yaml", source, float(top1)) for top1, source in figures}
    assert quoted == {(row.config, row.source, row.top1) for row in OURS if row.top1}


@pytest.mark.parametrize(
    "row",
    chosen([row for row in ROWS if row.released_macs], lambda row: row.config.startswith("deit_tiny_p8/")),
    ids=lambda row: row.config,
)
def test_a_figure_made_by_the_released_code_is_quoted_for_its_model(row):
    """Every option that `released` chooses is as released; tests/uniform/test_costs.py compares the counts."""
    for options in stages(load(CONFIGS / row.config, row.overrides)):
        assert options == as_released(options)


def as_released(options: dict[str, Any]) -> dict[str, Any]:
    """A mechanism's options, with the released value of every option that `released` changes."""
    fields = ATTENTION[options["name"]].Config.__dataclass_fields__
    if "released" not in fields:
        return options
    given = {key: value for key, value in options.items() if key == "name" or not fields[key].metadata["chosen"]}
    papers, released = (
        dataclasses.asdict(AttentionFactory.from_options(given | {"released": value}).config) for value in (False, True)
    )
    return options | {key: released[key] for key in released if released[key] != papers[key]}


@pytest.mark.parametrize("path", some(IMAGENET), ids=name)
def test_the_recipe_is_that_of_the_papers(path):
    run = load(path)
    pvt = path.parent.name.startswith("pvtv2")
    optim, schedule, augment = run.optim, run.schedule, run.augment
    assert (optim.opt, optim.betas, optim.eps, optim.weight_decay) == ("adamw", None, None, 0.05)
    (group,) = create_optimizer(nn.Linear(1, 1, bias=False), optim, optim.lr_base_size).param_groups
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)
    assert optim.lr * run.train.total_batch_size / optim.lr_base_size == pytest.approx(1e-3)
    assert (run.train.total_batch_size, run.train.amp) == (1024, "auto")  # bf16, on a CPU only where it is faster
    assert (schedule.sched, schedule.epochs, schedule.warmup_epochs) == ("cosine", 300, 10)
    assert (schedule.warmup_lr, schedule.min_lr) == (1e-6, 1e-5)
    assert (augment.auto_augment, augment.color_jitter) == ("rand-m9-mstd0.5-inc1", 0.4)
    assert (augment.reprob, augment.remode, augment.interpolation) == (0.25, "pixel", "bicubic")
    assert (augment.mixup, augment.cutmix, augment.mixup_switch_prob, augment.smoothing) == (0.8, 1.0, 0.5, 0.1)
    assert run.data.crop_pct == 0.875
    assert (augment.repeats, run.train.channels_last) == ((3, True) if pvt else (0, False))
    assert run.model["drop_path_rate"] == (0.3 if run.model["name"][:8] in ("pvtv2_b3", "pvtv2_b4") else 0.1)
    assert optim.clip_grad == (1.0 if pvt and path.stem == "lara" else 5.0)


@pytest.mark.parametrize(("task", "steps"), [("image", 35_000), ("pathfinder", 62_400)])
def test_long_range_arena_has_the_model_and_the_steps_of_the_papers(task, steps):
    path = CONFIGS / f"lra_{task}/softmax.yaml"
    run = load(path)
    model, optim, schedule, augment = run.model, run.optim, run.schedule, run.augment
    assert (model["img_size"] // model["patch_size"]) ** 2 == 1024
    assert (model["depth"], model["embed_dim"], model["num_heads"], model["mlp_ratio"]) == (2, 64, 2, 2.0)
    assert (optim.opt, optim.lr, optim.lr_base_size, run.train.total_batch_size) == ("adamw", 1e-4, 256, 256)
    assert (optim.weight_decay, optim.clip_grad, schedule.sched, schedule.min_lr) == (0, None, "linear", 0)
    assert not any((augment.mixup, augment.cutmix, augment.reprob, augment.color_jitter, augment.smoothing))
    drawn = re.search(r"--images (\d+) ", header(path))
    num_images = int(drawn[1]) if drawn else run.data.subset * model["num_classes"]
    assert num_images // 256 * schedule.epochs == steps


@pytest.mark.parametrize("images", [17, 60])
def test_own_images_are_enough(images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three classes of flat colours, few or many images: the commands at the beginning of the file, a small model."""
    random = np.random.default_rng(0)
    for label, colour in {"red": (200, 0, 0), "c10": (0, 200, 0), "c2": (0, 0, 200)}.items():
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(images):
            pixels = np.clip(random.normal(colour, 30, (40, 56, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    small = ["model.img_size=32", "model.patch_size=8", "model.embed_dim=24", "model.depth=1", "model.num_heads=2"]
    small += ["init.weights=null", "optim.lr=1e-3", "data.workers=0", "train.early_stop=1", "schedule.warmup_epochs=0"]
    train.main([str(OWN), "data.root=photos", "--output", "run", *small])
    run = read_yaml(tmp_path / "run/config.yaml").values
    assert run["model"]["num_classes"] == 3
    validate.main(["run", "--per-class", "classes.csv", "--calibration", "calibration.png"])
    rows = list(csv.DictReader((tmp_path / "classes.csv").read_text().splitlines()))
    assert [(row["class"], int(row["support"])) for row in rows] == [
        (name, images // 5) for name in ("c2", "c10", "red")
    ]
    predict.main(["run", "photos/red", "--output", "predictions.csv"])
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 1 + images


DEIT_FINETUNING = ("adamw", 5e-6, 1e-8, "constant", 30, 5, 512)
FINETUNING = {
    "deit_tiny_p16_softmax_384": (DEIT_FINETUNING, ["loaded", "adapted"]),
    "deit_tiny_p8_eva_784": (DEIT_FINETUNING, ["loaded", "adapted"]),
    "deit_tiny_p16_softmax_cifar10": (("sgd", 0.01, 1e-4, "cosine", 1000, 5, 768), ["loaded", "re-made"]),
    "deit_tiny_p16_eva": (("adamw", 5e-5, 1e-8, "cosine", 30, 5, 512), ["loaded", "fresh"]),
    "pvtv2_b1_eva": (("adamw", 5e-5, 1e-8, "cosine", 30, 5, 512), ["loaded", "fresh", "dropped"]),
    "pvtv2_b1_sra_cifar10": (("sgd", 0.01, 1e-4, "cosine", 1000, 5, 768), ["loaded", "re-made"]),
    "deit_small_p16_softmax_linear_probe": (("momentum", 2e-3, 0, "cosine", 100, 0, 1024), ["loaded", "fresh"]),
}
"""Optimiser, learning rate at 512 images, weight decay, schedule, epochs, warm-up epochs, batch; fate of weights."""


@pytest.mark.parametrize("path", FINETUNE, ids=name)
def test_fine_tuning_follows_its_recipe_and_takes_its_weights(path, tmp_path, capsys):
    """Takes the weights of a small model of the same kind."""
    run = load(path)
    recipe, becomes = FINETUNING[path.stem]
    optim, schedule = run.optim, run.schedule
    found = (optim.opt, optim.lr * 512 / optim.lr_base_size, optim.weight_decay, schedule.sched, schedule.epochs)
    assert (*found, schedule.warmup_epochs, run.train.total_batch_size) == recipe
    is_pvt = run.model["name"].startswith("pvtv2")
    small = {"depths": [1, 1, 1, 1]} if is_pvt else {"embed_dim": 24, "depth": 2, "num_heads": 2}
    if run.init.weights.startswith("timm:"):
        source = timm.create_model(run.init.weights.removeprefix("timm:"), **small)
    else:
        there = load(CONFIGS / f"{run.init.weights.removeprefix('runs/').replace('_eva', '/eva')}.yaml")
        source = create_model(attention=there.attention, **{**there.model, **small})
    weights = tmp_path / "small.safetensors"
    safetensors.torch.save_file(source.state_dict(), weights)
    overrides = [f"model.{key}={value}" for key, value in small.items()]
    model = create_initial_model(
        load(path, (*overrides, f"init.weights={weights}")), tmp_path, World(torch.device("cpu"))
    )
    kinds = [line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r"  [\w-]+ +[1-9]", line)]
    assert kinds == becomes
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert (trained == ["head.weight", "head.bias"]) is path.stem.endswith("_linear_probe")


@pytest.mark.parametrize("path", ALIGN, ids=name)
def test_two_stages_train_one_model(path):
    """The first has no labels, and images that are cropped and flipped alone; the second starts from its directory."""
    tune = path.with_stem(f"{path.stem}_tune")
    align, tuned = load(path), load(tune)
    assert (align.model, align.attention) == (tuned.model, tuned.attention)
    assert (align.distill.teacher, align.distill.type, align.distill.alpha) == ("init.weights", "attention", 1)
    assert tuned.init.weights == re.search(r"--output (\S+)", header(path))[1]
    assert tuned.augment == Augment(repeats=3 if "pvtv2" in path.stem else 0)
    off = dict.fromkeys(("color_jitter", "reprob", "mixup", "cutmix", "smoothing", "repeats"), 0)
    assert align.augment == Augment(auto_augment=None, **off)
    for run, recipe in ((align, (1e-3, 0, 1, 0)), (tuned, (5e-5, 1e-8, 10, 1))):
        optim, schedule = run.optim, run.schedule
        assert (optim.lr, optim.weight_decay, schedule.epochs, schedule.warmup_epochs) == recipe
        assert (optim.opt, optim.lr_base_size, schedule.sched) == ("adamw", 512, "cosine")
        assert run.train.total_batch_size == 512
    assert f" in one epoch: {1_281_167 // align.train.total_batch_size:,}" in header(path)


@pytest.mark.parametrize(
    "path", chosen(ABLATIONS, lambda path: path.stem in ("eva_table6", "quickstart_pvt")), ids=name
)
def test_an_ablation_is_read_and_all_its_runs_checked(path, tmp_path):
    ablation, settings, left_out = read_ablation(path, [], tmp_path / "output", ["python"])
    names = short_names(settings)
    assert len(set(names)) == len(settings)
    assert not any(sign in name for name in names for sign in "{}")
    assert max(map(len, names)) <= 60
    assert ablation.caption
    assert not left_out
    assert all(setting.matched is None or abs(setting.matched.deviation) <= TOLERANCE for setting in settings)
    assert len(settings) == len(ablation.bases) if ablation.bases else len(settings) > 1
    is_papers = path.stem.startswith(("eva_", "lara_", "lra_"))
    assert all(setting.paper is not None and setting.paper.top1 for setting in settings) == is_papers
    if ablation.bases:  # every row of the paper's table whose model exists here
        assert len(settings) == len({row.config for row in OURS if row.source == ablation.paper})
    assert not list(tmp_path.iterdir())
    for setting in settings:  # a figure that a configuration quotes too is of one model
        run = setting.run
        for row in ROWS:
            figure = setting.paper and not setting.paper.source and setting.paper.top1  # given by the file itself
            if figure and (row.top1, row.config.partition("/")[0]) == (figure, run.model["name"]):
                assert run.attention == load(CONFIGS / row.config).attention


def test_simmim_fine_tunes_from_what_its_pre_training_leaves():
    """Both sweeps have the same mechanisms; directories of the first are weights of the second."""
    _, pre_trained, _ = read_ablation(CONFIGS / "ablation/simmim_pretrain.yaml", [], Path("runs/simmim"), ["python"])
    _, tuned, _ = read_ablation(CONFIGS / "ablation/simmim.yaml", [], Path("runs/x"), ["python"])
    runs = [setting.cases[0].run for setting in tuned]
    assert [len(setting.cases) for setting in tuned] == [3] * 12
    assert [run.init.weights for run in runs[0::2]] == [None] * 6
    directories = {str(case.directory): case.run.attention for setting in pre_trained for case in setting.cases}
    assert {run.init.weights: run.attention for run in runs[1::2]} == directories
    assert [run.attention for run in runs[0::2]] == [run.attention for run in runs[1::2]]
