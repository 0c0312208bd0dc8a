"""Open token files once, and check what is cheap to check."""

import difflib
import stat
from pathlib import Path

import numpy as np

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.made_with import require_recorded_tokenizer
from megalite.data.tokenizers.base import Tokenizer
from megalite.data.tokenizers.null import NullTokenizer

SAMPLED_BYTES = 64 << 20
"""Of a token file are looked at for ids outside the vocabulary when it is opened."""

_BLOCK_BYTES = 1 << 20


class TokenFiles:
    """Opens and checks each token file once, whichever splits read it."""

    def __init__(self, vocab_size: int, tokenizer: Tokenizer | None = None) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self._open: dict[str, IndexedDataset] = {}

    def open(self, prefix: str) -> IndexedDataset:
        """The token file `prefix`.bin with its .idx.

        Raises:
            ConfigError: it is not there, is damaged, or holds a token id outside the vocabulary.
        """
        if prefix not in self._open:
            _check_exists(prefix)
            indexed = IndexedDataset(prefix)
            if not indexed.num_tokens:
                raise ConfigError(
                    f"data path {prefix}: {prefix}.bin holds no tokens; leave it out, or write it again from text"
                )
            if self.tokenizer is not None:
                require_recorded_tokenizer(prefix, self.tokenizer)
            _check_token_ids(indexed, self.vocab_size, self.tokenizer)
            self._open[prefix] = indexed
        return self._open[prefix]


def _check_exists(prefix: str) -> None:
    """Name what is missing and what is there with a like name."""
    try:
        missing = [suffix for suffix in (".bin", ".idx") if not _is_file(f"{prefix}{suffix}")]
    except OSError as error:
        raise ConfigError(
            f"data path {prefix}: {error.strerror}; a prefix is a path without .bin whose folders may be read"
        ) from None
    if not missing:
        return
    folder = Path(prefix).parent
    if not folder.is_dir():
        raise ConfigError(
            f"data path {prefix}: the folder {folder} does not exist; a prefix is a path without .bin"
        )
    if prefix.endswith((".bin", ".idx")) and Path(prefix).is_file():
        raise ConfigError(f"data path {prefix}: give the prefix alone: {prefix[:-4]}")
    try:
        there = sorted({path.stem for path in folder.iterdir() if path.suffix == ".idx"})
    except OSError as error:
        raise ConfigError(
            f"data path {prefix}: {prefix}{missing[0]} is missing, and {folder} cannot be listed ({error.strerror}); "
            "check the name"
        ) from None
    near = difflib.get_close_matches(Path(prefix).name, there, n=3, cutoff=0.4)
    if near:
        hint = "did you mean " + " or ".join(str(folder / name) for name in near) + "?"
    elif there:
        hint = f"{folder} has " + ", ".join(there[:5])
    else:
        hint = f"{folder} has no .idx file; make one with tools/preprocess_data.py"
    if len(missing) == 1:
        there_is = ".idx" if missing[0] == ".bin" else ".bin"
        raise ConfigError(
            f"data path {prefix}: {prefix}{missing[0]} is missing, {prefix}{there_is} is there; {hint}"
        )
    raise ConfigError(f"data path {prefix}: neither {prefix}.bin nor {prefix}.idx exists; {hint}")


def _is_file(path: str) -> bool:
    """Raises OSError where that cannot be told."""
    try:
        return stat.S_ISREG(Path(path).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _check_token_ids(indexed: IndexedDataset, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Every id of a small file, evenly spread blocks of a large one; what slips through fails when it is read."""
    tokens = indexed.tokens
    if not len(tokens) or (tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < vocab_size):
        return
    block = _BLOCK_BYTES // tokens.dtype.itemsize
    blocks = -(-len(tokens) // block)
    if blocks * _BLOCK_BYTES <= SAMPLED_BYTES:
        chosen = list(range(blocks))
    else:
        looked_at = max(2, SAMPLED_BYTES // _BLOCK_BYTES)
        chosen = [i * (blocks - 1) // (looked_at - 1) for i in range(looked_at)]
    lowest, highest = 0, 0
    for number in chosen:
        part = tokens[number * block : (number + 1) * block]
        lowest, highest = min(lowest, int(part.min())), max(highest, int(part.max()))
    if lowest < 0:
        raise ConfigError(
            f"{indexed.bin_path}: holds token id {lowest}; ids are at least 0: write the dataset again with "
            "tools/preprocess_data.py"
        )
    if highest >= vocab_size:
        # The size of NullTokenizer is the user's.
        if tokenizer is not None and tokenizer.name != NullTokenizer.name and highest >= tokenizer.vocab_size:
            raise ConfigError(
                f"{indexed.bin_path}: holds token id {highest}, but {tokenizer.name} (sha256 "
                f"{tokenizer.fingerprint()[:12]}...) has ids below {tokenizer.vocab_size}: it is another tokenizer than "
                "the one that wrote the file; give that one"
            )
        raise ConfigError(
            f"{indexed.bin_path}: holds token id {highest}, but vocab_size is {vocab_size}; set vocab_size to at least "
            f"{highest + 1}, the size of the tokenizer that wrote the file"
        )
