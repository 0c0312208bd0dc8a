"""Flags of a command: declared and shown as argparse has them, read here, so that one answer names all that is wrong."""

import argparse
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError, Problems, closest, nearest

_LARGEST = 1 << 63
_MANY = 60
"""Characters of a flag's choices."""
_FLAG = re.compile(r"--?[A-Za-z][^\s=]*(=.*)?", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Bad flags are ConfigErrors, unknown ones with the nearest; no flag can be shortened, dashes and underscores are one.

    Args:
        prog: name of the command.
        description: what it does; its lines are kept unless they are long.
        examples: command lines, shown below the flags.
        rest: as argparse has them.
    """

    def __init__(
        self, prog: str | None = None, description: str = "", *, examples: Sequence[str] = (), **rest: Any
    ) -> None:
        epilog = rest.pop("epilog", None) or ""
        if examples:
            lines = "\n".join(f"  {line}" for line in examples)
            epilog = f"example{'s' if len(examples) > 1 else ''}:\n{lines}\n\n{epilog}"
        rest = {"formatter_class": _Formatter, **rest, "allow_abbrev": False}
        super().__init__(prog=prog, description=description, epilog=epilog, **rest)
        self.register("type", int, _whole_number)
        self.register("type", float, _number)
        self.register("type", Path, _path)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's.

        Raises:
            ConfigError: everything that is wrong with the words, in one.
        """
        words = deque(sys.argv[1:] if args is None else args)
        problems, found = Problems(), argparse.Namespace() if namespace is None else namespace
        program = _Reading(self, found, problems).read(words)
        if problems.found:
            error = ConfigError(*problems.found)
            error.add_note(f"{program} --help lists the flags")
            raise error
        return found


class _Reading:
    """One pass over the words of a command: values go to the namespace, what is wrong to the problems."""

    def __init__(self, parser: argparse.ArgumentParser, found: argparse.Namespace, problems: Problems) -> None:
        self.parser, self.found, self.problems = parser, found, problems
        self.flags = parser._option_string_actions
        self.seen: list[argparse.Action] = []
        self.unknown: list[str] = []
        self._takes_more = False
        """The flag before has less values than it needs."""

    def read(self, words: deque[str]) -> str:
        """All words; returns the name of the program or of the subcommand that they end in."""
        for action in self.parser._actions:
            if action.dest != argparse.SUPPRESS and action.default != argparse.SUPPRESS:
                default = action.default
                given = self._converted(action, action.dest, default) if isinstance(default, str) else default
                setattr(self.found, action.dest, given)
        commands = next((a for a in self._positionals() if isinstance(a, argparse._SubParsersAction)), None)
        loose: list[str] = []
        while words:
            word = words.popleft()
            if word == "--":
                loose += words
                break
            if _FLAG.fullmatch(word):
                self._flag(word, words)
            elif commands is not None:
                return self._command(commands, word, words)
            else:
                loose.append(word)
        if not self.unknown:  # or else a word may be the value of a flag that is not known
            self._place(loose)
        self._missing()
        return self.parser.prog

    def _command(self, commands: "argparse._SubParsersAction[Any]", word: str, rest: deque[str]) -> str:
        if word not in commands.choices:
            known = list(commands.choices)
            self.problems.add(f"unknown command {word}{nearest(word, known)} (one of {', '.join(known)})")
            return self.parser.prog
        setattr(self.found, commands.dest, word)
        return _Reading(commands.choices[word], self.found, self.problems).read(rest)

    def _flag(self, word: str, rest: deque[str]) -> None:
        """A flag and, taken off the rest, its values."""
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag not in self.flags:
            shown = [name for name, action in self.flags.items() if action.help != argparse.SUPPRESS]
            meant = nearest(flag, shown) if flag.startswith("--") else ""
            before = self.seen[-1].option_strings[0] if self.seen and self._takes_more else ""
            hint = f"; if it is the value of {before} write {before}={word}" if before else ""
            self.problems.add(f"unknown flag {flag}{meant}{hint}")
            self.unknown.append(flag)
            return
        action = self.flags[flag]
        values = [value] if equals else []
        while not equals and rest and len(values) < _most(action) and not self._ends(rest[0]):
            values.append(rest.popleft())
        self.seen.append(action)
        self._takes_more = len(values) < _least(action)
        if equals and action.nargs == 0:
            self.problems.add(f"{flag} takes no value, got {value}")
        elif not self._takes_more:
            self._store(action, flag, values)
        elif not (rest and _FLAG.fullmatch(rest[0]) and self._is_unknown(rest[0])):  # that says what to write
            count = action.nargs
            wanted = "a value" if count is None else "one or more values" if count == "+" else f"{count} values"
            self.problems.add(f"{flag} needs {wanted}")

    def _ends(self, word: str) -> bool:
        """The values of a flag are at their end."""
        return word == "--" or _FLAG.fullmatch(word) is not None

    def _is_unknown(self, word: str) -> bool:
        return word.partition("=")[0].replace("_", "-") not in self.flags

    def _store(self, action: argparse.Action, name: str, words: list[str]) -> None:
        with self.problems.collecting():
            values: Any = [self._converted(action, name, word) for word in words]
            for value in values:
                _check_choice(action, name, value)
            if action.nargs in (None, "?"):
                values = values[0] if values else action.const if action.option_strings else action.default
            elif not words and not action.option_strings:
                values = action.default or []
            action(self.parser, self.found, values, name)

    def _converted(self, action: argparse.Action, name: str, word: str) -> Any:
        convert = self.parser._registry_get("type", action.type, action.type)
        try:
            return convert(word)
        except ConfigError:
            raise
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{name}: {error}") from None
        except (TypeError, ValueError):
            raise ConfigError(f"{name}: {word!r} is not a value of it") from None

    def _positionals(self) -> list[argparse.Action]:
        return [action for action in self.parser._actions if not action.option_strings]

    def _place(self, loose: list[str]) -> None:
        """Words that belong to no flag, over the arguments that have a place: each gets the least that it needs."""
        places = self._positionals()
        missing = []
        for index, action in enumerate(places):
            later = sum(map(_least, places[index + 1 :]))
            count = int(min(_most(action), max(len(loose) - later, _least(action))))
            if len(loose) < _least(action):
                missing.append(_name(action))
                continue
            taken, loose = loose[:count], loose[count:]
            self.seen.append(action)
            self._store(action, _name(action), taken)
        if missing:
            self.problems.add(f"missing: {', '.join(missing)}")
        if loose:
            self.problems.add(f"unexpected: {' '.join(loose)}")

    def _missing(self) -> None:
        """Flags that must be there, but for those that an unknown one may be meant for; and those that exclude others."""
        meant = {self.flags[name] for flag in self.unknown for name in closest(flag, self.flags)}
        given = {*self.seen, *meant}
        required = [a for a in self.parser._actions if a.required and a.option_strings and a not in given]
        if required:
            self.problems.add(f"missing: {', '.join(map(_name, required))}")
        for group in self.parser._mutually_exclusive_groups:
            both = [_name(action) for action in self.seen if action in group._group_actions]
            both = list(dict.fromkeys(both))
            if len(both) > 1:
                self.problems.add(f"{both[0]} and {both[1]} contradict; keep one of them")
            if group.required and not given & set(group._group_actions):
                self.problems.add(f"give one of {' '.join(map(_name, group._group_actions))}")


def _least(action: argparse.Action) -> int:
    """Values that an argument needs."""
    return action.nargs if isinstance(action.nargs, int) else {"?": 0, "*": 0}.get(action.nargs or "", 1)


def _most(action: argparse.Action) -> float:
    """Values that an argument can take."""
    return action.nargs if isinstance(action.nargs, int) else math.inf if action.nargs in ("*", "+") else 1


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)


def _check_choice(action: argparse.Action, name: str, value: Any) -> None:
    if action.choices is not None and value not in action.choices:
        known = [str(choice) for choice in action.choices]
        raise ConfigError(f"{name}: there is no {value}{nearest(str(value), known)} (one of {', '.join(known)})")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Lines of description and examples as they are written, but for those that are longer than the screen; and many
    choices in the text of a flag rather than beside its name."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for line in text.splitlines():
            wraps = len(line) > width and not line.startswith(" ")
            lines.append(self._filled(line, width, indent) if wraps else indent + line)
        return "\n".join(lines)

    @staticmethod
    def _filled(line: str, width: int, indent: str) -> str:
        return argparse.HelpFormatter("", width=width)._fill_text(line, width, indent)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if _has_many_choices(action):
            return lambda count: ("NAME",) * count
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        return f"{text}; one of {', '.join(action.choices or ())}" if _has_many_choices(action) else text


def _has_many_choices(action: argparse.Action) -> bool:
    return action.metavar is None and len(", ".join(map(str, action.choices or ()))) > _MANY


def _whole_number(word: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", word):
        raise argparse.ArgumentTypeError(f"takes a whole number such as 4, got {word!r}")
    if len(word) > 20 or abs(int(word)) >= _LARGEST:
        raise argparse.ArgumentTypeError(f"takes a whole number below 2^63, got {word[:24]}")
    return int(word)


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"takes a number such as 0.5, got {word!r}")
    return value


def _path(word: str) -> Path:
    if not word.strip():
        raise argparse.ArgumentTypeError("is empty; give a path")
    return Path(word)
