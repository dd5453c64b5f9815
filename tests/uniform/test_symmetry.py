"""Tests of the rearrangements of tokens that commute with a mechanism, and of those that do not (float64, 1e-10).

On a grid of 6 x 4 with windows, groups and segments of 2 x 2: any permutation; one inside every block; one of whole
blocks; and the transposed grid. Position biases and convolutions distinguish positions, and leave fewer symmetries.
"""

import pytest
import torch

from tests.support.comparisons import assert_equal, assert_mean, standard_errors
from tests.support.facts import rows
from tests.support.inputs import B, d, draw, h, layer
from tests.support.symmetry import GRID, TRANSPOSED, permutations


def label(argument) -> str:
    """A mechanism's name, or the options of a row."""
    return argument if isinstance(argument, str) else "-".join(map(str, argument[1].values()))


@pytest.mark.parametrize(("name", "row"), rows("SYMMETRIES"), ids=label)
def test_what_commutes(name, row):
    commuting, options = row
    attn, x = layer(name, GRID, **options), draw(B, 24, h * d)
    in_law = [kinds for other, (kinds, _) in rows("SYMMETRIES_IN_LAW") if other == name]
    assert not attn.ignores_order() or "any" in set().union(commuting, *in_law)
    y, turned = attn(x, GRID), layer(name, GRID[::-1], **options)
    shapes = {key: x.shape for key, x in turned.state_dict().items()}  # a table of rows is not one of columns
    turned.load_state_dict({key: x for key, x in attn.state_dict().items() if x.shape == shapes[key]}, strict=False)
    differences = {kind: attn(x[:, order], GRID) - y[:, order] for kind, order in permutations().items()}
    differences["transposed"] = turned(x[:, TRANSPOSED], GRID[::-1]) - y[:, TRANSPOSED]
    for kind, difference in differences.items():
        if kind in commuting:
            assert_equal(difference, torch.zeros_like(difference))
        else:
            assert difference.abs().max() > 1e-3, kind


@torch.no_grad()
@pytest.mark.parametrize(("name", "row"), rows("SYMMETRIES_IN_LAW"), ids=label)
def test_what_commutes_in_law(name, row):
    """Mean and mean square over 2000 draws of training, one for every image of a batch."""
    commuting, options = row
    attn, x = layer(name, GRID, **options).train(), draw(1, 24, h * d).expand(2000, -1, -1)
    y = attn(x, GRID)
    for kind, order in permutations().items():
        moved, stayed = attn(x[:, order], GRID), y[:, order]
        if kind in commuting:
            assert_mean(moved - stayed, 0)
            assert_mean(moved.square() - stayed.square(), 0)
        else:
            assert standard_errors(moved - stayed, 0).max() > 6
