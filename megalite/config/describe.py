"""The table of all settings, read from the dataclasses, and the conversion of text and YAML to their types: parser, help,
docs and file loader use them."""

import ast
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError, nearest, shortened
from megalite.config.numbers import Bounds, parse_number
from megalite.config.registry import Registry
from megalite.config.run import RunConfig, cache_by_object
from megalite.config.strategies import ALIASES

HIDDEN = "***"

_NAMES = frozenset(
    {
        *("key", "apikey", "token", "secret", "password", "passwd", "passphrase", "credential", "credentials"),
        *("signature", "sig"),  # of a signed address, which grants read access
    }
)
_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
# Credentials end at the last @ before a slash: a password may contain one. An address parsed as a path has one slash.
_ADDRESS = re.compile(r"(?<=:/)(/?)[^\s/'\"]*(?=@)")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_-]*)=(?:'[^']*'|\"[^\"]*\"|[^\s&'\",;]+)", re.ASCII)


def is_secret_name(name: str) -> bool:
    """Return whether the name denotes a secret: `WANDB_API_KEY`, `hf-token`, `clientSecret`; not `tokenizer_model`,
    `tokens_per_second` or `eod_token_id`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and words[-1] in _NAMES


def redact_text(text: str) -> str:
    """Remove credentials from addresses (`s3://user:pass@host`) and values of secret names (`?token=...`,
    `API_KEY=...`)."""

    def assigned(found: re.Match[str]) -> str:
        # A folder may be called key=1.
        if not is_secret_name(found["name"]) or found["name"].lower() == "key":
            return found[0]
        return f"{found['name']}={HIDDEN}"

    return _ASSIGNED.sub(assigned, _ADDRESS.sub(rf"\1{HIDDEN}", text))


def redacted(value: Any) -> Any:
    """Redact every text in a tree of mappings and lists, and hide the texts of secret names."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {
            name: HIDDEN
            if isinstance(inner, str) and isinstance(name, str) and is_secret_name(name)
            else redacted(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a section of RunConfig."""

    section: str  # section name: model, parallel, ...
    name: str  # field name; unique over all sections
    type: type  # bool, int, float or str; the element type if `is_list`
    is_list: bool  # takes several values
    optional: bool  # None is legal: the value is then derived or the feature is off
    default: Any
    flags: tuple[str, ...]  # spellings on the command line, the canonical one first
    legal: Collection[str]  # `choices`, not copied: registries grow during a run
    basic: bool  # shown by `--help`
    bounds: Bounds | None  # of the number, or of each number of a list

    @property
    def help(self) -> str:
        """The docstring under the field, on one line."""
        return _attribute_docstrings(sections()[self.section])[self.name]

    @property
    def choices(self) -> tuple[str, ...]:
        """The legal values, if they are few."""
        return tuple(self.legal)

    @property
    def off(self) -> str:
        """The flag that turns a switch off."""
        return f"--no-{self.flags[0].removeprefix('--')}"

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that set the value."""
        if self.type is bool:
            return [self.flags[0] if value else self.off]
        values = value if isinstance(value, list) else ["none" if value is None else value]
        words = (str(each).removesuffix(".0") if isinstance(each, float) else str(each) for each in values)
        return [self.flags[0], *words]

    @property
    def shipped(self) -> tuple[str, ...]:
        """The `choices` that are part of megalite."""
        return tuple(getattr(self.legal, "builtin", self.legal))

    @property
    def type_name(self) -> str:
        """The type in words, for messages and tables."""
        if self.shipped:
            return " | ".join(self.shipped)
        return f"list of {self.type.__name__}" if self.is_list else self.type.__name__


@cache
def _attribute_docstrings(section: type) -> dict[str, str]:
    """Return field name -> the string literal that follows it in the source. Only help needs this."""
    source = Path(str(sys.modules[section.__module__].__file__)).read_text(encoding="utf-8")
    classes = (statement for statement in ast.parse(source).body if isinstance(statement, ast.ClassDef))
    body = next(each for each in classes if each.name == section.__name__)
    found = {}
    for statement, following in zip(body.body, body.body[1:]):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def _element_type(annotation: Any) -> tuple[type, bool, bool]:
    """Return (element type, is a list, None is legal) of `int`, `int | None`, `list[str]`, `list[int] | None`, ..."""
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    (inner,) = (member for member in members if member is not type(None))
    is_list = typing.get_origin(inner) is list
    element = typing.get_args(inner)[0] if is_list else inner
    assert element in (bool, int, float, str), annotation
    return element, is_list, type(None) in members


@cache
def sections() -> Mapping[str, type]:
    """Return section name -> its dataclass, in the order of RunConfig."""
    hints = typing.get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig)}


@cache
def settings() -> Mapping[str, Setting]:
    """Return setting name -> its description, in source order."""
    table: dict[str, Setting] = {}
    for section, cls in sections().items():
        hints, defaults = typing.get_type_hints(cls), cls()
        for field in dataclasses.fields(cls):
            assert field.name not in table, f"{field.name} is in two sections"
            element, is_list, optional = _element_type(hints[field.name])
            flags = ("--" + field.name.replace("_", "-"), *field.metadata["flags"])
            table[field.name] = Setting(
                section=section,
                name=field.name,
                type=element,
                is_list=is_list,
                optional=optional,
                default=getattr(defaults, field.name),
                **{**field.metadata, "flags": flags},
            )
    return table


@cache_by_object(maxsize=4)
def values_of(config: RunConfig) -> Mapping[str, Any]:
    """Return every setting of a config, flat."""
    return {name: value for part in vars(config).values() for name, value in vars(part).items()}


def value_of(config: RunConfig, name: str) -> Any:
    """Return one setting of a config."""
    return getattr(getattr(config, settings()[name].section), name)


def sectioned(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return every setting of a config by section, as in a config file."""
    return {section: {field: getattr(part, field) for field in vars(part)} for section, part in vars(config).items()}


def without_credentials(config: RunConfig) -> RunConfig:
    """Return the config without the credentials in its addresses, for a file that others may read."""
    shown = redacted(values_of(config))
    return replace(config, **{name: value for name, value in shown.items() if value != value_of(config, name)})


def without_derived(config: RunConfig, asked: RunConfig) -> RunConfig:
    """Return the resolved config for a file that may be used elsewhere: settings that `asked` left open are open again,
    and data and load are as in `asked`, since resolution replaces their paths by local files."""
    open_ = [name for name, value in values_of(asked).items() if value is None]
    config = dataclasses.replace(config, data=asked.data)
    return replace(config, **{**dict.fromkeys(open_), "load": asked.checkpoint.load})


def replace(config: RunConfig, **changes: Any) -> RunConfig:
    """Return a copy with some settings changed, named flat: `replace(config, dp=2, vocab_size=50257)`."""
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        by_section.setdefault(settings()[name].section, {})[name] = value
    replaced = {
        section: dataclasses.replace(getattr(config, section), **changed) for section, changed in by_section.items()
    }
    return dataclasses.replace(config, **replaced)


_EXAMPLES = {int: "4", float: "0.1", bool: "true", str: "some text"}


def _element(setting: Setting, value: Any, where: str) -> Any:
    """Convert one value to the setting's element type; text that spells a number becomes that number."""
    if setting.type is str:
        if not isinstance(value, str):
            nested = isinstance(value, list | tuple | dict)
            remedy = "" if nested else f"; write it in quotes if you mean it: '{value}'"
            raise ConfigError(
                f"{where}: {setting.name} takes text, got the {type(value).__name__} {shortened(value)}{remedy}"
            )
        if not value.strip():
            raise ConfigError(f"{where}: {setting.name} is empty; leave it out or give it a value")
        return value
    if setting.type is bool:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where}: {setting.name} takes true or false, got {shortened(value)}")
    try:
        return parse_number(value, setting.type)
    except ConfigError as error:
        raise ConfigError(f"{where}: {setting.name} {error}") from None


def check_choice(setting: Setting, value: Any, where: str) -> None:
    """Raise ConfigError unless the value is one of the setting's choices, if it has any."""
    registered = isinstance(setting.legal, Registry)
    if (registered or setting.legal) and value is not None and value not in setting.legal:
        known = f"one of {', '.join(setting.choices)}" if setting.choices else "nothing is registered for it"
        more = "; --import MODULE registers others" if registered else ""
        raise ConfigError(
            f"{where}: {setting.name} cannot be {shortened(value)}{nearest(str(value), setting.choices)} ({known}{more})"
        )


def coerce(setting: Setting, value: Any, where: str) -> Any:
    """Convert a value from YAML or a caller to the setting's type; dp_strategy also accepts aliases. Raises
    ConfigError: another type or not among the choices; the message starts with `where`."""
    if value is None:
        if setting.optional:
            return None
        raise ConfigError(f"{where}: {setting.name} cannot be null; its default is {setting.default!r}")
    if setting.is_list:
        if isinstance(value, str) and setting.type is int:
            value = value.split(",")
        if not isinstance(value, list | tuple):
            example = f"[{_EXAMPLES[setting.type]}]"
            raise ConfigError(f"{where}: {setting.name} takes a list such as {example}, got {shortened(value)}")
        return [_element(setting, element, where) for element in value]
    if isinstance(value, list | tuple | dict):
        raise ConfigError(f"{where}: {setting.name} takes one {setting.type.__name__}, got {shortened(value)}")
    coerced = _element(setting, value, where)
    if setting.name != "dp_strategy" or coerced not in ALIASES:
        check_choice(setting, coerced, where)
    return coerced


def from_words(setting: Setting, words: list[str], flag: str) -> Any:
    """Convert command-line words to a value. `none` unsets an optional setting."""
    if setting.optional and words in (["none"], ["None"]):
        return None
    if setting.is_list and setting.type is int:
        words = [part for word in words for part in word.split(",") if part]
    return coerce(setting, words if setting.is_list else words[0], flag)
