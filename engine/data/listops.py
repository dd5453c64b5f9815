"""Draws Long Range Arena's ListOps, in IDX files: expressions of operators on lists of digits, and their values.

After Nangia and Bowman, 2018 (arXiv:1804.06028), with the numbers of Long Range Arena (Tay et al., 2021,
arXiv:2011.04006): an expression is a digit, or with probability 1/4 an operator on 2 to 10 expressions, to a depth of
10. The operators are the largest, the least, the median, rounded down, and the sum modulo 10. An expression such as
``[MAX 2 [MIN 3 1 ] 0 ]`` is a sequence of the tokens in `TOKENS`, and its class is its value. Sequences are drawn again
until their length is in `--length`, and filled with the token 0 to the largest length. Equal arguments give equal
files, and sequence i does not depend on the number of sequences.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from engine.data.idx import LIMIT, write_splits
from engine.runtime.arguments import SEED, ArgumentParser, Count
from engine.runtime.errors import refuse_bad_input
from engine.runtime.signals import end_at_interrupt

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
"""Operator, with its bracket -> function of its arguments."""

TOKENS = ("", *map(str, range(10)), *OPERATORS, "]")
"""Tokens in the order of their numbers; the first fills sequences."""

OPERATOR_RATE, MAX_DEPTH, MAX_ARGUMENTS = 0.25, 10, 10

NUMBERS = {token: number for number, token in enumerate(TOKENS)}


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Draw ListOps and write it in IDX files.")
    add = parser.add_argument
    add("output", type=Path, help="directory of the splits train and t10k")
    number = "number of sequences of train and of t10k (96000 2000)"
    add("--sequences", type=Count(), nargs=2, default=(96_000, 2_000), metavar=("N", "M"), help=number)
    length = "least and largest length of a sequence, tokens (500 2000)"
    add("--length", type=Count(1, 4096), nargs=2, default=(500, 2000), metavar=("A", "B"), help=length)
    add("--seed", type=SEED, default=0, help="seed of the random numbers (0)")
    args = parser.parse_args(arguments)
    least, largest = args.length
    if least > largest or largest < 4:
        parser.error(f"--length must be ascending, to at least 4, got {args.length}")
    if (size := max(args.sequences) * largest) > LIMIT:
        parser.error(f"--sequences {max(args.sequences)} of {largest} tokens: {size:,} bytes; at most {LIMIT:,}")

    def draw_one(number: int, i: int) -> tuple[np.ndarray, int]:
        """A sequence is an image of one row."""
        tokens, value = draw(random.Random(f"{args.seed} {number} {i}"), least, largest)
        image = np.zeros((1, largest), np.uint8)
        image[0, : len(tokens)] = [NUMBERS[token] for token in tokens]
        return image, value

    with refuse_bad_input():
        write_splits(args.output, args.sequences, draw_one)


def draw(rng: random.Random, least: int, largest: int) -> tuple[list[str], int]:
    """Draws an expression of `least` to `largest` tokens, and its value."""
    while True:
        tokens: list[str] = []
        value = _draw_expression(rng, 1, tokens, largest)
        if least <= len(tokens) <= largest:
            return tokens, value


def _draw_expression(rng: random.Random, depth: int, tokens: list[str], largest: int) -> int:
    """Adds an expression at this depth to `tokens` and returns its value; stops early once there are too many."""
    if len(tokens) > largest or depth == MAX_DEPTH or rng.random() >= OPERATOR_RATE:
        digit = rng.randrange(10)
        tokens.append(str(digit))
        return digit
    operator, count = rng.choice([*OPERATORS]), rng.randint(2, MAX_ARGUMENTS)
    tokens.append(operator)
    values = [_draw_expression(rng, depth + 1, tokens, largest) for _ in range(count)]
    tokens.append("]")
    return OPERATORS[operator](values)


if __name__ == "__main__":
    main()
