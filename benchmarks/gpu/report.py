"""The tables that run.py prints: ceilings, kernels, profiles, steps with their floor."""

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.kernels import COMPILED
from benchmarks.gpu.legs import Row
from benchmarks.gpu.step import config_of
from megalite.config.model import ModelConfig
from megalite.models.shapes import attention_core_flops, flops_per_token, parameter_count

AGAINST = ("torch", COMPILED, "apex")
NORMS_AND_ACTIVATIONS = 36 * 2
"""Minimum bytes of a layer per bf16 element of [tokens, hidden]: two sums with norms, 4 passes each way, GELU 8 and 12."""
LOSS = 6  # bytes per bf16 logit: a read in the forward, a read and a write in the backward
OPTIMIZER = 34
"""Bytes per parameter: 30 of AdamW with fp32 gradients and bf16 weights, 4 of the gradient norm."""


def copy_rate(rows: Sequence[Row]) -> float | None:
    """Return the measured GB/s, reads and writes together."""
    return next((row["gb_s"] for row in rows if row.get("what") == "copy" and "gb_s" in row), None)


def gemm_rate(rows: Sequence[Row]) -> float | None:
    """Return the measured TFLOP/s of the square product in bf16."""
    products = [row for row in rows if row.get("what") == "gemm" and "tflops" in row]
    square = (row for row in products if row["shape"].startswith("square") and row["dtype"] == "bfloat16")
    return next((row["tflops"] for row in square), None)


def floor(
    ceilings: Sequence[Row], model: ModelConfig, *, seq_length: int, microbatch: int, accumulation: int
) -> dict[str, float] | None:
    """Return the time of a step in which each piece runs at the measured ceiling.

    Returns:
        category of the profile -> ms in bf16 without recomputation; None without all three ceilings."""
    copy, gemm = copy_rate(ceilings), gemm_rate(ceilings)
    backends = [row for row in ceilings if row.get("what") == "attention" and "tflops" in row]
    best = min(backends, key=lambda row: row["ms"] + row["backward_ms"], default=None)
    if copy is None or gemm is None or best is None:
        return None
    tokens = seq_length * microbatch * accumulation
    layers = range(model.num_layers)
    core = sum(attention_core_flops(model, index, seq_length, "megatron") for index in layers)  # of the forward, per token
    products = flops_per_token(model, seq_length, "megatron") - 3 * core
    moved = model.num_layers * NORMS_AND_ACTIVATIONS * model.hidden_size
    return {
        "GEMM": tokens * products / gemm / 1e9,
        # The backward has five products, the forward two.
        "attention": tokens * core * (1 / best["tflops"] + 2.5 / best["backward_tflops"]) / 1e9,
        "norms and activations": tokens * moved / copy / 1e6,
        "cross-entropy": tokens * model.padded_vocab_size * LOSS / copy / 1e6,
        "optimizer": parameter_count(model) * OPTIMIZER / copy / 1e6,
    }


def floor_of(rows: Sequence[Row], row: Row) -> dict[str, float] | None:
    """Return the floor of a row's run, if it is in bf16."""
    if row["precision"] != "bf16":
        return None
    counts = {"microbatch": row["microbatch"], "accumulation": row["accumulation"]}
    config = config_of(row["model"], device="cpu", **counts)
    return floor(rows, config.model, seq_length=config.training.seq_length, **counts)


def ceilings_table(rows: Sequence[Row]) -> list[str]:
    lines = ["Ceilings", f"{'':<46}{'ms':>9} {'TFLOP/s':>9} {'GB/s':>8}"]
    for row in rows:
        if row.get("part") != "ceilings" or "shape" not in row:
            continue
        name = " ".join(str(row[key]) for key in ("what", "shape", "dtype", "backend") if key in row)
        if "failed" in row:
            lines.append(f"{name:<46}  - {row['failed']}")
            continue
        rate = f"{row['tflops']:9.1f}" if "tflops" in row else " " * 9
        bandwidth = f"{row['gb_s']:8.0f}" if "gb_s" in row else ""
        lines.append(f"{name:<46}{row['ms']:9.3f} {rate} {bandwidth}".rstrip())
        if "ran" in row:
            name = f"  its backward; what ran: {row['ran']}"
            lines.append(f"{name:<46}{row['backward_ms']:9.3f} {row['backward_tflops']:9.1f}")
    return lines


def kernels_table(rows: Sequence[Row]) -> list[str]:
    """Return a line per kernel and pass, then what is missing."""
    copy, gemm = copy_rate(rows), gemm_rate(rows)
    own = [row for row in rows if row.get("part") == "kernels" and "ms" in row]
    rivals = " ".join(f"{'x ' + name:>9}" for name in AGAINST)
    lines = [
        "Kernels (x: rival's time / this time; %: of the measured copy or product; copy: share of a copy of as many bytes)",
        f"{'':<18}{'shape':<16}{'pass':<11}{'by':<8}{'ms':>9} {'p20-p80':>15} {'graph':>8} {'GB/s':>6} {'%':>4} {'copy':>4} "
        f"{rivals} {'error':>8} {'max':>8} same",
    ]
    times = {(row["backend"], *_key(row)): row["ms"] for row in own}
    for row in own:
        rate, best = ("tflops", gemm) if "tflops" in row else ("gb_s", copy)
        share = f"{100 * row[rate] / best:.0f}" if best else "-"
        equal = f"{100 * row['copy_ms'] / min(row['ms'], row.get('graph_ms', row['ms'])):.0f}"
        graph = f"{row['graph_ms']:8.4f}" if "graph_ms" in row else f"{'-':>8}"
        shape = f"{row['rows']} x {row['size']}" if row["rows"] > 1 else str(row["size"])
        others = [None if name == row["backend"] else times.get((name, *_key(row))) for name in AGAINST]
        against = " ".join(f"{other / row['ms']:>9.2f}" if other else f"{'-':>9}" for other in others)
        lines.append(
            f"{row['case']:<18}{shape:<16}{row['pass']:<11}{row['backend']:<8}{row['ms']:9.4f} "
            f"{row['p20']:7.4f}-{row['p80']:<7.4f} {graph} {row['gb_s']:6.0f} {share:>4} {equal:>4} {against} "
            f"{row['error']:8.1e} {row['max_error']:8.1e} {'yes' if row['bitwise'] else 'NO'}"
        )
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row.get("part") == "kernels" and "failed" in row:
            what = f"{row.get('case', row.get('operation'))} {row.get('size', '')}".strip()
            missing.setdefault(f"{row.get('backend', 'all')}: {row['failed']}", []).append(what)
    lines += [f"  missing: {reason} ({', '.join(dict.fromkeys(of))})" for reason, of in missing.items()]
    return lines


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("case", "rows", "size", "pass"))


def steps_table(rows: Sequence[Row]) -> list[str]:
    """Return a line per run; the floor is the step with each piece at its ceiling."""
    lines = [
        "Steps (mb: microbatch, ga: microbatches per step, floor: every piece at its measured ceiling)",
        f"{'':<34}{'model':<12}{'type':<6}{'mb':>3}{'ga':>3}{'ms':>10}{'floor':>8}{'tokens/s':>10}{'MFU PaLM':>9}"
        f"{'causal':>8}{'GiB':>7}",
    ]
    for row in rows:
        if row.get("part") not in ("step", "peer") or "step_ms" in row:  # rows of a profile have it
            continue
        name = f"{row['who']:<34}{row['model']:<12}{row['precision']:<6}{row['microbatch']:>3}"
        if "failed" in row:
            lines.append(f"{name}  - {row['failed']}")
            continue
        least = floor_of(rows, row)
        at_best = f"{sum(least.values()):.0f}" if least else "-"
        palm, causal = ("-" if row[key] is None else f"{100 * row[key]:.1f} %" for key in ("mfu_palm", "mfu_causal"))
        lines.append(
            f"{name}{row['accumulation']:>3}{row['ms']:10.1f}{at_best:>8}{row['tokens_per_second']:10.0f}"
            f"{palm:>9}{causal:>8}{row['peak_gib']:7.1f}"
        )
    return lines


def profiles_table(rows: Sequence[Row]) -> list[str]:
    """Return where the time of each profiled step goes."""
    runs: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if "step_ms" in row:
            runs.setdefault((row["who"], row["model"], row["precision"]), []).append(row)
    lines: list[str] = []
    for key, of in runs.items():
        least = floor_of(rows, of[0]) or {}
        lines.append(f"Profile: {', '.join(key)}, step of {of[0]['step_ms']:.1f} ms")
        for row in of:
            at_best = f"   floor {least[row['profile']]:8.1f} ms" if row["profile"] in least else ""
            lines.append(f"  {row['profile']:<24}{row['ms']:10.2f} ms {100 * row['share']:6.1f} %{at_best}")
            for name, ms in row["pieces"].items():
                lines.append(f"      {100 * ms / row['step_ms']:5.1f} %  {name}")
    return lines
