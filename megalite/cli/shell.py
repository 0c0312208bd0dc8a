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

from megalite.cli.shell_words import Lexer, Token, tokens
from megalite.config.errors import ConfigError

_MOST_COMMANDS, _DEEPEST = 100_000, 20
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[[^\]]+\])?)(\+?)=(.*)", re.DOTALL)
_ELEMENT = re.compile(r"\[([^\]]+)\]=(.*)", re.DOTALL)  # of an associative array
OUTPUT = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
"""A regular expression: of a command, where only its name is known."""
_WORD = re.compile(rf"(?:{OUTPUT}|\$\{{[^}}]*\}}|\S)+")  # the output of a command is not known, and taken for one
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
    functions: dict[str, list[Token]] = field(default_factory=dict)  # name -> what stands between its braces
    arguments: list[str] | None = None  # of the function that is followed; None: of the script, which are not known
    depth: int = 0
    done: int = 0
    last: list[str] = field(default_factory=list)  # the words of the command before

    def run(self, text: str, where: str) -> None:
        """Follow a script, or a string that a shell would run."""
        self._follow(tokens(text, where), where)

    def call(self, name: str, arguments: list[str] | None, where: str) -> None:
        """Follow the body of a function."""
        before, self.arguments = self.arguments, arguments
        self._follow(self.functions[name], where)
        self.arguments = before

    def _follow(self, script: list[Token], where: str) -> None:
        if self.depth >= _DEEPEST:
            raise ConfigError(f"{where}: scripts and functions start one another more than {_DEEPEST} deep")
        self.depth += 1
        try:
            _Block(self, script, where).follow()
        except IndexError:
            raise ConfigError(f"{where} ends within a command") from None
        self.depth -= 1

    def assign(self, name: str, values: list[str], *, add: bool = False, array: bool = False) -> None:
        if not array and not add and values and is_unknown(values[0]) and re.fullmatch(r"\$\{?\w+\}?", values[0]):
            # `CHECKPOINT=$1`: its own name says more than the place.
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
        return [self.given[name]] if name in self.given else None

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
                    words = [word for value in words for word in _WORD.findall(value)]
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
            return end, [document[3] if document[1] else "".join(self.expand(_quoted(document[3])))]
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


def _quoted(text: str) -> str:
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


class _Block:
    """The commands of one script, with the conditions around them."""

    def __init__(self, shell: Shell, script: list[Token], where: str) -> None:
        self._shell, self._script, self._where = shell, [*script, Token("\n", is_operator=True)], where
        self._at = 0

    def follow(self) -> None:
        self._until((), live=True)

    def _until(self, ends: tuple[str, ...], *, live: bool) -> str:
        """Follow commands up to a word of `ends`, which is returned.

        Of commands joined by && and || some run only if the one before has failed or has not: a test has its result, all others
        succeed."""
        holds, turn, negated = True, True, False
        while self._at < len(self._script):
            token = self._script[self._at]
            if token.text in ends and token.document is None:
                self._at += 1
                return token.text
            if token.is_operator or token.document is not None:
                self._at += 1
                if token.document is not None and live:
                    self._document(token)
                elif token.text in ("&&", "||"):
                    turn = holds == (token.text == "&&")
                else:
                    holds = turn = True
            elif token.text in ("if", "while", "until", "for", "case", "select", "function"):
                self._compound(token.text, live=live and turn)
            elif token.text == "{":
                self._at += 1
                self._until(("}",), live=live and turn)
            elif token.text in ("}", "do", "then", "!", "time", "done", "fi", "esac", "else"):
                self._at += 1
                negated = token.text == "!"
            else:
                found = self._simple(live=live and turn)
                holds, negated = (found != negated if turn else holds), False
        if ends:
            raise ConfigError(f"{self._where}: {' or '.join(ends)} is missing")
        return ""

    def _document(self, token: Token) -> None:
        """The text below `sbatch <<EOF` is a script, that below `read VARIABLE <<EOF` a value."""
        assert token.document is not None
        shell = self._shell
        text = token.document if token.text else "".join(shell.expand(_quoted(token.document)))
        if shell.last[:1] == ["read"]:
            shell.assign(shell.last[-1], [text])
        elif "pretrain" in text:
            shell.run(text, self._where)

    def _compound(self, kind: str, *, live: bool) -> None:
        self._at += 1
        if kind == "if":
            self._if(live=live)
        elif kind == "case":
            self._case(live=live)
        elif kind == "function":
            self._at += 1
            self._function(self._script[self._at - 1].text, live=live)
        elif kind == "for":
            words = self._line()
            name, values = words[0].text, [value for word in words[2:] for value in self._shell.expand(word.text)]
            start = self._at
            for value in values[:100] if live else []:
                self._at = start
                self._shell.assign(name, [value])
                self._until(("done",), live=True)
            if not values or not live:
                self._until(("done",), live=False)
        else:  # a loop over what is not known here: its body is passed over
            self._line()
            self._until(("done",), live=False)

    def _line(self) -> list[Token]:
        """The words up to the end of the line."""
        words = []
        while not (token := self._script[self._at]).is_operator or token.text in ("&&", "||", "|", "(", ")", "<", ">"):
            words.append(token)
            self._at += 1
        self._at += 1
        return words

    def _if(self, *, live: bool) -> None:
        taken = False
        while True:
            holds = self._condition(self._line()) and live and not taken
            if self._script[self._at].text == "then":
                self._at += 1
            end = self._until(("elif", "else", "fi"), live=holds)
            taken = taken or holds
            if end == "else":
                self._until(("fi",), live=live and not taken)
                return
            if end == "fi":
                return

    def _condition(self, words: list[Token]) -> bool:
        """Tests joined by && and ||, from left to right."""
        holds, joint, test, inside = True, "&&", list[str](), False
        for word in [*words, Token("&&", is_operator=True)]:
            if word.is_operator and word.text in ("&&", "||"):
                test = ["[[", *test] if inside else test
                found = self._test(test)
                holds = (holds and found) if joint == "&&" else (holds or found)
                inside = test[:1] == ["[["] and test[-1:] != ["]]"]
                joint, test = word.text, []
            elif word.text != "then":
                test.append(word.text)
        return holds

    def _test(self, raw: list[str]) -> bool:
        if raw[:1] == ["!"]:
            return not self._test(raw[1:])
        if raw and raw[0].startswith("(("):
            return bool(self._shell.arithmetic(raw[0][2:-2]))
        if raw[:1] not in (["["], ["[["], ["test"]):
            return not raw or self._shell.expand(raw[0]) != ["false"]
        expanded = [" ".join(self._shell.expand(text, split=False)) for text in raw[1:] if text not in ("]", "]]")]
        words = ["" if is_unknown(word) else word for word in expanded]
        negated = words[:1] == ["!"]
        return self._holds(words[negated:]) != negated

    @staticmethod
    def _holds(words: list[str]) -> bool:
        for joint, every in (("-o", any), ("-a", all)):
            if joint in words[1:-1]:
                at = words.index(joint, 1)
                return every((_Block._holds(words[:at]), _Block._holds(words[at + 1 :])))
        match words:
            case ["-n", word] | [word]:
                return word != ""
            case ["-z", word]:
                return word == ""
            case [left, "=" | "==", right]:
                return fnmatch.fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatch.fnmatchcase(left, right)
            case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as how, right]:
                if not (left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal()):
                    return False
                a, b = int(left), int(right)
                return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[how]
        return bool(words) and words[0].startswith("-")  # tests of files

    def _case(self, *, live: bool) -> None:
        head = [self._script[self._at]]
        self._at += 2  # and `in`
        word = " ".join(self._shell.expand(head[0].text, split=False))
        matched = False
        while True:
            while self._script[self._at].is_operator:
                self._at += 1
            if self._script[self._at].text == "esac":
                self._at += 1
                return
            patterns = []
            while not (token := self._script[self._at]).is_operator or token.text != ")":
                patterns += [] if token.is_operator else ["".join(self._shell.expand(token.text, split=False))]
                self._at += 1
            self._at += 1
            fits = not matched and any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns)
            matched = matched or fits
            if self._until((";;", "esac"), live=live and fits) == "esac":
                return

    def _simple(self, *, live: bool) -> bool:
        """A command with its words, up to an operator; whether it succeeds."""
        line: list[Token] = []
        while (
            not (token := self._script[self._at]).is_operator
            or (token.text in ("&&", "||") and line[0].text == "[[" and line[-1].text != "]]")
        ) and token.document is None:
            line.append(token)
            self._at += 1
        if token.text == "(" and len(line) == 1:
            self._function(line[0].text, live=live)
            return True
        while token.is_operator and token.text == "<<<":
            self._at += 2
            token = self._script[self._at]
        shell = self._shell
        if not live:
            return True
        if line and (line[0].text in ("[", "[[", "test", "false") or line[0].text.startswith("((")):
            return self._condition(line)
        shell.done += 1
        if shell.done > _MOST_COMMANDS:
            raise ConfigError(f"{self._where} has more than {_MOST_COMMANDS} commands")
        while line and line[0].text in ("export", "local", "declare", "readonly", "typeset", "exec", "nohup", "env"):
            line = [word for word in line[1:] if not re.fullmatch(r"-[a-zA-Z]", word.text)]
        while line:
            match = _ASSIGNMENT.fullmatch(line[0].text)
            if match is None:
                break
            name, add, raw = match.groups()
            values = line[0].array
            if values is not None:
                shell.assign(name, [word for each in values for word in shell.expand(each)], add=bool(add), array=True)
            else:
                shell.assign(name, [" ".join(shell.expand(raw, split=False))], add=bool(add))
            line = line[1:]
        words = shell.last = [word for token in line for word in shell.expand(token.text)]
        if words[:1] == ["shift"]:
            del (shell.arguments or [])[: int(words[1]) if words[1:] and words[1].isdecimal() else 1]
        elif words[:1] == ["unset"]:
            for name in words[1:]:
                shell.variables.pop(name, None)
        elif words and words[0] in shell.functions:
            unknown = (
                shell.arguments is None
                and not words[1:]
                and any("$@" in token.text or "$*" in token.text for token in line)
            )
            shell.call(words[0], None if unknown else words[1:], self._where)
        elif words:
            shell.command(shell, words)
        return True

    def _function(self, name: str, *, live: bool) -> None:
        """What is in its braces is followed where it is called."""
        while self._script[self._at].text in ("(", ")", "\n", "{"):
            self._at += 1
        start = self._at
        self._until(("}",), live=False)
        if live:
            self._shell.functions[name] = self._script[start : self._at - 1]
