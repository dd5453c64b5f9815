"""One line per (mechanism, options, grid): what the uniform tests of `test_attention.py` run over.

Sizes are all different and no grid is square, so that a transposed axis cannot pass.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from attention import Attention, create_attention
from attention.parts.geometry import Grid

B, HEADS, HEAD_DIM = 2, 3, 4


@dataclass(frozen=True)
class Case:
    """A mechanism with options on a grid.

    Attributes:
        op: the pure function that the mechanism calls, where it is not named after the mechanism.
        stochastic: whether training draws noise.
        mixes_values: whether the output is a weighted mean of values (weights sum to one).
        well_conditioned: whether rounding queries and keys changes little; not so where a key is drawn or chosen, which
            may flip, a normaliser can vanish, or a matrix is inverted.
    """

    name: str
    grid: Grid
    options: dict[str, Any] = field(default_factory=dict)
    op: str | None = None
    stochastic: bool = False
    mixes_values: bool = True
    well_conditioned: bool = True

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items()), "x".join(map(str, self.grid))])

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0, **site: Any) -> Attention:
        """The layer with `seed`ed weights; position biases and norms are moved off their trivial start."""
        torch.manual_seed(seed)
        place = {"dim": HEADS * HEAD_DIM, "num_heads": HEADS, "grid": self.grid}
        attn = create_attention(self.name, **(place | self.options | site)).to(dtype)
        with torch.no_grad():
            for parameter in attn.parameters():
                parameter.add_(0.25 * torch.randn_like(parameter))
        return attn

    def num_tokens(self, grid: Grid) -> int:
        """Prefix tokens and those of a grid."""
        return self.options.get("num_prefix_tokens", 0) + grid[0] * grid[1]

    def tokens(self, dtype: torch.dtype = torch.float64, seed: int = 1, batch: int = B) -> torch.Tensor:
        """Random tokens (B, N, C)."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, self.num_tokens(self.grid), HEADS * HEAD_DIM)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def local(grid: Grid, **options: Any) -> Case:
    return Case("local", grid, options)


def eva(grid: Grid, **options: Any) -> Case:
    return Case("eva", grid, options, stochastic=True)


def performer(grid: Grid, sampling: str = "redraw", **options: Any) -> Case:
    mixes_values = options.get("features") != "favorp"  # its normaliser has a floor
    options = {"num_samples": 10, "sampling": sampling, **options}
    well_conditioned = options.get("features") != "trigonometric"
    return Case("performer", grid, options, None, sampling == "redraw", mixes_values, well_conditioned)


def ra(grid: Grid, **options: Any) -> Case:
    return Case("ra", grid, options, stochastic=True, well_conditioned="proposal" in options)


def lara(grid: Grid, **options: Any) -> Case:
    well_conditioned = options.get("proposal") != "single"
    return Case("lara", grid, {"num_landmarks": 6, **options}, stochastic=True, well_conditioned=well_conditioned)


def combiner(grid: Grid, **options: Any) -> Case:
    return Case("combiner", grid, {"window_size": 3, **options})


def transformer_ls(grid: Grid, **options: Any) -> Case:
    options = {"num_landmarks": 6, "window_size": 3, **options}
    op = None if options["num_landmarks"] else "local"
    return Case("transformer_ls", grid, options, op, mixes_values=op == "local" or not options.get("dual_norm", True))


def smyrf(grid: Grid, **options: Any) -> Case:
    return Case("smyrf", grid, options, stochastic=True, well_conditioned=False)


def scatterbrain(grid: Grid, **options: Any) -> Case:
    lsh = options.get("support") == "lsh"
    return Case(
        "scatterbrain",
        grid,
        {"num_samples": 10, "window_size": 3, **options},
        "scatterbrain_lsh" if lsh else None,
        stochastic=lsh or options.get("sampling") != "fixed",
        mixes_values=options.get("complement") != "released",  # where its floors act
        well_conditioned=not lsh,
    )


def sparse_kernel(name: str, **options: Any) -> Case:
    """Rectified features: a query may find no weight at all, and then gives 0, or find one by rounding."""
    return Case(name, (5, 7), options, mixes_values=False, well_conditioned=False)


def nystrom(grid: Grid, **options: Any) -> Case:
    options = {"num_landmarks": 6, "conv_size": 3, **options}
    return Case("nystrom", grid, options, mixes_values=False, well_conditioned=False)


def reformer(grid: Grid, **options: Any) -> Case:
    return Case("reformer", grid, {"chunk_size": 8, **options}, stochastic=True, well_conditioned=False)


def clustered(grid: Grid, **options: Any) -> Case:
    options = {"num_clusters": 5, "num_top_keys": 6, **options}
    return Case("clustered", grid, options, stochastic=True, well_conditioned=False)


SMALL = {"window_size": 3, "num_landmarks": 6}
CAUSAL = {"causal": True, "layout": "1d", "window_size": 8}
PREFIX = {"num_prefix_tokens": 2}

CASES = [
    Case("softmax", (5, 7)),
    local((5, 7), window_size=3),
    local((6, 8), window_size=2, position_bias="none"),
    local((5, 7), window_size=4, overlap=2),
    local((5, 7), window_size=3, overlap=1, position_bias="t5"),
    local((5, 7), window_size=3, overlap=1, position_bias="table_released"),
    local((5, 7), window_size=3, overlap=1, position_bias="t5_released"),
    local((5, 7), layout="1d", window_size=8, overlap=3),
    local((5, 7), layout="1d", window_size=8, overlap=3, position_bias="t5"),
    local((5, 7), layout="1d", window_size=8, overlap=3, position_bias="table_released"),
    eva((5, 7), **SMALL),
    eva((6, 8), window_size=2, num_landmarks=12, position_bias="none"),
    eva((5, 7), **SMALL, overlap=1, position_bias="t5"),
    eva((5, 7), **SMALL, layout="1d"),
    eva((5, 7), **SMALL, partition="all_1d"),
    eva((5, 7), **SMALL, partition="complement"),
    eva((5, 7), **SMALL, partition="complement", overlap=1, num_samples=2),
    eva((5, 7), **SMALL, partition="mask"),
    eva((5, 7), **SMALL, partition="mask", overlap=1, num_samples=2),
    eva((5, 7), **SMALL, num_samples=3),
    eva((5, 7), **SMALL, num_samples=3, mu="zero"),
    eva((5, 7), **SMALL, mu="q"),
    eva((5, 7), **SMALL, mu="trainable"),
    eva((5, 7), **SMALL, mu_scale=0.5, noise="released", position_bias="table_released"),
    eva((5, 7), **SMALL, landmark_transform="linear"),
    eva((5, 7), **SMALL, landmark_transform="identity"),
    eva((5, 7), **SMALL, log_count=True),
    eva((5, 7), **SMALL, overlap=1, released_overlap_groups=True),
    eva((5, 7), window_size=0, num_landmarks=6),
    Case("eva", (5, 7), {"window_size": 3, "num_landmarks": 0}, op="local"),
    performer((5, 7)),
    performer((5, 7), draws="orthogonal"),
    performer((5, 7), eval_draws="orthogonal_sqrt_d"),
    performer((5, 7), redraw_every=2),
    performer((5, 7), "fixed", features="hyperbolic"),
    performer((5, 7), "learnable"),
    performer((5, 7), features="trigonometric"),
    performer((5, 7), features="relu"),
    performer((5, 7), features="favorp"),
    ra((3, 5)),
    ra((3, 5), num_samples=2, num_eval_samples=3),
    ra((3, 5), hyperbolic=True, noise="released"),
    ra((3, 5), eval_noise=False),
    ra((3, 5), proposal="biased"),
    ra((3, 5), proposal="biased", eval_noise=True),
    ra((3, 5), proposal="mean_key", num_samples=2, hyperbolic=True),
    lara((5, 7)),
    lara((5, 7), landmark_transform="dense", beta=1.0),
    lara((5, 7), landmark_transform="none", noise="released"),
    lara((5, 7), proposal="pool", weighting="balance"),
    lara((5, 7), proposal="attended_keys", weighting="coupled"),
    lara((5, 7), proposal="mixture", weighting="coupled_density"),
    lara((5, 7), proposal="mixture", samples_per_proposal=2),
    lara((5, 7), samples_per_proposal=2, antithetic=True),
    lara((5, 7), proposal="single", weighting="balance", landmark_transform="none"),
    Case("sra", (6, 8), {"reduction": 2}, mixes_values=False),
    Case("sra", (5, 7), {"reduction": 3}, mixes_values=False),
    combiner((5, 7)),
    combiner((6, 8), window_size=2, position_bias="none"),
    combiner((5, 7), layout="1d", window_size=8, summary="relu"),
    combiner((5, 7), summary="identity", pool="mean"),
    transformer_ls((5, 7)),
    transformer_ls((6, 8), window_size=2, position_bias="none", dual_norm=False),
    transformer_ls((5, 7), overlap=1),
    transformer_ls((5, 7), layout="1d", window_size=8, overlap=3),
    transformer_ls((5, 7), window_size=0),
    transformer_ls((5, 7), num_landmarks=0),
    smyrf((5, 7), cluster_size=7),
    smyrf((5, 7), cluster_size=8, num_rounds=3),
    scatterbrain((5, 7)),
    scatterbrain((6, 8), window_size=2, position_bias="none", features="hyperbolic", sampling="fixed"),
    scatterbrain((5, 7), layout="1d", window_size=8, draws="orthogonal"),
    scatterbrain((5, 7), complement="subtract", overlap=1),
    scatterbrain((5, 7), complement="released"),
    scatterbrain((5, 7), support="lsh", position_bias="none", num_rounds=1),
    scatterbrain((5, 7), support="lsh", position_bias="none", layout="1d", window_size=8, num_rounds=3),
    Case("linear", (5, 7)),
    Case("xca", (5, 7), mixes_values=False),
    sparse_kernel("cosformer"),
    sparse_kernel("cosformer", layout="2d"),
    Case("transnormer", (5, 7), mixes_values=False),
    Case("transnormer", (5, 7), {"variant": "t1", "norm": "heads"}, mixes_values=False),
    Case("transnormer", (5, 7), {"depth": 2, "window_size": 3}, op="local"),
    Case("transnormer", (5, 7), {"depth": 2, "window_size": 3, "variant": "t1"}, op="rela", mixes_values=False),
    sparse_kernel("t2r", num_features=6),
    Case("rfa", (5, 7), {"num_samples": 10}, stochastic=True, well_conditioned=False),
    sparse_kernel("dpfp"),
    sparse_kernel("dpfp", nu=2),
    Case("linear_sra", (5, 7), {"pool_size": 3}, mixes_values=False),
    nystrom((5, 7)),
    nystrom((5, 7), segments="1d", pinv_iterations=4),
    nystrom((5, 7), conv="2d"),
    nystrom((5, 7), conv="none", conv_size=33),
    Case("linformer", (5, 7), {"num_landmarks": 6}, mixes_values=False),
    Case("linformer", (5, 7), {"num_landmarks": 6, "sharing": "kv"}, mixes_values=False),
    Case("linformer", (5, 7), {"num_landmarks": 6, "sharing": "none"}, mixes_values=False),
    Case("linformer", (5, 7), {"num_landmarks": 6, "sharing": "layers"}, mixes_values=False),
    Case("abc", (5, 7), {"num_landmarks": 6}),
    Case("synthesizer", (5, 7), {"rank": 2}),
    Case("orthoformer", (5, 7), {"num_landmarks": 6}, well_conditioned=False),
    Case("longformer", (5, 7), {"radius": 4, "num_global": 2}),
    Case("longformer", (5, 7), {"radius": 2, "num_global": 0, "layout": "2d"}),
    Case("longformer", (5, 7), {"radius": 1, "layout": "2d", "separate_global": True}, mixes_values=False),
    Case("sparse_transformer", (5, 7), {"num_summary": 2}),
    Case("sparse_transformer", (5, 7), {"block_size": 8, "num_summary": 3}),
    Case("bigbird", (5, 7), {"block_size": 3, "num_random": 2}),
    Case("bigbird", (5, 7), {"block_size": 2, "layout": "2d", "num_window": 1, "num_global": 1}),
    clustered((5, 7)),
    clustered((5, 7), num_top_keys=0),
    reformer((5, 7)),
    reformer((5, 7), chunk_size=4, same_bucket=True, num_rounds=2),
    Case("softmax", (5, 7), {"causal": True}),
    local((5, 7), **CAUSAL, overlap=3),
    local((5, 7), **CAUSAL, position_bias="t5"),
    combiner((5, 7), **CAUSAL),
    eva((5, 7), **CAUSAL, num_landmarks=5),
    eva((5, 7), **CAUSAL, num_landmarks=7, overlap=3, num_samples=2),
    eva((5, 7), **CAUSAL, num_landmarks=7, visibility="released", log_count=True),
    local((5, 7), window_size=3, **PREFIX),
    eva((5, 7), **SMALL, **PREFIX),
    eva((5, 7), **SMALL, **PREFIX, partition="mask", overlap=1, num_samples=2),
    eva((5, 7), window_size=0, num_landmarks=6, **PREFIX),
    lara((5, 7), **PREFIX),
    Case("sra", (6, 8), {"reduction": 2, **PREFIX}, mixes_values=False),
    combiner((5, 7), **PREFIX),
    transformer_ls((5, 7), **PREFIX),
    scatterbrain((5, 7), **PREFIX),
    scatterbrain((5, 7), **PREFIX, support="lsh", position_bias="none"),
    sparse_kernel("cosformer", **PREFIX),
    sparse_kernel("cosformer", **PREFIX, layout="2d"),
    Case("transnormer", (5, 7), {**PREFIX}, mixes_values=False),
    Case("transnormer", (5, 7), {"depth": 2, "window_size": 3, "variant": "t1", **PREFIX}, "rela", mixes_values=False),
    Case("linear_sra", (5, 7), {"pool_size": 3, **PREFIX}, mixes_values=False),
    nystrom((5, 7), **PREFIX),
    Case("linformer", (5, 7), {"num_landmarks": 6, **PREFIX}, mixes_values=False),
    Case("synthesizer", (5, 7), {"rank": 2, **PREFIX}),
    Case("longformer", (5, 7), {"radius": 4, "num_global": 2, **PREFIX}),
    Case("longformer", (5, 7), {"radius": 1, "separate_global": True, **PREFIX}, mixes_values=False),
    Case("sparse_transformer", (5, 7), {"num_summary": 2, **PREFIX}),
    Case("bigbird", (5, 7), {"block_size": 3, "num_random": 2, **PREFIX}),
    reformer((5, 7), **PREFIX),
    Case("linear", (5, 7), PREFIX),
]
