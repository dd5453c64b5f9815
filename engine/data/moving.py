"""Clips of moving digits, drawn. The class is the movement, which no frame tells.

One of the embedded handwritten digits (8 x 8 pixels) moves through eight frames of 28 x 28 pixels, by 2 to 3 pixels a
frame: in class 0 to 7 straight to the right, down right, down, and so on clockwise; in class 8 and 9 once around a
circle of 2.6 to 3.9 pixels radius, clockwise and anticlockwise. The digit, its first position and the place where a
circle begins are random, and positions wrap around the borders. So every frame alone is independent of the class, and
of a sum over frames the one with the least cross-entropy is a constant. Two successive frames alone are independent of
the sense of a circle.
"""

import numpy as np

FRAMES, SIDE = 8, 28


def draw(rng: np.random.Generator, label: int, digits: np.ndarray) -> np.ndarray:
    """Draws a clip of one of `digits`, (n, 8, 8) levels of 0 to 16: bytes (FRAMES * SIDE, SIDE), frame below frame."""
    image = np.zeros((SIDE, SIDE), np.uint8)
    image[:8, :8] = rng.choice(digits) * (255 / 16)
    start, speed, begin = rng.uniform(0, SIDE, 2), rng.uniform(2, 3), rng.uniform(0, 2 * np.pi)
    turns = np.pi / 4 * np.arange(FRAMES - 1)
    angles = {8: begin + turns, 9: begin - turns}.get(label, np.pi / 4 * label + 0 * turns)
    steps = speed * np.stack([np.sin(angles), np.cos(angles)], 1)  # rows go down: angles grow clockwise
    places = np.rint(start + np.concatenate([np.zeros((1, 2)), steps.cumsum(0)])).astype(int)
    return np.concatenate([np.roll(image, place, (0, 1)) for place in places])
