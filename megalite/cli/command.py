"""One command line for all commands: a table of flags makes the help and reads the words.

argparse reports one mistake at a time; here, as for the settings of training, one answer names all that is wrong."""

import math
import re
import textwrap
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import megalite
from megalite.cli.failures import DEBUG_FLAG, guarded
from megalite.cli.output import show, tell
from megalite.config.byte_size import parse_byte_size
from megalite.config.data import is_address
from megalite.config.errors import ConfigError, Problems, closest, nearest
from megalite.config.registry import import_modules, imported
from megalite.config.run import hugging_face_folder

_LARGEST = 1 << 63
_WIDTH, _COLUMN = 110, 26
_FLAG = re.compile(r"--?[A-Za-z][^\s=]*(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class Flag:
    """A flag as the help has it, `--name VALUE`, or without dashes an argument that has a place, `name VALUE`.

    `VALUE ...` is one or more values, which make a list, `[VALUE ...]` any number, `[VALUE]` at most one."""

    form: str
    help: str = ""  # empty: not shown
    type: Callable[[str], Any] = str  # `bool` takes no value; int, float and Path are checked
    default: Any = None
    choices: Collection[str] = ()
    required: bool = False
    repeat: bool = False  # may be given again; the values make a list
    negated: bool = False  # there is a --no-NAME too, and the default is neither
    dest: str = ""

    @property
    def name(self) -> str:
        return self.form.partition(" ")[0]

    @property
    def value(self) -> str:
        """Stands for the value in the help."""
        choices = "|".join(self.choices)
        return self.form.partition(" ")[2] or (choices if len(choices) <= 40 else "NAME")

    @property
    def attribute(self) -> str:
        return self.dest or self.name.lstrip("-").replace("-", "_")

    @property
    def is_placed(self) -> bool:
        """No flag: known by its place."""
        return not self.name.startswith("-")

    @cached_property
    def takes(self) -> tuple[float, float]:
        """Numbers of values, at least and at most."""
        if self.type is bool:
            return 0, 0
        several, count = "..." in self.value, len(self.value.split())
        return 0 if self.value.startswith("[") else 1 if several else count, math.inf if several else count

    @property
    def spellings(self) -> list[str]:
        return [self.name, *([f"--no-{self.name[2:]}"] if self.negated else [])]

    @property
    def shown(self) -> str:
        """In messages and in the help."""
        return self.value if self.is_placed else self.name

    @property
    def usage(self) -> str:
        """`--name VALUE`, as the help has it."""
        name = "|".join(self.spellings)
        return self.value if self.is_placed else name if self.type is bool else f"{name} {self.value}"

    def converted(self, word: str) -> Any:
        """The value of a word; ConfigError if it is none."""
        try:
            value = _CONVERTERS.get(self.type, self.type)(word)
        except ConfigError as error:
            raise ConfigError(f"{self.shown}: {error}") from None
        if self.choices and value not in self.choices:
            known = ", ".join(self.choices)
            raise ConfigError(f"{self.shown}: there is no {value}{nearest(word, self.choices)} (one of {known})")
        return value


IMPORT = Flag("--import MODULE ...", "your modules, which register more; may be given again", repeat=True)


@dataclass(frozen=True)
class Command:
    """A command, called with its words; returns the exit status."""

    name: str
    summary: str = ""  # in the list of the commands
    about: str = ""
    flags: Sequence[Flag] = ()
    examples: Sequence[str] = ()
    notes: str = ""
    commands: "Mapping[str, Command]" = field(default_factory=dict)  # that it is divided into
    exclusive: Sequence[Sequence[str]] = ()  # flags of which one may be given
    idle: Mapping[str, str] = field(default_factory=dict)  # flag -> flags that have no effect beside it
    one_needed: bool = False  # one of each `exclusive` must be given
    settings: Sequence[str] | None = None
    """It takes the flags of training too, behind these: `invocation` has what they say."""
    reads: bool = True  # False: `run` gets the words
    foreign: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Flag of another program's command line -> what to do instead, and a pattern of the values that change nothing."""
    bare: int | None = None  # exit status without words: then the help is shown
    lasting: bool = False  # see `guarded`
    run: str = (
        ""  # `module:function`, which gets what the words say; default: `run` of the module of the command's name
    )

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        with guarded(self.name, argv, lasting=self.lasting) as end:
            end.status = self._answer(end.words)
        return end.status or 0

    @property
    def place(self) -> str:
        """What does the work: imported when the words have been read."""
        return self.run or f"megalite.cli.{re.sub('[- ]', '_', self.name.removeprefix('megalite '))}:run"

    def _answer(self, words: list[str]) -> int | None:
        if not self.reads:
            return imported(self.place)(words)
        if self.commands and words and words[0] in self.commands:
            return self.commands[words[0]](words[1:])
        if {"--help", "-h"} & set(words) or (not words and self.bare is not None):
            show(self.help())
            return 0 if words else self.bare
        if self.settings is not None and "--help-all" in words:
            show(imported("megalite.config.help:full_help")(self.name))
            return 0
        if self.commands:
            return self._no_command(words)
        return imported(self.place)(self.parse(words))

    def _no_command(self, words: list[str]) -> int:
        if words[:1] == ["--version"]:
            show(f"megalite {megalite.__version__}")
            return 0
        error = ConfigError("missing: COMMAND")
        if words:
            what = "flag" if words[0].startswith("-") else "command"
            known = ", ".join(self.commands)
            error = ConfigError(f"unknown {what} {words[0]}{nearest(words[0], self.commands)} (one of {known})")
        error.add_note(f"{self.name} --help lists the flags")
        raise error

    def parse(self, words: Sequence[str]) -> Namespace:
        """What the words say: a value for each flag, its default where it is not given. Raises ConfigError: everything
        that is wrong with them, in one."""
        if IMPORT.name in self.spellings:  # what values may be depends on them
            import_modules(_imports(deque(words)))
        reading = _Reading(self)
        reading.found.words = list(words)
        with reading.problems.collecting():
            reading.read(deque(words))
        if self.settings is not None:
            with reading.problems.collecting():
                if "--dry-run" in reading.rest:
                    raise ConfigError(f"--dry-run has no effect with {self.name}; remove it")
                words = [*self.settings, *reading.rest]
                parse = imported("megalite.config.flags:parse_arguments")
                reading.found.invocation = parse(
                    words, others=self.spellings, shape=imported("megalite.cli.train:shape_in")
                )
        if reading.problems.found:
            error = ConfigError(*reading.problems.found)
            if self.settings is None:
                error.add_note(f"{self.name} --help lists the flags")
            raise error
        return reading.found

    @cached_property
    def spellings(self) -> dict[str, Flag]:
        return {word: flag for flag in self.flags if not flag.is_placed for word in flag.spellings}

    def help(self) -> str:
        needed = [flag.usage for flag in self.flags if flag.required or (flag.is_placed and flag.takes[0])]
        optional = [flag.usage for flag in self.flags if flag.is_placed and not flag.takes[0]]
        usage = [*optional, *needed, "[SETTINGS ...]" if self.settings is not None else "[OPTIONS]"]
        if self.commands:
            usage = ["COMMAND ...", f" ({self.name} COMMAND --help says more)"]
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


class _Reading:
    """One pass over the words: values go to the namespace, what is wrong to the problems."""

    def __init__(self, command: Command) -> None:
        self.command, self.flags = command, command.spellings
        self.problems, self.found = Problems(), Namespace()
        self.given: dict[Flag, str] = {}
        """Flag -> how it was written."""
        self.unknown: list[str] = []
        self.rest: list[str] = []
        """Words that belong to no flag of this command."""
        self._starved: Flag | None = None
        """The flag before, if it has fewer values than it needs."""
        if command.foreign:
            self.found.ignored = []
        for flag in command.flags:
            default = flag.default
            if default is None and flag.type is bool and not flag.negated:
                default = False
            setattr(self.found, flag.attribute, default)

    def read(self, words: deque[str]) -> None:
        takes_settings = self.command.settings is not None
        while words:
            word = words.popleft()
            if word == "--" and not takes_settings:
                self.rest += words
                break
            name = word.partition("=")[0]
            name = name.replace("_", "-") if name.startswith("--") else name
            if _FLAG.fullmatch(word) is None or (takes_settings and name not in self.flags):
                self.rest.append(word)
            elif name in self.flags:
                self._flag(name, word, words)
            elif name in self.command.foreign:
                self._foreign(name, word, words)
            else:
                self._refuse(name, word)
        if not takes_settings and not self.unknown:  # a word may be the value of an unknown flag
            self._place()
        self._missing()

    def _refuse(self, name: str, word: str) -> None:
        known = [spelling for spelling, flag in self.flags.items() if flag.help]
        meant = nearest(name, known) if name.startswith("--") else ""
        before = (
            f"; if it is the value of {self._starved.name} write {self._starved.name}={word}" if self._starved else ""
        )
        self.problems.add(f"unknown flag {name}{meant}{before}")
        self.unknown.append(name)

    def _foreign(self, name: str, word: str, rest: deque[str]) -> None:
        """A flag that has no use here: accepted where it asks for what happens anyway."""
        instead, harmless = self.command.foreign[name]
        text = " ".join(_values(word, rest, math.inf))
        if harmless and re.fullmatch(harmless, text):
            self.found.ignored.append(f"{name} {text}")
        else:
            self.problems.add(f"{name}: {instead}")

    def _flag(self, name: str, word: str, rest: deque[str]) -> None:
        """A flag and, taken off the rest, its values."""
        flag, (_, equals, value) = self.flags[name], word.partition("=")
        least, most = flag.takes
        values = _values(word, rest, most)
        starved = len(values) < least
        self._starved = flag if starved else None
        if equals and not most:
            self.problems.add(f"{name} takes no value, got {value}")
        elif not starved:
            self._store(flag, values, name)
        elif not (rest and _FLAG.fullmatch(rest[0]) and rest[0].partition("=")[0].replace("_", "-") not in self.flags):
            wanted = "a value" if most == 1 else "one or more values" if most == math.inf else f"{least} values"
            self.problems.add(f"{name} needs {wanted}")  # unless an unknown flag follows: that says what to write
        self.given.setdefault(flag, name)

    def _store(self, flag: Flag, words: list[str], name: str) -> None:
        before = getattr(self.found, flag.attribute)
        with self.problems.collecting():
            values: Any = [flag.converted(word) for word in words]
            if flag.type is bool:
                values = name == flag.name
            elif flag.repeat:
                values = [*(before or ()), *values]
            elif flag.takes[1] == 1:
                values = values[0]
            if self.command.settings is not None and flag in self.given and not flag.repeat and values != before:
                raise ConfigError(f"{name} is given twice; keep one of them")
            setattr(self.found, flag.attribute, values)

    def _place(self) -> None:
        """The remaining words, over the arguments that have a place: each gets the least that it needs."""
        loose, missing = self.rest, []
        places = [flag for flag in self.command.flags if flag.is_placed]
        for index, flag in enumerate(places):
            least, most = flag.takes
            later = sum(each.takes[0] for each in places[index + 1 :])
            count = int(min(most, max(len(loose) - later, least)))
            if len(loose) < least:
                missing.append(flag.shown)
            elif count:
                self._store(flag, loose[:count], flag.name)
                loose = loose[count:]
        if missing:
            self.problems.add(f"missing: {', '.join(missing)}")
        if loose:
            self.problems.add(f"unexpected: {' '.join(loose)}")

    def _missing(self) -> None:
        """Flags that must be there, except those that an unknown one may be meant for; and those that exclude others."""
        words = [*self.unknown, *self.rest] if self.command.settings is not None else self.unknown
        meant = {self.flags[name] for word in words for name in closest(word, self.flags)}
        required = [flag for flag in self.flags.values() if flag.required and flag not in {*self.given, *meant}]
        if required:
            self.problems.add(f"missing: {', '.join(flag.name for flag in required)}")
        given = [flag.name for flag in self.given]
        for name, others in self.command.idle.items():
            for other in others.split() if name in given else ():
                if other in given:
                    self.problems.add(f"{other} has no effect with {name}; remove one of them")
        for group in self.command.exclusive:
            both = [name for name in given if name in group]
            if len(both) > 1:
                self.problems.add(f"{both[0]} and {both[1]} contradict; keep one of them")
            if self.command.one_needed and not {flag.name for flag in (*self.given, *meant)} & set(group):
                self.problems.add(f"give one of {' '.join(group)}")


def _imports(words: deque[str]) -> list[str]:
    found = []
    while words:
        word = words.popleft()
        if word.partition("=")[0] == IMPORT.name:
            found += _values(word, words, math.inf)
    return found


def _values(word: str, rest: deque[str], most: float) -> list[str]:
    """Of the flag in `word`: behind its `=`, or taken off the rest."""
    _, equals, value = word.partition("=")
    values = [value] if equals else []
    while not equals and rest and len(values) < most and rest[0] != "--" and not _FLAG.fullmatch(rest[0]):
        values.append(rest.popleft())
    return values


def _whole_number(word: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", word):
        raise ConfigError(f"takes a whole number such as 4, got {word!r}")
    if len(word) > 20 or abs(int(word)) >= _LARGEST:
        raise ConfigError(f"takes a whole number below 2^63, got {word[:24]}")
    return int(word)


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"takes a number such as 0.5, got {word!r}")
    return value


def _path(word: str) -> Path:
    if not word.strip():
        raise ConfigError("is empty; give a path")
    return Path(word)


def path_or_address(word: str) -> Path | str:
    """A path, also of `hf:FOLDER`, as training has it; an address as it is."""
    return word if is_address(word) else hugging_face_folder(word) or _path(word)


def fetched(place: Path | str, step: int | None) -> Path:
    """A path as it is; the folder here to which a checkpoint has been fetched from an address."""
    if isinstance(place, Path):
        return place
    folder: Path = imported("megalite.data.remote:fetch_checkpoint")(place, step, say=tell)
    return folder


_CONVERTERS: Mapping[Any, Callable[[str], Any]] = {int: _whole_number, float: _number, Path: _path}


def positive(word: str) -> int:
    """A whole number of at least 1."""
    if not word.isdecimal() or not (number := _whole_number(word)) >= 1:
        raise ConfigError(f"takes a whole number of at least 1, such as 4, got {word}")
    return number


def not_negative(word: str) -> float:
    """A number of at least 0."""
    if (number := _number(word)) < 0:
        raise ConfigError(f"takes a number of at least 0, got {word}")
    return number


def byte_size(word: str) -> float:
    """A number of bytes with its unit."""
    if (size := parse_byte_size(word)) is None:
        raise ConfigError(f"takes a size with its unit such as 500MB or 4GiB, got {word}")
    return size


def above_zero(word: str) -> float:
    """A number above 0."""
    if (number := _number(word)) <= 0:
        raise ConfigError(f"takes a number above 0, such as 300, got {word}")
    return number
