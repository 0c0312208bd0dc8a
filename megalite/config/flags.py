"""The flat command line: `parse_arguments(sys.argv[1:])` gives a RunConfig and what else was asked for.

A small parser over the table of settings rather than argparse: no abbreviations, one error for each way to be wrong,
and Megatron-LM's spellings beside ours.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import MappingProxyType

from megalite.config.data_paths import DATA_FILES
from megalite.config.describe import Setting, settings
from megalite.config.errors import ConfigError
from megalite.config.files import read_level
from megalite.config.megatron import (
    DERIVED,
    NO_EFFECT,
    REFUSED_VALUES,
    SHORTHANDS,
    VALUES,
    WORDS,
    settings_of_word,
)
from megalite.config.merge import Level, merge
from megalite.config.presets import read_preset
from megalite.config.run import RunConfig
from megalite.config.values import from_words, nearest

RUN_OPTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "--config": ("FILE", "YAML file of settings; may be repeated, later files win."),
        "--preset": ("NAME", "Start from a named model; files and flags go over it."),
        "--dry-run": (
            "",
            "Print layout, memory, schedule and batch sizes; needs no devices.",
        ),
        "--json": ("", "With --dry-run: print it as JSON."),
        "--world-size": ("N", "With --dry-run: number of ranks; default tp·pp·cp·dp."),
        "--rank": ("N", "With --dry-run: what this one rank holds and does, counted from 0."),
        "--help": ("", "The settings most runs need."),
        "--help-all": ("", "Every setting."),
        "--version": ("", "Print the version."),
    }
)
"""Flags that are not settings -> (value's name or nothing, help)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invocation:
    """A parsed command line."""

    config: RunConfig
    provenance: dict[str, str]
    """Setting -> `default`, `preset NAME`, `file PATH` or `flag --NAME`."""
    explicit: frozenset[str]
    """Settings that a flag gave, or a file with a value other than the default; for `validate`."""
    dry_run: bool = False
    json: bool = False
    world_size: int | None = None
    """As given by --world-size."""
    rank: int | None = None
    """As given by --rank."""
    help: str | None = None
    """`basic` or `all` if help was asked for; the rest of the command line is then not read."""
    version: bool = False


@dataclasses.dataclass(frozen=True)
class _Occurrence:
    """A flag as written, the words that follow it, and whether the first came by `--flag=word`."""

    flag: str
    words: list[str]


def parse_arguments(argv: list[str], *, others: Iterable[str] = ()) -> Invocation:
    """Read a command line (without the program's name): default < preset < --config files < flags.

    Args:
        others: flags that the caller has taken out; an unknown one may be meant for one of them.

    Raises:
        ConfigError: an unknown flag (the nearest are named), a value of the wrong type, one setting given two values,
            a flag that has no effect here.
    """
    for flag in ("--help-all", "--help", "-h", "--version"):
        if flag in argv:
            merged = merge([])
            asked = {"--help-all": "all", "--help": "basic", "-h": "basic"}.get(flag)
            return Invocation(**vars(merged), help=asked, version=flag == "--version")
    run_options: dict[str, list[str]] = {}
    level = Level(always_explicit=True)
    for occurrence in _occurrences(argv):
        if occurrence.flag in RUN_OPTIONS:
            _add_run_option(run_options, occurrence)
        else:
            _add_setting(level, occurrence, others)
    presets = [read_preset(name) for name in run_options.get("--preset", [])]
    files = [read_level(path) for path in run_options.get("--config", [])]
    merged = merge([*presets, *files, level])
    dry_run = "--dry-run" in run_options
    for flag in ("--json", "--world-size", "--rank"):
        if flag in run_options and not dry_run:
            raise ConfigError(f"{flag} has no effect without --dry-run; add --dry-run or remove it")
    world_size, rank = run_options.get("--world-size"), run_options.get("--rank")
    return Invocation(
        **vars(merged),
        dry_run=dry_run,
        json="--json" in run_options,
        world_size=_whole_number("--world-size", world_size[0]) if world_size else None,
        rank=_whole_number("--rank", rank[0], least=0) if rank else None,
    )


def _occurrences(argv: list[str]) -> list[_Occurrence]:
    """Cut the command line into flags with the words that follow them."""
    found: list[_Occurrence] = []
    for argument in argv:
        is_flag = argument.startswith("-") and not argument[1:2].isdigit() and argument[1:2] not in (".", "")
        if is_flag:
            name, equals, word = argument.partition("=")
            found.append(_Occurrence(_normal(name), [word] if equals else []))
        elif found:
            found[-1].words.append(argument)
        else:
            raise ConfigError(f"unexpected argument {argument}; settings are flags such as --num-layers 4")
    return found


def _normal(flag: str) -> str:
    """`--seq_length` is read as `--seq-length`; -x stays as it is."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _add_run_option(run_options: dict[str, list[str]], occurrence: _Occurrence) -> None:
    flag, words = occurrence.flag, occurrence.words
    if not RUN_OPTIONS[flag][0]:
        _no_words(occurrence)
        run_options[flag] = []
        return
    word = _one_word(occurrence, {"--config": "run.yaml", "--preset": "gpt2-124m"}.get(flag, "8"))
    if flag == "--config":
        run_options.setdefault(flag, []).append(word)
    elif run_options.setdefault(flag, words) != words:
        raise ConfigError(f"{flag} is given twice: {run_options[flag][0]} and {word}; keep one of them")


def _add_setting(level: Level, occurrence: _Occurrence, others: Iterable[str]) -> None:
    flag = occurrence.flag
    add = _setting_flags().get(flag)
    if add:
        add(level, occurrence)
    elif flag in SHORTHANDS:
        _no_words(occurrence)
        for name, value in SHORTHANDS[flag].items():
            level.add(name, value, f"flag {flag}")
    elif flag in WORDS:
        word = _one_word(occurrence, next(iter(WORDS[flag])))
        for name, value in settings_of_word(flag, word, flag).items():
            level.add(name, value, f"flag {flag}")
    elif flag in DERIVED:
        if DERIVED[flag]:
            level.add_derived(flag, _whole_number(flag, _one_word(occurrence, "4")), f"flag {flag}")
        else:
            _no_words(occurrence)
            level.add_derived(flag, True, f"flag {flag}")
    elif flag in DATA_FILES:
        for name, words in DATA_FILES[flag](_one_word(occurrence, "paths.txt"), flag).items():
            level.add(name, words, f"flag {flag}")
    elif flag in NO_EFFECT:
        raise ConfigError(f"{flag} has no effect: {NO_EFFECT[flag]}; remove it")
    else:
        known = [*others, *_setting_flags(), *RUN_OPTIONS, *SHORTHANDS, *WORDS, *DERIVED, *DATA_FILES]
        raise ConfigError(f"unknown flag {flag}{nearest(flag, known)} (--help-all lists all)")


@cache
def _setting_flags() -> Mapping[str, Callable[[Level, _Occurrence], None]]:
    """Every spelling on the command line -> what it does to the level."""
    table: dict[str, Callable[[Level, _Occurrence], None]] = {}
    for setting in settings().values():
        for flag in setting.flags:
            if setting.type is bool:
                table[flag] = partial(_add_switch, setting, True)
                table["--no-" + flag.removeprefix("--")] = partial(_add_switch, setting, False)
            else:
                table[flag] = partial(_add_words, setting)
    return table


def _add_switch(setting: Setting, value: bool, level: Level, occurrence: _Occurrence) -> None:
    _no_words(occurrence, opposite=("--no-" if value else "--") + setting.flags[0].removeprefix("--"))
    level.add(setting.name, value, f"flag {occurrence.flag}")


def _add_words(setting: Setting, level: Level, occurrence: _Occurrence) -> None:
    flag, words = occurrence.flag, occurrence.words
    if not words:
        wanted = (
            f"one or more values ({setting.type_name})"
            if setting.is_list
            else f"a value ({setting.type_name})"
        )
        raise ConfigError(f"{flag} needs {wanted}")
    if len(words) > 1 and not setting.is_list:
        raise ConfigError(f"{flag} takes one value, got {len(words)}: {' '.join(words)}")
    for word in words:
        if word in REFUSED_VALUES.get(setting.name, {}):
            raise ConfigError(f"{flag} cannot be {word}; {REFUSED_VALUES[setting.name][word]}")
    words = [VALUES.get(setting.name, {}).get(word, word) for word in words]
    level.add(setting.name, from_words(setting, words, flag), f"flag {flag}")


def _no_words(occurrence: _Occurrence, opposite: str = "") -> None:
    if occurrence.words:
        remedy = f"; to say the opposite write {opposite}" if opposite else ""
        raise ConfigError(f"{occurrence.flag} takes no value, got {' '.join(occurrence.words)}{remedy}")


def _one_word(occurrence: _Occurrence, example: str) -> str:
    if len(occurrence.words) != 1 or not occurrence.words[0]:
        got = " ".join(occurrence.words) or "none"
        raise ConfigError(f"{occurrence.flag} takes one value such as {example}, got {got}")
    return occurrence.words[0]


def _whole_number(flag: str, word: str, least: int = 1) -> int:
    if not word.isdecimal() or int(word) < least:
        raise ConfigError(f"{flag} takes a whole number of at least {least}, such as 4, got {word}")
    return int(word)
