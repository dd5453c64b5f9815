"""Scatterbrain (Chen et al. 2021, arXiv:2110.15343): exact on a sparse support, s random features elsewhere.

    y_n = sum_m A_nm v_m / sum_m A_nm,   A_nm = exp(q_n . k_m / sqrt(d)) on the support, phi(q_n) . phi(k_m) off it

The support is a query's window (EVA appendix G, eq. 30); `scatterbrain_lsh` finds it by hashing. The matrix A is
unbiased, but the normalisation of its rows is not. If windows do not overlap, the sums off the support are those of
the other windows, without cancellation; otherwise the window's share is subtracted from the sums over all tokens. In
causal attention the window is the earlier part of a query's block, and the tokens before the block are off the support.
The features of linear attention, elu + 1, work too (section 4.2): their mean product equals the exact weight 1 at
q = k = 0, but does not estimate it elsewhere.
Cost: 4 N s C + 2 N |E| C multiply-accumulates, N s C more with subtraction. Linear in N.
Papers: EVA Tables 2, 15 'Scatterbrain'.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext, up_to_side
from ..costs import num_padded, window_cost
from ..ops.joint_softmax.op import attended_in_window, joint_softmax
from ..ops.kernels import with_gradients
from ..ops.random_features.maps import log_kernel, of_both
from ..options import Options, fit_option, local_option, option, released_option
from ..parts.features import full_precision, phi
from ..parts.geometry import Grid, Layout, Windows, split_prefix
from ..parts.leave_one_out import LeaveOneOut, before, merge_all_but_one, over_all, shifted, subtract, within
from ..parts.masking import mask_logits
from ..parts.position import BiasKind
from ..parts.sampling import OmegaSampling, gaussian, omega_sampling_option
from ..window_options import position_bias, window_option, windows_on


@full_precision
def scatterbrain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    bias: Tensor | None = None,
    *,
    windows: Windows,
    leave_one_out: LeaveOneOut = "merge",
) -> Tensor:
    """One softmax: exact within windows, by random features elsewhere.

    Args:
        omega: samples (h, s, d); None takes the features elu + 1.
        leave_one_out: method for the sums off the window, see `merge_all_but_one` and `subtract`; an overlap needs the
            latter. Causal windows have sums over the tokens before them. none: sums over all tokens, so that the window
            counts twice, the paper's naive sum (section 4.1).
    """
    k_grid, v_grid = (split_prefix(x, q.shape[2])[1] for x in (k, v))
    log_q, log_k = of_both(lambda x: log_kernel(x, omega), q, k_grid)  # (B, h, N, s)
    log_k = mask_logits(log_k, windows.key_mask, -2)
    if leave_one_out == "none":
        log_mass, beta = over_all(log_k, v_grid)
    elif windows.causal:
        log_mass, beta = before(log_k, v_grid, windows)
    elif leave_one_out == "merge":
        log_mass, beta = merge_others(*within(log_k, v_grid, windows))
    else:
        log_mass, beta = subtract(log_k, v_grid, *within(log_k, v_grid, windows), leave_one_out == "released")
    logits = windows.partition(log_q) + log_mass[..., None, :] - math.log(log_k.shape[-1])
    return joint_softmax(q, k, v, bias, values=beta, logits=logits, windows=windows)


def _of_others(dlog, dmean, log_mass, mean, log_left, left):
    """Window a has the share exp(log_mass_a - log_left_b) in the sums outside b; sums over b leave out one, too."""
    of_sums = torch.cat([dmean, (dlog - (dmean * left).sum(-1))[..., None]], -1)
    log_total, of_sums = merge_all_but_one(-log_left, of_sums)
    dmean, dlog = (of_sums * (log_mass + log_total).exp()[..., None]).split([mean.shape[-1], 1], -1)
    return (dmean * mean).sum(-1) + dlog[..., 0], dmean


merge_others = with_gradients(_of_others, keep=lambda results, *inputs: (*inputs, *results))(merge_all_but_one)


def scatterbrain_reference(q, k, v, omega, bias=None, *, windows, leave_one_out="merge"):
    """`scatterbrain`, query by query: eq. 30."""
    N, v_grid, y = q.shape[2], v[:, :, -q.shape[2] :], torch.zeros_like(q)
    phi_q, phi_k = (F.elu(x) + 1 if omega is None else phi(x, omega) for x in (q, k[:, :, -N:]))
    counted = [m for m in range(N) if windows.key_mask is None or windows.key_mask[0, m]]
    for n in range(N):
        window, *_ = windows.attended(n)
        outside = [m for m in counted if m not in window or leave_one_out == "none"]
        outside = [m for m in outside if m <= n or not windows.causal]
        logits, values = attended_in_window(n, q, k, v, bias, windows=windows)
        mass = phi_k[:, :, outside].sum(2)  # (B, h, s)
        mean = phi_k[:, :, outside].mT @ v_grid[:, :, outside] / (mass[..., None] if outside else 1)
        if leave_one_out == "released":
            largest = phi_k[:, :, counted].amax(2).detach()
            mean = mean * (mass / mass.maximum(1e-3 * largest))[..., None]
            mass = mass + 1e-5 * phi_k[:, :, counted].sum(2)
        if not values.shape[2] and not outside:  # a masked query, with no token that counts before it
            continue
        exact, estimate = logits.exp(), phi_q[:, :, n] * mass / phi_q.shape[-1]
        numerator = (exact[:, :, None] @ values + estimate[:, :, None] @ mean)[:, :, 0]
        y[:, :, n] = numerator / (exact.sum(-1) + estimate.sum(-1))[..., None]
    return y


def features_option() -> Any:
    """The field `features`, for both kinds of support."""
    return option(
        "positive",
        "positive: xi(x, omega); hyperbolic: also xi(x, -omega); elu: elu + 1 as in linear attention, without samples",
    )


def redraw_option() -> Any:
    """The field `feature_redraw`, for both kinds of support."""
    return option("redraw", "samples of training: redraw: new ones for every pass; fixed: those of evaluation")


def check_features(attn: Attention) -> None:
    """Raises the OptionError for an option of samples if the features have no samples."""
    if attn.config.features == "elu":
        of_samples = "num_samples", "omega_sampling", "feature_redraw"
        neutral = {name: getattr(attn.Config, name) for name in of_samples}
        if hasattr(attn.config, "eval_omega_sampling"):
            neutral["eval_omega_sampling"] = attn.config.omega_sampling
        attn.refuse_unused(neutral, "the features elu have no samples")


def sample_omega(attn: Attention, like: Tensor, sampling: OmegaSampling | None = None) -> Tensor | None:
    """Samples (h, s, d) on the device of `like`, in its compute dtype; None if features are elu + 1.

    sampling: kind of the samples; None: that of training.
    """
    config = attn.config
    if config.features == "elu":
        return None
    return gaussian(sampling or config.omega_sampling, (attn.num_heads, config.num_samples, attn.head_dim), like)


def samples(attn: Any, like: Tensor) -> Tensor | None:
    """Samples for this pass; with hyperbolic features also their negatives."""
    redraw = attn.training and attn.config.feature_redraw == "redraw"
    omega = sample_omega(attn, like) if redraw else attn.omega
    return omega if omega is None or attn.config.features != "hyperbolic" else torch.cat([omega, -omega], -2)


def feature_cost(context: LayerContext, config: Any) -> tuple[int, int]:
    """Number of features of a head, and multiply-accumulates of a layer for the features of queries and keys."""
    if config.features == "elu":
        return context.head_dim, 0
    s = config.num_samples * (2 if config.features == "hyperbolic" else 1)
    return s, 2 * context.num_tokens * s * context.dim


class Scatterbrain(Attention):
    prefix_tokens = "exact"
    size_option = "num_samples"
    omega: Tensor | None

    class Config(Options):
        num_samples: int = option(96, "samples omega per head", low=1)
        window_size: int = option(7, "side w of the window in tokens; block length where layout is 1d", low=1)
        released: bool = released_option()
        layout: Layout | None = window_option("layout")
        overlap: int = window_option("overlap")
        position_bias: BiasKind | None = window_option("position_bias")
        leave_one_out: LeaveOneOut | None = option(
            None,
            "sums off a window: merge those of the other windows; subtract its own from those of all tokens; released: "
            "subtract as the released code does; none: those of all, so that the window counts twice; null: as fits",
            chosen=lambda c: (
                "merge" if c.causal else "released" if c.released else "subtract" if c.overlap else "merge"
            ),
        )
        causal: bool = window_option("causal")
        features: Literal["positive", "hyperbolic", "elu"] = features_option()
        omega_sampling: OmegaSampling = omega_sampling_option()
        eval_omega_sampling: OmegaSampling | None = option(
            None,
            "the same for evaluation; null: as in training, as released orthogonal; acts with feature_redraw redraw",
            chosen=lambda c: (
                "orthogonal"
                if c.released and c.feature_redraw == "redraw" and c.features != "elu"
                else c.omega_sampling
            ),
        )
        feature_redraw: Literal["redraw", "fixed"] = redraw_option()
        local: bool = local_option()
        fit: bool = fit_option(window_size=up_to_side, overlap=up_to_side)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.position_bias = position_bias(self, context)
        if config.causal and config.leave_one_out != "merge":
            problem = "in causal attention the sums before a window are merged; set leave_one_out: merge"
            self.refuse("leave_one_out", config.leave_one_out, problem)
        if config.overlap and config.leave_one_out == "merge" and not config.causal:
            self.refuse("leave_one_out", "merge", "with overlap windows share tokens; set leave_one_out: subtract")
        check_features(self)
        if config.feature_redraw == "fixed":
            self.refuse_unused({"eval_omega_sampling": config.omega_sampling}, "nothing is redrawn")
        self.register_buffer("omega", sample_omega(self, self.qkv.weight, config.eval_omega_sampling))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        window, windows = window_cost(context, config), windows_on(config, context.grid)
        N, C, queries = context.num_tokens, context.dim, num_padded(windows)
        s, features = feature_cost(context, config)
        of_all = 0 if config.leave_one_out == "merge" else N * s * C
        of_sums = shifted(windows) if config.causal else windows
        inside = 0 if config.leave_one_out == "none" else of_sums.num_windows * of_sums.num_keys * s * C
        outside = queries * s * C  # values under the features
        return Cost(window.parameters, window.macs + features + of_all + inside + outside)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        config = self.config
        options: dict[str, Any] = {"windows": windows_on(config, grid, key_mask), "leave_one_out": config.leave_one_out}
        return scatterbrain(q, k, v, samples(self, q), self.position_bias(), **options).to(v.dtype)
