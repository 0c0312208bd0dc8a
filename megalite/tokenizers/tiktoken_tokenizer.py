"""Read tiktoken's BPE files; the optional package `tiktoken` merges.

The file is parsed here and not by the library, because an error must name the position of a fault, and tiktoken cannot
read Megatron-LM's JSON list. Sources of the patterns and special tokens of well-known files: tiktoken's openai_public.py,
Meta's Llama 3 tokenizer.py, Megatron-LM's tiktoken_tokenizer.py."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import regex

from megalite.config.errors import ConfigError
from megalite.tokenizers.base import (
    GPT2_END,
    Tokenizer,
    as_config_error,
    digest,
    parse_json,
    read_tokenizer_file,
    require_characters,
    require_package,
)

_WORD_END = r"\s+(?!\S)|\s"
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|" + _WORD_END
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    + _WORD_END
)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_MARKED = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K_PATTERN = (
    rf"{_MARKED}{_UPPER}*{_LOWER}+{_CONTRACTION}|{_MARKED}{_UPPER}+{_LOWER}*{_CONTRACTION}|\p{{N}}{{1,3}}|{_O200K_REST}"
)
MEGATRON_V1_PATTERN = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
MEGATRON_V2_PATTERN = rf"{_MARKED}{_UPPER}*{_LOWER}+|{_MARKED}{_UPPER}+{_LOWER}*|\p{{N}}|{_O200K_REST}"


@dataclass(frozen=True)
class Encoding:
    pattern: str
    ranks: int  # number of ranks in its file
    special: tuple[tuple[str, int], ...]  # special tokens and their ids; the first one ends a document
    sha256: str  # of the published file


def _llama3_special() -> tuple[tuple[str, int], ...]:
    named = {128000: "<|begin_of_text|>", 128006: "<|start_header_id|>", 128007: "<|end_header_id|>"}
    named |= {128009: "<|eot_id|>"}
    spare = (i for i in range(256))
    rest = [
        (named[i] if i in named else f"<|reserved_special_token_{next(spare)}|>", i)
        for i in range(128000, 128256)
        if i != 128001
    ]
    return (("<|end_of_text|>", 128001), *rest)


ENCODINGS = {
    "r50k_base": Encoding(
        GPT2_PATTERN, 50256, ((GPT2_END, 50256),), "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    ),
    # Its ranks skip 50256, the id of <|endoftext|>.
    "p50k_base": Encoding(
        GPT2_PATTERN, 50280, ((GPT2_END, 50256),), "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"
    ),
    "cl100k_base": Encoding(
        CL100K_PATTERN,
        100256,
        (
            *((GPT2_END, 100257), ("<|fim_prefix|>", 100258), ("<|fim_middle|>", 100259)),
            *(("<|fim_suffix|>", 100260), ("<|endofprompt|>", 100276)),
        ),
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    "o200k_base": Encoding(
        O200K_PATTERN,
        199998,
        ((GPT2_END, 199999), ("<|endofprompt|>", 200018)),
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
    "llama3": Encoding(
        LLAMA3_PATTERN, 128000, _llama3_special(), "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
    ),
}
PATTERNS = {
    **{name: encoding.pattern for name, encoding in ENCODINGS.items()},
    "gpt2": GPT2_PATTERN,
    "v1": MEGATRON_V1_PATTERN,
    "v2": MEGATRON_V2_PATTERN,
}
"""Names for --tiktoken-pattern; v1 and v2 are Megatron-LM's."""


def megatron_special(count: int) -> tuple[tuple[str, int], ...]:
    """Return Megatron-LM's special tokens, which come before the ranks; the first, </s>, ends a document."""
    first = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
    names = [*first, *(f"<SPECIAL_{i}>" for i in range(len(first), count))]
    return (("</s>", 2), *((name, i) for i, name in enumerate(names) if i != 2))


_MAX_RANK = 1 << 24  # far above any vocabulary, but low enough that a damaged rank costs no memory
_MEGATRON_SPECIAL = 1000
_MEGATRON_VOCABULARY = 1 << 17
_WINDOW = 1 << 12
# All kinds of characters in many combinations, because tiktoken silently drops what a pattern does not match.
_PROBE = "".join(
    f"{c}a {c}1\t{c}.{c} {c}{c}\n"
    for c in [*map(chr, range(0x20, 0x7F)), "\t", "\n", "\r", "\0", *"é½٣日🙂\u0301\u2028"]
)


@dataclass(frozen=True)
class _Plan:
    ranks: dict[bytes, int]
    pattern: str
    is_implied: bool  # whether the file alone implies the pattern
    special: tuple[tuple[str, int], ...]  # the first is the end of document

    @property
    def is_known(self) -> bool:
        return self.pattern in PATTERNS.values()


class TikTokenizer(Tokenizer):
    """A tiktoken file: lines of a token in base64 and its rank, or the JSON list of Megatron-LM's TikTokenizer.

    Ids are ranks. The files of r50k_base, p50k_base, cl100k_base, o200k_base and Llama 3 are recognised by their
    sha256, with their pattern and special tokens. Any other file needs `pattern`; if it has as many ranks as the
    encoding named by `pattern`, it is treated as a copy of that encoding, otherwise its end of document is the first id
    after its ranks. In Megatron-LM's JSON list ids are rank + 1000; the first 1000 ids are special tokens, with </s> =
    2 as the end of document. Its default pattern is v2, and entries past vocab_size (default 131072) ids are left out.

    Special tokens spelled out in a text are encoded as their letters; only the caller ends a document. `pattern`: the
    regular expression that splits text into words, or a name in PATTERNS. `vocab_size`: number of ids of a JSON list.
    Raises ConfigError if the file is missing or damaged, the pattern is missing, invalid or does not match all
    characters, or `tiktoken` is not installed."""

    name = "TikTokenizer"

    def __init__(self, model_file: str | Path, pattern: str | None = None, vocab_size: int | None = None) -> None:
        content = read_tokenizer_file(model_file)
        self._make_encoding = require_package(model_file, "tiktoken", "tokenizers").Encoding
        self._path = model_file
        is_list = content.lstrip()[:1] == b"["
        if is_list:
            self._plan = _plan_list(content, model_file, pattern, vocab_size)
        else:
            self._plan = _plan_lines(content, model_file, pattern)
        self._encoding = self._make(self._plan.pattern)
        self._token_bytes = {rank: token for token, rank in self._plan.ranks.items()}
        self._token_bytes |= {i: name.encode() for name, i in self._plan.special}
        self.vocab_size = max(self._token_bytes) + 1
        self.eod: int = self._plan.special[0][1]
        # The fingerprint includes a pattern that the file alone does not imply.
        chosen = [] if self._plan.is_implied else [self._plan.pattern.encode("utf-8", "backslashreplace")]
        self._fingerprint = digest(content, *chosen, *([b"%d" % self.vocab_size] if is_list else []))
        self._require_all_characters()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        require_characters(texts)
        return [self._encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # Special tokens are spelled out.
        return b"".join(self._token_bytes.get(int(i), b"") for i in ids).decode("utf-8", errors="replace")

    def _require_all_characters(self) -> None:
        fault = ""
        try:
            if self.decode(self.encode(_PROBE)) == _PROBE:
                return
        except ConfigError as error:
            fault = f" ({error})"
        raise ConfigError(
            f"{self._path}: the pattern {self._plan.pattern[:100]!r} leaves characters out or matches nothing; every "
            rf"character must be in a match: end it with |\s+|\S{fault}"
        )

    def _make(self, pattern: str) -> Any:
        with as_config_error(f"{self._path}: tiktoken refuses it or {pattern[:100]!r}"):
            return self._make_encoding(
                Path(self._path).name,
                pat_str=pattern,
                mergeable_ranks=self._plan.ranks,
                special_tokens=dict(self._plan.special),
            )

    def _encode(self, text: str) -> list[int]:
        if self._plan.is_known and _has_long_space(text):
            return self._encode_by_words(text)
        # Not for a user's pattern, which may mean something else to the package `regex`.
        try:
            with as_config_error(f"{self._path}: {self._plan.pattern[:99]!r} fails on a text"):
                return self._encoding.encode_ordinary(text)
        except ConfigError:
            if self._plan.is_known:
                return self._encode_by_words(text)
            raise

    def _encode_by_words(self, text: str) -> list[int]:
        """Return the same ids for texts on which tiktoken's regular expressions panic.

        They panic on runs of about 100,000 characters of white space, because (?!\\S) stores a step for each. The
        package `regex` splits the words without a limit, and tiktoken merges each word."""
        # In `regex`, `$` also matches before a final line end; in these patterns it follows \s++, which leaves none.
        words = regex.compile(self._plan.pattern).finditer(text)
        encode = self._word_encoding.encode_ordinary
        return [i for word in words for i in encode(word.group())]

    @cached_property
    def _word_encoding(self) -> Any:
        """An encoding that treats its whole input as one word."""
        return self._make(r"(?s).+")


def _plan_lines(content: bytes, path: str | Path, pattern: str | None) -> _Plan:
    ranks = _parse_ranks(_lines(content, path), path)
    sha256, last = digest(content), max(ranks.values())
    known = next((name for name, e in ENCODINGS.items() if e.sha256 == sha256), None)
    if known is None and pattern in ENCODINGS and len(ranks) == ENCODINGS[pattern].ranks:
        known = pattern
    if known is None and pattern is None:
        similar = [name for name, encoding in ENCODINGS.items() if encoding.ranks == len(ranks)]
        raise ConfigError(
            f"{path}: this file of {len(ranks)} ranks does not say which pattern splits text into words; give "
            f"--tiktoken-pattern NAME ({', '.join(PATTERNS)}) or the regular expression itself"
            + (f"; it has as many ranks as {similar[0]}" if similar else "")
        )
    special = ENCODINGS[known].special if known is not None else ((GPT2_END, last + 1),)
    used, special_ids = set(ranks.values()), [i for _, i in special]
    holes = set(range(last)) - used - set(special_ids)
    if holes:
        raise ConfigError(f"{path}: rank {min(holes)} is missing of ranks up to {last}; give the whole file")
    taken = [i for i in special_ids if i in used]
    if taken:
        raise ConfigError(f"{path}: rank {taken[0]} is a special token of {known}; give {known}'s own file")
    chosen = PATTERNS.get(pattern or known or "", pattern or "")
    is_implied = known is not None and (ENCODINGS[known].sha256, ENCODINGS[known].pattern) == (sha256, chosen)
    return _Plan(ranks, chosen, is_implied, special)


def _plan_list(content: bytes, path: str | Path, pattern: str | None, vocab_size: int | None) -> _Plan:
    size = _MEGATRON_VOCABULARY if vocab_size is None else vocab_size
    least = _MEGATRON_SPECIAL + 256
    if size < least:
        raise ConfigError(f"{path}: vocab_size {size} is too small; give at least {least}")
    ranks = _parse_ranks(_json_entries(content, path), path)
    shifted = {token: rank + _MEGATRON_SPECIAL for token, rank in ranks.items() if rank < size - _MEGATRON_SPECIAL}
    if sum(len(token) == 1 for token in shifted) < 256:
        raise ConfigError(f"{path}: the first {size - _MEGATRON_SPECIAL} ranks lack bytes; use a larger --vocab-size")
    chosen = PATTERNS.get(pattern or "v2", pattern or "")
    return _Plan(shifted, chosen, chosen == PATTERNS["v2"], megatron_special(_MEGATRON_SPECIAL))


_Entry = tuple[str, Any, Any]  # position in the file, token in base64, rank


def _parse_ranks(entries: Sequence[_Entry], path: str | Path) -> dict[bytes, int]:
    """Return token -> rank, sorted by rank; lower ranks merge first."""
    ranks: dict[bytes, int] = {}
    owners: dict[int, str] = {}
    for place, text, rank in entries:
        try:
            token = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: {place}: {str(text)[:60]!r} is not base64: {error}") from None
        if not token:
            raise ConfigError(f"{path}: {place}: the token is empty")
        if type(rank) is not int or not 0 <= rank < _MAX_RANK:
            raise ConfigError(f"{path}: {place}: rank {str(rank)[:30]!r} is not a number from 0 to {_MAX_RANK - 1}")
        if token in ranks:
            raise ConfigError(f"{path}: {place}: token {token!r} has rank {ranks[token]} already")
        if rank in owners:
            raise ConfigError(f"{path}: {place}: rank {rank} is taken by {owners[rank]} already")
        ranks[token], owners[rank] = rank, place
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"{path}: {len(missing)} of the 256 single bytes are missing; give the whole file")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _lines(content: bytes, path: str | Path) -> list[_Entry]:
    entries: list[_Entry] = []
    for number, line in enumerate(content.splitlines(), 1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2:
            raise ConfigError(f"{path}: line {number}: expected a token in base64 and its rank, got {line[:60]!r}")
        is_rank = fields[1].isdigit() and len(fields[1]) < 12
        entries.append((f"line {number}", fields[0], int(fields[1]) if is_rank else fields[1].decode("latin-1")))
    return entries


def _json_entries(content: bytes, path: str | Path) -> list[_Entry]:
    entries: list[_Entry] = []
    for i, value in enumerate(parse_json(content, path)):
        place = f"entry {i}"
        fields = {"rank", "token_bytes"}
        if not isinstance(value, dict) or not fields <= value.keys() <= fields | {"token_str"}:
            raise ConfigError(f"{path}: {place}: expected rank, token_bytes and token_str, got {str(value)[:60]}")
        rank = value["rank"]
        if type(rank) is int and 0 <= rank < _MAX_RANK and rank != i:
            raise ConfigError(f"{path}: {place}: rank is {rank}; such a list is in the order of ranks")
        entries.append((place, value["token_bytes"], rank))
    return entries


def _has_long_space(text: str) -> bool:
    """Return whether the text may contain a run of 8192 or more white-space characters. Such a run contains two
    consecutive sampled characters and all characters between them."""
    probe = text[::_WINDOW]
    return any(
        probe[k : k + 2].isspace() and text[k * _WINDOW : (k + 1) * _WINDOW].isspace() for k in range(len(probe) - 1)
    )
