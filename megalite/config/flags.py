"""Parse the flat command line: `parse_arguments(sys.argv[1:])` returns a RunConfig and the other options. Build its help.

No argparse: no abbreviations, all problems in one error, and Megatron-LM's spellings too. A flag here takes all words up to
the next one, as Megatron-LM's scripts need, and the table of settings converts them as it does those of files. The flags of
a command (`cli.command`) take a fixed number, so that its positional arguments may follow them."""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from megalite.config.describe import Setting, from_words, sections, settings
from megalite.config.errors import ConfigError, Problems, closest, nearest, raise_at_end
from megalite.config.files import imports_of, preset_names, read_level, read_preset
from megalite.config.megatron import (
    DERIVED,
    FROM_VALUE,
    REFUSED_VALUES,
    SEVERAL,
    SHORTHANDS,
    STANDS_FOR,
    VALUES,
    WORDS,
    layer_list,
)
from megalite.config.megatron_flags import DIFFERS, NO_EFFECT_HERE, Note, known_flags, summary
from megalite.config.merge import Level, Merged, merge
from megalite.config.model import LAYER_LISTS, TRAINING_FIELDS, ModelConfig, free_settings
from megalite.config.numbers import whole_number
from megalite.config.registry import import_modules
from megalite.config.rules.rule import IDLE
from megalite.config.run import hugging_face_folder, least_ranks
from megalite.config.validate import validate

RUN_OPTIONS: Mapping[str, tuple[str, str]] = {
    "--config": ("FILE", "YAML file of settings; may be repeated, later files win."),
    "--preset": ("NAME", "Start from a named model; files and flags override it."),
    "--dry-run": ("", "Print layout, memory, schedule and batch sizes; needs no devices."),
    "--json": ("", "With --dry-run: print JSON."),
    "--world-size": ("N", "With --dry-run: number of ranks; default: the smallest that fits."),
    "--rank": ("N", "With --dry-run: show what rank N (from 0) holds and does."),
    "--use-checkpoint-args": (
        "",
        "Take the model from the checkpoint in --load and override the settings; default: only if they set no size.",
    ),
    "--help": ("", "Show the settings that most runs need."),
    "--help-all": ("", "Show every setting."),
    "--version": ("", "Print the version."),
}
"""Flags that are not settings -> (placeholder of the value or empty, help)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invocation(Merged):
    """A parsed command line."""

    dry_run: bool = False
    json: bool = False
    world_size: int | None = None
    """The value of --world-size."""
    rank: int | None = None
    """The value of --rank."""
    help: str | None = None
    """`basic` or `all` if help is requested; the rest of the command line is then ignored."""
    version: bool = False

    @property
    def remarks(self) -> list[str]:
        """One line for all of `notes`, and one for each difference."""
        return summary(self.notes)


Shape = Callable[[str, int | None], Mapping[str, Any] | None]
"""(load, step) -> settings of the model, its sequence and its tokenizer there; None if there are none."""
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
    """Parse a command line (without the program's name): default < preset < --config files < flags.

    Args:
        others: flags that the caller has already removed, for suggestions.
        world_size: number of ranks of the run about to start, for the rules; default: no run starts.
        shape: reads the model that --load names; default: it is not read.
        problems: collects problems; default: they are raised together. If flags or files are wrong, the rules still
            check the correct settings, so that one error names everything.

    Raises ConfigError: unknown flags (the nearest are named), values of the wrong type, a setting with two values,
    flags of Megatron-LM that change the computation and are not supported."""
    with raise_at_end(problems) as found:
        return _read(argv, found, others, world_size, shape)


def _read(
    argv: list[str], problems: Problems, others: Iterable[str], world_size: int | None, shape: Shape | None
) -> Invocation:
    """Parse the correct part of a command line; `problems` collects the rest."""
    for flag, asked in {"--help-all": "all", "--help": "basic", "-h": "basic", "--version": None}.items():
        if flag in argv:
            return Invocation(**vars(merge([])), help=asked, version=asked is None)
    options: dict[str, list[str]] = {}
    level = Level(always_explicit=True)
    occurrences = _occurrences(argv, problems)
    for flag, words in occurrences:  # they may register legal values of flags
        if flag in settings()["imports"].flags:
            import_modules(words)
        elif flag == "--config":
            import_modules(module for word in words for module in imports_of(word))
    for flag, words in occurrences:
        with problems.collecting(_settings_meant(flag)):
            if flag in RUN_OPTIONS:
                _add_run_option(options, flag, words)
            else:
                _add_setting(level, flag, words, others)
    levels = []
    # An unreadable preset or file could have set every setting that no flag sets.
    unread = set(settings()) - set(level.given)
    for read, names in ((read_preset, options.get("--preset", [])), (read_level, options.get("--config", []))):
        for name in names:
            with problems.collecting(unread):
                levels.append(read(name, problems=problems))
    levels.append(level)
    with problems.collecting(() if "--use-checkpoint-args" in options else _MODEL):
        levels += loaded_model(levels, shape, overrides="--use-checkpoint-args" in options)
    merged = merge(levels, problems)
    dry_run = "--dry-run" in options
    numbers: dict[str, int] = {}
    for flag, least in {"--world-size": 1, "--rank": 0}.items():
        with problems.collecting(_settings_meant(flag)):
            if flag in options:
                numbers[flag] = whole_number(options[flag][0], flag, least)
    for flag in ("--json", "--world-size", "--rank"):
        if flag in options and not dry_run:
            problems.add(f"{flag} has no effect without --dry-run; add --dry-run or remove it")
    idle: Problems | None = None
    if problems.found or merged.explicit & IDLE:
        ranks = (numbers.get("--world-size") or least_ranks(merged.config)) if dry_run else world_size
        starts = world_size is not None and not dry_run
        # If flags and files are correct, the caller validates; here only settings without effect matter.
        idle = problems if problems.found else Problems()
        validate(merged.config, ranks, merged.explicit, startable=starts, problems=idle)
    notes = list(merged.notes)
    for name, why in idle.idle.items() if idle else ():
        setting = settings()[name]
        notes.append(Note(setting.off if setting.default is True else setting.flags[0], NO_EFFECT_HERE, why))
    return Invocation(
        **(vars(merged) | {"notes": tuple(notes)}),
        dry_run=dry_run,
        json="--json" in options,
        world_size=numbers.get("--world-size"),
        rank=numbers.get("--rank"),
    )


def loaded_model(levels: Sequence[Level], shape: Shape | None, *, overrides: bool) -> list[Level]:
    """Return the model settings of `load`, to override all others: of a Hugging Face folder always, of a checkpoint if
    no size is set. Other settings that differ are errors, unless `overrides`, as in Megatron-LM."""
    given = {name: value for level in levels for name, value in level.given.items() if value.value is not None}
    load, step = given.get("load"), given.get("ckpt_step")
    if overrides and load is None:
        raise ConfigError("--use-checkpoint-args takes the model from a checkpoint; add --load FOLDER or remove it")
    if overrides and shape is None:
        raise ConfigError("--use-checkpoint-args is not supported here; use --config with the checkpoint's config.yaml")
    is_folder = load is not None and hugging_face_folder(load.value) is not None
    if load is None or shape is None or not (overrides or is_folder or _SIZES.isdisjoint(given)):
        return []
    level, found = Level(), shape(load.value, None if step is None else step.value)
    if found is None:
        if overrides:
            why = f"{load.value} has no checkpoint: the settings are used"
            level.notes.append(Note("--use-checkpoint-args", NO_EFFECT_HERE, why))
        return [level]
    extends = "finetune" in given and given["finetune"].value is True
    may_differ = free_settings(found.get("position_embedding_type", ""), extends=extends)
    may_differ |= {"make_vocab_size_divisible_by"} if is_folder else set()
    wrong = []
    for name, value in found.items():
        replaced = name in _TOKENIZER and not _TOKENIZER.isdisjoint(given)
        if name not in settings() or name in TRAINING_FIELDS or replaced or (name == "seq_length" and name in given):
            continue
        differs = name in given and given[name].value != value
        if differs and not overrides:
            conflict = f"{name} is {given[name].value} by {given[name].source}, and {value} in {load.value}"
            wrong += [] if name in may_differ else [f"{conflict}; leave it out, or give another --load"]
            continue
        level.add(name, value, f"checkpoint {load.value}")
        if differs:
            why = f"{given[name].source} sets {given[name].value}; the checkpoint's {value} overrides it"
            level.notes.append(Note(name, DIFFERS, why))
    if wrong:
        raise ConfigError(*wrong)
    return [level]


def _settings_meant(flag: str) -> Iterator[str]:
    """Yield the settings that a flag, or a misspelled flag, sets."""
    known = {**STANDS_FOR, "--world-size": ("dp",), "--rank": ()}
    known |= dict.fromkeys(("--config", "--preset"), tuple(settings()))
    known |= {spelling: (setting.name,) for spelling, setting in _setting_flags().items()}
    yield from (name for close in ([flag] if flag in known else closest(flag, known)) for name in known[close])


def _occurrences(argv: list[str], problems: Problems) -> list[tuple[str, list[str]]]:
    """Split the command line into flags and the words after each; `--seq_length` is read as `--seq-length`."""
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
        level.add_megatron_flag(flag, value, flag, f"flag {flag}")
    elif flag in known_flags():
        level.notes.append(known_flags()[flag].judge(words, flag))
    else:
        known = [*others, *_setting_flags(), *RUN_OPTIONS, *STANDS_FOR, *known_flags()]
        raise ConfigError(f"unknown flag {flag}{nearest(flag, known)} (--help-all lists all)")


@cache
def _setting_flags() -> Mapping[str, Setting]:
    """Return every spelling on the command line -> its setting."""
    table = {flag: setting for setting in settings().values() for flag in setting.flags}
    negative = {f"--no-{flag.removeprefix('--')}": each for flag, each in table.items() if each.type is bool}
    return table | negative


def _value_of(setting: Setting, flag: str, words: list[str]) -> Any:
    if setting.type is bool:
        on = flag in setting.flags
        _no_words(flag, words, setting.off if on else setting.flags[0])
        return on
    if not words:
        raise ConfigError(f"{flag} needs a value ({setting.type_name})")
    if len(words) > 1 and setting.name == "step_batch_size_schedule":
        words = [" ".join(words)]  # scripts that keep it in a bash array lose its quotes
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
        remedy = f"; for the opposite write {opposite}" if opposite else ""
        raise ConfigError(f"{flag} takes no value, got {' '.join(words)}{remedy}")


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
                flags = (*setting.flags, setting.off) if setting.type is bool else setting.flags
                lines.append(f"  {', '.join(f'{flag}{_value(setting)}' for flag in flags)}")
                lines.append(f"      {setting.help} [{setting.type_name}; default {_shown(setting.default)}]")
    lines += ["", "Megatron-LM's flags that set other settings:"]
    with_word = {f"{flag} {word}": sets for flag, words in WORDS.items() for word, sets in words.items()}
    for flag, sets in {**SHORTHANDS, **with_word}.items():
        lines.append(f"  {flag:<42} {', '.join(f'`{name}: {_shown(value)}`' for name, value in sets.items())}")
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
