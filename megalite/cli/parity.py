"""`megalite parity`: does this layout of this model give the numbers of one rank?"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.parity.fuzz import fuzz
from megalite.parity.pool import RankPool
from megalite.parity.report import Report, as_data, format_report, run_parity
from megalite.parity.shrink import shrink

USAGE = """usage: megalite parity [--preset NAME] [--config FILE ...] [--SETTING VALUE ...] [OPTIONS]
       megalite parity --fuzz SECONDS [--seed N] [--steps N]

Shrinks the model to laptop size, trains it on one rank and in the layout (gloo on this CPU, float64) and compares every
loss, gradient and weight. Takes the flags of megalite train, but for strategies, compression and optimizers that are
not meant to give the numbers of one rank. Exit status: 0 the same, 1 different, 2 bad input.

  --steps N          steps to train (default 3)
  --tolerance X      largest relative difference (default 1e-9 in fp64)
  --precision NAME   run both in it: fp64 (default), fp32, bf16 or fp16
  --world-size N     ranks of the layout (default tp·pp·cp·dp with dp at most 2, and at most 8)
  --no-eod-mask-loss all tokens count (default: uneven masks)
  --json             print the comparison as JSON
  --fuzz SECONDS     draw random layouts and models for so long; prints a line that repeats each failure
example: megalite parity --preset gpt2-124m --tp 2 --pp 2
docs/parity.md says how to read the table."""

SAME, DIFFERENT = 0, 1
OWN = ("--steps", "--tolerance", "--fuzz")
"""Flags that are not of `megalite train`."""


@dataclass
class _Options:
    """What the command line says beside the settings."""

    steps: int = 3
    tolerance: float | None = None
    fuzz: float | None = None
    rest: list[str] = field(default_factory=list)


@command("megalite parity")
def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    if not argv or {"--help", "-h"} & set(argv):
        show(USAGE)
        return SAME
    options = _options(list(argv))
    return _one(options) if options.fuzz is None else _fuzz(options)


def _one(options: _Options) -> int:
    if "--dry-run" in options.rest:
        raise ConfigError(
            "--dry-run has no effect with megalite parity; use megalite train --dry-run, or remove it"
        )
    # --world-size and --json belong to dry runs, and nothing else may know what to do with them.
    invocation = parse_arguments(["--dry-run", *options.rest], others=OWN)
    keep = {
        name
        for name in ("precision", "eod_mask_loss")
        if invocation.provenance[name] in (f"flag --{name}", "flag --no-eod-mask-loss")
    }
    shrunk = shrink(
        invocation.config,
        world_size=invocation.world_size,
        keep=frozenset(keep),
        explicit=invocation.explicit,
    )
    with RankPool(shrunk.world_size) as pool:
        report = run_parity(shrunk, steps=options.steps, tolerance=options.tolerance, pool=pool)
    show(json.dumps(as_data(report), indent=2) if invocation.json else format_report(report))
    return SAME if report.same else DIFFERENT


def _fuzz(options: _Options) -> int:
    seed = _seed(options.rest)
    assert options.fuzz is not None

    def failed(line: str, report: Report) -> None:
        print(f"{line}\n  {report.verdict.splitlines()[0]}", flush=True)
        if report.failure is not None:
            print(report.failure, file=sys.stderr, flush=True)

    started = time.monotonic()
    tried, failures = fuzz(
        options.fuzz, seed=seed, steps=options.steps, tolerance=options.tolerance, failed=failed
    )
    seconds = time.monotonic() - started
    show(f"{tried} layouts in {seconds:.0f} s with seed {seed}: {failures} different from one rank")
    return DIFFERENT if failures else SAME


def _options(arguments: list[str]) -> _Options:
    """Take our own options out of the command line."""
    options = _Options()
    words = [part for argument in arguments for part in _parts(argument)]
    while words:
        word = words.pop(0)
        if word not in OWN:
            options.rest.append(word)
            continue
        if not words or words[0].startswith("--"):
            raise ConfigError(f"{word} needs a value, e.g. {word} 3")
        value = words.pop(0)
        number = _number(word, value)
        if word == "--steps":
            if number < 1 or number != int(number):
                raise ConfigError(f"--steps takes a whole number of at least 1, such as 3, got {value}")
            options.steps = int(number)
        elif word == "--tolerance":
            options.tolerance = number
        else:
            options.fuzz = number
    return options


def _parts(argument: str) -> list[str]:
    """`--steps=3` as two words; other flags as they are."""
    name, equals, value = argument.partition("=")
    return [name, value] if equals and name in OWN else [argument]


def _number(flag: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{flag} takes a number of at least 0, got {word}")
    return value


def _seed(rest: list[str]) -> int:
    """--seed N, and nothing else: the fuzzer chooses every setting itself."""
    if not rest:
        return 0
    if len(rest) != 2 or rest[0] != "--seed" or not rest[1].isdecimal():
        raise ConfigError(
            f"--fuzz chooses every setting itself and takes --seed N and --steps N alone, got {' '.join(rest)}; to try "
            "one layout leave --fuzz out"
        )
    return int(rest[1])
