"""tiktoken's BPE files, merged by the optional package `tiktoken`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import regex

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.base import digest, is_failure, read_tokenizer_file, require_characters
from megalite.data.tokenizers.tiktoken_file import parse_ranks
from megalite.data.tokenizers.tiktoken_known import ENCODINGS, PATTERNS, Encoding, megatron_special

_MEGATRON_SPECIAL = 1000
_MEGATRON_VOCABULARY = 1 << 17
_WINDOW = 1 << 12
# Every kind of character in every kind of company: what a pattern does not match, tiktoken leaves out in silence.
_PROBE = "".join(
    f"{c}a {c}1\t{c}.{c} {c}{c}\n"
    for c in [*map(chr, range(0x20, 0x7F)), "\t", "\n", "\r", "\0", *"é½٣日🙂\u0301\u2028"]
)


@dataclass(frozen=True)
class _Plan:
    """How a file's ranks become ids."""

    ranks: dict[bytes, int]
    pattern: str
    is_named: bool
    """The pattern is one of ours."""
    told: bool
    """The file alone tells the pattern."""
    special: tuple[tuple[str, int], ...]
    """The first one is the end of document."""


class TikTokenizer:
    """A tiktoken file: lines of a token in base64 and its rank, or the JSON list that Megatron-LM's TikTokenizer reads.

    Ids are ranks. The files of r50k_base, p50k_base, cl100k_base, o200k_base and Llama 3 are known by their sha256: their
    pattern and special tokens are those of their makers, so that <|endoftext|> is 50256, 50256, 100257 and 199999, and
    Llama 3's <|end_of_text|> 128001. For any other file `pattern` is needed (or, if it has as many ranks as the
    encoding that `pattern` names, it is taken for a copy of that one); the end of document is the first id after its
    ranks. Of a JSON list, as in Megatron-LM, ids are rank + 1000, the first 1000 being special tokens with </s> = 2 for
    the end of document, the pattern is v2 unless another is given, and entries past vocab_size (default 131072) ids
    are left out.

    Special tokens spelled out in a text get the ids of their letters: only the caller ends a document.

    Args:
        model_file: the file.
        pattern: the regular expression that cuts text into words, or a name: gpt2, r50k_base, p50k_base, cl100k_base,
            o200k_base, llama3, and Megatron-LM's v1 and v2.
        vocab_size: for a JSON list, number of ids.

    Raises:
        ConfigError: the file is missing or garbled, the pattern is needed, invalid or leaves characters out, or
            `tiktoken` is not installed.
    """

    name = "TikTokenizer"

    def __init__(
        self, model_file: str | Path, pattern: str | None = None, vocab_size: int | None = None
    ) -> None:
        content = read_tokenizer_file(model_file)
        try:
            import tiktoken
        except ImportError:
            raise ConfigError(
                f"{model_file} needs the package tiktoken, which is not installed: pip install 'megalite[tokenizers]'"
            ) from None
        self._make_encoding = tiktoken.Encoding
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
        # What the file alone does not tell is part of what defines the tokenizer.
        given = [] if self._plan.told else [self._plan.pattern.encode("utf-8", "backslashreplace")]
        self._fingerprint = digest(content, *given, *([b"%d" % self.vocab_size] if is_list else []))
        self._require_all_characters()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        require_characters(texts)
        return [self._encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are spelled out."""
        return b"".join(self._token_bytes.get(int(i), b"") for i in ids).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """Digest of the file, of the pattern where the file does not tell it, and of a JSON list's vocabulary size."""
        return self._fingerprint

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
        """tiktoken's encoder that cuts words by `pattern`."""
        try:
            return self._make_encoding(
                Path(self._path).name,
                pat_str=pattern,
                mergeable_ranks=self._plan.ranks,
                special_tokens=dict(self._plan.special),
            )
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ConfigError(
                f"{self._path}: tiktoken refuses the file or the pattern {pattern[:100]!r}: {str(error)[:200]}"
            ) from None

    def _encode(self, text: str) -> list[int]:
        if self._plan.is_named and _long_space(text):
            return self._encode_by_words(text)
        try:
            ids: list[int] = self._encoding.encode_ordinary(text)
        except BaseException as error:
            if not is_failure(error):
                raise
            if self._plan.is_named:
                return self._encode_by_words(text)
            # A pattern of the user's own may mean something else to another engine.
            raise ConfigError(
                f"{self._path}: the pattern {self._plan.pattern[:100]!r} fails on a text of {len(text)} characters: "
                f"{str(error)[:200]}; use a simpler pattern, or drop that document"
            ) from None
        return ids

    def _encode_by_words(self, text: str) -> list[int]:
        """The same ids, for texts that tiktoken's regular expressions panic on.

        That happens in runs of some 100,000 characters of white space, as (?!\\S) keeps a step for each. The package
        `regex` cuts the words instead, which it does without a bound, and tiktoken merges each.
        """
        # To `regex`, `$` is also before a last line end; ours come after \s++, which leaves none.
        words = regex.compile(self._plan.pattern).finditer(text)
        encode = self._word_encoding.encode_ordinary
        return [i for word in words for i in encode(word.group())]

    @cached_property
    def _word_encoding(self) -> Any:
        """An encoder that cuts nothing."""
        return self._make(r"(?s).+")


def _plan_lines(content: bytes, path: str | Path, pattern: str | None) -> _Plan:
    ranks = parse_ranks(content, path)
    sha256 = digest(content)
    known = next((name for name, e in ENCODINGS.items() if e.sha256 == sha256), None)
    if known is None and pattern in ENCODINGS and len(ranks) == ENCODINGS[pattern].ranks:
        known = pattern
    if known is None and pattern is None:
        alike = [name for name, encoding in ENCODINGS.items() if encoding.ranks == len(ranks)]
        raise ConfigError(
            f"{path}: which pattern cuts text into words cannot be told from this file of {len(ranks)} ranks; give "
            f"--tiktoken-pattern NAME ({', '.join(PATTERNS)}) or the regular expression itself"
            + (f"; it has as many ranks as {alike[0]}" if alike else "")
        )
    encoding: Encoding | None = ENCODINGS[known] if known is not None else None
    special = encoding.special if encoding is not None else (("<|endoftext|>", max(ranks.values()) + 1),)
    last = max(ranks.values())
    holes = set(range(last)) - set(ranks.values()) - {i for _, i in special}
    if holes:
        raise ConfigError(
            f"{path}: ranks are not contiguous: {min(holes)} is missing of {len(ranks)} ranks up to {last}; give the "
            "whole file"
        )
    taken = [i for _, i in special if i in set(ranks.values())]
    if taken:
        raise ConfigError(f"{path}: rank {taken[0]} is a special token of {known}; give {known}'s own file")
    chosen = PATTERNS.get(pattern or known or "", pattern or "")
    told = known is not None and ENCODINGS[known].sha256 == sha256 and ENCODINGS[known].pattern == chosen
    return _Plan(ranks, chosen, chosen in PATTERNS.values(), told, special)


def _plan_list(content: bytes, path: str | Path, pattern: str | None, vocab_size: int | None) -> _Plan:
    size = _MEGATRON_VOCABULARY if vocab_size is None else vocab_size
    least = _MEGATRON_SPECIAL + 256
    if size < least:
        raise ConfigError(
            f"{path}: vocab_size {size} is too small for {_MEGATRON_SPECIAL} special tokens and 256 bytes; give at least "
            f"{least}"
        )
    ranks = parse_ranks(content, path)
    shifted = {
        token: rank + _MEGATRON_SPECIAL for token, rank in ranks.items() if rank < size - _MEGATRON_SPECIAL
    }
    if sum(len(token) == 1 for token in shifted) < 256:
        raise ConfigError(
            f"{path}: the 256 single bytes are not all among the first {size - _MEGATRON_SPECIAL} ranks; give a larger "
            "--vocab-size"
        )
    chosen = PATTERNS.get(pattern or "v2", pattern or "")
    told = chosen == PATTERNS["v2"]
    return _Plan(shifted, chosen, chosen in PATTERNS.values(), told, megatron_special(_MEGATRON_SPECIAL))


def _long_space(text: str) -> bool:
    """There is white space of 8192 characters on end: such a run holds two of the places looked at, and all between."""
    looked = text[::_WINDOW]
    return any(
        looked[k : k + 2].isspace() and text[k * _WINDOW : (k + 1) * _WINDOW].isspace()
        for k in range(len(looked) - 1)
    )
