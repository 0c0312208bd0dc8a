"""The flat command line: `parse_arguments(sys.argv[1:])` gives a RunConfig and what else was asked for.

A small parser over the table of settings rather than argparse: no abbreviations, everything that is wrong in one
answer, and Megatron-LM's spellings beside ours.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from megalite.config.describe import Setting, settings
from megalite.config.errors import ConfigError, Problems, closest, gathered, nearest
from megalite.config.files import imports_of, read_level, read_preset
from megalite.config.megatron import DERIVED, FROM_VALUE, REFUSED_VALUES, SEVERAL, STANDS_FOR, VALUES, WORDS, layer_list
from megalite.config.megatron_flags import DIFFERS, NO_EFFECT_HERE, Note, known_flags, summary
from megalite.config.merge import Level, Merged, merge
from megalite.config.model import LAYER_LISTS, TRAINING_FIELDS, ModelConfig, free_settings
from megalite.config.registry import import_modules
from megalite.config.rules.rule import IDLE
from megalite.config.run import hugging_face_folder, least_ranks
from megalite.config.validate import validate
from megalite.config.values import from_words

RUN_OPTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "--config": ("FILE", "YAML file of settings; may be repeated, later files win."),
        "--preset": ("NAME", "Start from a named model; files and flags go over it."),
        "--dry-run": ("", "Print layout, memory, schedule and batch sizes; needs no devices."),
        "--json": ("", "With --dry-run: print it as JSON."),
        "--world-size": ("N", "With --dry-run: number of ranks; default the least that fits."),
        "--rank": ("N", "With --dry-run: what this one rank holds and does, counted from 0."),
        "--use-checkpoint-args": (
            "",
            "Take the model from the checkpoint in --load, whatever the settings say; without it, where they say no size.",
        ),
        "--help": ("", "The settings most runs need."),
        "--help-all": ("", "Every setting."),
        "--version": ("", "Print the version."),
    }
)
"""Flags that are not settings -> (value's name or nothing, help)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invocation(Merged):
    """A parsed command line."""

    dry_run: bool = False
    json: bool = False
    world_size: int | None = None
    """As given by --world-size."""
    rank: int | None = None
    """As given by --rank."""
    help: str | None = None
    """`basic` or `all` if help was asked for; the rest of the command line is then not read."""
    version: bool = False

    @property
    def remarks(self) -> list[str]:
        """A line for all of `notes`, and one for each difference."""
        return summary(self.notes)


Shape = Callable[[str, int | None], Mapping[str, Any] | None]
"""(load, step) -> settings of the model, its sequence and its tokenizer there; None where there is nothing."""
_MODEL = frozenset(field.name for field in dataclasses.fields(ModelConfig))
_SIZES = frozenset({"num_layers", "hidden_size", "num_attention_heads"})
_TOKENIZER = frozenset({"tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern"})


def parse_arguments(
    argv: list[str],
    *,
    others: Iterable[str] = (),
    world_size: int | None = None,
    shape: Shape | None = None,
    problems: Problems | None = None,
) -> Invocation:
    """Read a command line (without the program's name): default < preset < --config files < flags.

    Args:
        others: flags that the caller has taken out; an unknown one may be meant for one of them.
        world_size: number of ranks of the run that is about to start, for the rules; default: nothing starts.
        shape: reads what --load names; default: nothing does.
        problems: gets what is wrong; default: raised, all in one. If anything is wrong with flags or files, the rules
            are asked too about what is right in them, so that one answer names everything.

    Raises ConfigError: unknown flags (the nearest are named), values of the wrong type, one setting given two values,
    flags of Megatron-LM that change what is computed and cannot be had."""
    with gathered(problems) as found:
        return _read(argv, found, others, world_size, shape)


def _read(
    argv: list[str], problems: Problems, others: Iterable[str], world_size: int | None, shape: Shape | None
) -> Invocation:
    """What is right in a command line; `problems` gets the rest."""
    for flag, asked in {"--help-all": "all", "--help": "basic", "-h": "basic", "--version": None}.items():
        if flag in argv:
            return Invocation(**vars(merge([])), help=asked, version=asked is None)
    options: dict[str, list[str]] = {}
    level = Level(always_explicit=True)
    occurrences = _occurrences(argv, problems)
    for flag, words in occurrences:  # what flags may say depends on them
        if flag in settings()["imports"].flags:
            import_modules(words)
        elif flag == "--config":
            import_modules(module for word in words for module in imports_of(word))
    for flag, words in occurrences:
        with problems.collecting(_meant_by(flag)):
            if flag in RUN_OPTIONS:
                _add_run_option(options, flag, words)
            else:
                _add_setting(level, flag, words, others)
    levels = []
    # A preset or a file that cannot be read could have held every setting that no flag gives.
    unread = set(settings()) - set(level.given)
    for read, names in ((read_preset, options.get("--preset", [])), (read_level, options.get("--config", []))):
        for name in names:
            with problems.collecting(unread):
                levels.append(read(name, problems=problems))
    levels.append(level)
    with problems.collecting(() if "--use-checkpoint-args" in options else _MODEL):
        levels += _of_load(levels, shape, overrides="--use-checkpoint-args" in options)
    merged = merge(levels, problems)
    dry_run = "--dry-run" in options
    numbers: dict[str, int] = {}
    for flag, least in {"--world-size": 1, "--rank": 0}.items():
        with problems.collecting(_meant_by(flag)):
            if flag in options:
                numbers[flag] = _whole_number(flag, options[flag][0], least)
    for flag in ("--json", "--world-size", "--rank"):
        if flag in options and not dry_run:
            problems.add(f"{flag} has no effect without --dry-run; add --dry-run or remove it")
    idle: Problems | None = None
    if problems.found or merged.explicit & IDLE:
        ranks = (numbers.get("--world-size") or least_ranks(merged.config)) if dry_run else world_size
        starts = world_size is not None and not dry_run
        # Where nothing is wrong with flags and files the caller validates: here only what has no effect is of interest.
        idle = problems if problems.found else Problems()
        validate(merged.config, ranks, merged.explicit, startable=starts, problems=idle)
    without_effect = [Note(_flag_of_idle(name), NO_EFFECT_HERE, why) for name, why in idle.idle.items()] if idle else []
    return Invocation(
        **(vars(merged) | {"notes": (*merged.notes, *without_effect)}),
        dry_run=dry_run,
        json="--json" in options,
        world_size=numbers.get("--world-size"),
        rank=numbers.get("--rank"),
    )


def _of_load(levels: Sequence[Level], shape: Shape | None, *, overrides: bool) -> list[Level]:
    """The model in what is loaded, over everything else: of a Hugging Face folder always, of a checkpoint where no size is
    given. Settings that say otherwise are wrong, unless it `overrides` them, as in Megatron-LM."""
    given = {name: value for level in levels for name, value in level.given.items() if value.value is not None}
    load, step = given.get("load"), given.get("ckpt_step")
    if overrides and load is None:
        raise ConfigError("--use-checkpoint-args takes the model from a checkpoint; add --load FOLDER or remove it")
    if overrides and shape is None:
        raise ConfigError("--use-checkpoint-args reads no checkpoint here; use --config with the config.yaml in it")
    is_folder = load is not None and hugging_face_folder(load.value) is not None
    if load is None or shape is None or not (overrides or is_folder or _SIZES.isdisjoint(given)):
        return []
    level, found = Level(), shape(load.value, None if step is None else step.value)
    if found is None:
        if overrides:
            why = f"{load.value} has no checkpoint: the settings count as given"
            level.notes.append(Note("--use-checkpoint-args", NO_EFFECT_HERE, why))
        return [level]
    extends = "finetune" in given and given["finetune"].value is True
    may_differ = free_settings(found.get("position_embedding_type", ""), extends=extends)
    may_differ |= {"make_vocab_size_divisible_by"} if is_folder else set()
    wrong = []
    for name, value in found.items():
        theirs = name in _TOKENIZER and not _TOKENIZER.isdisjoint(given)
        if name not in settings() or name in TRAINING_FIELDS or theirs or (name == "seq_length" and name in given):
            continue
        differs = name in given and given[name].value != value
        if differs and not overrides:
            said = f"{name} is {given[name].value} by {given[name].source}, and {value} in {load.value}"
            wrong += [] if name in may_differ else [f"{said}; leave it out, or give another --load"]
            continue
        level.add(name, value, f"checkpoint {load.value}")
        if differs:
            said = f"{given[name].source} says {given[name].value}, the checkpoint {value}, which counts"
            level.notes.append(Note(name, DIFFERS, said))
    if wrong:
        raise ConfigError(*wrong)
    return [level]


def _meant_by(flag: str) -> Iterator[str]:
    """The settings that a flag, or a flag like it, gives."""
    known = {**STANDS_FOR, "--world-size": ("dp",), "--rank": ()}
    known |= dict.fromkeys(("--config", "--preset"), tuple(settings()))
    known |= {spelling: (setting.name,) for spelling, setting in _setting_flags().items()}
    yield from (name for close in ([flag] if flag in known else closest(flag, known)) for name in known[close])


def _occurrences(argv: list[str], problems: Problems) -> list[tuple[str, list[str]]]:
    """Cut the command line into flags with the words that follow them; `--seq_length` is read as `--seq-length`."""
    found: list[tuple[str, list[str]]] = []
    for argument in argv:
        if re.match(r"-[^\d.]", argument):
            name, equals, word = argument.partition("=")
            flag = name.replace("_", "-") if name.startswith("--") else name
            found.append((flag, [word] if equals else []))
        elif found:
            found[-1][1].append(argument)
        else:
            problems.add(f"unexpected argument {argument}; settings are flags such as --num-layers 4")
    return found


def _add_run_option(options: dict[str, list[str]], flag: str, words: list[str]) -> None:
    if not RUN_OPTIONS[flag][0]:
        _no_words(flag, words)
        options[flag] = []
        return
    if len(words) != 1 or not words[0]:
        raise ConfigError(f"{flag} takes one {RUN_OPTIONS[flag][0]}, got {' '.join(words) or 'none'}")
    if flag == "--config":
        options.setdefault(flag, []).append(words[0])
    elif options.setdefault(flag, words) != words:
        raise ConfigError(f"{flag} is given twice: {options[flag][0]} and {words[0]}; keep one of them")


def _add_setting(level: Level, flag: str, words: list[str], others: Iterable[str]) -> None:
    if flag in _setting_flags() and not (flag in DERIVED and "[" in "".join(words)):
        setting = _setting_flags()[flag]
        several = SEVERAL.get(setting.name, {}).get(" ".join(words))
        given = {setting.name: _value_of(setting, flag, words)} if several is None else several
        for name, value in given.items():
            level.add(name, value, f"flag {flag}")
    elif flag in STANDS_FOR:
        if (
            len(words) > 1
            or words == [""]
            or (not words and (flag in WORDS or flag in FROM_VALUE or DERIVED.get(flag, (None,))[0]))
        ):
            raise ConfigError(f"{flag} takes one value, got {' '.join(words) or 'none'}")
        value = int(words[0]) if words and words[0].isdecimal() and flag in DERIVED else words[0] if words else True
        level.add_stand_in(flag, value, flag, f"flag {flag}")
    elif flag in known_flags():
        level.notes.append(known_flags()[flag].judge(words, flag))
    else:
        known = [*others, *_setting_flags(), *RUN_OPTIONS, *STANDS_FOR, *known_flags()]
        raise ConfigError(f"unknown flag {flag}{nearest(flag, known)} (--help-all lists all)")


@cache
def _setting_flags() -> Mapping[str, Setting]:
    """Every spelling on the command line -> its setting."""
    table = {flag: setting for setting in settings().values() for flag in setting.flags}
    return table | {_negative(flag): setting for flag, setting in table.items() if setting.type is bool}


def _flag_of_idle(name: str) -> str:
    """Of a switch that is on unless it is turned off, the one that does that."""
    flag = f"--{name.replace('_', '-')}"
    return _negative(flag) if settings()[name].default is True else flag


def _negative(flag: str) -> str:
    return f"--no-{flag.removeprefix('--')}"


def _value_of(setting: Setting, flag: str, words: list[str]) -> Any:
    if setting.type is bool:
        on = flag in setting.flags
        _no_words(flag, words, _negative(setting.flags[0]) if on else setting.flags[0])
        return on
    if not words:
        raise ConfigError(f"{flag} needs a value ({setting.type_name})")
    if len(words) > 1 and setting.name == "step_batch_size_schedule":
        words = [" ".join(words)]  # bash takes its quotes off where scripts keep it in an array
    if len(words) > 1 and not setting.is_list:
        raise ConfigError(f"{flag} takes one value, got {len(words)}: {' '.join(words)}")
    if setting.name in LAYER_LISTS and any("[" in word for word in words):
        return layer_list(" ".join(words), flag)
    for word in words:
        if word in REFUSED_VALUES.get(setting.name, {}):
            raise ConfigError(f"{flag} cannot be {word}; {REFUSED_VALUES[setting.name][word]}")
    return from_words(setting, [VALUES.get(setting.name, {}).get(word, word) for word in words], flag)


def _no_words(flag: str, words: list[str], opposite: str = "") -> None:
    if words:
        remedy = f"; to say the opposite write {opposite}" if opposite else ""
        raise ConfigError(f"{flag} takes no value, got {' '.join(words)}{remedy}")


def _whole_number(flag: str, word: str, least: int = 1) -> int:
    if not word.isdecimal() or int(word) < least:
        raise ConfigError(f"{flag} takes a whole number of at least {least}, such as 4, got {word}")
    return int(word)
