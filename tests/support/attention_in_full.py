"""The attention of a model in full."""

from models import parse_model
from models.assignment import as_option, assign


def resolve_attention(name, attention, options=None):
    """The attention of model `name` with these `options`: one mapping, or the list of its entries."""
    return as_option(
        [entry.options for entry in assign(name, attention, parse_model(name, options or {}).depths)], attention
    )
