"""Approximations of a matrix A of N rows: low rank, sparse, and both.

The budget is the mean number of kept numbers per row. Rank r and N s entries anywhere cost 2 r + s, because the two
factors of an N x N matrix of rank r hold 2 N r numbers. Positions of entries are not counted.
"""

import torch
from torch import Tensor

MAX_RESIDUAL = 1e-7
"""Largest residual of robust PCA, relative to ||A||_F."""


def truncate(a: Tensor, rank: int) -> Tensor:
    """Returns the matrix of `rank` nearest to `a` (M, N), from its largest singular values (Eckart and Young, 1936)."""
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vh[:rank]


def keep_largest(a: Tensor, count: int) -> Tensor:
    """Returns `a` with only its `count` entries of largest magnitude, fewer than all.

    Entries that tie for the last places are all dropped.
    """
    size = a.abs()
    return a.where(size > size.flatten().kthvalue(a.numel() - count).values, 0)


def robust_pca(a: Tensor, weight: float | None = None, max_steps: int = 1000) -> tuple[Tensor, Tensor]:
    """Finds low-rank L + sparse S = A with least ||L||_* + weight ||S||_1 (Candes et al. 2011, arXiv:0912.3599).

    Uses the inexact augmented Lagrangian method (Lin et al. 2010, arXiv:1009.5055, Algorithm 5, with its parameters).

    Args:
        a: (M, N), not zero. weight: weight of the entries; None: max(M, N)^(-1/2), for which recovery is proved.
    Raises:
        RuntimeError: the residual is not within `MAX_RESIDUAL` after `max_steps`.
    """
    weight = weight or max(a.shape) ** -0.5
    spectral, norm = torch.linalg.matrix_norm(a, 2), a.norm()
    multiplier, sparse = a / torch.maximum(spectral, a.abs().max() / weight), torch.zeros_like(a)
    mu, largest_mu = 1.25 / spectral, 1.25e7 / spectral
    for _ in range(max_steps):
        u, s, vh = torch.linalg.svd(a - sparse + multiplier / mu, full_matrices=False)
        low = u * (s - 1 / mu).relu() @ vh
        rest = a - low + multiplier / mu
        sparse = rest.sign() * (rest.abs() - weight / mu).relu()
        residual = a - low - sparse
        if residual.norm() <= MAX_RESIDUAL * norm:
            return low, sparse
        multiplier = multiplier + mu * residual
        mu = torch.minimum(1.5 * mu, largest_mu)
    raise RuntimeError(f"robust PCA: residual {residual.norm() / norm:.1e} of the norm after {max_steps} steps")
