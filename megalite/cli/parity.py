"""`megalite parity`: check that a layout gives the same numbers as one rank."""

import sys
import time
from argparse import Namespace

from megalite.cli.display import working
from megalite.cli.output import json_text, show
from megalite.config.errors import ConfigError
from megalite.parity.fuzz import fuzz
from megalite.parity.pool import RankPool
from megalite.parity.report import Report, as_data, format_report, run_parity
from megalite.parity.shrink import shrink

SAME, DIFFERENT = 0, 1


def run(flags: Namespace) -> int:
    if flags.fuzz is not None:
        return _fuzz(flags)
    invocation = flags.invocation
    keep = {
        name
        for name in ("precision", "eod_mask_loss")
        if invocation.provenance[name] in (f"flag --{name}", "flag --no-eod-mask-loss")
    }
    shrunk = shrink(
        invocation.config, world_size=invocation.world_size, keep=frozenset(keep), explicit=invocation.explicit
    )
    with (
        working(f"training {flags.steps} steps on one rank and on {shrunk.world_size}"),
        RankPool(shrunk.world_size) as pool,
    ):
        report = run_parity(shrunk, steps=flags.steps, tolerance=flags.tolerance, pool=pool)
    show(json_text(as_data(report)) if invocation.json else format_report(report))
    return SAME if report.same else DIFFERENT


def _fuzz(flags: Namespace) -> int:
    sources = {name: source for name, source in flags.invocation.provenance.items() if source != "default"}
    if set(sources) - {"seed"}:
        wrong = next(source.removeprefix("flag ") for name, source in sources.items() if name != "seed")
        raise ConfigError(
            f"--fuzz draws all settings at random and accepts only --seed N and --steps N, got {wrong}; to try one layout "
            "leave --fuzz out"
        )
    seed = flags.invocation.config.training.seed if sources else 0

    def failed(line: str, report: Report) -> None:
        print(f"{line}\n  {report.verdict.splitlines()[0]}", flush=True)
        if report.failure is not None:
            print(report.failure, file=sys.stderr, flush=True)

    started = time.monotonic()
    tried, failures = fuzz(flags.fuzz, seed=seed, steps=flags.steps, tolerance=flags.tolerance, failed=failed)
    seconds = time.monotonic() - started
    show(f"{tried} layouts in {seconds:.0f} s with seed {seed}: {failures} different from one rank")
    return DIFFERENT if failures else SAME
