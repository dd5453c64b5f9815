"""Pooled attention."""

from tests.support.cases import PREFIX, Case
from tests.support.growth import Growth
from tests.support.symmetry import BLOCKS

SMALL = {"num_landmarks": 6}
CASES = [Case("pooled", (5, 7), SMALL), Case("pooled", (5, 7), {**SMALL, **PREFIX})]
EFFECTS = {"num_landmarks": (SMALL, 4)}  # an option, and another value that makes a difference
SYMMETRIES = [(BLOCKS, SMALL)]  # tokens may change places within bins of 2 x 2, the bins among each other
GROWTH = [Growth(macs=1, saved_bytes=1)]  # orders in N
SYMBOLS = {"c": 49}  # of the formula in the docstring
