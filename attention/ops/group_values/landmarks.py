"""Landmarks of groups and the proposals of their samples."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...options import option
from ...parts.groups import group_max
from ...parts.linear import LandmarkTransform, is_plain
from ...parts.sampling import scale_noise
from .op import group_mean

Transform = Literal["ln_linear", "linear", "identity"]
Pool = Literal["mean", "max"]
Mean = Literal["qk", "q", "zero", "trainable"]

OPTIONS: dict[str, dict[str, Any]] = {
    "landmark_transform": {"default": "ln_linear", "meaning": "map sigma of pooled queries and keys to landmarks"},
    "pool": {"default": "mean", "meaning": "pooling of a group's queries and keys, channel by channel"},
    "num_samples": {"default": 1, "meaning": "samples S per group", "low": 1},
    "mu": {
        "default": "qk",
        "meaning": "means of proposals: qk: q_tilde + k_tilde; q: q_tilde; zero: 0; trainable: learned",
    },
    "mu_scale": {
        "default": None,
        "meaning": "factor of the means qk and q; null: 1.0, as released 0.5, but not in causal attention",
        "above": 0,
        "chosen": lambda c: 0.5 if c.released and not c.causal else 1.0,
    },
}


def landmark_option(name: str) -> Any:
    """The dataclass field `name` of a mechanism with `Landmarks`."""
    return option(**OPTIONS[name])


class Landmarks(nn.Module):
    """Summary tokens of groups: landmarks of their keys, and proposals centred on landmarks of queries and keys (eq. 26
    to 28, Table 8).

    Args:
        config: options of `eva`, or `OPTIONS` and `noise` of another mechanism. num_heads, head_dim: h, d.
        pool: function of tokens and groups, -> (B, h, G, c, d); by default the one that the option `pool` names.
    """

    eval_noise: Tensor

    def __init__(self, config: Any, num_heads: int, head_dim: int, pool: Callable[[Tensor, Any], Tensor] | None = None):
        super().__init__()
        self.config = config
        self.pool = pool or {"mean": group_mean, "max": group_max}[config.pool]
        kind = config.landmark_transform
        transform = (
            nn.Identity if kind == "identity" else partial(LandmarkTransform, head_dim, norm=kind == "ln_linear")
        )
        self.k = transform()
        if config.mu in ("qk", "q"):
            self.q = transform()
        if config.mu == "trainable":
            self.mu = nn.Parameter(torch.empty(num_heads, config.num_landmarks, head_dim))
            nn.init.trunc_normal_(self.mu, std=0.02)
        if config.num_samples > 1:  # with one sample, evaluation uses the proposal's mean
            self.register_buffer("eval_noise", torch.randn(num_heads, config.num_samples, head_dim))

    def forward(self, q: Tensor, k: Tensor, groups: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns k_tilde (B, h, G, c, d), means mu (B, h, G, c, d) and samples omega (B, h, G, c, s, d) of proposals.

        Args:
            q, k: tokens of the grid, (B, h, N, d). groups: `Groups`, or the second argument of a custom `pool`.
        """
        k_tilde = self.k(self.pool(k, groups))
        mu = self.mean(q, k_tilde, groups)
        return k_tilde, mu, self.noise(mu) + mu[..., None, :]

    def mean(self, q: Tensor, k_tilde: Tensor, groups: Any) -> Tensor:
        """Means mu of the proposals, (B, h, G, c, d)."""
        kind, scale = self.config.mu, k_tilde.shape[-1] ** -0.25
        if kind == "zero":
            return torch.zeros_like(k_tilde)
        if kind == "trainable":
            return scale * self.mu[:, None].expand_as(k_tilde)
        q_tilde = self.q(self.pool(q, groups))
        return self.config.mu_scale * scale * (q_tilde + k_tilde if kind == "qk" else q_tilde)

    def noise(self, mu: Tensor) -> Tensor:
        """Noise added to the proposals' means, (B, h, G, c, s, d): drawn in training, fixed in evaluation."""
        shape = (*mu.shape[:-1], self.config.num_samples, mu.shape[-1])
        if self.training:
            noise = torch.randn(shape, dtype=mu.dtype, device=mu.device)
        elif self.config.num_samples > 1:
            noise = self.eval_noise[:, None, None].expand(shape)
        else:
            noise = mu.new_zeros(shape)
        return scale_noise(noise, self.config.noise)

    def plain_transforms(self) -> list[LandmarkTransform] | None:
        """The transforms of the means of queries and keys, if landmarks are LayerNorm(Linear(mean)) by modules that
        nothing replaced or watches, with one sample about the sum of both; otherwise None.
        """
        config = self.config
        if (config.landmark_transform, config.pool, config.num_samples, config.mu) != ("ln_linear", "mean", 1, "qk"):
            return None
        transforms = [each for each in (self.q, self.k) if isinstance(each, LandmarkTransform)]
        kinds = {"linear": nn.Linear, "norm": nn.LayerNorm}
        plain = [is_plain(getattr(each, name), kind) for each in transforms for name, kind in kinds.items()]
        plain += [is_plain(self, Landmarks), *(is_plain(each, LandmarkTransform) for each in transforms)]
        return transforms if len(plain) == 7 and all(plain) else None
