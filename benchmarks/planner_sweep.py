"""Does the planner tell which layout is the fastest on this machine? Profile it, predict layouts, run them, compare.

python benchmarks/planner_sweep.py --folder runs/planner-sweep [--json FILE] [--profile-seconds N] [--steps N] [--passes N]

17 layouts of a GPT with 4.5 million parameters on 4 gloo ranks of one thread each. Run it on a machine where nothing else
runs. All layouts are run once in each pass, some six minutes; a layout's time is the median over the passes, since the
speed of a virtual machine drifts by more than what lies between neighbouring layouts. The same command goes on where it was
stopped.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from megalite.sweep.judgement import spearman

RANKS = 4
BASE = {
    "model": {
        "num_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "ffn_hidden_size": 768,
        "add_bias_linear": False,
    },
    "training": {
        "seq_length": 256,
        "micro_batch_size": 1,
        "global_batch_size": 16,
        "train_iters": 8,
        "device": "cpu",
    },
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


def start(words: list[str]) -> None:
    """A program with this interpreter's environment, one thread a rank; raises CalledProcessError."""
    folder = Path(sys.executable).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(words, check=True, env=environment)


def profile(folder: Path, seconds: float) -> None:
    """cluster.yaml and stack.yaml of this machine, unless they are there."""
    if (folder / "stack.yaml").exists():
        return
    start(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
            *("-m", "megalite.cli.profile", "--seconds", f"{seconds:g}"),
            *("--output", str(folder / "cluster.yaml"), "--output-stack", str(folder / "stack.yaml")),
        ]
    )


def sweep(folder: Path, steps: int, turn: int) -> list[dict[str, Any]]:
    """The rows of a pass's results.csv."""
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    content = {
        "base": "base.yaml",
        **LAYOUTS,
        "steps": steps,
        "warm_up_steps": 3,
        "cluster": str(folder / "cluster.yaml"),
        "stack": str(folder / "stack.yaml"),
        "environment": {"OMP_NUM_THREADS": 1},
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    output = folder / f"results-{turn}"
    start(
        [
            sys.executable,
            "-m",
            "megalite.cli.main",
            "sweep",
            str(folder / "sweep.yaml"),
            "--output",
            str(output),
        ]
    )
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
            found.append(
                {
                    "layout": name,
                    "predicted_seconds": float(rows[0]["predicted_step_seconds"]),
                    "measured_seconds": statistics.median(seconds),
                    "passes": seconds,
                }
            )
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for profile, runs and results")
    parser.add_argument("--profile-seconds", type=float, default=120.0, metavar="N")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of each run; 3 are not measured")
    parser.add_argument("--passes", type=int, default=3, metavar="N", help="runs of each layout (3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    profile(folder, arguments.profile_seconds)
    found = compare([sweep(folder, arguments.steps, turn) for turn in range(arguments.passes)])
    print(f"{'layout':<45} {'measured':>10} {'predicted':>10}")
    for row in found["layouts"]:
        print(f"{row['layout']:<45} {row['measured_seconds']:>8.3f} s {row['predicted_seconds']:>8.3f} s")
    print(
        f"rank correlation {found['rank_correlation']:.3f} (goal 0.9), regret {found['regret']:.1%} (goal 5 %), mean error "
        f"{found['mean_error']:.1%}, {len(found['layouts'])} layouts, {len(found['failed'])} failed"
    )
    if arguments.json is not None:
        about = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": str(torch.__version__),
            "ranks": RANKS,
            "command": f"python benchmarks/planner_sweep.py --profile-seconds {arguments.profile_seconds:g} "
            f"--steps {arguments.steps} --passes {arguments.passes}",
        }
        arguments.json.write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
