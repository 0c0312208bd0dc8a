"""The rows and tables of step_vs_peers.py."""

import statistics
from typing import Any

import step_vs_peers_worker as worker
from peer_case import Case
from peer_megalite import step_flops
from step_vs_peers_rounds import Measured, quartiles, ratio

NOT_GIVEN = "not given"
HEADER = (
    "contender",
    "tokens/s",
    "quartiles",
    "CPU s a step",
    "of GEMM",
    "ours",
    "ours, CPU",
    "loss differs by",
)


def row_of(name: str, found: Measured, case: Case) -> dict[str, Any]:
    """A contender's figures."""
    if name in found.failed:
        return {"contender": name, "note": f"failed: {found.failed[name]}"}
    tokens = case.size.batch * case.size.seq
    rates = [tokens / seconds for seconds in found.seconds[name]]
    low, middle, high = quartiles(rates)
    of_gemm = [
        step_flops(case) / seconds / (rate * case.layout.ranks)
        for seconds, rate in zip(found.seconds[name], found.gemm)
    ]
    row = {
        "contender": name,
        "tokens_per_second": round(middle, 1),
        "quartiles": [round(low, 1), round(high, 1)],
        "cpu_seconds": round(statistics.median(found.cpu[name]), 4),
        "of_gemm": round(statistics.median(of_gemm), 4),
        "gemm_gflops_a_rank": round(statistics.median(found.gemm) / 1e9, 1),
        "loss_difference": found.differences[name],
        "losses": found.losses[name],
        "rounds": [round(rate, 1) for rate in rates],
    }
    if worker.CONTENDERS[name].ours:
        peers = {peer: ratio(found, peer, name) for peer in found.seconds if not worker.CONTENDERS[peer].ours}
        if peers:
            best = min(peers, key=lambda peer: peers[peer]["wall"])
            row["over_the_best_peer"] = {"peer": best, **_rounded(peers[best])}
    else:
        row["ours_over_theirs"] = _rounded(ratio(found, name))
    return row


def _rounded(ratios: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in ratios.items()}


def table(result: dict[str, Any]) -> str:
    """A layout's rows in Markdown, and what was reached against the best peer."""
    cells = [HEADER]
    measured = [row for row in result["rows"] if "note" not in row]
    for row in result["rows"]:
        if "note" in row:
            cells.append((row["contender"], row["note"], *[""] * (len(HEADER) - 2)))
            continue
        ours = row.get("ours_over_theirs", {})
        cells.append(
            (
                row["contender"],
                f"{row['tokens_per_second']:.0f}",
                "{:.0f} to {:.0f}".format(*row["quartiles"]),
                f"{row['cpu_seconds']:.2f}",
                f"{row['of_gemm']:.0%}",
                f"{ours['wall']:.2f}" if ours else "",
                f"{ours['cpu']:.2f}" if ours else "",
                "" if row["contender"] == worker.MEGALITE else f"{row['loss_difference']:.1e}",
            )
        )
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|" + "---|" * len(HEADER))
    rate = f"GEMM {measured[0]['gemm_gflops_a_rank']:.0f} GFLOP/s a rank"
    title = (
        f"{result['model']}, {result['layout']}, {result['precision']} ({result['rounds']} rounds; {rate})"
    )
    return "\n".join(["", title, "", *lines, "", verdict(measured)])


def verdict(measured: list[dict[str, Any]]) -> str:
    """megalite in each of its ways against the peer that came nearest."""
    lines = [
        f"{row['contender']} over the best peer ({best['peer']}): {best['wall']:.2f} (CPU time {best['cpu']:.2f})"
        for row in measured
        if (best := row.get("over_the_best_peer"))
    ]
    return "\n".join(lines) or "no peer ran"
