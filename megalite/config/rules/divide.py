"""Arithmetic for messages: which numbers would work."""

import math


def divisors(number: int) -> str:
    """The divisors of a number: `1, 2, 3, 6`."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return ", ".join(map(str, sorted({*small, *(number // d for d in small)})))


def next_multiple(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `number`."""
    return -(-number // unit) * unit
