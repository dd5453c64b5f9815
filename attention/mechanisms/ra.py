"""Randomized attention (Zheng, Wang, Kong 2022, arXiv:2204.04667): an unbiased estimate, from s samples for each query.

Softmax attention is the mean of a random-feature average of values, y_n = E f_n(omega), with omega drawn for each query
from a mixture of Gaussians p_n = sum_m pi_nm N(q_n + k_m, I), pi_n = softmax(q_n . k): sampling it gives an unbiased
estimate of the whole of softmax attention, not only of its kernel (section 3, Algorithm 1). The biased variant replaces
the random key by its mean (eq. 31).
Cost: (2 + s) N^2 C multiply-accumulates unbiased, (3 + s) N^2 C biased, (1 + s) N^2 C with the mean key.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Attention, Cost, LayerContext
from attention.ops.dispatch import with_fast_path
from attention.ops.randomized import eager
from attention.options import option, released_option
from attention.parts.features import full_precision, scale
from attention.parts.geometry import Grid
from attention.parts.masking import mask_logits, masked_mean
from attention.parts.sampling import Noise, attended_keys, mixture_noise, noise_option, noise_std, random_seed

Proposal = Literal["unbiased", "biased", "mean_key"]


@full_precision
@with_fast_path(eager.ra, eager.covers)
def ra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    noise: Tensor,
    uniform: Tensor | None = None,
    *,
    proposal: Proposal = "unbiased",
    hyperbolic: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Mean over samples of f_n(omega) (LARA paper eq. 6), omega = q'_n + key + noise.

    Args:
        q, k, v: (B, h, N, d). noise: Gaussian part of omega, broadcast to (B, h, N, s, d).
        uniform: in (0, 1), (..., N, s); chooses the unbiased proposal's key by the inverse distribution of pi_n.
        proposal: the key is drawn from pi_n ("unbiased"), or is its mean ("biased", eq. 31), or the plain mean of keys.
        hyperbolic: f and p_n of the hyperbolic features (corollary C.1). f is even there, so that drawing from one half
            of p_n is enough.
        key_mask: which keys count, (B, N) bool.
    Returns:
        (B, h, N, d), float32 at least.
    """
    q, k = scale(q), scale(k)
    if proposal == "mean_key":
        key = masked_mean(k, key_mask)[:, :, None, None]
    else:
        key = attended_keys(mask_logits(q @ k.mT, key_mask).softmax(-1), k, uniform if proposal == "unbiased" else None)
    omega = q[:, :, :, None] + key + noise  # (B, h, N, s, d)
    logits = omega.flatten(2, 3) @ k.mT  # (B, h, N s, M)
    if hyperbolic:
        on_q = (omega * q[:, :, :, None]).sum(-1).flatten(2)[..., None]
        logits = torch.logaddexp(on_q + logits, -on_q - logits)
    weights = mask_logits(logits - k.square().sum(-1)[:, :, None] / 2, key_mask).softmax(-1)
    return weights.unflatten(2, omega.shape[2:4]).mean(3) @ v


def ra_reference(q, k, v, noise, uniform=None, *, proposal="unbiased", hyperbolic=False):
    """`ra` by the paper's Algorithm 1."""
    (B, h, N, d), y = q.shape, []
    q, k = q * d**-0.25, k * d**-0.25
    noise = noise.expand(B, h, N, -1, d)
    signs = (1, -1) if hyperbolic else (1,)
    for n in range(N):
        q_n, y_n = q[:, :, n, None], 0
        pi = torch.exp(q_n @ k.mT) / torch.exp(q_n @ k.mT).sum(-1, keepdim=True)  # (B, h, 1, M)
        for s in range(noise.shape[3]):
            if proposal == "unbiased":
                u = uniform.expand(B, h, N, -1)[:, :, n, s, None, None]
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
    """Randomized attention over all tokens."""

    prefix_tokens = "plain"
    key_mask_refusal = None
    eval_seed: Tensor | None

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_samples: int = option(1, "samples per query in training", low=1, high=1024)
        num_eval_samples: int = option(
            1, "samples per query in evaluation; acts where evaluation is random", low=1, high=1024
        )
        proposal: Proposal = option("unbiased", "key that centres a sample: drawn, mean by attention, or plain mean")
        hyperbolic: bool = option(False, "hyperbolic instead of positive features")
        released: bool = released_option()
        noise: Noise | None = noise_option()
        eval_noise: bool | None = option(
            None,
            "add the noise in evaluation too; null: with the unbiased proposal only, and not as released",
            chosen=lambda c: c.proposal == "unbiased" and not c.released,
        )

    def __init__(self, context: LayerContext, config: Any):
        super().__init__(context, config)
        unbiased = config.proposal == "unbiased"
        if config.num_eval_samples > 1 and not (unbiased or config.eval_noise):
            self.refuse("num_eval_samples", config.num_eval_samples, "evaluation draws nothing; set eval_noise: true")
        self.noise_std = noise_std(config.noise, self.head_dim)
        self.register_buffer("eval_seed", random_seed() if unbiased or config.eval_noise else None)

    def sample_noise(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Noise (..., N, s, d) and uniforms (..., N, s): random in training; in evaluation functions of `eval_seed`."""
        config, seed = self.config, None if self.training else self.eval_seed
        if not self.training and seed is None:
            return q.new_zeros(1, q.shape[-1]), None
        samples = config.num_samples if self.training else config.num_eval_samples
        noise, uniform = mixture_noise((*q.shape[1:3], samples), q, seed)
        noise = noise * self.noise_std if self.training or config.eval_noise else torch.zeros_like(noise)
        return noise, uniform if config.proposal == "unbiased" else None

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        key = {"unbiased": 1, "biased": 2, "mean_key": 0}[config.proposal]  # weights of keys, their mean
        logits, values = config.num_eval_samples, 1
        return Cost(0, (key + logits + values) * context.num_tokens**2 * context.dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        noise, uniform = self.sample_noise(q)
        options = {"proposal": self.config.proposal, "hyperbolic": self.config.hyperbolic, "key_mask": key_mask}
        return ra(q, k, v, noise, uniform, **options).to(v.dtype)
