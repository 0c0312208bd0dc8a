"""Datasets laid end to end."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import TOKEN_DTYPES, IndexedDataset
from megalite.data.side_file import read_side_file
from megalite.data.tools.copying import SideFile, Stretch, Written, write_stretches
from megalite.data.tools.prefixes import refuse_existing
from megalite.data.tools.side_facts import (
    check_tokenizers,
    digests_of,
    side_of_merged,
    vocab_size_of,
    why_no_side_file,
)


def merge(
    prefixes: Sequence[str],
    output: str,
    *,
    dtype: str | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Written:
    """Write the documents of all datasets, in the order given, as one; its bytes are those of preprocessing all inputs.

    If all have side files, the new one has one too; if not, `no_side_file` of what is returned says why. What a side file says of sha256 is compared on the way.

    Args:
        prefixes: of the datasets.
        output: prefix of the new one.
        dtype: type of the new tokens; needed if the datasets' types differ.
        on_bytes: called with the number of bytes of .bin files just read.

    Raises:
        ConfigError: a dataset is damaged, their types or tokenizers differ, an id does not fit, or the output is there.
    """
    refuse_existing([output])
    sides = [read_side_file(prefix) for prefix in prefixes]
    check_tokenizers(prefixes, sides)
    stretches = [Stretch.of(IndexedDataset(prefix)) for prefix in prefixes]
    kind = _common_dtype(stretches) if dtype is None else np.dtype(dtype).newbyteorder("<")
    known = {prefix: side for prefix, side in zip(prefixes, sides, strict=True) if side is not None}
    vocab_size = vocab_size_of(sides)
    written = write_stretches(
        output,
        stretches,
        dtype=kind,
        side_file=None
        if vocab_size is None
        else SideFile(vocab_size, lambda written: side_of_merged(list(known.values()), written)),
        digests={prefix: digests_of(side) for prefix, side in known.items()},
        on_bytes=on_bytes,
    )
    return replace(written, no_side_file=why_no_side_file(prefixes, sides))


def _common_dtype(stretches: Sequence[Stretch]) -> np.dtype:
    first = stretches[0]
    for stretch in stretches:
        if stretch.dtype != first.dtype:
            wide = np.result_type(*(each.dtype for each in stretches))
            names = [known.name for known in TOKEN_DTYPES.values()]
            assert wide.name in names, wide
            raise ConfigError(
                f"{first.prefix} holds {first.dtype.name} tokens, {stretch.prefix} {stretch.dtype.name}; give --dtype "
                f"{wide.name} to store all of them as that"
            )
    return first.dtype
