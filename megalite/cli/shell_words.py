"""The words and operators of a bash script, quotes and all."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megalite.config.errors import ConfigError

_OPERATORS = ("&&", "||", ";;", "<<<", "<<-", "<<", "|&", ";", "|", "&", "(", ")", "<", ">", "\n")
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>|>\||>|<)(?![<(])(&[\d-])?[ \t]*")
_ARITHMETIC = re.compile(r"\(\([^\n]*?\)\)(?=[\s;&|]|$)")


@dataclass(frozen=True)
class Token:
    """A raw word, quotes and all, or an operator; a word may be an array's `NAME=(`, with its raw words."""

    text: str
    is_operator: bool = False
    array: tuple[str, ...] | None = None
    document: str | None = None  # of `<<`: the text below


def tokens(text: str, where: str) -> list[Token]:
    """The words and operators of a script."""
    return list(Lexer(text, where).tokens())


class Lexer:
    def __init__(self, text: str, where: str) -> None:
        # A backslash at the end of a comment continues nothing.
        text = re.sub(r"(?m)(^[ \t]*#.*?|[ \t]#[^'\"\n]*?)\\+$", r"\1", text.replace("\r\n", "\n"))
        text = re.sub(r"(?<!\\)((?:\\\\)*)\\\n", r"\1 ", text)  # two of them are one for the script below `<<EOF`
        self._text, self._where, self._at = text, where, 0
        self._documents: list[tuple[str, bool]] = []

    def tokens(self, *, inside: bool = False) -> Iterator[Token]:
        """Up to the end, or inside an array up to its closing parenthesis."""
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char in " \t" or (inside and char == "\n"):
                self._at += 1
            elif char == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif not inside and (arithmetic := _ARITHMETIC.match(text, self._at)):
                self._at = arithmetic.end()
                yield Token(arithmetic[0])
            elif inside and char == ")":
                self._at += 1
                return
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
                    yield Token(word, array=tuple(token.text for token in self.tokens(inside=True)))
                else:
                    yield Token(word)
        if inside:
            raise ConfigError(f"{self._where}: an array is not closed; add )")

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
        """A raw word: up to white space or an operator outside quotes."""
        start, text = self._at, self._text
        while self._at < len(text):
            char = text[self._at]
            if char in " \t\n;|&()<>":
                break
            self._at = self.skip(self._at)
        return text[start : self._at]

    def skip(self, at: int) -> int:
        """Behind the character, the quoted text or the expansion that begins here."""
        text, char = self._text, self._text[at]
        if char == "\\":
            return min(at + 2, len(text))
        if char == "'":
            return self._behind("'", at + 1, literal=True)
        if char in '"`':
            return self._behind(char, at + 1)
        for opening, closing in (("${", "}"), ("$((", "))"), ("$(", ")")):
            if text.startswith(opening, at):
                return self._behind(closing, at + len(opening))
        return at + 1

    def _behind(self, closing: str, at: int, *, literal: bool = False) -> int:
        text = self._text
        while at < len(text):
            if text.startswith(closing, at):
                return at + len(closing)
            nested = not literal and (text[at] in "\\`" or text[at] == "$" or (text[at] in "\"'" and closing != '"'))
            at = self.skip(at) if nested and text[at] != closing else at + 1
        raise ConfigError(f"{self._where}: a {closing} is missing")
