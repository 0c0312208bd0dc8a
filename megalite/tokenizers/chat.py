"""Render chat templates of Hugging Face tokenizers, and find the assistant's parts of the text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from megalite.config.errors import ConfigError
from megalite.tokenizers.base import SETTINGS_NAME, TEMPLATE_NAME, Tokenizer, digest, read_tokenizer_file
from megalite.tokenizers.subword import HuggingFaceTokenizer

_START, _END = "\ufdd0", "\ufdd1"  # around the marked parts; Unicode noncharacters, which no text contains

Span = tuple[int, int]  # [start, stop) of characters


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: transformers' marks around the model's output."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line) for mark in (_START, _END)]
        return [marks[0], *body, marks[1]]


class NoTemplate(ConfigError):
    """Raised for chat messages if the tokenizer has no template."""


class ChatTemplate:
    """Template of a tokenizer, rendered like transformers' apply_chat_template.

    strftime_now is not provided, so equal messages give equal text on any day. Raises ConfigError if the template is
    invalid."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self.source = source
        self._tokens, self._marks = dict(tokens), "endgeneration" in source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{where}: the chat template is not one: {error}; fetch it again") from None
        self.fingerprint = digest(source.encode(), json.dumps(self._tokens, sort_keys=True).encode())

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[str, list[Span]]:
        """Return the text and the assistant's spans in it: the parts that the template marks as generated, or else the
        text that each message of the assistant adds to its prompt.

        Raises ValueError if the template rejects the messages, or renders earlier messages differently from the last
        one, so that the answers cannot be located."""
        text = self._text(messages, tools)
        if self._marks:
            return _marked(text)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not number:
                raise ValueError("the first message is the assistant's, so there is no prompt")
            before = self.prompt(messages[:number], tools)
            after = self._text(messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"the chat template renders message {number} differently if others follow; mark the assistant's output "
                    "with {% generation %} and {% endgeneration %} in it"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, begun: bool = False) -> str:
        """Return the text up to the start of the assistant's answer or, with `begun`, to the end of its last message,
        which generation continues. Raises ValueError if the template rejects the messages."""
        text = self._text(messages, tools, prompts=not begun)
        if begun:
            last = messages[-1]["content"]
            last = last if last in text else last.strip()  # many templates strip messages
            text = text.rpartition(last)[0] + last
        return text

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompts: bool = False) -> str:
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=prompts, **self._tokens)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ValueError(f"the chat template refuses the messages: {str(error)[:200]}") from None


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the template beside a tokenizer.json: chat_template.jinja, or chat_template in tokenizer_config.json (of
    several the one named default). Return None if it does not exist. Raises ConfigError if a file is damaged."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    settings, file = tokenizer.settings(), tokenizer.file.with_name(TEMPLATE_NAME)
    source = settings.get("chat_template")
    where = tokenizer.file.with_name(SETTINGS_NAME)
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if file.is_file():
        source, where = read_tokenizer_file(file).decode("utf-8", "replace"), file
    if not isinstance(source, str) or not source.strip():
        return None
    tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return ChatTemplate(source, {name: text for name, text in texts.items() if isinstance(text, str)}, str(where))


def require_chat_template(tokenizer: Tokenizer, what: str) -> ChatTemplate:
    """Return `chat_template`, or raise NoTemplate with `what` as the part that needs it."""
    template = chat_template(tokenizer)
    if template is None:
        raise NoTemplate(
            f"{what} needs a chat template, and the tokenizer ({tokenizer.name}) has none; give --tokenizer-model a folder "
            "with tokenizer.json and chat_template.jinja (or chat_template in tokenizer_config.json)"
        )
    return template


def _marked(text: str) -> tuple[str, list[Span]]:
    """Return a text without its marks, and the marked spans."""
    first, *parts = text.split(_START)
    spans, plain = [], first
    for part in parts:
        generated, end, rest = part.partition(_END)
        if not end:
            raise ValueError("the chat template leaves a {% generation %} open")
        spans.append((len(plain), len(plain) + len(generated)))
        plain += generated + rest
    return plain, spans


def _to_json(value: Any, indent: int | None = None) -> str:
    # Not jinja2's filter, which escapes HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
