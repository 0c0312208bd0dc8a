"""Text of tokens that come one by one."""

from collections.abc import Callable, Sequence

_HALF_A_CHARACTER = "\ufffd"
_BEFORE = 6
"""Tokens of the prompt that are decoded along with the first new one: some tokenizers drop a space at the beginning."""


class GrowingText:
    """The text of new tokens. What `take` has given out is never changed by tokens that come later.

    A token may end in the middle of a character: its part of the text waits for the rest. And what may be the beginning of
    a stop string is held back until that is certain.

    Args:
        decode: text of token ids.
        prompt: the tokens before.
        stops: the text ends before the first of these strings.

    Attributes:
        text: all of it so far.
        stopped: a stop string has come.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stops = stops
        self._held_back = max(map(len, stops), default=1) - 1
        self._ids = list(prompt[-_BEFORE:])
        self._first, self._decoded = 0, len(self._ids)
        self._given = 0

    def push(self, token: int) -> None:
        """One more token. Only the last few are decoded, so that a long text costs no more a token than a short one."""
        self._ids.append(token)
        new = self._new()
        if new and not new.endswith(_HALF_A_CHARACTER):
            self._first, self._decoded = self._decoded, len(self._ids)
            self._add(new)

    def finish(self) -> None:
        """No token will come: what is not a whole character will not become one."""
        if not self.stopped:
            self._add(self._new())
        self._decoded = len(self._ids)
        self._held_back = 0

    def take(self) -> str:
        """What has become certain since the last call."""
        end = len(self.text) if self.stopped else max(self._given, len(self.text) - self._held_back)
        start, self._given = self._given, end
        return self.text[start:end]

    def _new(self) -> str:
        before = self._decode(self._ids[self._first : self._decoded])
        return self._decode(self._ids[self._first :])[len(before) :]

    def _add(self, new: str) -> None:
        look_from = max(0, len(self.text) - self._held_back)
        self.text += new
        found = [at for stop in self._stops if (at := self.text.find(stop, look_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
