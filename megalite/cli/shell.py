"""Interpret a bash launch script without running any command, and report the words of each command that it would start.

The subset is what scripts use to assemble flags: assignments, arrays, quotes, `${NAME:-default}`, arithmetic, `if` with
tests, `case`, loops over words, functions, `source`, here-documents and strings that another shell runs. Tests of files
count as true. The output of a command other than echo is unknown, and an unknown value keeps its source text."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import jinja2
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalite.cli.shell_syntax import Case, Command, For, Function, If, Lexer, Script, Token, While, parse
from megalite.config.errors import ConfigError

_MAX_COMMANDS, _MAX_ITERATIONS, _MAX_DEPTH = 100_000, 100, 20
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[[^\]]+\])?)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"\[([^\]]+)\]=(.*)", re.DOTALL)  # an element of an associative array
OUTPUT = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
"""Regular expression of a command substitution."""
WORD = re.compile(rf"(?:{OUTPUT}|\$\{{[^}}]*\}}|\S)+")  # a command substitution counts as one word
_UNKNOWN = re.compile(r"\$(\{[^}]*\}|\w+|\()|`")
_CAT = re.compile(r"\$\(\s*cat\s*<<-?\s*(['\"\\]?)(\w+)['\"]?[ \t]*\n(.*)\n\s*\2\s*\)", re.DOTALL)
_ECHO = re.compile(r"(?:`|\$\()(?!\().*\becho\b", re.DOTALL)
_MODIFIED = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!])(\[[^\]]*\])?(:?[-=+?])?(.*)", re.DOTALL)


@dataclass
class Shell:
    """Interprets a script and calls `command` with the expanded words of each command except builtins and functions.

    `overrides`: values of variables, of the environment or the command line of the script."""

    command: Callable[["Shell", list[str]], None]
    overrides: Mapping[str, str]
    variables: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, Script] = field(default_factory=dict)
    arguments: list[str] | None = None  # arguments of the current function; None: those of the script, unknown
    source: str = ""  # name of the current script, for errors
    depth: int = 0
    num_commands: int = 0
    previous: list[str] = field(default_factory=list)  # words of the previous command
    undecided: str = ""  # an unknown word in a condition around the current command
    skipped: dict[str, str] = field(default_factory=dict)
    """Variable that skipped commands assign -> the unknown word that decides whether they run; without such a word the
    variable itself, or empty if the skipped value is empty or holds flags."""

    def run(self, text: str, source: str) -> None:
        """Interpret a script, or a string that a shell would run."""
        script, before, self.source = parse(text, source), self.source, source
        self._enter(script)
        self.source = before

    def _enter(self, script: Script) -> None:
        if self.depth >= _MAX_DEPTH:
            raise ConfigError(f"{self.source}: scripts and functions start one another more than {_MAX_DEPTH} deep")
        self.depth += 1
        self.follow(script)
        self.depth -= 1

    def follow(self, script: Script) -> bool:
        """Interpret commands and return whether the last one succeeds. Every command but a test succeeds."""
        succeeds, undecided = True, self.undecided
        for joint, negated, command in script:
            if not joint:
                self.undecided = undecided
            if not joint or succeeds == (joint == "&&"):
                succeeds = self._run(command) != negated
            else:
                self._skip(command)
        return succeeds

    def _run(self, command: Command) -> bool:
        undecided = self.undecided
        match command:
            case If(branches):
                # Commands inside a condition are not reported.
                tests, taken = dataclasses.replace(self, command=lambda shell, words: None), False
                for condition, body in branches:
                    is_true = not taken and tests.follow(condition)
                    taken, self.undecided = taken or is_true, tests.undecided
                    (self.follow if is_true else self._skip)(body)
            case While(body):
                self.undecided = undecided or "$@"
                self._skip(body)
            case For(name, values, body):
                for value in [value for raw in values for value in self.expand(raw)][:_MAX_ITERATIONS]:
                    self.assign(name, [value])
                    self.follow(body)
            case Case(word, choices):
                text, taken = self._text(word), False
                self.undecided = undecided or (text if is_unknown(text) else "")
                for patterns, body in choices:
                    matches = not taken and any(fnmatchcase(text, self._text(pattern)) for pattern in patterns)
                    taken = taken or matches
                    (self.follow if matches else self._skip)(body)
            case Function(name, body):
                self.functions[name] = body
            case [Token(document=str(document), text=quote)]:
                self._document(document if quote else "".join(self.expand(quoted(document))))
            case list(line):
                return self._simple(line)
            case _:
                return self.follow(command)
        self.undecided = undecided
        return True

    def _skip(self, command: Command) -> None:
        """Record the variables that a command would assign if it ran."""
        match command:
            case If(branches) | Case(_, branches):
                for _, body in branches:
                    self._skip(body)
            case For(_, _, body) | While(body):
                self._skip(body)
            case Function():
                pass
            case list(line):
                for token in line:
                    if match := _ASSIGNMENT.fullmatch(token.text):
                        name, _, raw = match.groups()
                        text = raw.strip("\"' \t\n") if token.array is None else "".join(token.array[:1])
                        itself = "" if not text or "--" in text else f"${{{name}}}"
                        self.skipped[name] = self.skipped.get(name) or self.undecided or itself
            case _:
                for step in command:
                    self._skip(step.command)

    def _text(self, raw: str) -> str:
        return " ".join(self.expand(raw, split=False))

    def _document(self, text: str) -> None:
        """Interpret a here-document: `sbatch <<EOF` runs it as a script, `read VARIABLE <<EOF` assigns it."""
        if self.previous[:1] == ["read"]:
            self.assign(self.previous[-1], [text])
        elif "pretrain" in text:
            self.run(text, self.source)

    def _simple(self, line: list[Token]) -> bool:
        """Interpret a test, or assignments and a command; return whether it succeeds."""
        if line[0].text in ("[", "[[", "test") or line[0].text.startswith("(("):
            return self._test(line)
        self.num_commands += 1
        if self.num_commands > _MAX_COMMANDS:
            raise ConfigError(f"{self.source} has more than {_MAX_COMMANDS} commands")
        while line and line[0].text in ("export", "local", "declare", "readonly", "typeset", "exec", "nohup", "env"):
            line = [word for word in line[1:] if not re.fullmatch(r"-[a-zA-Z]", word.text)]
        while line and (match := _ASSIGNMENT.fullmatch(line[0].text)):
            name, add, raw = match.groups()
            if (array := line[0].array) is not None:
                self.assign(name, [word for each in array for word in self.expand(each)], add=bool(add), array=True)
            else:
                self.assign(name, [self._text(raw)], add=bool(add))
            line = line[1:]
        words = self.previous = [word for token in line for word in self.expand(token.text)]
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
        """Return the result of `((...))`, `[ ... ]` or `[[ ... ]]`; && and || inside brackets associate to the left."""
        if line[0].text.startswith("(("):
            return bool(self.arithmetic(line[0].text[2:-2]))
        result, joint, words = True, "&&", list[str]()
        for token in (*line[1:], Token("&&", is_operator=True)):
            if token.is_operator and token.text in ("&&", "||"):
                if result == (joint == "&&"):
                    known, negated = ["" if is_unknown(word) else word for word in words], words[:1] == ["!"]
                    result = _evaluate_test(known[negated:]) != negated
                    if not {"-z", "-n"} & {*words}:  # these take unknown as not set; a comparison stays undecided
                        self.undecided = self.undecided or next(filter(is_unknown, words), "")
                joint, words = token.text, []
            elif token.text not in ("]", "]]"):
                words.append(self._text(token.text))
        return result

    def assign(self, name: str, values: list[str], *, add: bool = False, array: bool = False) -> None:
        if not array and not add and values and re.fullmatch(r"\$\{?\w+\}?|<[A-Za-z][^<>]*>", values[0]):
            # For `CHECKPOINT=$1` or `CHECKPOINT=<path to it>` the name CHECKPOINT is clearer than the value.
            values = [self.overrides.get(name, f"${{{name}}}")]
        elif name in self.overrides and not array:
            values = [self.overrides[name]]
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
        """Return the value of a variable, None if it is unknown."""
        if self.arguments is not None and name.isdecimal() and name != "0":
            return self.arguments[int(name) - 1 : int(name)] or [""]
        if name in ("@", "*"):
            return list(self.arguments or [])
        if name in self.variables:
            return self.variables[name]
        if name in self.overrides:
            return [self.overrides[name]]
        return [""] if self.skipped.get(name) == "" else None

    def expand(self, raw: str, *, split: bool = True) -> list[str]:
        """Expand a raw word into words. Double quotes prevent splitting, but `[@]` gives one word per element."""
        fields, started, quoted, at = [""], False, False, 0
        while at < len(raw):
            char, start = raw[at], at
            if char == '"':
                # `""` is an empty word, `"${EMPTY_ARRAY[@]}"` is no word.
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
        """Expand what begins at `at`; return the end and the values, or the source text if they are unknown."""
        lexer = Lexer(raw, "script")
        end = lexer.skip(at)
        text = raw[at:end]
        if text.startswith("$(("):
            number = self.arithmetic(text[3:-2])
            return end, [text if number is None else str(number)]
        if document := _CAT.fullmatch(text):
            return end, [document[3] if document[1] else "".join(self.expand(quoted(document[3])))]
        if _ECHO.match(text):
            echoed = self._echoed(text[1 if text[0] == "`" else 2 : -1])
            return end, [text if echoed is None else echoed]
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

    def _echoed(self, script: str) -> str | None:
        """Return the output of a script that only tests and echoes; None if it runs another command."""
        commands: list[list[str]] = []
        variables, record = dict(self.variables), lambda shell, words: commands.append(words)
        try:
            dataclasses.replace(self, command=record, variables=variables).run(script, "script")
        except ConfigError:
            return None
        if any(words[0] != "echo" for words in commands):
            return None
        return " ".join(" ".join(words[1 + (words[1:2] == ["-n"]) :]) for words in commands)

    def _modified(self, inner: str) -> list[str] | None:
        """Expand `${inner}`; None if the value is unknown."""
        match = _MODIFIED.fullmatch(inner)
        if match is None:
            return None
        length, name, index, operator, rest = match.groups(default="")
        values = self.value(name)
        known = values is not None and not (len(values) == 1 and is_unknown(values[0]))
        is_list = name in ("@", "*") or index in ("[@]", "[*]")
        if length:
            return [str(len(values) if is_list else len("".join(values[:1])))] if known and values is not None else None
        if values is None and index == "[@]" and not self.skipped.get(name):
            return []  # bash cannot import an array from the environment
        if values is not None and index and not is_list:
            subscript = self._text(index[1:-1])
            element = values[int(subscript) :][:1] if subscript.isdecimal() else None
            values = self.variables.get(f"{name}[{subscript}]", element)
        elif values and not is_list:
            values = values[:1]
        is_set = known and any(values or ())
        match operator[-1:]:
            case "-" | "=":
                if not is_set:
                    values = [self._text(rest)]
                    if operator[-1] == "=" and not index:
                        self.variables[name] = values
                return values
            case "+":
                return [self._text(rest)] if is_set else []
            case "?" if values is None:
                return [f"${{{name}}}"]
        if values is None or not rest or operator:
            return [] if index and name not in self.overrides and name in self.variables and values is None else values
        if known and (substring := re.fullmatch(r":\s*(\d+)(?::(\d+))?", rest)):
            start = int(substring[1]) - (name in ("@", "*"))  # arguments are numbered from 1
            part = slice(start, None if substring[2] is None else start + int(substring[2]))
            return values[part] if is_list else [value[part] for value in values]
        return [_cut(value, rest) for value in values] if known else None

    def arithmetic(self, text: str) -> int | None:
        """Evaluate an integer expression; None if a variable in it is unknown."""
        words = re.sub(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)", lambda m: (self.value(m[1] or m[2]) or ["?"])[0], text)
        try:
            words = re.sub(r"!(?!=)", " not ", words.replace("&&", " and ").replace("||", " or "))
            value: Any = _ARITHMETIC.compile_expression(words, undefined_to_none=False)()
            return int(value)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError):
            return None


def quoted(text: str) -> str:
    """Wrap text in double quotes and escape its own."""
    return '"' + text.replace('"', '\\"') + '"'


def is_unknown(text: str) -> bool:
    """Return whether the text contains an expansion without a known value."""
    return _UNKNOWN.search(text) is not None


class _Arithmetic(ImmutableSandboxedEnvironment):
    """jinja2's expressions with bash's integer division, which rounds towards 0."""

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
    """Apply an operator of `${NAME...}`: `#`, `##`, `%`, `%%`, `/`, `//`, `^^` or `,,`; others change nothing."""
    if rest in ("^^", ",,"):
        return value.upper() if rest == "^^" else value.lower()
    if rest[0] == "/":
        old, _, new = rest[1:].lstrip("/").partition("/")
        return value.replace(old, new) if rest.startswith("//") else value.replace(old, new, 1)
    mark, greedy = rest[0], rest[:2] in ("##", "%%")
    pattern = rest[2:] if greedy else rest[1:]
    if mark not in "#%":
        return value
    halves = [(value[:cut], value[cut:]) for cut in range(len(value) + 1)]
    if mark == "#":
        matches = [tail for head, tail in halves if fnmatchcase(head, pattern)]
    else:
        matches = [head for head, tail in halves if fnmatchcase(tail, pattern)]
    return (min if greedy else max)(matches, key=len, default=value)


def _evaluate_test(words: list[str]) -> bool:
    """Evaluate a test without its brackets."""
    for joint, combine in (("-o", any), ("-a", all)):
        if joint in words[1:-1]:
            at = words.index(joint, 1)
            return combine((_evaluate_test(words[:at]), _evaluate_test(words[at + 1 :])))
    match words:
        case ["-n", word] | [word]:
            return word != ""
        case ["-z", word]:
            return word == ""
        case [left, "=" | "==", right]:
            return fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatchcase(left, right)
        case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as how, right]:
            if not (left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal()):
                return False
            a, b = int(left), int(right)
            return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[how]
    return bool(words) and words[0].startswith("-")  # tests of files
