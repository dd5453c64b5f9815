"""Every option of a run: name, type, default, meaning, unit and range. A configuration file is one `Run`.

`model` and `attention` are open mappings here: their options are those of the model family and of the mechanism
(`models.MODELS[name][0].Config`, `attention.ATTENTION[name].Config`), checked with the same strictness when a file is
read.
"""

import statistics
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal

from attention.options import option
from engine.config.objective_options import Distill, Simmim


@dataclass(frozen=True, kw_only=True)
class Init:
    """Weights that a run starts from; a run that is resumed has its own."""

    weights: str | None = option(
        None, "file (of timm, DeiT, PVT-v2 or a run), run directory, timm:NAME of timm's hub or hf:NAME; null: none"
    )
    strict: bool = option(False, "refuse weights unless all of them, and of the model, load as they are")


SPLIT = "folder (csv: NAME.csv, wds: NAME-*.tar, cache: NAME.npz, idx: NAME-images-idx3-ubyte)"

Torchvision = Literal["torch/cifar10", "torch/cifar100", "torch/mnist", "torch/fashion_mnist", "torch/kmnist"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Place of the images, and preparation of a validation image."""

    dataset: Literal["folder", "csv", "cache", "idx", "digits", "copy", "wds", Torchvision] = option(
        "folder",
        "class folders, CSV files of file and label, what engine.data.prepare made, IDX files, the embedded digits,"
        " sequences of the copy task, WebDataset shards, or one of torchvision's",
    )
    root: str | None = option(None, "directory that holds the two splits; digits need none")
    train_split: str = option("train", f"{SPLIT} of training images")
    val_split: str = option("val", f"{SPLIT} of validation images")
    classes: str | None = option(
        None,
        "file that names the classes, a line each: other classes' images are left out; where the data has numbers 0, 1,"
        " ..., their names; null: those of the data",
    )
    subset: int | float | None = option(
        None, "training images of every class to use: a count (13) or a fraction (0.1); null: all", above=0
    )
    val_fraction: float | None = option(
        None,
        "share of the training images of every class to hold out: they validate in the place of val_split and are not"
        " trained on; null: none",
        above=0,
        below=1,
    )
    folds: int | None = option(
        None,
        "cross-validation: number of parts of the training images, alike in their classes; one is held out, as by"
        " val_fraction; null: none",
        low=2,
        high=1000,
    )
    fold: int = option(0, "number of the part that is held out, from 0", low=0, below=1000)
    subset_seed: int = option(
        0,
        "seed of the choice of subset, val_fraction and folds; not train.seed, so that replicates train on the same"
        " images",
        low=0,
    )
    num_sequences: tuple[int, int] = option(
        (20_000, 1_000), "copy: sequences that are drawn to train and to validate", low=1, high=10**6
    )
    workers: int = option(8, "loader processes per rank, at most its share of the cores", low=0, high=256)
    max_broken: int = option(10, "broken training images that an epoch may leave out, over all ranks", low=0)
    broken_val: Literal["refuse", "skip"] = option(
        "refuse", "broken validation images: end the evaluation, or be left out, named and counted in its metrics"
    )
    crop_mode: Literal["center", "squash", "border"] = option(
        "center",
        "validation, as in timm: the centre of an image; all of it, stretched (squash) or with a border, if crop_pct is"
        " 1 (below, the margin is cut)",
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

    @property
    def held_out_by(self) -> str:
        """The options that hold training images out for validation, with their values; "" if `val_split` validates."""
        if self.val_fraction is not None:
            return f"data.val_fraction = {self.val_fraction:g}"
        return "" if self.folds is None else f"data.folds = {self.folds}, data.fold = {self.fold}"


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
        0.4, "colour jitter factor; acts where auto_augment is none or a 3-Augment, as in timm", low=0, high=2
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
    betas: tuple[float, float] | tuple[float, float, float] | None = option(
        None,
        "averaging coefficients, of an optimiser that has them; null: its own ([0.9, 0.999] for adamw)",
        low=0,
        below=1,
    )
    eps: float | None = option(
        None,
        "term of the denominator, of an optimiser that has one; null: its own (1.0e-08 for adamw)",
        above=0,
        high=1,
    )
    weight_decay: float = option(
        0.05,
        "weight decay; matrices only; decoupled in adamw, lion and muon; sgd and adam add it to the gradient, lamb to"
        " the update that it rescales",
        low=0,
        high=100,
    )
    layer_decay: float | None = option(
        None,
        "factor of the learning rate from each layer to the one before it, as in timm; null: none",
        above=0,
        high=1,
    )
    clip_grad: float | None = option(
        5.0, "largest gradient norm; null: no clipping, but lamb clips the norm at 1 by itself", above=0, high=1e6
    )


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
    """Training loop."""

    total_batch_size: int = option(
        1024, "images per optimiser step, over all ranks and accumulation steps", low=1, high=2**20
    )
    class_weights: Literal["balanced"] | tuple[float, ...] | None = option(
        None,
        "weights of the classes, in their order: the whole cross-entropy of an image is multiplied by the weight of"
        " its class, of a mixed image by the mix of their weights, and the loss is the mean over images;"
        " balanced: images / (classes x images of the class), as in scikit-learn, whose mean over the images is 1;"
        " null: 1",
        above=0,
        high=1e6,
    )
    grad_accum_steps: int = option(1, "backward passes per optimiser step", low=1, high=2**20)
    device: Literal["auto", "cuda", "cpu"] = option("auto", "auto: cuda where there is one")
    amp: Literal["auto", "bf16", "fp16"] | None = option(
        "auto",
        "automatic mixed precision; null: off; auto: bf16, on a CPU only with instructions for it (AMX, AVX512_BF16)",
    )
    tf32: bool = option(
        False,
        "on a GPU, fp32 matrix products in TF32: faster, with 10 bits of mantissa; false: convolutions only, as torch",
    )
    compile: Literal["auto", True, False] = option(
        "auto",
        "torch.compile the blocks, those that are alike as one graph, for full batches; smaller ones run as they are;"
        " auto: on a CUDA GPU of compute capability 8.0 or later, if Triton is installed, see docs/training.md",
    )
    cuda_graph: Literal["auto", True, False] = option(
        "auto",
        "capture the network's forward and backward pass over a full micro-batch in CUDA graphs, and replay them: the"
        " host launches thousands of kernels as two; smaller batches and evaluation run as they are; auto: on a GPU,"
        " unless an option or the mechanism rules it out, with a line that says so; true: refuse such an option",
    )
    kernels: Literal["auto", "torch", "triton", "plain"] = option(
        "auto",
        "fast paths of attention, see docs/mechanisms.md; torch: PyTorch's operators; triton: fused kernels on a GPU;"
        " auto: the faster of these two, timed before the first update; plain: none",
    )
    grad_checkpointing: bool = option(
        False, "recompute block activations in the backward pass; random state is restored"
    )
    channels_last: bool = option(False, "NHWC memory format (PVT)")
    deterministic: bool = option(False, "deterministic algorithms only, at some cost in speed")
    seed: int = option(0, "seed of weights, order and augmentation", low=0)
    budgets: tuple[int | dict[str, int] | tuple[int | dict[str, int], ...], ...] | None = option(
        None,
        "sizes of attention (num_landmarks, num_samples, ...), from the cheapest to the model's own: every update draws"
        " one for all layers; an item may be a mapping of sizes, {window_size: 2, num_landmarks: 4}, or a list, a size"
        " or mapping for each entry of attention that has one; null: its own",
        low=1,
        high=2**20,
    )
    budget_distill: bool = option(
        False,
        "with budgets: an update has passes at the first, the last and one size between, and the predictions of the"
        " last teach the others (Yu and Huang 2019); the loss is the sum",
    )
    freeze: str | tuple[str, ...] | None = option(
        None,
        "parameters that are not trained: backbone (all but the classifier), or patterns of the names of parameters or"
        " modules (blocks.[0-5], pos_embed); null: none",
    )
    ema_decay: float | None = option(
        None,
        "largest decay of the weight average per step: after n steps it is n / (n + 9), until that is larger; null: no"
        " average",
        above=0,
        below=1,
    )
    eval_every: int = option(1, "epochs between evaluations; the last epoch is always evaluated", low=1)
    best_by: Literal["top1", "balanced_accuracy", "loss"] | None = option(
        None,
        "validation metric that ranks epochs: the highest wins, of loss the lowest; null: top1, and loss without"
        " classes",
    )
    early_stop: int | None = option(
        None,
        "number of epochs without a better one, by best_by and of either kind of weights, after which a run ends; null:"
        " it has all its epochs",
        low=1,
        high=100_000,
    )
    keep_checkpoints: int = option(
        3,
        "number of best epoch checkpoints to keep for each kind of weights (plain, averaged), besides the last",
        low=1,
    )
    checkpoint_minutes: float | None = option(
        15.0, "minutes after which a checkpoint is made within an epoch; null: none", above=0
    )
    checkpoint_steps: int = option(0, "optimiser steps between checkpoints within an epoch; 0: none", low=0)
    timeout_minutes: float = option(
        10.0,
        "minutes that a rank waits for the others before it fails; it waits half as long for a batch of its loaders",
        above=0,
        high=10_080,
    )
    log_every: int = option(50, "optimiser steps between log lines", low=1)


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
    plugins: tuple[str, ...] = option(
        (), "modules or .py files that register the mechanisms in attention that are not built in, see --plugin"
    )


SECTIONS: dict[str, Any] = {name: kind for name, kind in typing.get_type_hints(Run).items() if is_dataclass(kind)}
"""Section of a run -> its dataclass; without `model` and `attention`, whose options differ."""


def num_channels(run: Run) -> int:
    """Channels of the images that the model takes: 3, RGB, or 1, grey levels."""
    return run.model.get("in_chans", 3)  # a run without a model, for its images alone, takes RGB


def per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """`data.mean` or `data.std` for `channels`: as it is, one value for each, or the mean of three for grey."""
    return tuple(values) if len(values) == channels else (statistics.fmean(values),) * channels
