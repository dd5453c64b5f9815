"""Causal attention token by token: what a generator calls, where training takes whole sequences at once."""

import torch
from torch import Tensor

from attention.mechanisms.eva import Eva
from attention.ops.group_values.op import group_logits, group_values
from attention.ops.joint_softmax.op import mix, shared_logits
from attention.parts.features import compute_dtype
from attention.parts.geometry import Grid, merge_heads
from attention.parts.groups import Groups
from attention.window_options import windows_on


class EvaDecoder:
    """Causal EVA in evaluation, one token at a time: the rows of the forward pass over the whole sequence.

    decoder = EvaDecoder(attn, grid)
    y = torch.cat([decoder(x_n) for x_n in x.split(1, dim=1)], dim=1)  # attn(x, grid)

    Keeps the tokens of the present window and group, and the summaries of the groups that ended: about |E| + C
    entries, where softmax keeps every token.

    Args:
        attn: an `eva` layer with causal: true, in evaluation. grid: (H, W) of the whole sequence.
    """

    def __init__(self, attn: Eva, grid: Grid):
        if not attn.config.causal or attn.training:
            raise ValueError("decoding needs an eva layer with causal: true, in evaluation; call eval() on it")
        self.attn, self.windows = attn, windows_on(attn.config, grid)
        self.position = 0
        self.tokens: dict[int, tuple[Tensor, ...]] = {}
        self.summaries: list[tuple[Tensor, ...]] = []
        self.groups: list[list[int]] = []
        if attn.config.num_landmarks:
            table = attn.groups(attn.config, grid, torch.device("cpu"))
            self.groups = [index[valid].tolist() for index, valid in zip(table.index[0], table.valid[0], strict=True)]
            self.padded_size = table.index.shape[-1] if table.padded_means else None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The next token (B, 1, C) -> its output (B, 1, C).

        Raises:
            ValueError: after the last token of the grid.
        """
        n, attn, config = self.position, self.attn, self.attn.config
        if n == self.windows.grid[1]:
            raise ValueError(f"all {n} tokens of the grid are decoded; begin another sequence with a new decoder")
        self.tokens[n] = q, _, _ = attn.project(x, (1, 1))
        window, positions, row = self.windows.attended(n)
        _, keys, values = self.gather(window)
        logits, bias = shared_logits(q[:, :, None], keys), attn.position_bias()
        terms = [(logits if bias is None else logits + bias[:, None, None, row, positions], values[:, :, None])]
        before = n if config.visibility == "released" else window[0]
        visible = [c for c in range(len(self.summaries)) if self.groups[c][-1] < before]
        if visible:
            count = torch.tensor([[len(self.groups[c]) for c in visible]], device=x.device)
            summaries = zip(*(self.summaries[c] for c in visible), strict=True)
            k_tilde, mu, omega, log_mass, beta = (torch.cat(x, 3) for x in summaries)
            prior = count.to(compute_dtype(q)).log()[:, None] if config.log_count else None
            logits = group_logits(q[:, :, None], k_tilde, mu, omega, log_mass, prior)
            terms.append((logits, beta))
        self.advance()
        return attn.proj(merge_heads(mix(terms)[:, :, 0]))

    def gather(self, positions: list[int]) -> tuple[Tensor, ...]:
        """Queries, keys and values (B, h, n, d) of n positions."""
        return tuple(torch.cat(x, 2) for x in zip(*(self.tokens[n] for n in positions), strict=True))

    def advance(self) -> None:
        """Summarises the group that ends with this token, and forgets the tokens that no later one needs."""
        c, groups = len(self.summaries), self.groups
        if c < len(groups) and self.position == groups[c][-1]:
            q, k, v = self.gather(groups[c])
            last, index = q.shape[2] - 1, torch.arange(self.padded_size or q.shape[2], device=q.device)[None, None]
            whole = Groups(index.clamp(max=last), index <= last, padded_means=self.padded_size is not None)
            k_tilde, mu, omega = self.attn.landmarks(q, k, whole, first=c)
            beta, log_mass = group_values(k, v, omega, whole)
            self.summaries.append((k_tilde, mu, omega, log_mass, beta))
        self.position += 1
        if self.position < self.windows.grid[1]:
            window, *_ = self.windows.attended(self.position)
            needed = {*window, *(n for members in groups[len(self.summaries) :] for n in members)}
            self.tokens = {n: token for n, token in self.tokens.items() if n in needed}
