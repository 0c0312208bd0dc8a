"""Reading bash without running it: what a launch script would start, as words, with variables, arrays and conditions.

Enough of the language for scripts that put flags together: assignments, arrays, quotes, `${NAME:-default}`, arithmetic,
`if` with tests, `case`, loops over words, functions, `source`, here-documents and strings that another shell runs. Commands
are never run: a test of a file counts as true, the output of a command other than echo as unknown. What is unknown stays as it is written."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalite.cli.shell_syntax import Case, Command, For, Function, If, Lexer, Script, Token, While, parse
from megalite.config.errors import ConfigError

_MOST_COMMANDS, _MOST_TURNS, _DEEPEST = 100_000, 100, 20
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[[^\]]+\])?)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"\[([^\]]+)\]=(.*)", re.DOTALL)  # of an associative array
OUTPUT = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
"""A regular expression: of a command, where only its name is known."""
WORD = re.compile(rf"(?:{OUTPUT}|\$\{{[^}}]*\}}|\S)+")  # the output of a command is not known, and taken for one
_UNKNOWN = re.compile(r"\$(\{[^}]*\}|\w+|\()|`")
_TEXT = re.compile(r"\$\(\s*cat\s*<<-?\s*(['\"\\]?)(\w+)['\"]?[ \t]*\n(.*)\n\s*\2\s*\)", re.DOTALL)  # what is below it
_ECHO = re.compile(r"(?:`|\$\()(?!\().*\becho\b", re.DOTALL)
_MODIFIED = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!])(\[[^\]]*\])?(.*)", re.DOTALL)


@dataclass
class Shell:
    """Follows a script and hands each command, in words, to `command`. `command`: its name and words, expanded; called
    for all but what the shell itself understands. `given`: values of variables that the script leaves open, or takes
    from its environment or command line."""

    command: Callable[["Shell", list[str]], None]
    given: Mapping[str, str]
    folder: Path
    variables: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, Script] = field(default_factory=dict)
    arguments: list[str] | None = None  # of the function that is followed; None: of the script, which are not known
    where: str = ""  # the script that is followed
    depth: int = 0
    done: int = 0
    last: list[str] = field(default_factory=list)  # the words of the command before
    in_doubt: str = ""  # an unknown word in a condition around what is followed
    passed_over: dict[str, str] = field(default_factory=dict)
    """Variable that commands which do not run would set -> the unknown word that decides, or else itself, unless it takes
    flags alone: it is empty then."""

    def run(self, text: str, where: str) -> None:
        """Follow a script, or a string that a shell would run."""
        script, before, self.where = parse(text, where), self.where, where
        self._enter(script)
        self.where = before

    def _enter(self, script: Script) -> None:
        if self.depth >= _DEEPEST:
            raise ConfigError(f"{self.where}: scripts and functions start one another more than {_DEEPEST} deep")
        self.depth += 1
        self.follow(script)
        self.depth -= 1

    def follow(self, script: Script) -> bool:
        """Follow commands; whether the last one has succeeded. A test has its result, all others succeed."""
        holds, in_doubt = True, self.in_doubt
        for joint, negated, command in script:
            if not joint:
                self.in_doubt = in_doubt
            if not joint or holds == (joint == "&&"):
                holds = self._run(command) != negated
            else:
                self._pass_over(command)
        return holds

    def _run(self, command: Command) -> bool:
        in_doubt = self.in_doubt
        match command:
            case If(branches):
                # What a condition starts is not looked at.
                tests, taken = dataclasses.replace(self, command=lambda shell, words: None), False
                for condition, body in branches:
                    holds = not taken and tests.follow(condition)
                    taken, self.in_doubt = taken or holds, tests.in_doubt
                    (self.follow if holds else self._pass_over)(body)
            case While(body):
                self.in_doubt = in_doubt or "$@"
                self._pass_over(body)
            case For(name, values, body):
                for value in [value for raw in values for value in self.expand(raw)][:_MOST_TURNS]:
                    self.assign(name, [value])
                    self.follow(body)
            case Case(word, choices):
                text, taken = self._text(word), False
                self.in_doubt = in_doubt or (text if is_unknown(text) else "")
                for patterns, body in choices:
                    holds = not taken and any(_fits(text, self._text(one)) for one in patterns)
                    taken = taken or holds
                    (self.follow if holds else self._pass_over)(body)
            case Function(name, body):
                self.functions[name] = body
            case [Token(document=str(document), text=quote)]:
                self._document(document if quote else "".join(self.expand(quoted(document))))
            case list(line):
                return self._simple(line)
            case _:
                return self.follow(command)
        self.in_doubt = in_doubt
        return True

    def _pass_over(self, command: Command) -> None:
        """Note what would be set if this ran."""
        match command:
            case If(branches) | Case(_, branches):
                for _, body in branches:
                    self._pass_over(body)
            case For(_, _, body) | While(body):
                self._pass_over(body)
            case Function():
                pass
            case list(line):
                for token in line:
                    if match := _ASSIGNMENT.fullmatch(token.text):
                        name, _, raw = match.groups()
                        text = raw.strip("\"' \t\n") if token.array is None else "".join(token.array[:1])
                        alone = "" if not text or "--" in text else f"${{{name}}}"
                        self.passed_over[name] = self.passed_over.get(name) or self.in_doubt or alone
            case _:
                for step in command:
                    self._pass_over(step.command)

    def _text(self, raw: str) -> str:
        return " ".join(self.expand(raw, split=False))

    def _document(self, text: str) -> None:
        """The text below `sbatch <<EOF` is a script, that below `read VARIABLE <<EOF` a value."""
        if self.last[:1] == ["read"]:
            self.assign(self.last[-1], [text])
        elif "pretrain" in text:
            self.run(text, self.where)

    def _simple(self, line: list[Token]) -> bool:
        """A test, or assignments and the words of a command; whether it succeeds."""
        if line[0].text in ("[", "[[", "test") or line[0].text.startswith("(("):
            return self._test(line)
        self.done += 1
        if self.done > _MOST_COMMANDS:
            raise ConfigError(f"{self.where} has more than {_MOST_COMMANDS} commands")
        while line and line[0].text in ("export", "local", "declare", "readonly", "typeset", "exec", "nohup", "env"):
            line = [word for word in line[1:] if not re.fullmatch(r"-[a-zA-Z]", word.text)]
        while line and (match := _ASSIGNMENT.fullmatch(line[0].text)):
            name, add, raw = match.groups()
            if (array := line[0].array) is not None:
                self.assign(name, [word for each in array for word in self.expand(each)], add=bool(add), array=True)
            else:
                self.assign(name, [self._text(raw)], add=bool(add))
            line = line[1:]
        words = self.last = [word for token in line for word in self.expand(token.text)]
        match words:
            case []:
                return True
            case ["false", *_]:
                return False
            case ["shift", *count]:
                del (self.arguments or [])[: int(count[0]) if count and count[0].isdecimal() else 1]
            case ["unset", *names]:
                for name in names:
                    self.variables.pop(name, None)
            case [name, *arguments] if name in self.functions:
                passed_on = any("$@" in token.text or "$*" in token.text for token in line)
                self._call(name, None if self.arguments is None and not arguments and passed_on else arguments)
            case _:
                self.command(self, words)
        return True

    def _call(self, name: str, arguments: list[str] | None) -> None:
        before, self.arguments = self.arguments, arguments
        self._enter(self.functions[name])
        self.arguments = before

    def _test(self, line: list[Token]) -> bool:
        """`((...))`, `[ ... ]`, or within `[[ ... ]]` several, joined by && and ||, from left to right."""
        if line[0].text.startswith("(("):
            return bool(self.arithmetic(line[0].text[2:-2]))
        holds, joint, words = True, "&&", list[str]()
        for token in (*line[1:], Token("&&", is_operator=True)):
            if token.is_operator and token.text in ("&&", "||"):
                if holds == (joint == "&&"):
                    known, negated = ["" if is_unknown(word) else word for word in words], words[:1] == ["!"]
                    holds = _holds(known[negated:]) != negated
                    if not {"-z", "-n"} & {*words}:  # unknown is not set there; what a comparison would say is open
                        self.in_doubt = self.in_doubt or next(filter(is_unknown, words), "")
                joint, words = token.text, []
            elif token.text not in ("]", "]]"):
                words.append(self._text(token.text))
        return holds

    def assign(self, name: str, values: list[str], *, add: bool = False, array: bool = False) -> None:
        if not array and not add and values and re.fullmatch(r"\$\{?\w+\}?|<[A-Za-z][^<>]*>", values[0]):
            # `CHECKPOINT=$1`: its own name says more than the place, or than `<path to it>`.
            values = [self.given.get(name, f"${{{name}}}")]
        elif name in self.given and not array:
            values = [self.given[name]]
        before = self.variables.get(name, [])
        if array and values and all(elements := [_ELEMENT.fullmatch(value) for value in values]):
            values = [found[2] for found in elements if found]
            self.variables |= {f"{name}[{found[1]}]": [found[2]] for found in elements if found}
        if add and not array:
            values = [(before[0] if before else "") + values[0]]
        elif add:
            values = [*before, *values]
        self.variables[name] = values
        if name.endswith("]"):
            base = name.partition("[")[0]
            self.variables[base] = [*self.variables.get(base, []), *values]

    def value(self, name: str) -> list[str] | None:
        """Of a variable; None: unknown."""
        if self.arguments is not None and name.isdecimal() and name != "0":
            return self.arguments[int(name) - 1 : int(name)] or [""]
        if name in ("@", "*"):
            return list(self.arguments or [])
        if name in self.variables:
            return self.variables[name]
        if name in self.given:
            return [self.given[name]]
        return [""] if self.passed_over.get(name) == "" else None

    def expand(self, raw: str, *, split: bool = True) -> list[str]:
        """The words that a raw word becomes. Inside double quotes nothing is split, but an array's `[@]` is one word each."""
        fields, started, quoted, at = [""], False, False, 0
        while at < len(raw):
            char, start = raw[at], at
            if char == '"':
                # An empty array by itself makes no word, two quotes make an empty one.
                quoted, started, at = not quoted, started or raw[at + 1 : at + 2] == '"', at + 1
            elif char == "'" and not quoted:
                at = raw.index("'", at + 1) + 1
                fields[-1] += raw[start + 1 : at - 1]
                started = True
            elif char in "$`":
                at, words = self._reference(raw, at)
                blank = "".join(words) if split and not quoted else ""
                if split and not quoted:
                    words = [word for value in words for word in WORD.findall(value)]
                elif "[*]" in raw[start:at] and quoted:
                    words = [" ".join(words)]
                if words and blank[:1].isspace() and fields[-1]:
                    fields.append("")
                for index, word in enumerate(words):
                    fields += [""] if index else []
                    fields[-1] += word
                if words and blank[-1:].isspace():
                    fields.append("")
                started = started or bool(words)
            else:
                follows = raw[at + 1 : at + 2]
                if char == "\\" and follows and (not quoted or follows in '"\\$`'):
                    at += 1
                fields[-1] += raw[at]
                at, started = at + 1, True
        if split and len(fields) > 1 and not fields[-1]:
            fields.pop()
        return fields if started else []

    def _reference(self, raw: str, at: int) -> tuple[int, list[str]]:
        """The expansion that begins here: where it ends, and its values; an unknown one as it is written."""
        lexer = Lexer(raw, "script")
        end = lexer.skip(at)
        text = raw[at:end]
        if text.startswith("$(("):
            number = self.arithmetic(text[3:-2])
            return end, [text if number is None else str(number)]
        if document := _TEXT.fullmatch(text):
            return end, [document[3] if document[1] else "".join(self.expand(quoted(document[3])))]
        if _ECHO.match(text):
            said = self._said(text[1 if text[0] == "`" else 2 : -1])
            return end, [text if said is None else said]
        if text[:2] == "${":
            values = self._modified(text[2:-1])
            return end, [text] if values is None else values
        if text == "$" and (name := re.match(r"[A-Za-z_]\w*|[0-9]|[@*#?$!]", raw[at + 1 :])):
            end = at + 1 + name.end()
            values = [str(len(self.arguments or []))] if name[0] == "#" else self.value(name[0])
            if values is None or name[0] in "@*":
                return end, [raw[at:end]] if values is None else values
            return end, values[:1] or [""]
        return end, [text]

    def _said(self, script: str) -> str | None:
        """The output of commands that only test and echo; None: of others, which is unknown."""
        found: list[list[str]] = []
        variables, keep = dict(self.variables), lambda shell, words: found.append(words)
        try:
            dataclasses.replace(self, command=keep, variables=variables).run(script, "script")
        except ConfigError:
            return None
        echoed = [" ".join(words[1 + (words[1:2] == ["-n"]) :]) for words in found if words[0] == "echo"]
        return " ".join(echoed) if len(echoed) == len(found) else None

    def _modified(self, inner: str) -> list[str] | None:
        """`${inner}`."""
        match = _MODIFIED.fullmatch(inner)
        if match is None:
            return None
        length, name, index, rest = match.groups()
        values = self.value(name)
        known = values is not None and not (len(values) == 1 and is_unknown(values[0]))
        if length:
            several = index in ("[@]", "[*]")
            return [str(len(values) if several else len("".join(values[:1])))] if known and values is not None else None
        if values is None and index == "[@]" and not self.passed_over.get(name):
            return []  # no array comes from the environment
        if index and values is not None:
            place = "".join(self.expand(index[1:-1], split=False))
            at = self.variables.get(
                f"{name}[{place}]", values[int(place) : int(place) + 1] if place.isdecimal() else None
            )
            values = values if place in ("@", "*") else at
        elif values and name not in ("@", "*"):
            values = values[:1]
        how, word = next(
            ((op, rest[len(op) :]) for op in (":-", ":=", ":+", ":?", "-", "=", "+", "?") if rest.startswith(op)),
            ("", ""),
        )
        if how in (":-", ":=", "-", "="):
            if not known or not any(values or ()):
                values = [" ".join(self.expand(word, split=False))]
                if "=" in how and not index:
                    self.variables[name] = values
            return values
        if values is None and how in (":?", "?"):
            return [f"${{{name}}}"]
        if how in (":+", "+"):
            return [" ".join(self.expand(word, split=False))] if known and any(values or ()) else []
        if values is None or not rest or how:
            return [] if index and name not in self.given and name in self.variables and values is None else values
        if known and (cut := re.fullmatch(r":\s*(\d+)(?::(\d+))?", rest)):
            start = int(cut[1]) - (name in ("@", "*"))  # arguments are numbered from 1
            part = slice(start, None if cut[2] is None else start + int(cut[2]))
            whole = name not in ("@", "*") and index not in ("[@]", "[*]")
            return [value[part] for value in values] if whole else values[part]
        return [_cut(value, rest) for value in values] if known else None

    def arithmetic(self, text: str) -> int | None:
        words = re.sub(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)", lambda m: (self.value(m[1] or m[2]) or ["?"])[0], text)
        try:
            words = re.sub(r"!(?!=)", " not ", words.replace("&&", " and ").replace("||", " or "))
            value: Any = _ARITHMETIC.compile_expression(words, undefined_to_none=False)()
            return int(value)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError):
            return None


def quoted(text: str) -> str:
    """Of a document, in which quotes mean nothing."""
    return '"' + text.replace('"', '\\"') + '"'


def is_unknown(text: str) -> bool:
    """Something in it has no value: it stands there as the script has it."""
    return _UNKNOWN.search(text) is not None


class _Arithmetic(ImmutableSandboxedEnvironment):
    """jinja2's expressions, with bash's division: of whole numbers, towards 0."""

    intercepted_binops = frozenset({"/", "%", "**"})

    def call_binop(self, context: Context, operator: str, left: int, right: int) -> int:
        if operator == "**":
            if not (0 <= right < 64 and abs(left) < 2**63):
                raise ValueError("bash has 64 bits")
            return int(left**right)
        sign = 1 if (left < 0) == (right < 0) else -1
        return sign * (abs(left) // abs(right)) if operator == "/" else abs(left) % abs(right) * (-1 if left < 0 else 1)


_ARITHMETIC = _Arithmetic()


def _cut(value: str, rest: str) -> str:
    """`${NAME%pattern}` and its kin, and `${NAME/old/new}`; anything else leaves the value as it is."""
    if rest in ("^^", ",,"):
        return value.upper() if rest == "^^" else value.lower()
    if rest[0] == "/":
        old, _, new = rest[1:].lstrip("/").partition("/")
        return value.replace(old, new) if rest.startswith("//") else value.replace(old, new, 1)
    mark, greedy = rest[0], rest[:2] in ("##", "%%")
    pattern = rest[2:] if greedy else rest[1:]
    if mark not in "#%":
        return value
    cuts = range(len(value) + 1)
    pieces = (
        [(value[cut:], value[:cut]) for cut in cuts] if mark == "#" else [(value[:cut], value[cut:]) for cut in cuts]
    )
    fitting = [kept for kept, gone in pieces if fnmatch.fnmatchcase(gone, pattern)]
    return (min if greedy else max)(fitting, key=len) if fitting else value


_fits = fnmatch.fnmatchcase


def _holds(words: list[str]) -> bool:
    """One test, of words without its brackets."""
    for joint, every in (("-o", any), ("-a", all)):
        if joint in words[1:-1]:
            at = words.index(joint, 1)
            return every((_holds(words[:at]), _holds(words[at + 1 :])))
    match words:
        case ["-n", word] | [word]:
            return word != ""
        case ["-z", word]:
            return word == ""
        case [left, "=" | "==", right]:
            return _fits(left, right)
        case [left, "!=", right]:
            return not _fits(left, right)
        case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as how, right]:
            if not (left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal()):
                return False
            a, b = int(left), int(right)
            return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[how]
    return bool(words) and words[0].startswith("-")  # tests of files
