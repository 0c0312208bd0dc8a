"""`--split 969,30,1`: the shares of training, validation and test data."""

import math

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
        shares = []
    # float() takes 9_0 for 90.
    if not shares or "_" in split:
        raise ConfigError(f"split {split!r} is not a list of numbers; {example}")
    if len(shares) > len(SPLITS):
        raise ConfigError(f"split {split!r} has {len(shares)} numbers; {example}")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or sum(shares) == 0:
        raise ConfigError(f"split {split!r} must have numbers of at least 0, not all of them 0; {example}")
    total = sum(shares)
    train, valid, test = [share / total for share in shares] + [0.0] * (len(SPLITS) - len(shares))
    return train, valid, test
