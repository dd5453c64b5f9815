"""Every shipped configuration is read, opens like a lab notebook, and states the recipe of the papers."""

import re
from pathlib import Path

import pytest
import yaml

import ablate
from attention import ATTENTION
from engine.config import load_run

CONFIGS = Path(__file__).parent.parent / "configs"
BASES = [CONFIGS / "deit.yaml", CONFIGS / "pvtv2.yaml"]
ABLATIONS = sorted(CONFIGS.glob("ablation/*.yaml"))
RUNS = sorted(set(CONFIGS.rglob("*.yaml")) - {*BASES, *ABLATIONS})
IMAGENET = [path for path in RUNS if "quickstart" not in str(path.relative_to(CONFIGS))]

TABLES = {  # every row of these tables that the mechanisms here cover: model -> mechanisms -> top-1
    "EVA Table 1": {
        "deit_tiny_p16": {"local": 67.10, "performer": 65.92, "lara": 71.48, "eva": 73.00, "softmax": 72.98},
        "deit_small_p16": {"local": 74.06, "performer": 74.29, "lara": 79.48, "eva": 80.65, "softmax": 80.36},
        "pvtv2_b3_2xheads": {"local": 83.34, "performer": 82.40, "lara": 83.47, "eva": 83.71, "sra": 83.14},
    },
    "EVA Table 2": {
        "deit_tiny_p8": {
            "performer": 67.19,
            "local": 70.62,
            "scatterbrain": 73.50,
            "nystrom": 74.20,
            "lara": 75.02,
            "combiner": 75.56,
            "transformer_ls": 76.41,
            "eva": 76.67,
            "softmax": 77.16,
        }
    },
    "LARA Table 1": {
        "deit_tiny_p16": {"performer": 65.92, "lara": 71.48, "ra": 71.86, "softmax": 72.20},
        "deit_tiny_p8": {"performer": 67.79, "lara": 74.16},
        "deit_small_p16": {"performer": 74.29, "lara": 79.48, "ra": 80.04, "softmax": 79.90},
        "deit_small_p8": {"performer": 74.57, "lara": 80.62},
    },
    "LARA Table 2": {
        "pvtv2_b1_2xheads": {"sra": 78.7, "performer": 77.3, "lara": 79.6},
        "pvtv2_b2_2xheads": {"sra": 82.1, "performer": 81.0, "lara": 82.6},
        "pvtv2_b3_2xheads": {"sra": 83.3, "performer": 82.4, "lara": 83.6},
        "pvtv2_b4_2xheads": {"sra": 83.6, "performer": 82.7, "lara": 84.0},
    },
    "LARA Table 8": {"deit_small_p16": {"sra": 74.4, "linformer": 76.0, "nystrom": 79.3}},
    "LARA Table 5": {
        "deit_tiny_p16": {"ra": 71.86, "ra_biased": 72.98},
        "deit_small_p16": {"ra": 80.04, "ra_biased": 80.49},
    },
}


def name(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def header(path: Path) -> str:
    """The comment a file opens with."""
    return re.match(r"(#.*\n)*", path.read_text())[0]


@pytest.mark.parametrize("path", RUNS + ABLATIONS, ids=name)
def test_a_file_opens_with_what_it_reproduces_its_command_its_cost_and_the_expected_result(path):
    script = "ablate.py" if path in ABLATIONS else "train.py"
    assert f"{script} configs/{path.relative_to(CONFIGS)} " in header(path)
    assert "# GPU-hours: " in header(path)
    assert "# Expected top-1: " in header(path)


@pytest.mark.parametrize("path", RUNS, ids=name)
def test_a_configuration_is_read_and_its_model_built(path):
    run = load_run(path)
    if path in IMAGENET:
        assert (run.model["name"], run.model["num_classes"]) == (path.parent.name, 1000)
        assert run.data.dataset == "folder"
    else:
        assert (run.data.dataset, run.model["num_classes"]) == ("digits", 10)
    if path.parent != CONFIGS:
        stages = run.attention if isinstance(run.attention, list) else [run.attention]
        (mechanism,) = {stage["name"] for stage in stages[:3]}
        assert f"{path.stem}_".startswith(f"{mechanism}_")
        assert [stage["name"] for stage in stages[3:]] in ([], ["softmax"])


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_the_papers_tables_has_a_configuration(table):
    for model, rows in TABLES[table].items():
        for mechanism, top1 in rows.items():
            expected = re.search(r"# Expected top-1: (.*)\.\n", header(CONFIGS / model / f"{mechanism}.yaml"))[1]
            figures = {source: float(figure) for figure, source in re.findall(r"([\d.]+) \((.*?)\)", expected)}
            assert figures[table] == top1


def test_every_mechanism_with_a_configuration_is_in_the_list_of_the_digits():
    runs = yaml.safe_load((CONFIGS / "ablation/mechanisms.yaml").read_text())["runs"]
    shipped = {path.stem for path in CONFIGS.glob("*/*.yaml")} & set(ATTENTION)
    assert [run["attention"]["name"] for run in runs] == [name for name in ATTENTION if name in shipped]


@pytest.mark.parametrize("path", IMAGENET, ids=name)
def test_the_recipe_is_that_of_the_papers(path):
    run = load_run(path)
    pvt = path.parent.name.startswith("pvtv2")
    optim, schedule, augment = run.optim, run.schedule, run.augment
    assert (optim.opt, optim.betas, optim.eps, optim.weight_decay) == ("adamw", (0.9, 0.999), 1e-8, 0.05)
    assert optim.lr * run.train.total_batch_size / optim.lr_base_size == pytest.approx(1e-3)
    assert run.train.total_batch_size == 1024
    assert (schedule.sched, schedule.epochs, schedule.warmup_epochs) == ("cosine", 300, 10)
    assert (schedule.warmup_lr, schedule.min_lr) == (1e-6, 1e-5)
    assert (augment.auto_augment, augment.color_jitter) == ("rand-m9-mstd0.5-inc1", 0.4)
    assert (augment.reprob, augment.remode, augment.interpolation) == (0.25, "pixel", "bicubic")
    assert (augment.mixup, augment.cutmix, augment.mixup_switch_prob, augment.smoothing) == (0.8, 1.0, 0.5, 0.1)
    assert run.data.crop_pct == 0.875
    assert (augment.repeats, run.train.channels_last) == ((3, True) if pvt else (0, False))
    assert run.model["drop_path_rate"] == (0.3 if run.model["name"][:8] in ("pvtv2_b3", "pvtv2_b4") else 0.1)
    assert optim.clip_grad == (1.0 if pvt and path.stem == "lara" else 5.0)


@pytest.mark.parametrize("path", ABLATIONS, ids=name)
def test_an_ablation_is_read_and_all_its_runs_checked(path, tmp_path):
    ablation, cases = ablate.read_ablation(path, [], tmp_path / "output", ["python"])
    assert ablation.caption
    assert len(cases) >= 8
    assert all(case.paper is not None for case in cases) == (path.stem not in ("quickstart", "mechanisms"))
    assert not list(tmp_path.iterdir())
