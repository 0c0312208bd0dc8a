"""GPT-2's byte-level BPE (Radford et al. 2019; BPE: Sennrich et al. 2016) from vocab.json and merges.txt."""

import heapq
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import regex

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.base import digest, read_tokenizer_file, require_characters

END_OF_DOCUMENT = "<|endoftext|>"
# GPT-2's words: English contractions, then runs of letters, digits or other signs, each with the space before it;
# white space that is followed by a word leaves its last character to that word.
_WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 64


class GPT2BPETokenizer:
    """Byte-level BPE: every text has ids and decodes to itself.

    Words that come again are looked up, which makes it faster on text than the package `tokenizers`, whose ids it gives.

    A text that spells out <|endoftext|> gets the ids of its letters: only the caller ends a document.

    Args:
        vocab_file: vocab.json, token -> id.
        merge_file: merges.txt, one pair a line, the first to be merged first.

    Raises:
        ConfigError: a file is missing or garbled, the two do not belong together, or <|endoftext|> is not there.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        vocab_bytes, merge_bytes = read_tokenizer_file(vocab_file), read_tokenizer_file(merge_file)
        self._fingerprint = digest(vocab_bytes, merge_bytes)
        vocabulary = _parse_vocabulary(vocab_bytes, vocab_file)
        if END_OF_DOCUMENT not in vocabulary:
            raise ConfigError(
                f"{vocab_file}: {END_OF_DOCUMENT} is not in the vocabulary; add it with an id of its own"
            )
        self.eod = vocabulary[END_OF_DOCUMENT]
        self.vocab_size = max(vocabulary.values()) + 1
        byte_symbols = _byte_symbols()
        missing = [symbol for symbol in byte_symbols if symbol not in vocabulary]
        if missing:
            raise ConfigError(
                f"{vocab_file}: {len(missing)} of the 256 byte symbols are missing, {missing[0]!r} among them; "
                "give the vocab.json of a byte-level BPE"
            )
        self._byte_ids = [vocabulary[symbol] for symbol in byte_symbols]
        self._merges = _parse_merges(merge_bytes, merge_file, vocabulary, vocab_file)
        byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols)}
        self._token_bytes = {
            i: bytes(byte_of[symbol] for symbol in token)
            if set(token) <= byte_of.keys()
            else token.encode("utf-8")
            for token, i in vocabulary.items()
        }
        # A word of everyday text comes again soon; a cache without bounds would keep every misspelling for ever.
        self._encode_common = lru_cache(maxsize=_CACHED_WORDS)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        require_characters(texts)
        return [self._encode_text(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""
        return b"".join(self._token_bytes.get(int(i), b"") for i in ids).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """Digest of both files."""
        return self._fingerprint

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in _WORDS.findall(text):
            ids.extend(self._encode_common(word) if len(word) <= _CACHED_LENGTH else self._encode_word(word))
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        """Merge neighbours, the pair that comes first in merges.txt first, leftmost first, until none can be.

        A heap of candidate pairs over a linked list: n log n, so that a megabyte without white space is no trap.
        """
        ids = [self._byte_ids[byte] for byte in word.encode("utf-8")]
        after = list(range(1, len(ids) + 1))
        before = list(range(-1, len(ids) - 1))
        heap: list[tuple[int, int, int, int]] = []

        def offer(left: int) -> None:
            if left >= 0 and after[left] < len(ids):
                pair = (ids[left], ids[after[left]])
                if pair in self._merges:
                    heapq.heappush(heap, (self._merges[pair][0], left, *pair))

        for position in range(len(ids) - 1):
            offer(position)
        while heap:
            _, left, first, second = heapq.heappop(heap)
            right = after[left]
            # A candidate is stale once either of its sides has been merged; -1 marks a place that is gone.
            if ids[left] != first or right >= len(ids) or ids[right] != second:
                continue
            ids[left], ids[right] = self._merges[first, second][1], -1
            after[left] = after[right]
            if after[left] < len(ids):
                before[after[left]] = left
            offer(before[left])
            offer(left)
        return tuple(i for i in ids if i >= 0)


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte: itself where it is one, else the next from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return symbols


def _parse_vocabulary(content: bytes, path: str | Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; give the vocab.json of a GPT-2 tokenizer") from None
    ids = vocabulary.values() if isinstance(vocabulary, dict) else [None]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids) or len(set(ids)) != len(ids):
        raise ConfigError(
            f"{path}: expected an object of tokens with different ids from 0 on, as in GPT-2's vocab.json"
        )
    return dict(vocabulary)


def _parse_merges(
    content: bytes, path: str | Path, vocabulary: dict[str, int], vocab_file: str | Path
) -> dict[tuple[int, int], tuple[int, int]]:
    """(left id, right id) -> (rank, merged id)."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: {error}; give the merges.txt of a GPT-2 tokenizer"
        ) from None
    merges: dict[tuple[int, int], tuple[int, int]] = {}
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or line.startswith("#version"):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise ConfigError(f"{path}:{number}: expected two symbols parted by a space, got {line[:60]!r}")
        unknown = [token for token in (*pair, "".join(pair)) if token not in vocabulary]
        if unknown:
            raise ConfigError(
                f"{path}:{number}: {unknown[0]!r} is not in {vocab_file}; give the two files of one tokenizer"
            )
        ranked = (len(merges), vocabulary["".join(pair)])
        merges.setdefault((vocabulary[pair[0]], vocabulary[pair[1]]), ranked)
    return merges
