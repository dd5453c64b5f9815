"""Every option of a run: name, type, default, meaning, unit and range. A configuration file is one `Run`.

`model` and `attention` are open mappings here: their options are those of the model family and of the mechanism
(`models.MODELS[name]`, `attention.ATTENTION[name].Config`), checked with the same strictness when a file is read.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from timm.layers import to_2tuple
from timm.optim import list_optimizers

from attention.options import OptionError, nearest, option


@dataclass(frozen=True, kw_only=True)
class Init:
    """Weights that a run starts from; a run that is resumed has its own."""

    weights: str | None = option(
        None, "file (of timm, DeiT, PVT-v2 or a run), run directory, or timm:NAME of timm's hub; null: none"
    )
    strict: bool = option(False, "refuse weights unless all of them, and of the model, load as they are")


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Distillation as in DeiT: the loss is (1 - alpha) x cross-entropy + alpha x divergence from a teacher."""

    teacher: str | None = option(
        None, "trained model: run directory, checkpoint or export, or timm:NAME of timm's hub; null: none"
    )
    type: Literal["hard", "soft", "soft_released"] = option(
        "hard",
        "cross-entropy with the teacher's class, or tau^2 x the divergence of the predictions; soft_released: also"
        " divided by the number of classes, as by DeiT's code",
    )
    alpha: float = option(0.5, "weight of the teacher", low=0, high=1)
    tau: float = option(1.0, "temperature of soft predictions", above=0, high=1000)


@dataclass(frozen=True, kw_only=True)
class Simmim:
    """Pre-training on masked images as in SimMIM, of a model with a mask token (model.mask_token)."""

    mask_ratio: float = option(0.6, "share of an image's squares that are masked, counted up", above=0, below=1)
    mask_size: int = option(
        32, "side of a square, pixels: a multiple of the patch size that divides the image", low=1, high=4096
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the images are and how a validation image is prepared."""

    dataset: Literal[
        "folder",
        "tar",
        "cache",
        "idx",
        "digits",
        "copy",
        "wds",
        "hfds",
        "torch/cifar10",
        "torch/cifar100",
        "torch/mnist",
        "torch/fashion_mnist",
        "torch/kmnist",
    ] = option(
        "folder",
        "class folders, tar files of them, what engine.prepare made, IDX files, the embedded digits, sequences of"
        " the copy task, WebDataset shards, a Hugging Face data set (columns image and label), or one of torchvision's",
    )
    root: str | None = option(
        None, "directory that holds the two splits (hfds: or the name on the hub); digits need none"
    )
    train_split: str = option(
        "train",
        "folder (tar: NAME.tar, wds: NAME-*.tar, cache: NAME.npz, idx: NAME-images-idx3-ubyte) of training images",
    )
    val_split: str = option(
        "val",
        "folder (tar: NAME.tar, wds: NAME-*.tar, cache: NAME.npz, idx: NAME-images-idx3-ubyte) of validation images",
    )
    classes: str | None = option(
        None,
        "file that names the classes, a line each: other classes' images are left out; where the data has numbers 0, 1,"
        " ..., their names; null: those of the data",
    )
    subset: int | float | None = option(
        None, "training images of every class to use: a count (13) or a fraction (0.1); null: all", above=0
    )
    subset_seed: int = option(
        0, "seed of the choice of subset; not train.seed, so that replicates train on the same images", low=0
    )
    num_sequences: tuple[int, int] = option(
        (20_000, 1_000), "copy: sequences that are drawn to train and to validate", low=1, high=10**6
    )
    workers: int = option(8, "loader processes per rank", low=0, high=256)
    max_broken: int = option(10, "broken training images that an epoch may leave out, over all ranks", low=0)
    broken_val: Literal["refuse", "skip"] = option(
        "refuse", "broken validation images: end the evaluation, or be left out, named and counted in its metrics"
    )
    crop_pct: float = option(0.875, "validation: share of the resized image kept by the centre crop", low=0.25, high=1)
    interpolation: Literal["bicubic", "bilinear", "nearest"] = option("bicubic", "validation resize")
    mean: tuple[float] | tuple[float, float, float] = option(
        (0.485, 0.456, 0.406),
        "subtracted from images in [0, 1]: one for each channel or for all; grey images: the mean of three",
        low=0,
        high=1,
    )
    std: tuple[float] | tuple[float, float, float] = option(
        (0.229, 0.224, 0.225), "standard deviation by which images are divided, likewise", above=0, high=1
    )


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Training augmentation, in timm's vocabulary. Defaults: DeiT without repeated augmentation."""

    scale: tuple[float, float] = option((0.08, 1.0), "random resized crop: range of the area kept", above=0, high=1)
    ratio: tuple[float, float] = option(
        (0.75, 4 / 3), "random resized crop: range of the aspect ratio", low=0.1, high=10
    )
    hflip: float = option(0.5, "probability of a horizontal flip", low=0, high=1)
    vflip: float = option(0.0, "probability of a vertical flip", low=0, high=1)
    color_jitter: float = option(
        0.4, "colour jitter factor; acts where auto_augment is none, as in timm", low=0, high=2
    )
    auto_augment: str | None = option(
        "rand-m9-mstd0.5-inc1", "timm's RandAugment / AutoAugment policy string; null: none"
    )
    interpolation: Literal["bicubic", "bilinear", "random"] = option("bicubic", "training resize")
    reprob: float = option(0.25, "probability of random erasing", low=0, high=1)
    remode: Literal["pixel", "const", "rand"] = option("pixel", "filling of erased areas")
    mixup: float = option(0.8, "mixup alpha; 0: off", low=0, high=100)
    cutmix: float = option(1.0, "cutmix alpha; 0: off", low=0, high=100)
    mixup_switch_prob: float = option(0.5, "probability of cutmix where both are on", low=0, high=1)
    smoothing: float = option(0.1, "label smoothing", low=0, below=1)
    repeats: int = option(0, "repeated augmentation: views of an image per epoch; 0: off", low=0, high=100)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """Optimiser, made by timm."""

    opt: str = option("adamw", "timm optimiser name")
    lr: float = option(
        5e-4, "learning rate at a total batch of lr_base_size; scaled linearly to the total batch", above=0, high=100
    )
    lr_base_size: int = option(512, "total batch for which lr is stated, images", low=1, high=2**20)
    betas: tuple[float, float] = option((0.9, 0.999), "Adam's averaging coefficients", low=0, below=1)
    eps: float = option(1e-8, "Adam's epsilon", above=0, high=1)
    weight_decay: float = option(0.05, "decoupled weight decay; matrices only", low=0, high=100)
    layer_decay: float | None = option(
        None,
        "factor of the learning rate from each layer to the one before it, as in timm; null: none",
        above=0,
        high=1,
    )
    clip_grad: float | None = option(5.0, "largest gradient norm; null: no clipping", above=0, high=1e6)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate over time, made by timm, updated after every optimiser step."""

    sched: Literal["cosine", "linear", "constant"] = option("cosine", "shape after the warm-up")
    epochs: int = option(300, "epochs in all, warm-up included", low=1, high=100_000)
    warmup_epochs: int = option(10, "epochs of linear warm-up", low=0, high=100_000)
    warmup_lr: float = option(1e-6, "learning rate of the first step", low=0, high=100)
    min_lr: float = option(1e-5, "learning rate at the end", low=0, high=100)


@dataclass(frozen=True, kw_only=True)
class Train:
    """How the loop runs."""

    total_batch_size: int = option(
        1024, "images per optimiser step, over all ranks and accumulation steps", low=1, high=2**20
    )
    grad_accum_steps: int = option(1, "backward passes per optimiser step", low=1, high=2**20)
    device: Literal["auto", "cuda", "cpu"] = option("auto", "auto: cuda where there is one")
    amp: Literal["bf16", "fp16"] | None = option("bf16", "automatic mixed precision; null: off")
    tf32: bool = option(
        False,
        "on a GPU, fp32 matrix products in TF32: faster, with 10 bits of mantissa; false: convolutions only, as torch",
    )
    compile: bool = option(
        False,
        "torch.compile the blocks, those that are alike as one graph, for full batches; smaller ones run as they are",
    )
    kernels: Literal["auto", "lean", "triton", "plain"] = option(
        "auto", "fast paths of attention; lean: least memory; triton: on a GPU fused kernels, experimental; plain: none"
    )
    grad_checkpointing: bool = option(
        False, "recompute block activations in the backward pass; random state is restored"
    )
    channels_last: bool = option(False, "NHWC memory format (PVT)")
    deterministic: bool = option(False, "deterministic algorithms only, at some cost in speed")
    seed: int = option(0, "seed of weights, order and augmentation", low=0)
    freeze: str | tuple[str, ...] | None = option(
        None,
        "parameters that are not trained: backbone (all but the classifier), or patterns of the names of parameters or"
        " modules (blocks.[0-5], pos_embed); null: none",
    )
    ema_decay: float | None = option(None, "decay of the weight average per step; null: none", above=0, below=1)
    eval_every: int = option(1, "epochs between evaluations; the last epoch is always evaluated", low=1)
    keep_checkpoints: int = option(
        3, "how many of the best epoch checkpoints stay, by each kind of weights, beside the last", low=1
    )
    checkpoint_minutes: float | None = option(
        15.0, "minutes after which a checkpoint is made within an epoch; null: none", above=0
    )
    checkpoint_steps: int = option(0, "optimiser steps between checkpoints within an epoch; 0: none", low=0)
    max_skipped: int = option(
        0,
        "optimiser steps to skip, for a loss or gradient that is not finite, before stopping; above 0, every step waits"
        " for the device once more",
        low=0,
    )
    max_overflows: int = option(
        40,
        "fp16: optimiser steps in a row that loss scaling may skip, for a gradient that is not finite, before the run"
        " stops; it halves the loss scale, 65536 at first, at each",
        low=1,
        high=10_000,
    )
    timeout_minutes: float = option(
        10.0, "minutes for which a rank waits for the others before it fails", above=0, high=10_080
    )
    log_every: int = option(50, "optimiser steps between log lines", low=1)


@dataclass(frozen=True, kw_only=True)
class Trackers:
    """Where records go besides the run directory."""

    wandb: str | None = option(None, "Weights & Biases: project; needs the extra wandb; null: none")
    mlflow: str | None = option(None, "MLflow: experiment; needs the extra mlflow; null: none")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    model: dict[str, Any]
    attention: Any
    init: Init = field(default_factory=Init)
    distill: Distill = field(default_factory=Distill)
    simmim: Simmim = field(default_factory=Simmim)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    report: Trackers = field(default_factory=Trackers)


def check_run(run: Run, world_size: int = 1) -> None:
    """Refuses options that are valid each on its own but not together.

    Args:
        world_size: ranks the run is to be trained with.
    Raises:
        OptionError: the first contradiction; its key is the option to change.
    """
    data, distill, augment = run.data, run.distill, run.augment
    optim, schedule, train = run.optim, run.schedule, run.train
    share = world_size * train.grad_accum_steps
    batch_size, rest = divmod(train.total_batch_size, share)
    peak_lr = optim.lr * train.total_batch_size / optim.lr_base_size
    total = f" = {train.total_batch_size}"
    scaled = f"the peak learning rate {peak_lr:g} (lr {optim.lr:g} scaled from {optim.lr_base_size} images)"
    contradictions = [
        (
            rest or not batch_size,
            "train.total_batch_size",
            f"{total} is not divisible by {world_size} ranks x {train.grad_accum_steps} accumulation steps"
            f"; nearest: {max(1, round(train.total_batch_size / share)) * share}",
        ),
        (
            (augment.mixup or augment.cutmix) and batch_size % 2,
            "train.total_batch_size",
            f"{total} leaves {batch_size} images per rank and step, but mixup and cutmix pair images: make it even",
        ),
        (
            schedule.warmup_epochs > schedule.epochs,
            "schedule.warmup_epochs",
            f" = {schedule.warmup_epochs} is above schedule.epochs = {schedule.epochs}",
        ),
        (
            schedule.warmup_epochs and schedule.warmup_lr > peak_lr,
            "schedule.warmup_lr",
            f" = {schedule.warmup_lr:g} is above {scaled}",
        ),
        (
            schedule.sched != "constant" and schedule.min_lr > peak_lr,
            "schedule.min_lr",
            f" = {schedule.min_lr:g} is above {scaled}",
        ),
        (
            isinstance(data.subset, float) and data.subset > 1,
            "data.subset",
            f" = {data.subset} is no fraction; write {data.subset or 0:.0f} for as many images of every class",
        ),
        (
            data.subset is None and data.subset_seed,
            "data.subset_seed",
            f" = {data.subset_seed}, but data.subset = null: set that, or leave it out",
        ),
        (
            distill.teacher is None and distill != Distill(),
            "distill.teacher",
            " = null, but other options of distill are given: name a teacher, or leave them out",
        ),
        (
            distill.type == "hard" and distill.tau != Distill.tau,
            "distill.tau",
            f" = {distill.tau:g} acts on soft predictions: set distill.type=soft, or leave it out",
        ),
        (augment.scale[0] > augment.scale[1], "augment.scale", f" = {list(augment.scale)} is not in ascending order"),
        (augment.ratio[0] > augment.ratio[1], "augment.ratio", f" = {list(augment.ratio)} is not in ascending order"),
        (
            optim.opt not in (known := list_optimizers()),
            "optim.opt",
            f" = {optim.opt!r} is not an optimiser of timm{nearest(optim.opt, known)}",
        ),
    ]
    for contradicts, key, problem in contradictions:
        if contradicts:
            raise OptionError(key, problem)
    if augment.auto_augment is not None:
        check_policy(augment.auto_augment)
    check_masks(run)
    check_copying(run)
    if run.model["in_chans"] not in (1, 3):
        raise OptionError("model.in_chans", f" = {run.model['in_chans']}: images have 3 channels (RGB) or 1 (grey)")


def check_masks(run: Run) -> None:
    """Refuses masks that a run cannot use.

    Raises:
        OptionError: squares that are no whole patches or leave nothing to see, labels in a run on masked images, or
            options of `Simmim` in any other.
    """
    simmim, model = run.simmim, run.model
    if not model.get("mask_token"):
        if simmim != Simmim():
            remedy = "set model.mask_token=true" if "mask_token" in model else f"choose a DeiT, not {model['name']}"
            raise OptionError("simmim", f"given, but the model has no mask token; {remedy}, or leave simmim out")
        return
    sides, patch = to_2tuple(model["img_size"]), model["patch_size"]
    valid = [size for size in range(patch, min(sides) + 1, patch) if not any(side % size for side in sides)]
    size, ratio = simmim.mask_size, simmim.mask_ratio
    for name in ("mixup", "cutmix"):
        if value := getattr(run.augment, name):
            raise OptionError(f"augment.{name}", f" = {value:g}: masked images have no labels to mix; set it to 0")
    if run.distill.teacher is not None:
        raise OptionError("distill.teacher", f" = {run.distill.teacher}: a model with mask_token predicts no classes")
    if size not in valid:
        squares = f"{size} x {size} pixels of a {sides[0]} x {sides[1]} image are no whole patches of {patch}"
        raise OptionError("simmim.mask_size", f" = {size}: {squares} that tile it; valid: {', '.join(map(str, valid))}")
    count = sides[0] * sides[1] // size**2
    if math.ceil(ratio * count) == count:
        raise OptionError("simmim.mask_ratio", f" = {ratio:g} masks all {count} squares; lower it, or simmim.mask_size")


UNCHANGED = Augment(
    scale=(1.0, 1.0),
    ratio=(1.0, 1.0),
    hflip=0.0,
    color_jitter=0.0,
    auto_augment=None,
    reprob=0.0,
    mixup=0.0,
    cutmix=0.0,
    smoothing=0.0,
)
"""What leaves images as they are."""


MAX_DRAWN = 2**27
"""Tokens of a split of the copy task: they are held in memory."""


def check_copying(run: Run) -> None:
    """Refuses options that the copy task cannot use, and a model of tokens for anything else.

    Raises:
        OptionError: the first of them.
    """
    data, model = run.data, run.model
    if data.dataset != "copy":
        if model.get("vocab_size"):
            problem = f" = {model['vocab_size']}: images are pixels; set it to 0, or data.dataset=copy"
            raise OptionError("model.vocab_size", problem)
        if data.num_sequences != Data.num_sequences:
            raise OptionError("data.num_sequences", f"acts on data.dataset=copy, not {data.dataset}; leave it out")
        return

    def refuse(key: str, value: Any, remedy: str) -> NoReturn:
        raise OptionError(key, f" = {value}: the copy task has sequences of tokens; {remedy}")

    if model.get("vocab_size", 0) < 2:
        refuse("model.vocab_size", model.get("vocab_size"), "set it to their number, of a DeiT, at least 2")
    height, length = to_2tuple(model["img_size"])
    if height != 1 or length % 2 or length < 4:
        refuse("model.img_size", [height, length], "set it to [1, N] with N even, at least 4")
    if (total := max(data.num_sequences) * length) > MAX_DRAWN:
        refuse("data.num_sequences", list(data.num_sequences), f"lower it: {total:,} tokens are above {MAX_DRAWN:,}")
    for name, value in {"global_pool": "", "num_classes": model["vocab_size"]}.items():
        if model[name] != value:
            refuse(f"model.{name}", model[name], f"set it to {value!r}, to predict one at every place")
    if not run.attention.get("causal"):
        name = run.attention["name"]
        refuse(f"attention({name}).causal", False, "set it to true, or choose a mechanism that has it")
    for section, neutral in {"augment": UNCHANGED, "data": Data(), "distill": Distill()}.items():
        names = ("root", "classes", "subset") if section == "data" else vars(neutral)
        for name in names:
            if (given := getattr(getattr(run, section), name)) != (value := getattr(neutral, name)):
                refuse(f"{section}.{name}", given, f"set it to {'null' if value is None else value}")


POLICIES: dict[str, dict[str, range | tuple[Any, ...]]] = {
    "rand": {
        "m": range(31),
        "n": range(1, 11),
        "p": (0.0, 1.0),
        "mstd": (0.0, 1000.0),
        "mmax": range(1, 31),
        "inc": range(2),
        "t": ("weights", "3a", "3aw"),
    },
    "augmix": {
        "m": range(11),
        "w": range(1, 11),
        "d": range(1, 11),
        "a": (0.01, 100.0),
        "b": range(2),
        "mstd": (0.0, 1000.0),
    },
    **{name: {"mstd": (0.0, 1000.0)} for name in ("original", "originalr", "v0", "v0r", "3a")},
}
"""timm's policies -> their sections -> valid values: integers, least and largest number, or words."""


def check_policy(policy: str) -> None:
    """Refuses a policy unless every section of it acts. timm itself passes over much that it does not understand.

    Raises:
        OptionError: an unknown policy, a section that is unknown or twice there, or a value out of range.
    """

    def refuse(problem: str) -> NoReturn:
        raise OptionError("augment.auto_augment", f" = {policy!r}: {problem}")

    family, *sections = policy.split("-")
    if family not in POLICIES:
        refuse(f"unknown policy {family!r}{nearest(family, POLICIES)}")
    found = {}
    for section in sections:
        [(name, value)] = re.findall(r"^(t|[a-z]*)(.*)", section, re.DOTALL)
        if name not in POLICIES[family]:
            refuse(f"unknown section {section!r}; known: {', '.join(POLICIES[family])}, each with its value")
        if name in found:
            refuse(f"{name!r} twice; leave one out")
        if not _is_valid(value, valid := POLICIES[family][name]):
            words = isinstance(valid, tuple) and isinstance(valid[0], str)
            known = ", ".join(map(str, valid)) if words else f"{valid[0]} to {valid[-1]}"
            refuse(f"{section!r} is not {name} with {known}")
        found[name] = value
    highest = int(found.get("mmax", 10))
    if family == "rand" and int(found.get("m", 10)) > highest:
        refuse(f"timm clips magnitudes to {highest}; add or raise mmax")


def _is_valid(value: str, valid: range | tuple[Any, ...]) -> bool:
    if isinstance(valid, range):
        return value.isdecimal() and int(value) in valid
    if isinstance(valid[0], str):
        return value in valid
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", value) is not None and valid[0] <= float(value) <= valid[1]
