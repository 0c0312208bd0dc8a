"""Split a bash script into words and operators, and parse them into a tree of commands. Words keep their quotes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config.errors import ConfigError

_OPERATORS = ("&&", "||", ";;", "<<<", "<<-", "<<", "|&", ";", "|", "&", "(", ")", "<", ">", "\n")
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>|>\||>|<)(?![<(])(&[\d-])?[ \t]*")
_ARITHMETIC = re.compile(r"\(\([^\n]*?\)\)(?=[\s;&|]|$)")
_PLACEHOLDER = re.compile(r"<([A-Za-z][^<>\n$]*(?<=[\w.]))>")
"""A placeholder such as `<path to the data>`. It counts as a variable without a value."""


@dataclass(frozen=True)
class Token:
    """A raw word with its quotes, or an operator."""

    text: str
    is_operator: bool = False
    array: tuple[str, ...] | None = None  # raw words of the array if `text` is `NAME=` of `NAME=(...)`
    document: str | None = None  # text of a here-document


class Lexer:
    def __init__(self, text: str, source: str) -> None:
        # A backslash at the end of a comment does not join lines.
        text = re.sub(r"(?m)(^[ \t]*#.*?|[ \t]#[^'\"\n]*?)\\+$", r"\1", text.replace("\r\n", "\n"))
        text = re.sub(r"(?<!\\)((?:\\\\)*)\\\n", r"\1 ", text)  # an even number are escaped backslashes
        self._text, self._source, self._at = text, source, 0
        self._documents: list[tuple[str, bool]] = []  # delimiter and whether tabs are stripped, of open here-documents

    def tokens(self, *, in_array: bool = False) -> Iterator[Token]:
        """Yield tokens up to the end, or in an array up to its closing parenthesis."""
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char in " \t" or (in_array and char == "\n"):
                self._at += 1
            elif char == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif not in_array and (arithmetic := _ARITHMETIC.match(text, self._at)):
                self._at = arithmetic.end()
                yield Token(arithmetic[0])
            elif in_array and char == ")":
                self._at += 1
                return
            elif _PLACEHOLDER.match(text, self._at):
                yield Token(self._word())
            elif redirection := _REDIRECTION.match(text, self._at):
                self._at = redirection.end()
                if redirection[1] is None:
                    self._word()
            elif operator := next((each for each in _OPERATORS if text.startswith(each, self._at)), None):
                self._at += len(operator)
                yield from self._operator(operator)
            else:
                word = self._word()
                if re.fullmatch(r"[A-Za-z_]\w*\+?=", word) and text.startswith("(", self._at):
                    self._at += 1
                    yield Token(word, array=tuple(token.text for token in self.tokens(in_array=True)))
                else:
                    yield Token(word)
        if in_array:
            raise ConfigError(f"{self._source}: an array is not closed; add )")

    def _operator(self, operator: str) -> Iterator[Token]:
        if operator in ("<<", "<<-"):
            while self._text.startswith((" ", "\t"), self._at):
                self._at += 1
            self._documents.append((self._word(), operator == "<<-"))
            return
        yield Token(operator, is_operator=True)
        if operator == "\n":
            for delimiter, indented in self._documents:
                lines = []
                while self._at < len(self._text):
                    line, _, _ = self._text[self._at :].partition("\n")
                    self._at += len(line) + 1
                    if (line.lstrip("\t") if indented else line) == re.sub(r"[\"'\\]", "", delimiter):
                        break
                    lines.append(line)
                quoted = any(mark in delimiter for mark in "\"'\\")
                yield Token("'" if quoted else "", document="\n".join(lines))
            self._documents = []

    def _word(self) -> str:
        """Read a raw word, up to white space or an operator outside quotes."""
        text, word = self._text, ""
        while self._at < len(text):
            start, placeholder = self._at, _PLACEHOLDER.match(text, self._at)
            if text[start] in " \t\n;|&()<>" and placeholder is None:
                break
            self._at = placeholder.end() if placeholder else self.skip(start)
            word += "${" + re.sub(r"\W+", "_", placeholder[1]) + "}" if placeholder else text[start : self._at]
        return word

    def skip(self, at: int) -> int:
        """Return the position after the character, quoted text or expansion that begins at `at`."""
        text, char = self._text, self._text[at]
        if char == "\\":
            return min(at + 2, len(text))
        if char == "'":
            return self._after("'", at + 1, literal=True)
        if char in '"`':
            return self._after(char, at + 1)
        for opening, closing in (("${", "}"), ("$((", "))"), ("$(", ")")):
            if text.startswith(opening, at):
                return self._after(closing, at + len(opening))
        return at + 1

    def _after(self, closing: str, at: int, *, literal: bool = False) -> int:
        """Return the position after the next `closing`, past nested quotes and expansions unless `literal`."""
        text = self._text
        while at < len(text):
            if text.startswith(closing, at):
                return at + len(closing)
            nested = not literal and (text[at] in "\\`" or text[at] == "$" or (text[at] in "\"'" and closing != '"'))
            at = self.skip(at) if nested and text[at] != closing else at + 1
        raise ConfigError(f"{self._source}: a {closing} is missing")


class If(NamedTuple):
    branches: "list[tuple[Script, Script]]"  # (condition, body); the condition of `else` is empty


class For(NamedTuple):
    name: str
    values: list[str]  # raw words
    body: "Script"


class While(NamedTuple):
    """A `while`, `until` or `select` loop. Its condition is unknown."""

    body: "Script"


class Case(NamedTuple):
    word: str
    branches: "list[tuple[list[str], Script]]"  # (patterns, body)


class Function(NamedTuple):
    name: str
    body: "Script"


class Step(NamedTuple):
    """A command and the operator before it."""

    joint: str  # "&&", "||" or ""
    negated: bool
    command: "Command"


Script = tuple[Step, ...]
Command = list[Token] | If | For | While | Case | Function | Script  # a list is a simple command or a here-document
_IGNORED = ("}", "do", "then", "time", "done", "fi", "esac", "else")


def parse(text: str, source: str) -> Script:
    """Parse a script. `source`: its name for errors. Raises ConfigError if a construct is not closed."""
    try:
        return _Parser(text, source).until()[0]
    except IndexError:
        raise ConfigError(f"{source} ends within a command") from None


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self._tokens, self._source, self._at = list(Lexer(text, source).tokens()), source, 0
        self._tokens.append(Token("\n", is_operator=True))

    def _next(self) -> Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def until(self, *ends: str) -> tuple[Script, str]:
        """Parse commands up to a word of `ends`; return them and that word."""
        steps: list[Step] = []
        joint, negated = "", False
        while self._at < len(self._tokens):
            token = self._next()
            if token.document is not None:
                steps.append(Step("", False, [token]))
            elif token.text in ends:
                return tuple(steps), token.text
            elif token.is_operator:
                joint = token.text if token.text in ("&&", "||") else ""
            elif token.text == "!":
                negated = True
            elif token.text not in _IGNORED:
                steps.append(Step(joint, negated, self._command(token)))
                joint, negated = "", False
        if ends:
            raise ConfigError(f"{self._source}: {' or '.join(ends)} is missing")
        return tuple(steps), ""

    def _command(self, first: Token) -> Command:
        match first.text:
            case "if":
                return self._if()
            case "case":
                return self._case()
            case "for":
                name, *values = self._line()
                return For(name, values[1:], self.until("done")[0])  # values[0] is `in`
            case "while" | "until" | "select":
                self.until("do")
                return While(self.until("done")[0])
            case "function":
                return self._function(self._next().text)
            case "{":
                return self.until("}")[0]
        return self._simple(first)

    def _line(self) -> list[str]:
        words = []
        while not (token := self._next()).is_operator:
            words.append(token.text)
        return words

    def _if(self) -> If:
        branches, end = list[tuple[Script, Script]](), "if"
        while end != "fi":
            condition: Script = () if end == "else" else self.until("then")[0]
            body, end = self.until("elif", "else", "fi")
            branches.append((condition, body))
        return If(branches)

    def _case(self) -> Case:
        word, end, branches = self._next().text, self._next().text, list[tuple[list[str], Script]]()
        while end != "esac":
            token, patterns = self._next(), list[str]()
            while token.is_operator:
                token = self._next()
            if token.text == "esac":
                break
            while not token.is_operator or token.text != ")":
                patterns += [] if token.is_operator else [token.text]
                token = self._next()
            body, end = self.until(";;", "esac")
            branches.append((patterns, body))
        return Case(word, branches)

    def _simple(self, first: Token) -> list[Token] | Function:
        line, token = [first], self._next()
        while token.document is None:
            is_test = line[0].text == "[[" and line[-1].text != "]]" and token.text not in (";", "\n")
            if token.is_operator and not is_test:
                break
            line.append(token)
            token = self._next()
        if token.text == "(" and len(line) == 1:
            return self._function(first.text)
        if token.text == "<<<":
            self._next()
        else:
            self._at -= 1
        return line

    def _function(self, name: str) -> Function:
        while self._tokens[self._at].text in ("(", ")", "\n", "{"):
            self._at += 1
        return Function(name, self.until("}")[0])
