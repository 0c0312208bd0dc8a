"""The flat command line: `parse_arguments(sys.argv[1:])` gives a RunConfig and what else was asked for.

A small parser over the table of settings rather than argparse: no abbreviations, everything that is wrong in one
answer, and Megatron-LM's spellings beside ours.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import MappingProxyType

from megalite.config.data import DATA_FILES
from megalite.config.describe import Setting, settings
from megalite.config.errors import ConfigError, Problems, closest, nearest
from megalite.config.files import read_level, read_preset
from megalite.config.megatron import DERIVED, NO_EFFECT, REFUSED_VALUES, STANDS_FOR, VALUES, WORDS
from megalite.config.merge import Level, Merged, merge
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
    """A flag as written, the words that follow it, and whether the first came by `--flag=word`."""

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
    for flag in ("--help-all", "--help", "-h", "--version"):
        if flag in argv:
            merged = merge([])
            asked = {"--help-all": "all", "--help": "basic", "-h": "basic"}.get(flag)
            return Invocation(**vars(merged), help=asked, version=flag == "--version")
    problems = Problems()
    run_options: dict[str, list[str]] = {}
    level = Level(always_explicit=True)
    for occurrence in _occurrences(argv, problems):
        with problems.collecting(*_meant_by(occurrence.flag)):
            if occurrence.flag in RUN_OPTIONS:
                _add_run_option(run_options, occurrence)
            else:
                _add_setting(level, occurrence, others)
    files = _files(run_options, level, problems)
    merged = merge([*files, level], problems)
    invocation = _invocation(merged, run_options, problems)
    if problems.found:
        starts = world_size is not None and not invocation.dry_run
        ranks = _world_size(invocation) if invocation.dry_run else world_size
        validate(merged.config, ranks, merged.explicit, startable=starts, problems=problems)
    problems.raise_all()
    return invocation


def _files(run_options: Mapping[str, list[str]], level: Level, problems: Problems) -> list[Level]:
    """The preset and the files. One that cannot be read could have held every setting that no flag gives."""
    levels = []
    wrong = set(settings()) - set(level.given)
    for name in run_options.get("--preset", []):
        with problems.collecting(*wrong):
            levels.append(read_preset(name, problems))
    for path in run_options.get("--config", []):
        with problems.collecting(*wrong):
            levels.append(read_level(path, problems=problems))
    return levels


def _invocation(merged: Merged, run_options: Mapping[str, list[str]], problems: Problems) -> Invocation:
    dry_run = "--dry-run" in run_options
    for flag in ("--json", "--world-size", "--rank"):
        if flag in run_options and not dry_run:
            problems.add(f"{flag} has no effect without --dry-run; add --dry-run or remove it")
    world_size = rank = None
    with problems.collecting("dp"):
        if "--world-size" in run_options:
            world_size = _whole_number("--world-size", run_options["--world-size"][0])
    with problems.collecting():
        if "--rank" in run_options:
            rank = _whole_number("--rank", run_options["--rank"][0], least=0)
    return Invocation(**vars(merged), dry_run=dry_run, json="--json" in run_options, world_size=world_size, rank=rank)


def _world_size(invocation: Invocation) -> int:
    """Of a dry run: what --world-size says, or the least that the layout needs."""
    p = invocation.config.parallel
    return invocation.world_size or max(p.tp * p.pp * p.cp * (p.dp or 1), 1)


def _meant_by(flag: str) -> set[str]:
    """The settings that a flag, or a flag like it, gives."""
    known = {**STANDS_FOR, "--world-size": ("dp",)} | dict.fromkeys(("--config", "--preset"), tuple(settings()))
    for name, setting in settings().items():
        for spelling in setting.flags:
            known[spelling] = (name,)
            if setting.type is bool:
                known["--no-" + spelling.removeprefix("--")] = (name,)
    return {name for close in ([flag] if flag in known else closest(flag, known)) for name in known[close]}


def _occurrences(argv: list[str], problems: Problems) -> list[_Occurrence]:
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
            problems.add(f"unexpected argument {argument}; settings are flags such as --num-layers 4")
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
    flag, words = occurrence.flag, occurrence.words
    add = _setting_flags().get(flag)
    if add:
        add(level, occurrence)
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
    if not words or (len(words) > 1 and not setting.is_list):
        number = "one or more values" if setting.is_list else "one value"
        raise ConfigError(f"{flag} takes {number} ({setting.type_name}), got {' '.join(words) or 'none'}")
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
