"""The rounds of step_vs_peers.py: build every contender, compare their losses, let them take turns."""

import math
import random
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import step_vs_peers_worker as worker
from peer_case import Case

from megalite.parity.pool import RankFailure, RankPool

BUILD_SECONDS, STEP_SECONDS = 300.0, 600.0


class Disagreement(Exception):
    """The contenders do not train the same model."""


@dataclass
class Measured:
    """What was found of the contenders of one layout."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of a step, round by round."""
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """CPU seconds of a step over all ranks, round by round."""
    differences: dict[str, float] = field(default_factory=dict)
    """Largest difference from megalite's loss."""
    failed: dict[str, str] = field(default_factory=dict)
    """Who did not run, and why."""
    gemm: list[float] = field(default_factory=list)
    """FLOP/s of matrix products on one rank, round by round."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Of the steps before the rounds."""


def compete(
    pools: Mapping[str, RankPool],
    case: Case,
    *,
    limit: float,
    checks: int,
    rounds: int,
    steps: int,
    gemm: int,
    seed: int,
) -> Measured:
    """One model in one layout.

    Args:
        pools: the processes of each contender.
        limit: largest difference of losses.
        checks: steps whose losses are compared; they warm up as well.
        rounds: turns of each contender.
        steps: steps of a turn.
        gemm: edge of the matrices that the machine's rate is measured with.
        seed: of the order.

    Raises:
        Disagreement: a contender's losses are not megalite's.
    """
    found, ranks = Measured(), case.layout.ranks
    for name, pool in pools.items():
        try:
            pool.run(ranks, worker.build, name, case, timeout=BUILD_SECONDS)
            parts = pool.run(ranks, worker.train, checks, timeout=STEP_SECONDS)
        except RankFailure as error:
            if name == worker.MEGALITE:
                raise
            found.failed[name] = str(error).strip().splitlines()[-1]
            print(f"{name} failed:\n{error}", file=sys.stderr)
            continue
        found.losses[name] = [sum(losses) for losses in zip(*parts)]
    _compare(found, limit)
    names = list(found.losses)
    order = random.Random(seed)
    for _ in range(rounds):
        pool = pools[worker.MEGALITE]
        found.gemm += pool.run(ranks, worker.gemm_rate, case.layout.threads, case.bf16, gemm, 0.2)[:1]
        order.shuffle(names)
        for name in names:
            turn = pools[name].run(ranks, worker.turn, steps, timeout=STEP_SECONDS)
            wall = max(rank["end"] for rank in turn) - min(rank["start"] for rank in turn)
            found.seconds.setdefault(name, []).append(wall / steps)
            found.cpu.setdefault(name, []).append(sum(rank["cpu"] for rank in turn) / steps)
    for name in names:
        pools[name].run(ranks, worker.leave)
    return found


def _compare(found: Measured, limit: float) -> None:
    ours = found.losses[worker.MEGALITE]
    for name, losses in found.losses.items():
        found.differences[name] = max(abs(a - b) for a, b in zip(losses, ours, strict=True))
    worst = max(found.differences, key=lambda name: _or_infinite(found.differences[name]))
    print(f"losses differ by at most {found.differences[worst]:.1e} ({worst})", file=sys.stderr)
    if _or_infinite(found.differences[worst]) > limit:
        lines = [
            f"{name}: {' '.join(f'{loss:.6f}' for loss in losses)}" for name, losses in found.losses.items()
        ]
        raise Disagreement(
            f"the losses of {worst} differ from megalite's by {found.differences[worst]:.2e}, more than {limit:g}: "
            "nothing is timed\n" + "\n".join(lines)
        )


def _or_infinite(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def ratio(found: Measured, name: str, ours: str = worker.MEGALITE) -> dict[str, Any]:
    """Our rate over this contender's: medians over rounds, in wall and in CPU time."""
    return {
        key: statistics.median(own / theirs for own, theirs in zip(values[name], values[ours]))
        for key, values in (("wall", found.seconds), ("cpu", found.cpu))
    }
