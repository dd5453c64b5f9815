"""Options of a DeiT, and those that contradict each other."""

from typing import Literal

from timm.layers import to_2tuple

from attention import OptionError
from attention.options import Options, option
from models.base import check_heads, check_tokens


class DeitConfig(Options):
    """Options of a DeiT."""

    img_size: int | tuple[int, int] = option(224, "image side, or height and width; pixels", low=1, high=4096)
    patch_size: int = option(16, "side of a patch, pixels", low=1)
    in_chans: int = option(3, "image channels", low=1)
    frames: int = option(
        1, "frames T of a clip, one below the other in an image; attention has a (T, H, W) grid of patches", low=1
    )
    num_classes: int = option(1000, "classes; 0: no classifier", low=0)
    embed_dim: int = option(192, "channels of a token", low=1)
    depth: int = option(12, "blocks", low=1, high=100)
    num_heads: int = option(3, "attention heads of a block", low=1)
    mlp_ratio: float = option(4.0, "width of the MLP over that of a token", above=0, high=64)
    qkv_bias: bool = option(True, "bias of the query, key and value projections")
    stem: Literal["linear", "conv"] = option("linear", "patch embedding: linear, or strided convolutions")
    vocab_size: int = option(
        0,
        "size of the vocabulary of a model of sequences, in which a pixel is a patch and the number of its token;"
        " 0: a model of images",
        low=0,
        high=256,
    )
    class_token: bool = option(False, "a class token before the patches")
    dist_token: bool = option(False, "a distillation token after the class token, and a second head that reads it")
    reg_tokens: int = option(0, "register tokens, after those two and before the patches", low=0)
    pad_token: int | None = option(
        None,
        "token of the vocabulary that fills sequences, and that attention and pooling leave out; null: none",
        low=0,
    )
    mask_token: bool = option(
        False, "a token in place of masked patches, and a linear layer to pixels in place of the classifier: simmim"
    )
    global_pool: Literal["avg", "token", ""] | None = option(
        None, "classifier's input; null: the class token where there is one, else the mean; '': all tokens"
    )
    dynamic_img_size: bool = option(
        False, "accept images of any size, a multiple of the patch: position embeddings are resampled for each"
    )
    drop_rate: float = option(0.0, "dropout rate before the classifier", low=0, below=1)
    pos_drop_rate: float = option(0.0, "dropout rate after the position embeddings", low=0, below=1)
    proj_drop_rate: float = option(0.0, "dropout rate after attention and MLP layers", low=0, below=1)
    drop_path_rate: float = option(0.0, "stochastic depth: rate of the last block, linear from 0", low=0, below=1)
    init_std: float = option(
        0.02, "std of the initial weights of linear layers; narrower models need a larger one", above=0
    )

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks per stage; a DeiT is one stage."""
        return (self.depth,)

    def __post_init__(self) -> None:
        check_heads(self.embed_dim, self.num_heads)
        for side in to_2tuple(self.img_size):
            if side % self.patch_size:
                valid = max(1, round(side / self.patch_size)) * self.patch_size
                problem = f" = {side} is not a multiple of patch_size = {self.patch_size}; nearest: {valid}"
                raise OptionError("model.img_size", problem)
        height, width = to_2tuple(self.img_size)
        mixes = self.stem == "conv" or self.dynamic_img_size
        if self.frames > 1 and (mixes or height // self.patch_size % self.frames):
            problem = f" = {self.frames}: needs a height of whole frames and patches, stem: linear and one image size"
            raise OptionError("model.frames", problem)
        check_tokens((height // self.patch_size, width // self.patch_size))
        if self.pad_token is not None and self.pad_token >= self.vocab_size:
            problem = f" = {self.pad_token} is not below model.vocab_size = {self.vocab_size}"
            raise OptionError("model.pad_token", f"{problem}; leave it out, or name a token of the vocabulary")
        if self.global_pool == "token" and not self.class_token:
            raise OptionError("model.global_pool", " = token needs class_token: true")
        if self.dist_token and not self.class_token:
            raise OptionError("model.dist_token", " = true needs class_token: true")
        if self.dist_token and self.global_pool not in (None, "token"):
            problem = f" = {self.global_pool!r}: with dist_token, each head reads its own token; leave it out"
            raise OptionError("model.global_pool", problem)
        if self.stem == "conv" and not self.vocab_size:  # tokens refuse this stem altogether
            if self.patch_size not in (4, 8, 16):
                raise OptionError("model.patch_size", f" = {self.patch_size}: the conv stem takes 4, 8 or 16")
            if self.embed_dim % (self.patch_size // 2):
                problem = f" = {self.embed_dim}: the conv stem needs a multiple of {self.patch_size // 2}"
                raise OptionError("model.embed_dim", problem)
