"""Chat templates of Hugging Face tokenizers: messages to text, and where in it the assistant speaks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from megalite.config.errors import ConfigError
from megalite.tokenizers.base import Tokenizer, digest, read_tokenizer_file
from megalite.tokenizers.subword import SETTINGS_NAME, HuggingFaceTokenizer

TEMPLATE_NAME = "chat_template.jinja"
_START, _END = "\ufdd0", "\ufdd1"  # around what a template marks; Unicode keeps them out of every text

Span = tuple[int, int]  # [start, stop) of characters


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: transformers' mark of what the model writes."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line) for mark in (_START, _END)]
        return [marks[0], *body, marks[1]]


class NoTemplate(ConfigError):
    """Chat messages, and a tokenizer without a template: none of them can be read."""


class ChatTemplate:
    """The template of a tokenizer, rendered as transformers' apply_chat_template does.

    There is no strftime_now in it: the same messages give the same text on any day. Raises ConfigError: it is no
    template."""

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
        """The text, and in it what the assistant says: what the template marks as generated, or else all that a message
        of the assistant adds to the prompt before it.

        Raises ValueError: the template refuses the messages, or shows earlier ones otherwise than the last, so that it
        does not say where the answers are."""
        text = self._text(messages, tools)
        if self._marks:
            return _marked(text)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not number:
                raise ValueError("the first message is the assistant's: there is nothing to answer")
            before = self.prompt(messages[:number], tools)
            after = self._text(messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"the chat template shows message {number} otherwise once others follow; mark what the assistant says "
                    "with {% generation %} and {% endgeneration %} in it"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, begun: bool = False) -> str:
        """The text up to where the assistant begins to answer, or, `begun`, to where its last message continues. Raises
        ValueError: the template refuses the messages."""
        text = self._text(messages, tools, prompts=not begun)
        if begun:
            last = messages[-1]["content"]
            last = last if last in text else last.strip()  # many templates strip what they show
            text = text.rpartition(last)[0] + last
        return text

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompts: bool = False) -> str:
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=prompts, **self._tokens)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ValueError(f"the chat template refuses the messages: {str(error)[:200]}") from None


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template beside a tokenizer.json: chat_template.jinja, or chat_template of tokenizer_config.json (of several
    the one called default); None if there is none. Raises ConfigError: a file is garbled."""
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
    """As `chat_template`; `what` needs one. Raises NoTemplate: there is none."""
    template = chat_template(tokenizer)
    if template is None:
        raise NoTemplate(
            f"{what} needs a chat template, and the tokenizer ({tokenizer.name}) has none; give --tokenizer-model a folder "
            "with tokenizer.json and chat_template.jinja (or chat_template in tokenizer_config.json)"
        )
    return template


def _marked(text: str) -> tuple[str, list[Span]]:
    """A text without its marks, and where they were."""
    first, *parts = text.split(_START)
    spans, plain = [], first
    for part in parts:
        said, end, rest = part.partition(_END)
        if not end:
            raise ValueError("the chat template leaves a {% generation %} open")
        spans.append((len(plain), len(plain) + len(said)))
        plain += said + rest
    return plain, spans


def _to_json(value: Any, indent: int | None = None) -> str:
    # Not jinja2's, which escapes what HTML would read.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
