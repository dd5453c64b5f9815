"""Linear layers that mechanisms learn in addition to the projections."""

from torch import Tensor, nn


def init_linear(linear: nn.Linear) -> None:
    """Initialises a linear layer: truncated normal of standard deviation 0.02, bias 0."""
    nn.init.trunc_normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


class LandmarkTransform(nn.Module):
    """Trainable map of group means to landmarks: LayerNorm(Linear(x)), or Linear alone (EVA paper eq. 26; LARA
    paper app. H). Its width is that of one head, and all heads share it, or that of all heads together.
    """

    def __init__(self, width: int, norm: bool = True):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-5) if norm else nn.Identity()
        init_linear(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, ..., d) -> (B, h, ..., d)."""
        tokens = x if x.shape[-1] == self.linear.in_features else x.movedim(1, -2)
        y = self.norm(self.linear(tokens.reshape(-1, self.linear.in_features))).view_as(tokens)
        return y if tokens is x else y.movedim(-2, 1)
