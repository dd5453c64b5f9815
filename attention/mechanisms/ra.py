"""Randomized attention (Zheng, Wang, Kong 2022, arXiv:2204.04667): an unbiased estimate, from s samples for each query.

Softmax attention is the mean of a random-feature average of values, y_n = E f_n(omega), with omega drawn for each query
from a mixture of Gaussians p_n = sum_m pi_nm N(q_n + k_m, I), pi_n = softmax(q_n . k): sampling it gives an unbiased
estimate of the whole of softmax attention, not only of its kernel (section 3, Algorithm 1). The biased variant replaces
the random key by its mean (eq. 31). Cosine features with a random phase (appendix C) can be negative, and so can p_n.
With them, omega is drawn from N(0, I), and products of features are divided by the exact sum of the kernel. Outputs and
gradients are unbiased, but weights can be as large as exp(||q_n - k_m||^2 / 2).
Cost: (2 + s) N^2 C multiply-accumulates unbiased, (3 + s) N^2 C biased, (1 + s) N^2 C with the mean key.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..ops.kernels import with_fast_path
from ..ops.randomized import fused
from ..options import Options, local_option, option, released_option
from ..parts.features import full_precision, scale
from ..parts.geometry import Grid
from ..parts.masking import mask_logits, masked_mean
from ..parts.sampling import Noise, attended_keys, mixture_noise, noise_option, random_seed, scale_noise

Proposal = Literal["unbiased", "biased", "mean_key"]
Features = Literal["positive", "hyperbolic", "cosine"]


@full_precision
@with_fast_path(fused.ra, fused.covers)
def ra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    noise: Tensor,
    uniform: Tensor | None = None,
    *,
    proposal: Proposal = "unbiased",
    features: Features = "positive",
    key_mask: Tensor | None = None,
) -> Tensor:
    """Mean over samples of f_n(omega) (LARA paper eq. 6), omega = q'_n + key + noise.

    Args:
        noise: Gaussian part of omega, broadcast to (B, h, N, s, d).
        uniform: numbers in (0, 1), (..., N, s), that choose the unbiased proposal's key by inverting cumulative sums of
            pi_n. For cosine features, whose omega is the noise, the phase in turns.
        proposal: the key is drawn from pi_n ("unbiased"), is its mean ("biased", eq. 31), or the plain mean of keys.
        features: features of f and p_n. hyperbolic: f is even, so that one half of p_n (corollary C.1) is enough.
    """
    q, k = scale(q), scale(k)
    if features == "cosine":
        assert uniform is not None
        return cosine_weights(q, k, noise, uniform, key_mask) @ v
    if proposal == "mean_key":
        key = masked_mean(k, key_mask)[:, :, None, None]
    else:
        key = attended_keys(mask_logits(q @ k.mT, key_mask).softmax(-1), k, uniform if proposal == "unbiased" else None)
    omega = q[:, :, :, None] + key + noise  # (B, h, N, s, d)
    logits = omega.flatten(2, 3) @ k.mT  # (B, h, N s, M)
    if features == "hyperbolic":
        on_q = (omega * q[:, :, :, None]).sum(-1).flatten(2)[..., None]
        logits = torch.logaddexp(on_q + logits, -on_q - logits)
    weights = mask_logits(logits - k.square().sum(-1)[:, :, None] / 2, key_mask).softmax(-1)
    return weights.unflatten(2, omega.shape[2:4]).mean(3) @ v


def cosine_weights(q: Tensor, k: Tensor, omega: Tensor, uniform: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mean over samples of xi(q_n, omega, b) xi(k_m, omega, b) / sum_m exp(q_n . k_m), (B, h, N, M); estimates pi_nm.

    xi(x, omega, b) = sqrt(2) exp(||x||^2 / 2) cos(omega . x + b), b = 2 pi uniform (LARA paper appendix C).
    """
    omega, phase = omega.expand(*q.shape[:3], -1, -1), 2 * math.pi * uniform.expand(*q.shape[:3], -1)
    on_q = ((omega * q[:, :, :, None]).sum(-1) + phase).cos()  # (B, h, N, s)
    on_k = (omega.flatten(2, 3) @ k.mT).unflatten(2, omega.shape[2:4])  # (B, h, N, s, M)
    waves = (on_q[..., None] * (on_k + phase[..., None]).cos()).mean(3)
    log_mass = mask_logits(q @ k.mT, key_mask).logsumexp(-1, keepdim=True)
    half_q, half_k = (x.square().sum(-1, keepdim=True) / 2 for x in (q, k))
    return 2 * waves * mask_logits(half_q + half_k.mT - log_mass, key_mask).exp()


def ra_reference(q, k, v, noise, uniform=None, *, proposal="unbiased", features="positive"):
    """`ra` by the paper's Algorithm 1."""
    (B, h, N, d), y = q.shape, []
    q, k = q * d**-0.25, k * d**-0.25
    noise = noise.expand(B, h, N, -1, d)
    signs = (1, -1) if features == "hyperbolic" else (1,)
    for n in range(N):
        q_n, y_n = q[:, :, n, None], 0
        mass = torch.exp(q_n @ k.mT).sum(-1, keepdim=True)
        pi = torch.exp(q_n @ k.mT) / mass  # (B, h, 1, M)
        for s in range(noise.shape[3]):
            u = None if uniform is None else uniform.expand(B, h, N, -1)[:, :, n, s, None, None]
            if features == "cosine":
                omega, root = noise[:, :, n, s, None], 2**0.5
                size_q, size_k = (root * torch.exp((x**2).sum(-1)[:, :, None] / 2) for x in (q_n, k))
                cos_q, cos_k = (torch.cos(omega @ x.mT + 2 * math.pi * u) for x in (q_n, k))
                y_n = y_n + (size_q * cos_q) * (size_k * cos_k) @ v / mass / noise.shape[3]
                continue
            if proposal == "unbiased":
                a = F.one_hot((pi.cumsum(-1) <= u).sum(-1), N).to(k.dtype)
            else:
                a = pi if proposal == "biased" else torch.full_like(pi, 1 / N)
            omega = a @ k + q_n + noise[:, :, n, s, None]
            kernel = 0  # xi(q_n, omega) . xi(k_m, omega), (B, h, 1, M)
            for sign in signs:
                xi_q = torch.exp(sign * (omega * q_n).sum(-1, keepdim=True) - (q_n**2).sum(-1, keepdim=True) / 2)
                kernel = kernel + xi_q * torch.exp(sign * omega @ k.mT - (k**2).sum(-1)[:, :, None] / 2) / len(signs)
            y_n = y_n + kernel @ v / kernel.sum(-1, keepdim=True) / noise.shape[3]
        y.append(y_n)
    return torch.cat(y, 2)


class Ra(Attention):
    prefix_tokens = "plain"
    size_option = "num_samples"
    eval_seed: Tensor | None

    class Config(Options):
        num_samples: int = option(1, "samples per query in training", low=1, high=1024)
        num_eval_samples: int = option(
            1, "samples per query in evaluation; acts where evaluation is random", low=1, high=1024
        )
        proposal: Proposal = option(
            "unbiased",
            "key that centres a sample: unbiased: drawn by attention; biased: mean under attention; mean_key: "
            "mean of all keys",
        )
        features: Features = option(
            "positive",
            "positive: xi(x, omega); hyperbolic: also xi(x, -omega); cosine: cosines of random phase, which have "
            "no proposal",
        )
        released: bool = released_option()
        noise: Noise | None = noise_option()
        eval_noise: bool | None = option(
            None,
            "add the noise in evaluation too; null: with the unbiased proposal only, and not as released",
            chosen=lambda c: c.proposal == "unbiased" and not c.released,
        )
        local: bool = local_option()

    def __init__(self, context: LayerContext, config: Any):
        super().__init__(context, config)
        unbiased = config.proposal == "unbiased"
        if config.num_eval_samples > 1 and not (unbiased or config.eval_noise):
            self.refuse("num_eval_samples", config.num_eval_samples, "evaluation draws nothing; set eval_noise: true")
        if config.features == "cosine":
            self.refuse_unused({"proposal": "unbiased"}, "features cosine have no proposals")
        self.register_buffer("eval_seed", random_seed() if unbiased or config.eval_noise else None)

    def sample_noise(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Noise (..., N, s, d) and uniforms (..., N, s): random in training, functions of `eval_seed` in evaluation."""
        config, seed = self.config, None if self.training else self.eval_seed
        if not self.training and seed is None:
            return q.new_zeros(1, q.shape[-1]), None
        samples = config.num_samples if self.training else config.num_eval_samples
        noise, uniform = mixture_noise((*q.shape[1:3], samples), q, seed)
        noise = scale_noise(noise, config.noise) if self.training or config.eval_noise else torch.zeros_like(noise)
        return noise, uniform if config.proposal == "unbiased" else None

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        key = {"unbiased": 1, "biased": 2, "mean_key": 0}[config.proposal]  # weights of keys, mean of keys
        logits, values = config.num_eval_samples, 1
        return Cost(0, (key + logits + values) * context.num_tokens**2 * context.dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        noise, uniform = self.sample_noise(q)
        options = {"proposal": self.config.proposal, "features": self.config.features, "key_mask": key_mask}
        y = ra(q, k, v, noise, uniform, **options)
        if self.config.features == "cosine":  # its weights have no bound, and float16 has one
            y = y.clamp(torch.finfo(v.dtype).min, torch.finfo(v.dtype).max)
        return y.to(v.dtype)
