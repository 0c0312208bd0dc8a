"""The tables that gpu.py prints, made of the rows of all parts."""

from collections.abc import Sequence

from gpu_floor import copy_rate, floor, gemm_rate
from gpu_legs import Row
from gpu_rivals import COMPILED, LIGER
from gpu_step import config_of

AGAINST = ("torch", COMPILED, "apex", LIGER)


def ceilings_table(rows: Sequence[Row]) -> list[str]:
    """What the device gives."""
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
            lines.append(
                f"{'  its backward; what ran: ' + row['ran']:<46}{row['backward_ms']:9.3f} {row['backward_tflops']:9.1f}"
            )
    return lines


def kernels_table(rows: Sequence[Row]) -> list[str]:
    """A line a kernel and pass, then what there is not."""
    copy, gemm = copy_rate(rows), gemm_rate(rows)
    own = [row for row in rows if row.get("part") == "kernels" and "ms" in row]
    lines = [
        "Kernels (x: time of that rival / time of this; %: of the measured copy, of a product of the measured GEMM)",
        f"{'':<18}{'shape':<16}{'pass':<11}{'by':<8}{'ms':>9} {'p20-p80':>15} {'graph':>8} {'GB/s':>6} {'%':>4} "
        + " ".join(f"{'x ' + name:>9}" for name in AGAINST)
        + f" {'error':>8} {'max':>8} same",
    ]
    for row in own:
        share = 100 * row["gb_s"] / copy if copy else None
        if "tflops" in row:
            share = 100 * row["tflops"] / gemm if gemm else None
        graph = f"{row['graph_ms']:8.4f}" if "graph_ms" in row else f"{'-':>8}"
        shape = f"{row['rows']} x {row['size']}" if row["rows"] > 1 else str(row["size"])
        lines.append(
            f"{row['case']:<18}{shape:<16}{row['pass']:<11}{row['backend']:<8}{row['ms']:9.4f} "
            f"{row['p20']:7.4f}-{row['p80']:<7.4f} {graph} {row['gb_s']:6.0f} {_percent(share):>4} "
            + " ".join(f"{_times(_same(own, row, name), row):>9}" for name in AGAINST)
            + f" {row['error']:8.1e} {row['max_error']:8.1e} {'yes' if row['bitwise'] else 'NO'}"
        )
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row.get("part") == "kernels" and "failed" in row:
            reason = f"{row.get('backend', 'all')}: {row['failed']}"
            missing.setdefault(reason, []).append(
                f"{row.get('case', row.get('operation'))} {row.get('size', '')}".strip()
            )
    lines += [f"  not there: {reason} ({', '.join(dict.fromkeys(of))})" for reason, of in missing.items()]
    return lines


def _same(rows: Sequence[Row], row: Row, backend: str) -> Row | None:
    keys = ("case", "rows", "size", "pass")
    return next(
        (
            other
            for other in rows
            if other["backend"] == backend and all(other[key] == row[key] for key in keys)
        ),
        None,
    )


def _times(other: Row | None, row: Row) -> str:
    return "-" if other is None or other is row else f"{other['ms'] / row['ms']:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0f}"


def steps_table(rows: Sequence[Row]) -> list[str]:
    """A line a run; the floor is the step with each piece at its ceiling."""
    lines = [
        "Steps (mb: microbatch, ga: microbatches a step, floor: every piece at its measured ceiling)",
        f"{'':<34}{'model':<12}{'type':<6}{'mb':>3}{'ga':>3}{'ms':>10}{'floor':>8}{'tokens/s':>10}{'MFU PaLM':>9}{'causal':>8}"
        f"{'GiB':>7}",
    ]
    for row in rows:
        if row.get("part") not in ("step", "peer") or "profile" in row:
            continue
        name = f"{row['who']:<34}{row['model']:<12}{row['precision']:<6}{row['microbatch']:>3}"
        if "failed" in row:
            lines.append(f"{name}  - {row['failed']}")
            continue
        least = floor_of(rows, row)
        at_best = f"{sum(least.values()):.0f}" if least else "-"
        lines.append(
            f"{name}{row['accumulation']:>3}{row['ms']:10.1f}{at_best:>8}"
            f"{row['tokens_per_second']:10.0f}{_share(row['mfu_palm']):>9}{_share(row['mfu_causal']):>8}{row['peak_gib']:7.1f}"
        )
    return lines


def floor_of(rows: Sequence[Row], row: Row) -> dict[str, float] | None:
    """Of the run that a row is of, if it is in bf16."""
    if row["precision"] != "bf16":
        return None
    config = config_of(
        row["model"], device="cpu", microbatch=row["microbatch"], accumulation=row["accumulation"]
    )
    return floor(
        rows,
        config.model,
        seq_length=config.training.seq_length,
        microbatch=row["microbatch"],
        accumulation=row["accumulation"],
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def profiles_table(rows: Sequence[Row]) -> list[str]:
    """Where each profiled step's time goes."""
    own = [row for row in rows if "profile" in row]
    lines: list[str] = []
    for key in dict.fromkeys((row["who"], row["model"], row["precision"]) for row in own):
        of = [row for row in own if (row["who"], row["model"], row["precision"]) == key]
        least = floor_of(rows, of[0]) or {}
        lines.append(f"Profile: {', '.join(key)}, step of {of[0]['step_ms']:.1f} ms")
        for row in of:
            at_best = f"   floor {least[row['profile']]:8.1f} ms" if row["profile"] in least else ""
            lines.append(f"  {row['profile']:<24}{row['ms']:10.2f} ms {100 * row['share']:6.1f} %{at_best}")
            for name, ms in row["pieces"].items():
                lines.append(f"      {100 * ms / row['step_ms']:5.1f} %  {name}")
    return lines
