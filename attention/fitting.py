"""The option `fit`: sizes that a small grid does not allow become the largest that it does."""

import dataclasses
from typing import Any

import torch

from .base import Attention, LayerContext
from .options import OptionError


def fitted(mechanism: type[Attention], context: LayerContext, config: Any) -> Any:
    """The options of a layer: `config`, or with the option `fit` the sizes that the context's grid allows.

    Each size that the constructor refuses becomes the value that the error names, in the order of the constructor's
    checks. Draws no random numbers.

    Raises:
        OptionError: the constructor refuses another option.
    """
    if not config.fit:
        return config
    by_itself, strict = dataclasses.replace(context, shared={}), dataclasses.replace(config, fit=False)
    while True:
        try:
            with torch.device("meta"):
                mechanism(by_itself, strict)
        except OptionError as error:
            if error.fitting is None:
                raise
            strict = dataclasses.replace(strict, **{error.key.rpartition(".")[2]: error.fitting})
        else:
            return dataclasses.replace(strict, fit=True)
