"""Which documents train, which validate, which test."""

from itertools import accumulate

from megalite.config.split import parse_split


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Consecutive ranges of documents for train, valid and test, cut at round(share · documents) as Megatron does.

    Raises:
        ConfigError: as `parse_split`.
    """
    ends = [round(end * documents) for end in accumulate(parse_split(split))]
    return range(ends[0]), range(ends[0], ends[1]), range(ends[1], ends[2])
