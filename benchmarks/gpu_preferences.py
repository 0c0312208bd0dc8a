"""Part 3: the order among backends that follows from what was measured, in the format of megalite's table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_kernels import acceptable
from gpu_legs import Row

from megalite.config.compute import BACKENDS
from megalite.kernels.preferences import Rule, read_preferences, shipped_preferences

CLEAR = 0.02
"""A backend must be faster than torch by this share to go before it."""
HALVES = ["bfloat16", "float16"]


def rules(rows: Sequence[Row], *, device: str, measured_on: str) -> list[dict[str, Any]]:
    """A rule an operation and range of sizes.

    A backend's time at a size is the sum of its passes as launched from Python. What failed, is not repeatable or is
    less exact than it may be has no place in the order. Sizes next to each other with one order share a rule; what
    holds for the smallest measured size holds below it too.

    Args:
        rows: of part 2.
        device: of the rules, such as `sm_90`.
        measured_on: device and versions, for `because`.
    """
    found: list[dict[str, Any]] = []
    for operation in dict.fromkeys(row["operation"] for row in rows if "operation" in row):
        # A case with a comma in its name is a variant, which the table of preferences does not tell apart.
        own = [row for row in rows if row.get("case") == operation]
        last: list[str] | None = None
        for number, size in enumerate(sorted({row["size"] for row in own})):
            at = [row for row in own if row["size"] == size]
            order, words = _order(at)
            if order is None or order == last:
                continue
            dtype = at[0]["dtype"]
            rule: dict[str, Any] = {"operation": operation, "device": device}
            if dtype != "float32":
                rule["dtypes"] = HALVES
            if number:
                rule["from_size"] = size
            found.append({**rule, "order": order, "because": f"measured on {measured_on}: {words}"})
            last = order
    return found


def _order(rows: list[Row]) -> tuple[list[str] | None, str]:
    """(backends, best first; the figures in words) at one size."""
    of_torch = [row for row in rows if row["backend"] == "torch"]
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    for backend in BACKENDS:
        own = [row for row in rows if row["backend"] == backend]
        reasons = [reason for row in own if (reason := acceptable(row, of_torch[0] if of_torch else None))]
        if reasons and any("ms" in row for row in own):
            refused[backend] = reasons[0]
        elif own and not reasons:
            times[backend] = sum(row["ms"] for row in own)
    if "torch" not in times:
        return None, ""
    # What torch does nearly as fast, torch does: it needs no compiler, and is what everybody else runs.
    order = sorted(times, key=lambda backend: times[backend] * (1.0 - CLEAR if backend == "torch" else 1.0))
    words = ", ".join(f"{backend} {times[backend]:.3f} ms" for backend in order)
    words += "".join(f"; {backend} refused: {reason}" for backend, reason in refused.items())
    shape = f"{rows[0]['rows']} x {rows[0]['size']}" if rows[0]["rows"] > 1 else f"{rows[0]['size']} elements"
    return order, f"{shape}: {words}"


def write(path: Path, measured: list[dict[str, Any]]) -> None:
    """The measured rules, and those of the shipped table that they do not replace; read back to be sure."""
    replaced = {(rule["operation"], rule["device"]) for rule in measured}
    kept = [
        _as_row(rule) for rule in shipped_preferences().rules if (rule.operation, rule.device) not in replaced
    ]
    text = "# Which backend goes first, by operation, device, type and size of the last dimension. Where no rule fits: torch.\n"
    text += "# Written by benchmarks/gpu.py; `because` says what a rule rests on.\n"
    for row in [*measured, *kept]:
        text += yaml.safe_dump([row], sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    read_preferences(text, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def capability(machine: Row) -> str:
    """What rules call the device."""
    return str(machine.get("capability", "cuda" if torch.cuda.is_available() else "cpu"))


def _as_row(rule: Rule) -> dict[str, Any]:
    row: dict[str, Any] = {"operation": rule.operation, "device": rule.device}
    if rule.dtypes:
        row["dtypes"] = sorted(rule.dtypes)
    if rule.from_size:
        row["from_size"] = rule.from_size
    return {**row, "order": list(rule.order), "because": rule.because}
