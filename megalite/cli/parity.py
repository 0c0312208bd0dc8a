"""`megalite parity`: does this layout of this model give the numbers of one rank?"""

import json
import sys
import time
from collections.abc import Sequence

from megalite.cli.early_flags import PARITY_FLAGS, ParityOptions, parity_options
from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.parity.fuzz import fuzz
from megalite.parity.pool import RankPool
from megalite.parity.report import Report, as_data, format_report, run_parity
from megalite.parity.shrink import shrink

SAME, DIFFERENT = 0, 1


@command("megalite parity")
def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    options = parity_options(argv)
    return _one(options) if options.fuzz is None else _fuzz(options)


def _one(options: ParityOptions) -> int:
    if "--dry-run" in options.rest:
        raise ConfigError("--dry-run has no effect with megalite parity; use megalite train --dry-run, or remove it")
    # --world-size and --json belong to dry runs, and nothing else may know what to do with them.
    invocation = parse_arguments(["--dry-run", *options.rest], others=PARITY_FLAGS)
    keep = {
        name
        for name in ("precision", "eod_mask_loss")
        if invocation.provenance[name] in (f"flag --{name}", "flag --no-eod-mask-loss")
    }
    shrunk = shrink(
        invocation.config, world_size=invocation.world_size, keep=frozenset(keep), explicit=invocation.explicit
    )
    with RankPool(shrunk.world_size) as pool:
        report = run_parity(shrunk, steps=options.steps, tolerance=options.tolerance, pool=pool)
    show(json.dumps(as_data(report), indent=2) if invocation.json else format_report(report))
    return SAME if report.same else DIFFERENT


def _fuzz(options: ParityOptions) -> int:
    seed = _seed(options.rest)
    assert options.fuzz is not None

    def failed(line: str, report: Report) -> None:
        print(f"{line}\n  {report.verdict.splitlines()[0]}", flush=True)
        if report.failure is not None:
            print(report.failure, file=sys.stderr, flush=True)

    started = time.monotonic()
    tried, failures = fuzz(options.fuzz, seed=seed, steps=options.steps, tolerance=options.tolerance, failed=failed)
    seconds = time.monotonic() - started
    show(f"{tried} layouts in {seconds:.0f} s with seed {seed}: {failures} different from one rank")
    return DIFFERENT if failures else SAME


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
