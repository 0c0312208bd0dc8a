"""Tokenize pieces of input: documents, or fine-tuning examples with a loss mask that marks responses.

A line with an example is {"prompt": text, "response": text} (or "completion") or {"messages": [{"role", "content"}, ...]},
which the tokenizer's chat template converts to text. Tokens and mask become two datasets of equal lengths.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import token_dtype
from megalite.preprocess.documents import BadDocument, BadLine, PieceTexts, parse_object, read_piece, text_of, type_name
from megalite.preprocess.job import MAX_FAULTS, PreprocessJob, require_tokenizer
from megalite.preprocess.pieces import Piece
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.chat import ChatTemplate, NoTemplate, chat_template, require_chat_template
from megalite.tokenizers.subword import HuggingFaceTokenizer


@dataclass(frozen=True)
class TokenizedPiece:
    """The tokens of a piece's good documents, and its bad lines."""

    lines: int  # lines of the piece, including bad and blank ones
    first_line: int | None  # line in the piece of the first good document
    tokens: list[NDArray]  # for each key the concatenated tokens of all documents, in the stored type
    lengths: list[NDArray[np.int64]]  # for each key the length of each document `[documents]`
    bad: dict[str, int]  # bad lines, by kind
    faults: list[tuple[int, str]]  # (line in the piece, reason) of the first of them, in order


class PieceTokenizer:
    def __init__(self, job: PreprocessJob, tokenizer: Tokenizer | None = None) -> None:
        self._keys, self._limits = job.json_keys, job.limits
        self._tokenizer = tokenizer or require_tokenizer(job)
        self._ending = [self._tokenizer.eod] if job.append_eod else []
        self._dtype = token_dtype(self._tokenizer.vocab_size)

    def __call__(self, piece: Piece) -> TokenizedPiece:
        """Parse and tokenize a piece. A bad document is left out under all keys. Raises ConfigError if the tokenizer
        returns ids outside its vocabulary."""
        read = self._read(piece)
        left_out: dict[int, tuple[str, str]] = {}
        encoded = self._encode_all(read, left_out)
        good = [i for i in range(len(encoded[0])) if i not in left_out]
        bad = sorted([*read.bad, *(BadLine(read.at[i], kind, reason) for i, (kind, reason) in left_out.items())])
        joined = [self._join([ids[i] for i in good]) for ids in encoded]
        return TokenizedPiece(
            lines=read.lines,
            first_line=read.at[good[0]] if good else None,
            tokens=[tokens for tokens, _ in joined],
            lengths=[lengths for _, lengths in joined],
            bad=dict(Counter(kind for _, kind, _ in bad)),
            faults=[(line, reason) for line, _, reason in bad[:MAX_FAULTS]],
        )

    def _read(self, piece: Piece) -> PieceTexts:
        return read_piece(piece, self._keys, self._limits)

    def _encode_all(
        self, read: PieceTexts, left_out: dict[int, tuple[str, str]]
    ) -> list[Sequence[Sequence[int] | NDArray]]:
        """Return [key][document] ids; add document -> (kind, reason) to `left_out` for documents without ids."""
        return [self._encode(key, texts, left_out) for key, texts in zip(self._keys, read.texts, strict=True)]

    def _encode(
        self, key: str, texts: Sequence[str], left_out: dict[int, tuple[str, str]]
    ) -> Sequence[Sequence[int] | NDArray]:
        """Return [document] ids; add document -> (kind, reason) to `left_out` for documents without ids."""
        try:
            encoded: Sequence[Sequence[int] | NDArray] = self._tokenizer.encode_batch(texts)
        except ConfigError:
            encoded = [self._encode_one(i, text, left_out) for i, text in enumerate(texts)]
        where = f" under {key!r}" if len(self._keys) > 1 else ""
        for i, document in enumerate(encoded):
            if not len(document):
                left_out.setdefault(i, ("no tokens", f"no tokens{where}"))
        return encoded

    def _encode_one(self, i: int, text: str, left_out: dict[int, tuple[str, str]]) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except ConfigError as error:
            left_out.setdefault(i, ("not tokenized", str(error)))
            return []

    def _join(self, documents: Sequence[Sequence[int] | NDArray]) -> tuple[NDArray, NDArray[np.int64]]:
        """Return (all tokens in the stored type, length of each document), including EOD tokens."""
        lengths = np.array([len(ids) + len(self._ending) for ids in documents], dtype=np.int64)
        if documents and isinstance(documents[0], np.ndarray):
            ending = np.array(self._ending, dtype=self._dtype)
            tokens = np.concatenate([part for ids in documents for part in (ids, ending)])
        else:
            flat: list[int] = []
            for ids in documents:
                flat += ids
                flat += self._ending
            tokens = np.fromiter(flat, np.int64, len(flat))
        size = self._tokenizer.vocab_size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            wrong = int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())
            raise ConfigError(f"{self._tokenizer.name} returns token id {wrong}, beyond its {size} ids; fetch it again")
        return tokens.astype(self._dtype), lengths


_RESPONSES = ("response", "completion")
Example = dict[str, Any]


def parse_example(raw: bytes, keys: Sequence[str]) -> list[Example]:
    """Parse a line with an example. Raises BadDocument if it is malformed or has no response."""
    example = parse_object(raw)
    if "messages" in example:
        messages = messages_of(example["messages"], "messages")
        if not any(message["role"] == "assistant" for message in messages):
            raise BadDocument("missing key", "no message has the role assistant: there is nothing to learn")
        return [example]
    key = next((key for key in _RESPONSES if key in example), None)
    if key is None or "prompt" not in example:
        present = ", ".join(map(repr, list(example)[:5])) or "none"
        raise BadDocument("missing key", f"neither 'prompt' and 'response' nor 'messages' (there are {present})")
    if not isinstance(example["prompt"], str):
        raise BadDocument("wrong type", f"expected a string under 'prompt', got {type_name(example['prompt'])}")
    return [{"prompt": example["prompt"], "response": text_of(example[key], key)}]


def messages_of(value: object, key: str) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises BadDocument if they are malformed."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadDocument("wrong type", f"expected a list of objects with role and content under {key!r}")
    for message in value:
        text_of(message.get("role"), "role")
        if not isinstance(message.get("content"), str) and "tool_calls" not in message:
            raise BadDocument(
                "wrong type", f"expected a string under 'content', got {type_name(message.get('content'))}"
            )
    return value


class ExampleEncoder:
    """Converts examples to ids and a mask. Raises ConfigError if the tokenizer's chat template is invalid."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = chat_template(tokenizer)

    @property
    def fingerprint(self) -> str | None:
        return None if self._template is None else self._template.fingerprint

    def __call__(self, example: Example) -> tuple[list[int], list[int]]:
        """Return ids, and a mask with 1 for each id of a response.

        A prompt and its response are encoded as one text, and the end-of-document token follows. Raises ValueError if
        the chat template rejects the messages; ConfigError if it is missing, or the tokenizer fails."""
        if "messages" in example:
            return self._chat(example)
        prompt = self._tokenizer.encode(example["prompt"]) if example["prompt"] else []
        ids = self._tokenizer.encode(example["prompt"] + example["response"])
        # A token with both the end of the prompt and the start of the response belongs to the response.
        num_prompt = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False)))
        return [*ids, self._tokenizer.eod], [0] * num_prompt + [1] * (len(ids) - num_prompt + 1)

    def _chat(self, example: Example) -> tuple[list[int], list[int]]:
        template = self._template or require_chat_template(self._tokenizer, "a list of messages")
        assert isinstance(self._tokenizer, HuggingFaceTokenizer)  # other tokenizers have no template
        text, spans = template.render(example["messages"], example.get("tools"))
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        return ids, [int(any(start < stop and end > first for first, stop in spans)) for start, end in offsets]


class ExampleTokenizer(PieceTokenizer):
    def __init__(self, job: PreprocessJob, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(job, tokenizer)
        self._ending = []
        self._encoder = ExampleEncoder(self._tokenizer)

    def _read(self, piece: Piece) -> PieceTexts:
        return read_piece(piece, ("example",), self._limits, parse_example)

    def _encode_all(
        self, read: PieceTexts, left_out: dict[int, tuple[str, str]]
    ) -> list[Sequence[Sequence[int] | NDArray]]:
        ids: list[list[int]] = []
        masks: list[list[int]] = []
        for number, example in enumerate(read.texts[0]):
            tokens: list[int] = []
            mask: list[int] = []
            try:
                tokens, mask = self._encoder(example)
                if not any(mask[1:]):
                    left_out[number] = ("no tokens", "no token belongs to a response")
            except NoTemplate:
                raise
            except ValueError as error:  # a ConfigError is one
                left_out[number] = ("not tokenized", str(error))
            ids.append(tokens)
            masks.append(mask)
        return [ids, masks]
