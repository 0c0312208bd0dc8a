"""Flags of a command, refused like everything else that is not right."""

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megalite.config.errors import ConfigError
from megalite.config.values import nearest

_LARGEST = 1 << 63
_MANY = 60
"""Characters of a flag's choices."""
_WORDING = (
    (r"argument (\S+): expected one argument", r"\1 needs a value"),
    (r"argument (.+): expected at least one argument", r"\1 needs one or more values"),
    (r"argument (.+): expected (\d+) arguments", r"\1 needs \2 values"),
    (r"argument (\S+): not allowed with argument (\S+)", r"\2 and \1 contradict; keep one of them"),
    (r"argument (\S+): ignored explicit argument '(.*)'", r"\1 takes no value, got \2"),
    (r"one of the arguments (.+) is required", r"give one of \1"),
    (r"the following arguments are required: (.+)", r"missing: \1"),
    (r"unrecognized arguments: (.+)", r"unexpected: \1"),
    (r"argument (.+?): (.+)", r"\1: \2"),
)
"""What argparse says, and how it is said here."""


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

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        for pattern, ours in _WORDING:
            match = re.fullmatch(pattern, message, re.DOTALL)
            if match is not None:
                message = match.expand(ours)
                break
        raise ConfigError(f"{message}; {self.prog} --help lists the flags")

    # argparse's own reports missing flags before unknown ones, and the unknown one is the reason.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, of flags that are known."""
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._with_known_flags(words), namespace)

    def _with_known_flags(self, words: list[str]) -> list[str]:
        """The words with dashes in the names of flags.

        Raises:
            ConfigError: a flag that there is not.
        """
        known = self._option_string_actions
        found: list[str] = []
        for index, word in enumerate(words):
            # What stands behind a subcommand is the subcommand's.
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return found + words[index:]
            flag, equals, value = word.partition("=")
            if not re.match(r"--?[A-Za-z]", word) or " " in flag:
                found.append(word)
                continue
            flag = flag.replace("_", "-") if flag.startswith("--") else flag
            if flag not in known:
                shown = [name for name, action in known.items() if action.help != argparse.SUPPRESS]
                before = words[index - 1] if index else ""
                hint = f"; if it is the value of {before} write {before}={word}" if before in known else ""
                meant = nearest(flag, shown) if flag.startswith("--") else ""
                self.error(f"unknown flag {flag}{meant}{hint}")
            found.append(f"{flag}{equals}{value}")
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """One of the choices, or an error with the nearest of them."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        meant = f"{nearest(str(value), known)} (one of {', '.join(known)})"
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"unknown command {value}{meant}")
        raise argparse.ArgumentError(action, f"there is no {value}{meant}")


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

    def _metavar_formatter(
        self, action: argparse.Action, default_metavar: str
    ) -> Callable[[int], tuple[str, ...]]:
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
