"""Table 1 of SC'21, and PTD-P of its table 2, beside what the planner says of each row."""

import sys

from pages import ROOT

sys.path.append(str(ROOT))
from benchmarks.planner.sc21 import PEAK, TABLE_1, TABLE_2, row


def table() -> str:
    """TFLOP/s per GPU by the paper's F, and their share of the peak."""
    lines = ["| preset | tp, pp | GPUs | batch | paper | planner | |", "|---|---|---|---|---|---|---|"]
    for found in map(row, TABLE_1 + TABLE_2):
        paper, ours = found["paper"], found["tflops"]
        shares = (
            f"{paper} ({paper / PEAK:.0%}) | {ours:.0f} ({ours / PEAK:.0%}), micro batch {found['micro_batch_size']}"
        )
        layout = f"{found['tp']}, {found['pp']} | {found['gpus']:,} | {found['batch']:,}"
        lines.append(f"| `{found['preset']}` | {layout} | {shares} | {ours / paper - 1:+.1%} |")
    return "\n".join(lines) + "\n"
