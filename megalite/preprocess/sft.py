"""Examples to fine-tune on as two datasets in step: their tokens, and of each token whether the model is to say it.

A line is {"prompt": text, "response": text} (or "completion") or {"messages": [{"role", "content"}, ...]}, which the
tokenizer's chat template turns into text. Training reads the second dataset as the mask of the loss.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from numpy.typing import NDArray

from megalite.preprocess.documents import BadDocument, PieceTexts, parse_object, read_piece, text_of, type_name
from megalite.preprocess.job import PreprocessJob
from megalite.preprocess.output import PieceTokenizer
from megalite.preprocess.pieces import Piece
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.chat import ChatTemplate, NoTemplate, chat_template, require_chat_template
from megalite.tokenizers.subword import HuggingFaceTokenizer

_RESPONSES = ("response", "completion")
Example = dict[str, Any]


def parse_example(raw: bytes, keys: Sequence[str]) -> list[Example]:
    """The example in a line of JSON. Raises BadDocument: it is none, or nothing in it is the model's to say."""
    example = parse_object(raw)
    if "messages" in example:
        messages = messages_of(example["messages"], "messages")
        if not any(message["role"] == "assistant" for message in messages):
            raise BadDocument("missing key", "no message has the role assistant: there is nothing to learn")
        return [example]
    key = next((key for key in _RESPONSES if key in example), None)
    if key is None or "prompt" not in example:
        there = ", ".join(map(repr, list(example)[:5])) or "none"
        raise BadDocument("missing key", f"neither 'prompt' and 'response' nor 'messages' (there are {there})")
    if not isinstance(example["prompt"], str):
        raise BadDocument("wrong type", f"expected a string under 'prompt', got {type_name(example['prompt'])}")
    return [{"prompt": example["prompt"], "response": text_of(example[key], key)}]


def messages_of(value: object, key: str) -> list[dict[str, Any]]:
    """The messages of a chat. Raises BadDocument: they are none."""
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
    """Examples to ids and a mask. Raises ConfigError: the tokenizer's chat template is garbled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = chat_template(tokenizer)

    @property
    def fingerprint(self) -> str | None:
        """Of the chat template, if there is one."""
        return None if self._template is None else self._template.fingerprint

    def __call__(self, example: Example) -> tuple[list[int], list[int]]:
        """Ids, and 1 for each that the model is to say, else 0.

        A prompt and its response are encoded as one text, and the end-of-document token follows. Raises ValueError: the
        chat template does not take the messages. ConfigError: there is none, or the tokenizer fails."""
        if "messages" in example:
            return self._chat(example)
        prompt = self._tokenizer.encode(example["prompt"]) if example["prompt"] else []
        ids = self._tokenizer.encode(example["prompt"] + example["response"])
        # A token that holds the end of the prompt and the beginning of the response is to be said too.
        given = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False)))
        return [*ids, self._tokenizer.eod], [0] * given + [1] * (len(ids) - given + 1)

    def _chat(self, example: Example) -> tuple[list[int], list[int]]:
        template = self._template or require_chat_template(self._tokenizer, "a list of messages")
        assert isinstance(self._tokenizer, HuggingFaceTokenizer)  # others have none
        text, spans = template.render(example["messages"], example.get("tools"))
        ids, places = self._tokenizer.encode_with_places(text)
        said = [any(start < stop and end > first for first, stop in spans) for start, end in places]
        return ids, [int(is_said) for is_said in said]


class ExampleTokenizer(PieceTokenizer):
    """As `PieceTokenizer`, of examples."""

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
                    left_out[number] = ("no tokens", "no token of it is the model's to say")
            except NoTemplate:
                raise
            except ValueError as error:  # a ConfigError is one
                left_out[number] = ("not tokenized", str(error))
            ids.append(tokens)
            masks.append(mask)
        return [ids, masks]
