"""The process that watches the ranks of one host; started by the first of them, which writes the plan into its stdin."""

import signal
import sys

from megalite.watchdog.watch import Lifeline, watch


def main() -> int:
    # Ctrl-C and what a scheduler sends to every process of a job are for the ranks; when they have ended, so does this.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    watch(Lifeline(sys.stdin.fileno()), _say)
    return 0


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
