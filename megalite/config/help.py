"""Build the help texts from the table of settings."""

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from megalite.config.describe import Setting, sections, settings
from megalite.config.files import preset_names
from megalite.config.flags import RUN_OPTIONS
from megalite.config.megatron import DERIVED, FROM_VALUE, SHORTHANDS, WORDS
from megalite.config.megatron_flags import known_flags

_WIDTH = 110
_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT"}


def basic_help(program: str) -> str:
    """Return the settings that most runs need, on one screen."""
    lines = _head(program)
    for flag in ("--config", "--preset", "--dry-run", "--json", "--world-size", "--help-all"):
        lines.append(_row("run" if flag == "--config" else "", f"{flag} {RUN_OPTIONS[flag][0]}", RUN_OPTIONS[flag][1]))
    for section in sections():
        shown = [setting for setting in settings().values() if setting.section == section and setting.basic]
        for setting in shown:
            usage = f"{setting.flags[0]}{_value(setting)}"
            lines.append(_row(section if setting is shown[0] else "", usage, _first_clause(setting)))
    return "\n".join(lines)


def full_help(program: str) -> str:
    """Return every setting with all spellings, choices and its default."""
    lines = [
        *_head(program),
        "Later ones win: default < preset < config files < flags. `none` unsets a setting that is none by default.",
        "",
    ]
    for flag, (placeholder, text) in RUN_OPTIONS.items():
        lines.append(f"  {flag} {placeholder}".rstrip())
        lines.append(f"      {text}")
    lines.append(f"      presets: {', '.join(preset_names())}")
    for section, cls in sections().items():
        lines += ["", f"{section}: {(cls.__doc__ or '').splitlines()[0]}"]
        for setting in settings().values():
            if setting.section == section:
                negative = [f"--no-{setting.flags[0][2:]}"] if setting.type is bool else []
                lines.append(f"  {', '.join(f'{flag}{_value(setting)}' for flag in (*setting.flags, *negative))}")
                lines.append(f"      {setting.help} [{setting.type_name}; default {_shown(setting.default)}]")
    lines += ["", "Megatron-LM's flags that set other settings:"]
    lines += [f"  {flag:<42} {as_settings(values)}" for flag, values in megatron_rows()]
    lines += [f"  {flag}{f' {_PLACEHOLDERS[kind]}' if kind else ''}" for flag, (kind, _) in DERIVED.items()]
    lines += [f"  {flag} {'FILE' if flag.endswith('-path') else 'VALUE'}" for flag in FROM_VALUE]
    lines += [f"  and {len(known_flags())} that set nothing or are refused; megalite port explains them"]
    return "\n".join(part for line in lines for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    """Wrap a line at its own indentation, hanging if it starts with a flag."""
    indent = " " * (len(line) - len(line.lstrip()) + (4 if line.lstrip().startswith("--") else 0))
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _head(program: str) -> list[str]:
    usage = f"usage: {program} [--preset NAME] [--config FILE ...] [--SETTING VALUE ...]"
    return [usage, f"  example: {program} --preset gpt2-124m --tp 2 --dry-run"]


def _row(section: str, usage: str, text: str) -> str:
    return f"{section:<10} {usage:<29} {text}".rstrip()


def _value(setting: Setting) -> str:
    """Return the placeholder of a flag's value."""
    if setting.type is bool:
        return ""
    return f" {'NAME' if setting.choices else _PLACEHOLDERS[setting.type]}{' ...' if setting.is_list else ''}"


def _first_clause(setting: Setting) -> str:
    """Return the first clause of the help, then the choices, in at most 70 characters.

    A long list of choices replaces the clause, a very long one is abbreviated."""
    clause = re.split(r"; |: |\. |\.$", setting.help)[0]
    if setting.choices:
        choices = "|".join(setting.choices)
        if len(choices) > 78:
            return f"{clause}: {setting.choices[0]} or another of {len(setting.choices)}"
        return f"{clause}: {choices}" if len(choices) <= 60 else choices
    return clause if len(clause) <= 70 else clause[:66].rsplit(" ", 1)[0] + " ..."


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def megatron_rows() -> list[tuple[str, Mapping[str, Any]]]:
    """Return Megatron-LM's flags that stand for settings, with their word if they take one, and those settings."""
    with_word = [(f"{flag} {word}", sets) for flag, words in WORDS.items() for word, sets in words.items()]
    return [*SHORTHANDS.items(), *with_word]


def as_settings(values: Mapping[str, Any]) -> str:
    """Format settings as `name: value`, ..."""
    return ", ".join(f"`{name}: {_shown(value)}`" for name, value in values.items())
