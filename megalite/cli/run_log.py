"""The log of a run on stdout: each line with the time of day, in colour on a terminal."""

import time

from megalite.cli.output import stdout_is_terminal, tell
from megalite.config.describe import redact_text

_COLOURS = {
    r"^\d\d:\d\d:\d\d": "dim",
    r"\bstep +\S+": "cyan",
    r"\b(?:(?:validation|test) )?loss (?=[-\dn])\S+": "bold green",
    r"\bETA \S+": "dim",
    r"\b(?:warning|straggler): .*|\bskipped \d+ of \d+ steps|\bdata wait \S+ ms/step": "yellow",
}


class RunLog:
    """Prints lines. That stdout cannot be written, as on a full disk, ends no run; that its reader has gone does."""

    def __init__(self) -> None:
        self._failed, self._day = 0, ""

    def __call__(self, line: str) -> None:
        try:
            now = time.localtime()
            if self._day != (day := time.strftime("%Y-%m-%d %Z", now)):
                _print(day)
                self._day = day
            _print(f"{time.strftime('%H:%M:%S', now)} {redact_text(line)}")
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._failed:
                tell(f"warning: cannot write the log: {error.strerror}; training continues")
            self._failed += 1
            return
        if self._failed:
            failed, self._failed = self._failed, 0
            self(f"the log is written again; up to {failed} lines before this one are missing")


def _print(line: str) -> None:
    if not stdout_is_terminal():
        print(line, flush=True)
        return
    from rich.console import Console  # which a file needs not
    from rich.text import Text

    text = Text(line)
    for pattern, style in _COLOURS.items():
        text.highlight_regex(pattern, style)
    Console(highlight=False).print(text, soft_wrap=True)
