"""Tokenize fine-tuning examples with a loss mask that marks responses.

A line with an example is {"prompt": text, "response": text} (or "completion") or {"messages": [{"role", "content"}, ...]},
which the tokenizer's chat template converts to text. Tokens and mask become two datasets of equal lengths."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from numpy.typing import NDArray

from megalite.preprocess.documents import (
    BadDocument,
    PieceTexts,
    PieceTokenizer,
    parse_object,
    read_piece,
    text_of,
    type_name,
)
from megalite.preprocess.job import PreprocessJob
from megalite.preprocess.pieces import Piece
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.chat import ChatTemplate, NoTemplate, chat_template, require_chat_template
from megalite.tokenizers.subword import HuggingFaceTokenizer

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
