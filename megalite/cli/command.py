"""The command-line parser of all commands: a table of flags defines both the help and the parsing.

argparse reports one mistake at a time. This parser reports all of them in one error, as the settings of training do, which
`config.flags` parses: they take any number of words, and files and other packages need their parser without the commands."""

import math
import re
import textwrap
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import megalite
from megalite.cli.output import DEBUG_FLAG, guarded, notify, show
from megalite.config.data import is_address, local_path
from megalite.config.errors import ConfigError, Problems, closest, nearest
from megalite.config.numbers import parse_byte_size, parse_number
from megalite.config.registry import import_modules, imported
from megalite.config.run import hugging_face_folder

_WIDTH, _COLUMN = 110, 26
_FLAG = re.compile(r"--?[A-Za-z][^\s=]*(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class Flag:
    """A flag `--name VALUE`, or without dashes a positional argument `name VALUE`.

    `VALUE ...` is a list of one or more values, `[VALUE ...]` a list of any number, `[VALUE]` an optional value."""

    form: str
    help: str = ""  # empty hides the flag
    type: Callable[[str], Any] = str  # `bool` takes no value; int, float and Path are checked
    default: Any = None
    choices: Collection[str] = ()
    required: bool = False
    repeat: bool = False  # may be repeated; the values are a list
    negated: bool = False  # --no-NAME exists too, and the default is None
    dest: str = ""

    @property
    def name(self) -> str:
        return self.form.partition(" ")[0]

    @property
    def value(self) -> str:
        """Placeholder of the value in the help."""
        choices = "|".join(self.choices)
        return self.form.partition(" ")[2] or (choices if len(choices) <= 40 else "NAME")

    @property
    def attribute(self) -> str:
        return self.dest or self.name.lstrip("-").replace("-", "_")

    @property
    def is_positional(self) -> bool:
        return not self.name.startswith("-")

    @cached_property
    def arity(self) -> tuple[float, float]:
        """Minimum and maximum number of values."""
        if self.type is bool:
            return 0, 0
        several, count = "..." in self.value, len(self.value.split())
        return 0 if self.value.startswith("[") else 1 if several else count, math.inf if several else count

    @property
    def spellings(self) -> list[str]:
        return [self.name, *([f"--no-{self.name[2:]}"] if self.negated else [])]

    @property
    def label(self) -> str:
        """Name of the flag in messages and in the help."""
        return self.value if self.is_positional else self.name

    @property
    def usage(self) -> str:
        """`--name VALUE`."""
        name = "|".join(self.spellings)
        return self.value if self.is_positional else name if self.type is bool else f"{name} {self.value}"

    def convert(self, word: str) -> Any:
        """Return the value of a word. Raises ConfigError if the word is not a valid value."""
        try:
            value = _CONVERTERS.get(self.type, self.type)(word)
        except ConfigError as error:
            raise ConfigError(f"{self.label}: {error}") from None
        if self.choices and value not in self.choices:
            known = ", ".join(self.choices)
            raise ConfigError(f"{self.label}: there is no {value}{nearest(word, self.choices)} (one of {known})")
        return value


IMPORT = Flag("--import MODULE ...", "your modules, which register more; may be repeated", repeat=True)


@dataclass(frozen=True)
class Command:
    """A command. Calling it with the words of a command line runs it and returns the exit status."""

    name: str
    summary: str = ""  # its line in the list of commands
    about: str = ""
    flags: Sequence[Flag] = ()
    examples: Sequence[str] = ()
    notes: str = ""
    commands: "Mapping[str, Command]" = field(default_factory=dict)  # subcommands
    exclusive: Sequence[Sequence[str]] = ()  # groups of flags; at most one of each may be given
    disables: Mapping[str, str] = field(default_factory=dict)  # flag -> flags that have no effect with it
    one_required: bool = False  # one flag of each `exclusive` group is required
    settings: Sequence[str] | None = None
    """If not None the command also accepts the flags of training, parsed after these words into `invocation`."""
    parses: bool = True  # False: `run` receives the words
    foreign: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Flag of Megatron-LM's script -> what to do instead, and a pattern of the values that are accepted and ignored."""
    status_without_words: int | None = None  # exit status of a call without words, which prints the help
    long_running: bool = False  # see `guarded`
    run: str = ""  # `module:function` that receives the parsed words; default: `run` of the module named as the command

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        with guarded(self.name, argv, long_running=self.long_running) as end:
            end.status = self._dispatch(end.words)
        return end.status or 0

    @property
    def target(self) -> str:
        """`module:function` of the implementation, imported after the words have been parsed."""
        return self.run or f"megalite.cli.{re.sub('[- ]', '_', self.name.removeprefix('megalite '))}:run"

    def _dispatch(self, words: list[str]) -> int | None:
        if not self.parses:
            return imported(self.target)(words)
        if self.commands and words and words[0] in self.commands:
            return self.commands[words[0]](words[1:])
        if {"--help", "-h"} & set(words) or (not words and self.status_without_words is not None):
            show(self.help())
            return 0 if words else self.status_without_words
        if self.settings is not None and "--help-all" in words:
            show(imported("megalite.config.flags:full_help")(self.name))
            return 0
        if self.commands:
            return self._no_command(words)
        return imported(self.target)(self.parse(words))

    def _no_command(self, words: list[str]) -> int:
        if words[:1] == ["--version"]:
            show(f"megalite {megalite.__version__}")
            return 0
        error = ConfigError("missing: COMMAND")
        if words:
            what = "flag" if words[0].startswith("-") else "command"
            known = ", ".join(self.commands)
            error = ConfigError(f"unknown {what} {words[0]}{nearest(words[0], self.commands)} (one of {known})")
        error.add_note(f"{self.name} --help lists the commands")
        raise error

    def parse(self, words: Sequence[str]) -> Namespace:
        """Return the value of each flag, or its default. Raises one ConfigError that names all problems."""
        if IMPORT.name in self.spellings:  # the modules may register further choices
            import_modules(_imports(deque(words)))
        parser = _Parser(self)
        parser.namespace.words = list(words)
        with parser.problems.collecting():
            parser.parse(deque(words))
        if self.settings is not None:
            with parser.problems.collecting():
                if "--dry-run" in parser.rest:
                    raise ConfigError(f"--dry-run has no effect with {self.name}; remove it")
                words = [*self.settings, *parser.rest]
                parse = imported("megalite.config.flags:parse_arguments")
                parser.namespace.invocation = parse(
                    words, others=self.spellings, shape=imported("megalite.cli.train:checkpoint_settings")
                )
        if parser.problems.found:
            error = ConfigError(*parser.problems.found)
            if self.settings is None:
                error.add_note(f"{self.name} --help lists the flags")
            raise error
        return parser.namespace

    @cached_property
    def spellings(self) -> dict[str, Flag]:
        return {word: flag for flag in self.flags if not flag.is_positional for word in flag.spellings}

    def help(self) -> str:
        required = [flag.usage for flag in self.flags if flag.required or (flag.is_positional and flag.arity[0])]
        optional = [flag.usage for flag in self.flags if flag.is_positional and not flag.arity[0]]
        usage = [*optional, *required, "[SETTINGS ...]" if self.settings is not None else "[OPTIONS]"]
        if self.commands:
            usage = ["COMMAND ...", f" (see {self.name} COMMAND --help)"]
        usage = textwrap.wrap(f"usage: {self.name} {' '.join(usage)}", _WIDTH, subsequent_indent=" " * 8)
        paragraphs = ["\n".join(usage)]
        paragraphs += [textwrap.fill(part, _WIDTH) for part in self.about.split("\n") if part]
        rows = [(flag.usage, flag.help) for flag in self.flags if flag.help]
        rows += [(name, command.summary) for name, command in self.commands.items()]
        paragraphs.append("\n".join(line for form, text in rows for line in _row(form, text)))
        if self.examples:
            title = "example:" if len(self.examples) == 1 else "examples:"
            paragraphs.append("\n".join([title, *(f"  {line}" for line in self.examples)]))
        general = f"{DEBUG_FLAG} shows where an error came from."
        if self.settings is not None:
            general = f"--help-all lists all settings. {general}"
        paragraphs.append(textwrap.fill(f"{self.notes} {general}".strip(), _WIDTH))
        return "\n\n".join(part for part in paragraphs if part)


def _row(form: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - _COLUMN) or [""]
    if len(form) > _COLUMN - 4:
        return [f"  {form}", *(" " * _COLUMN + line for line in lines)]
    return [f"  {form:<{_COLUMN - 2}}{lines[0]}", *(" " * _COLUMN + line for line in lines[1:])]


class _Parser:
    """Parses words in one pass into `namespace` and `problems`."""

    def __init__(self, command: Command) -> None:
        self.command, self.flags = command, command.spellings
        self.problems, self.namespace = Problems(), Namespace()
        self.given: dict[Flag, str] = {}
        """Flag -> its spelling on the command line."""
        self.unknown: list[str] = []
        self.rest: list[str] = []
        """Words that belong to no flag of this command."""
        self._incomplete: Flag | None = None
        """The previous flag, if it has too few values."""
        if command.foreign:
            self.namespace.ignored = []
        for flag in command.flags:
            default = flag.default
            if default is None and flag.type is bool and not flag.negated:
                default = False
            setattr(self.namespace, flag.attribute, default)

    def parse(self, words: deque[str]) -> None:
        has_settings = self.command.settings is not None
        while words:
            word = words.popleft()
            if word == "--" and not has_settings:
                self.rest += words
                break
            name = word.partition("=")[0]
            name = name.replace("_", "-") if name.startswith("--") else name
            if _FLAG.fullmatch(word) is None or (has_settings and name not in self.flags):
                self.rest.append(word)
            elif name in self.flags:
                self._flag(name, word, words)
            elif name in self.command.foreign:
                self._foreign(name, word, words)
            else:
                self._add_unknown(name, word)
        if not has_settings and not self.unknown:  # a word may be the value of an unknown flag
            self._assign_positional()
        self._check_combinations()

    def _add_unknown(self, name: str, word: str) -> None:
        known = [spelling for spelling, flag in self.flags.items() if flag.help]
        similar, before = nearest(name, known) if name.startswith("--") else "", self._incomplete
        hint = f"; if it is the value of {before.name} write {before.name}={word}" if before else ""
        self.problems.add(f"unknown flag {name}{similar}{hint}")
        self.unknown.append(name)

    def _foreign(self, name: str, word: str, rest: deque[str]) -> None:
        """Ignore a flag of another program if it requests what happens anyway, else add a problem."""
        instead, harmless = self.command.foreign[name]
        text = " ".join(_values(word, rest, math.inf))
        if harmless and re.fullmatch(harmless, text):
            self.namespace.ignored.append(f"{name} {text}")
        else:
            self.problems.add(f"{name}: {instead}")

    def _flag(self, name: str, word: str, rest: deque[str]) -> None:
        """Store a flag and its values, which are removed from `rest`."""
        flag, (_, equals, value) = self.flags[name], word.partition("=")
        least, most = flag.arity
        values = _values(word, rest, most)
        incomplete = len(values) < least
        self._incomplete = flag if incomplete else None
        if equals and not most:
            self.problems.add(f"{name} takes no value, got {value}")
        elif not incomplete:
            self._store(flag, values, name)
        elif not (rest and _FLAG.fullmatch(rest[0]) and rest[0].partition("=")[0].replace("_", "-") not in self.flags):
            # If an unknown flag follows, its own error says what to write.
            wanted = "a value" if most == 1 else "one or more values" if most == math.inf else f"{least} values"
            self.problems.add(f"{name} needs {wanted}")
        self.given.setdefault(flag, name)

    def _store(self, flag: Flag, words: list[str], name: str) -> None:
        before = getattr(self.namespace, flag.attribute)
        with self.problems.collecting():
            values: Any = [flag.convert(word) for word in words]
            if flag.type is bool:
                values = name == flag.name
            elif flag.repeat:
                values = [*(before or ()), *values]
            elif flag.arity[1] == 1:
                values = values[0]
            if self.command.settings is not None and flag in self.given and not flag.repeat and values != before:
                raise ConfigError(f"{name} is given twice; keep one of them")
            setattr(self.namespace, flag.attribute, values)

    def _assign_positional(self) -> None:
        """Assign the remaining words to the positional arguments, in order."""
        words, missing = self.rest, []
        for flag in (flag for flag in self.command.flags if flag.is_positional):
            least, most = flag.arity
            count = int(min(most, len(words)))
            if len(words) < least:
                missing.append(flag.label)
            elif count:
                self._store(flag, words[:count], flag.name)
                words = words[count:]
        if missing:
            self.problems.add(f"missing: {', '.join(missing)}")
        if words:
            self.problems.add(f"unexpected: {' '.join(words)}")

    def _check_combinations(self) -> None:
        """Report missing flags, unless an unknown flag is probably a misspelling of one, and flags that conflict."""
        words = [*self.unknown, *self.rest] if self.command.settings is not None else self.unknown
        meant = {self.flags[name] for word in words for name in closest(word, self.flags)}
        missing = [flag.name for flag in self.flags.values() if flag.required and flag not in {*self.given, *meant}]
        if missing:
            self.problems.add(f"missing: {', '.join(missing)}")
        given = [flag.name for flag in self.given]
        for name, others in self.command.disables.items():
            for other in others.split() if name in given else ():
                if other in given:
                    self.problems.add(f"{other} has no effect with {name}; remove one of them")
        for group in self.command.exclusive:
            both = [name for name in given if name in group]
            if len(both) > 1:
                self.problems.add(f"{both[0]} and {both[1]} contradict; keep one of them")
            if self.command.one_required and not {flag.name for flag in (*self.given, *meant)} & set(group):
                self.problems.add(f"give one of {' '.join(group)}")


def _imports(words: deque[str]) -> list[str]:
    found = []
    while words:
        word = words.popleft()
        if word.partition("=")[0] == IMPORT.name:
            found += _values(word, words, math.inf)
    return found


def _values(word: str, rest: deque[str], most: float) -> list[str]:
    """Return the values of the flag in `word`: the text after its `=`, or words removed from `rest`."""
    _, equals, value = word.partition("=")
    values = [value] if equals else []
    while not equals and rest and len(values) < most and rest[0] != "--" and not _FLAG.fullmatch(rest[0]):
        values.append(rest.popleft())
    return values


def path_or_address(word: str) -> Path | str:
    """Convert a path or `hf:FOLDER`; return an address unchanged."""
    return word if is_address(word) else hugging_face_folder(word) or Path(local_path(word))


def fetch(source: Path | str, step: int | None) -> Path:
    """Download a checkpoint if `source` is an address; return its local folder."""
    if isinstance(source, Path):
        return source
    return imported("megalite.data.remote:fetch_checkpoint")(source, step, say=notify)


_CONVERTERS: Mapping[Any, Callable[[str], Any]] = {
    **{kind: partial(parse_number, kind=kind) for kind in (int, float)},
    Path: lambda word: Path(local_path(word)),
}


def not_negative(word: str) -> float:
    """Convert a number of at least 0."""
    if (number := parse_number(word, float)) < 0:
        raise ConfigError(f"takes a number of at least 0, got {word}")
    return float(number)


def byte_size(word: str) -> float:
    """Convert a number of bytes with its unit."""
    if (size := parse_byte_size(word)) is None:
        raise ConfigError(f"takes a size with its unit such as 500MB or 4GiB, got {word}")
    return size


def above_zero(word: str) -> float:
    """Convert a number above 0."""
    if (number := parse_number(word, float)) <= 0:
        raise ConfigError(f"takes a number above 0, such as 300, got {word}")
    return float(number)
