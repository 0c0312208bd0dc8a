"""Plans for chains of unequal layers, from benchmarks/results/planner-chain.json."""

import json
from typing import Any

from pages import ROOT

COLUMNS = ("the paper's plan", "PipeDream", "GPipe", "data parallel", "straight pipeline")


def table() -> str:
    """A row for each model on each cluster."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "planner-chain.json").read_text(encoding="utf-8"))["rows"]
    lines = [
        "| model | cluster | our plan | idle | paper's plan | its time | PipeDream | GPipe | data parallel | straight |"
    ]
    lines.append("|" + "---|" * 10)
    for row in sorted(rows, key=lambda row: row["model"]):
        cells = (row["model"], row["cluster"], row["plan"], str(row["idle"] or ""), row["paper"] or "")
        lines.append(f"| {' | '.join((*cells, *(_times(row, name) for name in COLUMNS)))} |")
    return "\n".join(lines)


def _times(row: dict[str, Any], name: str) -> str:
    if name not in row["times_longer"]:
        return "none fits" if name == "GPipe" else ""
    return f"{row['times_longer'][name]:.2f}" + "\\*" * (not row["fits"][name])
