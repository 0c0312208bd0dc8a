"""`--split 969,30,1`: which documents train, which validate, which test."""

import math
from itertools import accumulate

from megalite.config.errors import ConfigError

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of train, valid and test, which sum to 1; missing ones are 0.

    Raises:
        ConfigError: not one to three numbers that are at least 0 and not all 0.
    """
    example = f"give up to three numbers for train, valid and test, as in {DEFAULT_SPLIT}"
    parts = split.split(",")
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        raise ConfigError(f"split {split!r} is not a list of numbers; {example}") from None
    if len(shares) > len(SPLITS):
        raise ConfigError(f"split {split!r} has {len(shares)} numbers; {example}")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or sum(shares) == 0:
        raise ConfigError(f"split {split!r} must have numbers of at least 0, not all of them 0; {example}")
    total = sum(shares)
    train, valid, test = [share / total for share in shares] + [0.0] * (len(SPLITS) - len(shares))
    return train, valid, test


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Consecutive ranges of documents for train, valid and test, cut at round(share · documents) as Megatron does."""
    ends = [round(end * documents) for end in accumulate(parse_split(split))]
    return range(ends[0]), range(ends[0], ends[1]), range(ends[1], ends[2])
