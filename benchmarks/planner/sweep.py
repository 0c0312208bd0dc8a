"""Does the planner tell which layout is the fastest on this machine? Profile it, predict layouts, run them, compare.

python -m benchmarks.planner.sweep --folder runs/planner-sweep [--json FILE] [--profile-seconds N] [--steps N] [--passes N]

17 layouts of a GPT with 4.5 million parameters on 4 gloo ranks of one thread each. Run it on a machine where nothing else
runs. All layouts are run once in each pass, some six minutes; a layout's time is the median over the passes, since the
speed of a virtual machine drifts by more than what lies between neighbouring layouts. The same command continues where it was
stopped.
"""

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import common
from megalite.sweep.report import spearman

RANKS = 4
BASE = {
    "model": common.settings(
        "num_layers=4 hidden_size=256 num_attention_heads=4 vocab_size=4096 position_embedding_type=rope "
        "normalization=RMSNorm activation=swiglu ffn_hidden_size=768 add_bias_linear=false"
    ),
    "training": common.settings("seq_length=256 micro_batch_size=1 global_batch_size=16 train_iters=8 device=cpu"),
    "data": {"mock_data": True},
}
LAYOUTS = {
    "ranks": RANKS,
    "grid": {"tp": [1, 2, 4], "pp": [1, 2, 4], "micro_batch_size": [1, 4]},
    "exclude": ["tp * pp > 4", {"pp": 4, "micro_batch_size": 4}],
    "list": [
        {"pp": 2, "pipeline_schedule": "zb-h1"},
        {"pp": 2, "vpp": 2},
        {"dp_strategy": "distributed-optimizer"},
        *({"recompute_granularity": "full", **layout} for layout in ({}, {"tp": 2}, {"pp": 2})),
    ],
}


def profile(folder: Path, seconds: float) -> None:
    """cluster.yaml and stack.yaml of this machine, unless they are there."""
    cluster, stack = str(folder / "cluster.yaml"), str(folder / "stack.yaml")
    if not Path(stack).exists():
        words = ("-m", "megalite.cli.profile", "--seconds", f"{seconds:g}")
        common.run_python(*words, "--output", cluster, "--output-stack", stack, ranks=RANKS)


def sweep(folder: Path, steps: int, turn: int) -> list[dict[str, Any]]:
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    files = {name: str(folder / f"{name}.yaml") for name in ("cluster", "stack")}
    content = {"base": "base.yaml", **LAYOUTS, "steps": steps, "warm_up_steps": 3, **files}
    content["environment"] = {"OMP_NUM_THREADS": 1}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    output = folder / f"results-{turn}"
    common.run_python("-m", "megalite.cli.main", "sweep", str(folder / "sweep.yaml"), "--output", str(output))
    with (output / "results.csv").open() as file:
        return list(csv.DictReader(file))


def label(row: dict[str, Any]) -> str:
    """`tp 1, pp 2, vpp 2, micro batch 1`, and schedule and strategy where they are not the usual ones."""
    words = [f"tp {row['tp']}", f"pp {row['pp']}", f"micro batch {row['micro_batch_size']}"]
    words += [f"vpp {row['vpp']}"] if row["vpp"] != "1" else []
    words += [row["pipeline_schedule"]] if row["pipeline_schedule"] else []
    words += [row["dp_strategy"]] if row["dp_strategy"] != "all-reduce" else []
    words += ["full recompute"] if row.get("recompute_granularity") == "full" else []
    return ", ".join(words)


def compare(passes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Measured beside predicted, the rank correlation, the regret of the pick and the mean error."""
    by_layout: dict[str, list[dict[str, Any]]] = {}
    for rows in passes:
        for row in rows:
            by_layout.setdefault(label(row), []).append(row)
    failed = [name for name, rows in by_layout.items() if any(row["status"] != "ok" for row in rows)]
    found: list[dict[str, Any]] = []
    for name, rows in by_layout.items():
        if name not in failed:
            seconds = [float(row["step_seconds"]) for row in rows]
            row = {"layout": name, "predicted_seconds": float(rows[0]["predicted_step_seconds"])}
            found.append({**row, "measured_seconds": statistics.median(seconds), "passes": seconds})
    predicted = [row["predicted_seconds"] for row in found]
    measured = [row["measured_seconds"] for row in found]
    pick = min(found, key=lambda row: row["predicted_seconds"])
    return {
        "layouts": sorted(found, key=lambda row: row["measured_seconds"]),
        "failed": failed,
        "rank_correlation": spearman(predicted, measured),
        "regret": pick["measured_seconds"] / min(measured) - 1.0,
        "mean_error": sum(abs(p / m - 1.0) for p, m in zip(predicted, measured)) / len(found),
    }


def measure(folder: Path, *, seconds: float, steps: int, passes: int) -> dict[str, Any]:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    profile(folder, seconds)
    return compare([sweep(folder, steps, turn) for turn in range(passes)])


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for profile, runs and results")
    parser.add_argument("--profile-seconds", type=float, default=120.0, metavar="N")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of each run; 3 are not measured")
    parser.add_argument("--passes", type=int, default=3, metavar="N", help="runs of each layout (3)")
    flags = parser.parse_args(words)
    found = measure(flags.folder, seconds=flags.profile_seconds, steps=flags.steps, passes=flags.passes)
    print(f"{'layout':<45} {'measured':>10} {'predicted':>10}")
    for row in found["layouts"]:
        print(f"{row['layout']:<45} {row['measured_seconds']:>8.3f} s {row['predicted_seconds']:>8.3f} s")
    print(
        f"rank correlation {found['rank_correlation']:.3f} (goal 0.95), regret {found['regret']:.1%} (goal 3 %), "
        f"mean error {found['mean_error']:.1%}, {len(found['layouts'])} layouts, {len(found['failed'])} failed"
    )
    common.write_json(flags.json, "planner.sweep", words, {"ranks": RANKS, **found})


if __name__ == "__main__":
    main()
