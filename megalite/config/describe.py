"""One table of every setting, read off the dataclasses: parser, help, docs and file loader all use it."""

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

from megalite.config.option import Bounds
from megalite.config.run import RunConfig, once_per_object

HIDDEN = "***"

_NAMES = frozenset(
    {
        *("key", "apikey", "token", "secret", "password", "passwd", "passphrase", "credential", "credentials"),
        *("signature", "sig"),  # of an address that lets anyone read
    }
)
_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
# The last @ before a slash ends the credentials: a password may hold one. As a path an address has one slash.
_ADDRESS = re.compile(r"(?<=:/)(/?)[^\s/'\"]*(?=@)")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_-]*)=(?:'[^']*'|\"[^\"]*\"|[^\s&'\",;]+)", re.ASCII)


def is_secret_name(name: str) -> bool:
    """`WANDB_API_KEY`, `hf-token`, `clientSecret`; not `tokenizer_model`, `tokens_per_second` or `eod_token_id`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and words[-1] in _NAMES


def redact_text(text: str) -> str:
    """Text without the credentials of addresses (`s3://user:pass@host`) and without the values of secret names
    (`?token=...`, `API_KEY=...`)."""

    def assigned(found: re.Match[str]) -> str:
        # A folder may well be called key=1.
        if not is_secret_name(found["name"]) or found["name"].lower() == "key":
            return found[0]
        return f"{found['name']}={HIDDEN}"

    return _ASSIGNED.sub(assigned, _ADDRESS.sub(rf"\1{HIDDEN}", text))


def redacted(value: Any) -> Any:
    """A tree of mappings and lists with every text redacted, and the text of every secret name hidden."""
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
    """One field of one section of RunConfig."""

    section: str  # name of the section: model, parallel, ...
    name: str  # field name; unique over all sections
    type: type  # bool, int, float or str; of one element where `is_list`
    is_list: bool  # it takes several values
    optional: bool  # None is legal: the value is then derived or the feature is off
    default: Any
    flags: tuple[str, ...]  # spellings on the command line, the canonical one first
    legal: Collection[str]  # `choices`, live: some grow with what a run registers
    basic: bool  # shown by `--help`
    bounds: Bounds | None  # of a number, or of each in a list

    @property
    def help(self) -> str:
        """The docstring under the field, on one line."""
        return _attribute_docstrings(sections()[self.section])[self.name]

    @property
    def choices(self) -> tuple[str, ...]:
        """The legal values, where they are few."""
        return tuple(self.legal)

    @property
    def shipped(self) -> tuple[str, ...]:
        """Those of `choices` that come with megalite."""
        return tuple(getattr(self.legal, "builtin", self.legal))

    @property
    def type_name(self) -> str:
        """The type in words, for messages and tables."""
        if self.shipped:
            return " | ".join(self.shipped)
        return f"list of {self.type.__name__}" if self.is_list else self.type.__name__


@cache
def _attribute_docstrings(section: type) -> dict[str, str]:
    """Field name -> the string literal that follows it in the source of the class. Only help waits for this."""
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
    """(element type, is a list, None is legal) of `int`, `int | None`, `list[str]`, `list[int] | None`, ..."""
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    (inner,) = (member for member in members if member is not type(None))
    is_list = typing.get_origin(inner) is list
    element = typing.get_args(inner)[0] if is_list else inner
    assert element in (bool, int, float, str), annotation
    return element, is_list, type(None) in members


@cache
def sections() -> Mapping[str, type]:
    """Section name -> its dataclass, in the order of RunConfig."""
    hints = typing.get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig)}


@cache
def settings() -> Mapping[str, Setting]:
    """Setting name -> its description, in the order of the source."""
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


@once_per_object(maxsize=4)
def values_of(config: RunConfig) -> Mapping[str, Any]:
    """Every setting of a config, flat."""
    return {name: value for part in vars(config).values() for name, value in vars(part).items()}


def value_of(config: RunConfig, name: str) -> Any:
    """One setting of a config."""
    return getattr(getattr(config, settings()[name].section), name)


def sectioned(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Every setting of a config, by section: the tree of a config file."""
    return {section: {field: getattr(part, field) for field in vars(part)} for section, part in vars(config).items()}


def without_credentials(config: RunConfig) -> RunConfig:
    """The config for a file that others may read: addresses in it (`s3://user:password@host`) lose their credentials."""
    shown = redacted(values_of(config))
    return replace(config, **{name: value for name, value in shown.items() if value != value_of(config, name)})


def without_derived(config: RunConfig, asked: RunConfig) -> RunConfig:
    """The resolved config for a file that may be read elsewhere: what `asked` left open, resolution has derived from
    run_dir, the world size and other settings, and does so again for those of the reader. So it does with data: text
    has become token files, and what is far away a file here."""
    open_ = [name for name, value in values_of(asked).items() if value is None]
    config = dataclasses.replace(config, data=asked.data)
    return replace(config, **{**dict.fromkeys(open_), "load": asked.checkpoint.load})


def replace(config: RunConfig, **changes: Any) -> RunConfig:
    """A copy of the config with some settings changed, named flat: `replace(config, dp=2, vocab_size=50257)`."""
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        by_section.setdefault(settings()[name].section, {})[name] = value
    replaced = {
        section: dataclasses.replace(getattr(config, section), **changed) for section, changed in by_section.items()
    }
    return dataclasses.replace(config, **replaced)
