"""The shapes of attention tiles that run without a mask. No torch."""

from enum import Enum


class TileKind(Enum):
    """Which of a tile's (row, column) pairs are visible; rows are queries, columns are keys."""

    FULL = "full"
    """All of a rectangle."""

    CAUSAL = "causal"
    """Row i of a square sees the columns j <= i."""

    EDGE = "edge"
    """Row i of a square sees the columns j >= i: CAUSAL with rows and columns both reversed."""
