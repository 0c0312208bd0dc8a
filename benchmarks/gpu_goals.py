"""What was aimed at, beside what was measured."""

from collections.abc import Callable, Sequence

from gpu_floor import copy_rate
from gpu_legs import Row

LARGE = 64 << 20
"""Bytes of a tensor from which memory, and not the launch, decides."""


def goals_table(rows: Sequence[Row]) -> list[str]:
    """A line a goal: met, missed, or not measured."""
    lines = ["Goals"]
    for name, wanted, found in [*_of_steps(rows), *_of_kernels(rows)]:
        verdict = (
            "not measured" if found is None else f"{found:8.3f}  {'met' if found >= wanted else 'MISSED'}"
        )
        lines.append(f"  {name:<66} >= {wanted:9.3f}   {verdict}")
    return lines


def run_of(
    rows: Sequence[Row], model: str, accumulation: int, *, precision: str = "bf16", who: str = "megalite"
) -> Row | None:
    """A run's row; of several microbatches the fastest."""
    found = [
        row
        for row in rows
        if row.get("part") == "step"
        and "tokens_per_second" in row
        and (row["who"], row["model"], row["precision"]) == (who, model, precision)
        and row["accumulation"] >= accumulation
        and (accumulation > 1 or row["accumulation"] <= 2)
    ]
    return max(found, key=lambda row: row["tokens_per_second"], default=None)


def _of_steps(rows: Sequence[Row]) -> list[tuple[str, float, float | None]]:
    def value(row: Row | None, key: str) -> float | None:
        return None if row is None else row[key]

    long, short = run_of(rows, "GPT 1.3B", 8), run_of(rows, "GPT 1.3B", 1)
    small, eight_bit = run_of(rows, "GPT-2 124M", 1), run_of(rows, "GPT 1.3B", 8, precision="fp8")
    gain = (
        None
        if long is None or eight_bit is None
        else eight_bit["tokens_per_second"] / long["tokens_per_second"]
    )
    idle = [row["share"] for row in rows if row.get("profile") == "idle" and row["model"] == "GPT 1.3B"]
    found: list[tuple[str, float, float | None]] = [
        ("GPT 1.3B, 8 microbatches: MFU, PaLM", 0.60, value(long, "mfu_palm")),
        ("GPT 1.3B, 8 microbatches: MFU, causal", 0.56, value(long, "mfu_causal")),
        ("GPT 1.3B, 8 microbatches: tokens/s", 65000.0, value(long, "tokens_per_second")),
        ("GPT 1.3B, 1 microbatch: MFU, PaLM", 0.56, value(short, "mfu_palm")),
        ("GPT-2 124M: MFU, PaLM", 0.45, value(small, "mfu_palm")),
        ("GPT 1.3B: FP8's tokens/s over bf16's", 1.20, gain),
        ("GPT 1.3B: share of the step in which the device works", 0.98, 1.0 - idle[0] if idle else None),
    ]
    for model, accumulation in (("GPT 1.3B", 8), ("GPT-2 124M", 1)):
        own = run_of(rows, model, accumulation)
        for who in dict.fromkeys(row["who"] for row in rows if row.get("part") == "step"):
            other = run_of(rows, model, accumulation, who=who)
            if who.startswith("megalite") or own is None or other is None:
                continue
            found.append(
                (f"{model}: tokens/s over {who}", 1.15, own["tokens_per_second"] / other["tokens_per_second"])
            )
    return found


def _of_kernels(rows: Sequence[Row]) -> list[tuple[str, float, float | None]]:
    copy = copy_rate(rows)
    timed = [row for row in rows if row.get("part") == "kernels" and "ms" in row]
    own = [row for row in timed if row["backend"] in ("torch", "triton", "apex")]
    large = [row for row in own if row["bytes"] >= 2 * LARGE and "tflops" not in row]

    def least(chosen: Callable[[Row], bool]) -> float | None:
        """Of all cases and sizes the smallest share of the copy rate that the best backend reaches."""
        best: dict[tuple[str, int, str], float] = {}
        for row in large:
            if copy and chosen(row):
                key = (row["case"], row["size"], row["pass"])
                best[key] = max(best.get(key, 0.0), row["gb_s"] / copy)
        return min(best.values(), default=None)

    sums = ("rmsnorm", "layernorm", "add_norm", "bias_gelu")
    """Their backward sums over all rows for the weights' gradients."""

    def with_sums(row: Row) -> bool:
        return row["pass"] == "backward" and row["operation"] in sums

    times: dict[tuple[str, int], dict[str, float]] = {}
    for row in own:
        of = times.setdefault((row["case"], row["size"]), {"preferred": 0.0})
        of[row["backend"]] = of.get(row["backend"], 0.0) + row["ms"]
        of["preferred"] += row["ms"] * (row["backend"] == row["preferred"])
    ratios = [of["torch"] / of["preferred"] for of in times.values() if "torch" in of and of["preferred"]]
    return [
        (
            "kernels that move 128 MB and more: least share of the copy rate",
            0.90,
            least(lambda row: not with_sums(row)),
        ),
        ("  their backwards with sums over the rows", 0.80, least(with_sums)),
        ("least speed of the preferred backend over torch's eager kernel", 1.0, min(ratios, default=None)),
    ]
