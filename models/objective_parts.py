"""DeiTs with the parts that an objective adds: a mask token and a decoder to pixels, or an embedding of tokens."""

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from attention import Grid, OptionError
from models.block import init_linears
from models.deit import Deit
from models.deit_options import DeitConfig


class MaskedDeit(Deit):
    """DeiT that reconstructs masked patches, `mask_token: true` (SimMIM, Xie et al., 2022).

    A mask token replaces masked patches, and a linear decoder to pixels replaces the classifier.
    """

    @staticmethod
    def check(config: DeitConfig) -> None:
        """Refuses options that would let the model see masked pixels, and those that act on predictions of classes.

        Raises:
            OptionError: the first such option.
        """
        why = {
            "num_classes": (0, "there is no classifier"),
            "stem": ("linear", "convolutions would see the masked pixels beside a patch"),
            "dist_token": (False, "there is no second head"),
            "global_pool": (None, "nothing is pooled"),
            "drop_rate": (0.0, "there is no classifier"),
        }
        for name, (value, reason) in why.items():
            if (given := getattr(config, name)) != value:
                remedy = "leave it out" if value is None else f"set it to {str(value).lower()}"
                raise OptionError(f"model.{name}", f" = {given}: with mask_token {reason}; {remedy}")

    def create_parts(self) -> None:
        dim, config = self.embed_dim, self.config
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.decoder = nn.Linear(dim, config.in_chans * config.patch_size**2)

    def init_weights(self) -> None:
        init_linears(self.decoder, self.init_std)
        super().init_weights()
        trunc_normal_(self.mask_token, std=0.02)

    def embed(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Grid]:
        x, grid = self.embed_patches(x)
        if mask is not None:
            x = torch.where(mask.flatten(1)[..., None], self.mask_token.to(x.dtype), x)
        return self.add_positions(x, grid)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.encode(*self.embed(x, mask))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images (B, in_chans, height, width) -> pixels in the same shape.

        The pixels of patches where `mask`, (B, H, W), is true are hidden from the model.
        """
        tokens, p = self.forward_features(x, mask), self.config.patch_size
        grid = x.shape[2] // p, x.shape[3] // p
        pixels = self.decoder(tokens[:, self.num_prefix_tokens :])
        return F.pixel_shuffle(pixels.mT.unflatten(2, grid), p)


class TokenEmbed(nn.Embedding):
    """Numbers of tokens (B, 1, H, W), of any type -> their embeddings (B, dim, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0].long()).permute(0, 3, 1, 2)


class TokenDeit(Deit):
    """DeiT of tokens of a vocabulary, `vocab_size: n`: the pixels of an image (B, 1, H, W) are numbers of tokens."""

    @staticmethod
    def check(config: DeitConfig) -> None:
        """Refuses options that act on pixels, the first of them, with an OptionError."""
        for name, value in {"patch_size": 1, "in_chans": 1, "stem": "linear", "mask_token": False}.items():
            if (given := getattr(config, name)) != value:
                raise OptionError(f"model.{name}", f" = {given}: with vocab_size set it to {str(value).lower()}")
        if config.pad_token is not None and config.dynamic_img_size:
            raise OptionError("model.dynamic_img_size", " = True: with pad_token set it to false")

    def create_stem(self) -> nn.Module:
        table = TokenEmbed(self.config.vocab_size, self.embed_dim)
        trunc_normal_(table.weight, std=self.init_std)
        return table

    def key_mask_of(self, x: Tensor) -> Tensor | None:
        """The key mask of tokens (B, 1, H, W) that are not `pad_token`."""
        return None if self.config.pad_token is None else x[:, 0] != self.config.pad_token


WITH_PARTS: dict[str, type[MaskedDeit | TokenDeit]] = {"mask_token": MaskedDeit, "vocab_size": TokenDeit}
"""Option of `DeitConfig` -> the class of models for which it is set."""
