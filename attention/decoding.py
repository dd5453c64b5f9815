"""Causal attention one token at a time, for generation; training takes whole sequences at once.

decoder = create_decoder(attn, grid)
y = torch.cat([decoder(x_n) for x_n in x.split(1, dim=1)], dim=1)  # attn(x, grid)
"""

import math
from typing import Any

import torch
from torch import Tensor

from .base import Attention
from .mechanisms.scatterbrain import samples
from .ops.group_values.op import group_logits, group_values
from .ops.joint_softmax.op import mix, shared_logits
from .ops.random_features.maps import log_kernel
from .parts.features import compute_dtype, upcast
from .parts.geometry import Grid
from .parts.groups import Groups
from .parts.leave_one_out import merge
from .parts.past import Past
from .window_options import windows_on


class Decoder:
    """Runs a causal layer in evaluation one token at a time; the outputs are the rows of the whole forward pass.

    The mechanism chooses the state to keep: running sums for linear attention, every key and value for softmax.

    Args:
        attn: a layer with causal: true, in evaluation. grid: (H, W) of the whole sequence.
    """

    def __init__(self, attn: Attention, grid: Grid):
        if not getattr(attn.config, "causal", False) or attn.training:
            problem = "decoding needs causal: true, and evaluation; set it, and call eval() on the layer"
            raise ValueError(f"attention({attn.name()}): {problem}")
        self.attn, self.grid, self.past = attn, grid, Past()

    @property
    def num_tokens(self) -> int:
        """Number of tokens decoded so far."""
        return self.past.num_tokens

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Maps the next token (B, 1, C) to its output (B, 1, C).

        Raises:
            ValueError: all tokens of the grid are decoded already, or x does not hold exactly one token.
        """
        H, W = self.grid
        if self.num_tokens == H * W:
            problem = f"all {H * W} tokens of the grid are decoded; begin another sequence with a new decoder"
            raise ValueError(f"attention({self.attn.name()}): {problem}")
        if x.shape[1] != 1:
            raise ValueError(f"attention({self.attn.name()}): got {x.shape[1]} tokens; decode them one by one")
        y = self.attn.output(self.step(*self.attn.project(x, (1, 1))), x)
        self.past.num_tokens += 1
        return y

    def step(self, *projected: Tensor) -> Tensor:
        """Attended values (B, h, 1, d) of the next token, from the output of `project` for it."""
        return self.attn.attend(*projected, self.grid, past=self.past)


class EvaDecoder(Decoder):
    """Decoder of causal EVA and of the windows of `local`.

    Keeps the tokens of the present window and group, and the summaries of completed groups: about |E| + C entries,
    whereas softmax keeps every token.
    """

    attn: Any  # Eva or Local

    def __init__(self, attn: Attention, grid: Grid):
        super().__init__(attn, grid)
        self.windows = windows_on(attn.config, grid)
        self.tokens: dict[int, tuple[Tensor, ...]] = {}
        self.summaries: list[tuple[Tensor, ...]] = []
        self.groups: list[list[int]] = []
        if getattr(attn.config, "num_landmarks", 0):
            table = self.attn.groups(attn.config, grid, torch.device("cpu"))
            self.groups = [index[valid].tolist() for index, valid in zip(table.index[0], table.valid[0], strict=True)]
            self.padded_size = table.index.shape[-1] if table.padded_means else None

    def step(self, *projected: Tensor) -> Tensor:
        n, attn, config = self.num_tokens, self.attn, self.attn.config
        self.tokens[n] = q, _, _ = projected
        window, positions, row = self.windows.attended(n)
        _, keys, values = self.gather(window)
        logits, bias = shared_logits(q[:, :, None], keys), attn.position_bias()
        terms = [(logits if bias is None else logits + bias[:, None, None, row, positions], values[:, :, None])]
        before = n if getattr(config, "visibility", "paper") == "released" else window[0]
        visible = [c for c in range(len(self.summaries)) if self.groups[c][-1] < before]
        if visible:
            count = torch.tensor([[len(self.groups[c]) for c in visible]], device=q.device)
            summaries = zip(*(self.summaries[c] for c in visible), strict=True)
            k_tilde, mu, omega, log_mass, beta = (torch.cat(parts, 3) for parts in summaries)
            prior = count.to(compute_dtype(q)).log()[:, None] if config.log_count else None
            logits = group_logits(q[:, :, None], k_tilde, mu, omega, log_mass, prior)
            terms.append((logits, beta.to(values.dtype)))
        self.advance()
        return mix(terms)[:, :, 0]

    def gather(self, positions: list[int]) -> tuple[Tensor, ...]:
        """Queries, keys and values (B, h, n, d) of n positions."""
        return tuple(torch.cat(x, 2) for x in zip(*(self.tokens[n] for n in positions), strict=True))

    def advance(self) -> None:
        """Summarises the group that ends with this token, and forgets the tokens that no later one needs."""
        c, groups = len(self.summaries), self.groups
        if c < len(groups) and self.num_tokens == groups[c][-1]:
            q, k, v = self.gather(groups[c])
            last, index = q.shape[2] - 1, torch.arange(self.padded_size or q.shape[2], device=q.device)[None, None]
            whole = Groups(index.clamp(max=last), index <= last, padded_means=self.padded_size is not None)
            k_tilde, mu, omega = self.attn.landmarks(q, k, whole, first=c)
            beta, log_mass = group_values(k, v, omega, whole)
            self.summaries.append((k_tilde, mu, omega, log_mass, beta))
        following = self.num_tokens + 1
        if following < self.windows.grid[1]:
            window, *_ = self.windows.attended(following)
            needed = {*window, *(n for members in groups[len(self.summaries) :] for n in members)}
            self.tokens = {n: token for n, token in self.tokens.items() if n in needed}


class ScatterbrainDecoder(Decoder):
    """Keeps the keys and values that the token's window attends to, and sums over the tokens before the window."""

    attn: Any  # Scatterbrain

    def step(self, *projected: Tensor) -> Tensor:
        q, k, v = map(upcast, projected)
        windows, kept = windows_on(self.attn.config, self.grid), self.past.kept
        attended, positions, row = windows.attended(self.num_tokens)
        omega = samples(self.attn, q)
        log_q = log_kernel(q, omega)[:, :, None]
        if not kept:
            (B, h, _, d), s = v.shape, log_q.shape[-1]
            kept |= {"k": k[:, :, :0], "v": v[:, :, :0], "mean": v.new_zeros(B, h, s, d)}
            kept["log_mass"] = v.new_full((B, h, s), torch.finfo(v.dtype).min)
        k, v = torch.cat([kept["k"], k], 2), torch.cat([kept["v"], v], 2)
        if gone := k.shape[2] - len(attended):
            log_k = log_kernel(k[:, :, :gone], omega)
            own = log_k.logsumexp(2), log_k.mT.softmax(-1) @ v[:, :, :gone]
            kept["log_mass"], kept["mean"] = merge(kept["log_mass"], kept["mean"], *own)
        kept["k"], kept["v"] = k, v = k[:, :, gone:], v[:, :, gone:]
        logits, bias = shared_logits(q[:, :, None], k), self.attn.position_bias()
        logits = logits if bias is None else logits + bias[:, None, None, row, positions]
        estimates = log_q + kept["log_mass"][:, :, None, None] - math.log(log_q.shape[-1])
        y = mix([(logits, v[:, :, None]), (estimates, kept["mean"][:, :, None])])
        return y[:, :, 0].to(projected[2].dtype)


DECODERS: dict[str, type[Decoder]] = {
    **{"softmax": Decoder, "local": EvaDecoder, "eva": EvaDecoder, "linear": Decoder, "performer": Decoder},
    "scatterbrain": ScatterbrainDecoder,
    **dict.fromkeys(("rfa", "t2r", "cosformer", "transnormer", "abc"), Decoder),
}
"""Mechanism -> class of its decoder."""


def create_decoder(attn: Attention, grid: Grid) -> Decoder:
    """The decoder of a causal layer for one sequence, or a batch of them. See `Decoder`.

    Raises:
        ValueError: the mechanism has no decoder, or the layer is not causal or is in training mode.
    """
    if attn.name() not in DECODERS:
        raise ValueError(f"attention({attn.name()}): is not decoded token by token; use one of {', '.join(DECODERS)}")
    return DECODERS[attn.name()](attn, grid)
