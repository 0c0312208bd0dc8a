"""The rounds of peers.run: build every contender, compare their losses, time them in turn."""

import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import common
from benchmarks.peers import worker
from benchmarks.peers.case import Case
from benchmarks.peers.megalite import step_flops
from megalite.parity.pool import RankFailure, RankPool

BUILD_SECONDS, STEP_SECONDS = 300.0, 600.0


class Disagreement(Exception):
    """The contenders do not train the same model."""


@dataclass
class Measured:
    """Results of the contenders of one layout. Times are per step, one per round; CPU time is summed over ranks."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)  # largest difference from megalite's loss
    failed: dict[str, str] = field(default_factory=dict)  # contender -> error
    gemm: list[float] = field(default_factory=list)  # FLOP/s of matrix products on one rank
    losses: dict[str, list[float]] = field(default_factory=dict)  # of the steps before the rounds


def compete(
    pools: Mapping[str, RankPool], case: Case, *, limit: float, checks: int, rounds: int, steps: int, gemm: int,
    seed: int,
) -> Measured:  # fmt: skip
    """Measure one model in one layout: `checks` steps with losses within `limit`, then `rounds` turns of `steps` each.

    Raises:
        Disagreement: a contender's losses are not megalite's."""
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
    for order in common.shuffled(names, rounds, seed):
        pool = pools[worker.MEGALITE]
        found.gemm += pool.run(ranks, worker.gemm_rate, case.layout.threads, case.bf16, gemm, 0.2)[:1]
        for name in order:
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
    difference = found.differences[worst]
    if _or_infinite(difference) > limit:
        lines = [f"{name}: {' '.join(f'{loss:.6f}' for loss in of)}" for name, of in found.losses.items()]
        raise Disagreement(
            f"the losses of {worst} differ from megalite's by {difference:.2e}, more than {limit:g}: "
            "nothing is timed\n" + "\n".join(lines)
        )


def _or_infinite(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def ratio(found: Measured, name: str, ours: str = worker.MEGALITE) -> dict[str, Any]:
    """Ratio of megalite's rate to this contender's: median over rounds, in wall and in CPU time."""
    sides = {"wall": found.seconds, "cpu": found.cpu}
    return {key: round(common.ratio(values[name], values[ours]), 4) for key, values in sides.items()}


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return values * 3 if len(values) < 2 else statistics.quantiles(values, n=4, method="inclusive")


NOT_GIVEN = "not given"
HEADER = ("contender", "tokens/s", "quartiles", "CPU s per step", "of GEMM", "ours", "ours, CPU", "loss differs by")


def row_of(name: str, found: Measured, case: Case) -> dict[str, Any]:
    if name in found.failed:
        return {"contender": name, "note": f"failed: {found.failed[name]}"}
    tokens = case.size.batch * case.size.seq
    rates = [tokens / seconds for seconds in found.seconds[name]]
    low, middle, high = quartiles(rates)
    rounds = zip(found.seconds[name], found.gemm)
    of_gemm = [step_flops(case) / seconds / (rate * case.layout.ranks) for seconds, rate in rounds]
    row = {"contender": name, "tokens_per_second": round(middle, 1), "quartiles": [round(low, 1), round(high, 1)]}
    row |= {"cpu_seconds": round(statistics.median(found.cpu[name]), 4), "of_gemm": round(statistics.median(of_gemm), 4)}
    row |= {"gemm_gflops_per_rank": round(statistics.median(found.gemm) / 1e9, 1), "losses": found.losses[name]}
    row |= {"loss_difference": found.differences[name], "rounds": [round(rate, 1) for rate in rates]}
    if worker.CONTENDERS[name].ours:
        peers = {peer: ratio(found, peer, name) for peer in found.seconds if not worker.CONTENDERS[peer].ours}
        if peers:
            best = min(peers, key=lambda peer: peers[peer]["wall"])
            row["over_the_best_peer"] = {"peer": best, **peers[best]}
    else:
        row["ours_over_theirs"] = ratio(found, name)
    return row


def table(result: dict[str, Any]) -> str:
    """Markdown table of a layout's rows, followed by the comparison with the best peer."""
    cells: list[tuple[str, ...]] = [HEADER]
    measured = [row for row in result["rows"] if "note" not in row]
    for row in result["rows"]:
        if "note" in row:
            cells.append((row["contender"], row["note"], *[""] * (len(HEADER) - 2)))
            continue
        ours, (low, high) = row.get("ours_over_theirs"), row["quartiles"]
        speed = (f"{row['tokens_per_second']:.0f}", f"{low:.0f} to {high:.0f}", f"{row['cpu_seconds']:.2f}")
        ratios = (f"{ours['wall']:.2f}", f"{ours['cpu']:.2f}") if ours else ("", "")
        off = "" if row["contender"] == worker.MEGALITE else f"{row['loss_difference']:.1e}"
        cells.append((row["contender"], *speed, f"{row['of_gemm']:.0%}", *ratios, off))
    rate = f"GEMM {measured[0]['gemm_gflops_per_rank']:.0f} GFLOP/s per rank"
    title = ", ".join(result[key] for key in ("model", "layout", "precision"))
    title += f" ({result['rounds']} rounds; {rate})"
    return "\n".join(["", title, "", common.markdown(cells), "", verdict(measured)])


def verdict(measured: list[dict[str, Any]]) -> str:
    """Compare each variant of megalite with the fastest peer."""
    lines = [
        f"{row['contender']} over the best peer ({best['peer']}): {best['wall']:.2f} (CPU time {best['cpu']:.2f})"
        for row in measured
        if (best := row.get("over_the_best_peer"))
    ]
    return "\n".join(lines) or "no peer ran"
