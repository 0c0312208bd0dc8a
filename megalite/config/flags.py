"""The flat command line: `parse_arguments(sys.argv[1:])` gives a RunConfig and what else was asked for.

A small parser over the table of settings rather than argparse: no abbreviations, everything that is wrong in one
answer, and Megatron-LM's spellings beside ours.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from megalite.config.data import DATA_FILES
from megalite.config.describe import Setting, settings
from megalite.config.errors import ConfigError, Problems, closest, nearest
from megalite.config.files import read_level, read_preset
from megalite.config.megatron import DERIVED, NO_EFFECT, REFUSED_VALUES, STANDS_FOR, VALUES, WORDS
from megalite.config.merge import Level, merge
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.config.values import from_words

RUN_OPTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "--config": ("FILE", "YAML file of settings; may be repeated, later files win."),
        "--preset": ("NAME", "Start from a named model; files and flags go over it."),
        "--dry-run": ("", "Print layout, memory, schedule and batch sizes; needs no devices."),
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
    """A flag and the words that follow it."""

    flag: str
    words: list[str]


def parse_arguments(argv: list[str], *, others: Iterable[str] = (), world_size: int | None = None) -> Invocation:
    """Read a command line (without the program's name): default < preset < --config files < flags.

    If anything is wrong with flags or files, the rules are asked too about what is right in them, so that one answer
    names everything.

    Args:
        others: flags that the caller has taken out; an unknown one may be meant for one of them.
        world_size: number of ranks of the run that is about to start, for those rules; default: nothing starts.

    Raises:
        ConfigError: unknown flags (the nearest are named), values of the wrong type, one setting given two values,
            flags that have no effect here.
    """
    for flag, asked in {"--help-all": "all", "--help": "basic", "-h": "basic", "--version": None}.items():
        if flag in argv:
            return Invocation(**vars(merge([])), help=asked, version=asked is None)
    problems = Problems()
    options: dict[str, list[str]] = {}
    level = Level(always_explicit=True)
    for occurrence in _occurrences(argv, problems):
        with problems.collecting(*_meant_by(occurrence.flag)):
            if occurrence.flag in RUN_OPTIONS:
                _add_run_option(options, occurrence)
            else:
                _add_setting(level, occurrence, others)
    levels = []
    # A preset or a file that cannot be read could have held every setting that no flag gives.
    unread = set(settings()) - set(level.given)
    for read, names in ((read_preset, options.get("--preset", [])), (read_level, options.get("--config", []))):
        for name in names:
            with problems.collecting(*unread):
                levels.append(read(name, problems=problems))
    merged = merge([*levels, level], problems)
    dry_run = "--dry-run" in options
    numbers: dict[str, int] = {}
    for flag, least in {"--world-size": 1, "--rank": 0}.items():
        with problems.collecting(*_meant_by(flag)):
            if flag in options:
                numbers[flag] = _whole_number(flag, options[flag][0], least)
    for flag in ("--json", "--world-size", "--rank"):
        if flag in options and not dry_run:
            problems.add(f"{flag} has no effect without --dry-run; add --dry-run or remove it")
    if problems.found:
        p = merged.config.parallel
        ranks = (numbers.get("--world-size") or max(p.tp * p.pp * p.cp * (p.dp or 1), 1)) if dry_run else world_size
        starts = world_size is not None and not dry_run
        validate(merged.config, ranks, merged.explicit, startable=starts, problems=problems)
    problems.raise_all()
    return Invocation(
        **vars(merged),
        dry_run=dry_run,
        json="--json" in options,
        world_size=numbers.get("--world-size"),
        rank=numbers.get("--rank"),
    )


def _meant_by(flag: str) -> set[str]:
    """The settings that a flag, or a flag like it, gives."""
    known = {**STANDS_FOR, "--world-size": ("dp",), "--rank": ()}
    known |= dict.fromkeys(("--config", "--preset"), tuple(settings()))
    known |= {spelling: (setting.name,) for spelling, setting in _setting_flags().items()}
    return {name for close in ([flag] if flag in known else closest(flag, known)) for name in known[close]}


def _occurrences(argv: list[str], problems: Problems) -> list[_Occurrence]:
    """Cut the command line into flags with the words that follow them; `--seq_length` is read as `--seq-length`."""
    found: list[_Occurrence] = []
    for argument in argv:
        if re.match(r"-[^\d.]", argument):
            name, equals, word = argument.partition("=")
            flag = name.replace("_", "-") if name.startswith("--") else name
            found.append(_Occurrence(flag, [word] if equals else []))
        elif found:
            found[-1].words.append(argument)
        else:
            problems.add(f"unexpected argument {argument}; settings are flags such as --num-layers 4")
    return found


def _add_run_option(options: dict[str, list[str]], occurrence: _Occurrence) -> None:
    flag, words = occurrence.flag, occurrence.words
    if not RUN_OPTIONS[flag][0]:
        _no_words(occurrence)
        options[flag] = []
        return
    if len(words) != 1 or not words[0]:
        raise ConfigError(f"{flag} takes one {RUN_OPTIONS[flag][0]}, got {' '.join(words) or 'none'}")
    if flag == "--config":
        options.setdefault(flag, []).append(words[0])
    elif options.setdefault(flag, words) != words:
        raise ConfigError(f"{flag} is given twice: {options[flag][0]} and {words[0]}; keep one of them")


def _add_setting(level: Level, occurrence: _Occurrence, others: Iterable[str]) -> None:
    flag, words = occurrence.flag, occurrence.words
    if flag in _setting_flags():
        setting = _setting_flags()[flag]
        level.add(setting.name, _value_of(setting, occurrence), f"flag {flag}")
    elif flag in STANDS_FOR:
        if (
            len(words) > 1
            or words == [""]
            or (not words and (flag in WORDS or flag in DATA_FILES or DERIVED.get(flag)))
        ):
            raise ConfigError(f"{flag} takes one value, got {' '.join(words) or 'none'}")
        value = int(words[0]) if words and words[0].isdecimal() and flag in DERIVED else words[0] if words else True
        level.add_stand_in(flag, value, flag, f"flag {flag}")
    elif flag in NO_EFFECT:
        raise ConfigError(f"{flag} has no effect: {NO_EFFECT[flag]}; remove it")
    else:
        known = [*others, *_setting_flags(), *RUN_OPTIONS, *STANDS_FOR]
        raise ConfigError(f"unknown flag {flag}{nearest(flag, known)} (--help-all lists all)")


@cache
def _setting_flags() -> Mapping[str, Setting]:
    """Every spelling on the command line -> its setting."""
    table = {flag: setting for setting in settings().values() for flag in setting.flags}
    return table | {_negative(flag): setting for flag, setting in table.items() if setting.type is bool}


def _negative(flag: str) -> str:
    return f"--no-{flag.removeprefix('--')}"


def _value_of(setting: Setting, occurrence: _Occurrence) -> Any:
    flag, words = occurrence.flag, occurrence.words
    if setting.type is bool:
        on = flag in setting.flags
        _no_words(occurrence, _negative(setting.flags[0]) if on else setting.flags[0])
        return on
    if not words:
        raise ConfigError(f"{flag} needs a value ({setting.type_name})")
    if len(words) > 1 and not setting.is_list:
        raise ConfigError(f"{flag} takes one value, got {len(words)}: {' '.join(words)}")
    for word in words:
        if word in REFUSED_VALUES.get(setting.name, {}):
            raise ConfigError(f"{flag} cannot be {word}; {REFUSED_VALUES[setting.name][word]}")
    return from_words(setting, [VALUES.get(setting.name, {}).get(word, word) for word in words], flag)


def _no_words(occurrence: _Occurrence, opposite: str = "") -> None:
    if occurrence.words:
        remedy = f"; to say the opposite write {opposite}" if opposite else ""
        raise ConfigError(f"{occurrence.flag} takes no value, got {' '.join(occurrence.words)}{remedy}")


def _whole_number(flag: str, word: str, least: int = 1) -> int:
    if not word.isdecimal() or int(word) < least:
        raise ConfigError(f"{flag} takes a whole number of at least {least}, such as 4, got {word}")
    return int(word)
