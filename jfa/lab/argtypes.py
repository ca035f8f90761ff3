"""Types of arguments that several command lines share: argparse tells the user what was wrong with one."""

import argparse
import math


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def seconds(text: str) -> float:
    """A finite time above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return number
