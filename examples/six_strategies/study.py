"""Six data-parallel strategies on GPT-2: one sweep, a table of speed, bytes, memory and losses, and a picture of them.

python examples/six_strategies/study.py
"""

import argparse
import csv
import pydoc_data.topics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from megalite.cli.tool_commands import SWEEP as sweep
from megalite.sweep.results import OK, RESULTS, RUNS, TABLE, Result, read_results
from megalite.training.records import read_records

HERE = Path(__file__).resolve().parent
STRATEGIES = {
    "parameter-server": "one parameter server",
    "sharded-parameter-server": "sharded parameter servers",
    "fused-all-reduce": "Horovod-style all-reduce",
}


@dataclass(frozen=True)
class Row:
    """What came of one strategy."""

    name: str
    tokens_per_second: float
    sent: float
    """Bytes of a step on rank 0, which sends most, later ones like the last."""
    planned: float
    """Bytes of memory on the fullest rank, as the planner counts them."""
    losses: list[float]
    ends: list[float]
    """Seconds after which each step ended, without the start."""


def write_sweep(path: Path, text: Path, *, steps: int | None, ranks: int | None) -> None:
    """The sweep for the devices of this machine."""
    tree = yaml.safe_load((HERE / "sweep.yaml").read_text(encoding="utf-8"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tree["base"] = [str(HERE / "run.yaml"), *([str(HERE / "gpt2.yaml")] if gpus else [])]
    tree["settings"] = {"data_path": [str(text)], "device": "cuda" if gpus else "cpu"}
    tree["steps"] = steps or tree["steps"]
    for entry in tree["list"]:
        if entry["dp"] > 1:
            entry["dp"] = ranks or gpus or entry["dp"]
    if min(entry["dp"] for entry in tree["list"][1:]) < 2:
        raise SystemExit("one GPU has no replicas to compare; give --ranks on more, or hide it: CUDA_VISIBLE_DEVICES=")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    text.write_text("\n".join(each for _, each in sorted(pydoc_data.topics.topics.items())), encoding="utf-8")


def name_of(result: Result) -> str:
    settings = result.settings
    if result.ranks == 1:
        return "single process"
    return STRATEGIES[settings["dp_strategy"]] + " + Apex" * (settings.get("precision") == "fp16")


def read_rows(folder: Path) -> list[Row]:
    """In the order of the sweep. Raises SystemExit: a run has failed."""
    with (folder / TABLE).open(encoding="utf-8") as file:
        planned = {row["key"]: float(row["predicted_memory_bytes"]) for row in csv.DictReader(file)}
    results = {result.key: result for result in read_results(folder / RESULTS)}
    rows = []
    for key in planned:
        result = results[key]
        if result.status != OK or result.tokens_per_second is None:
            raise SystemExit(f"{name_of(result)}: {result.status}: {result.error}; the command again tries it again")
        (run,) = (folder / RUNS).glob(f"*-{key}")
        records: list[dict[str, Any]] = read_records(run, "train")
        ends, total = [], 0.0
        for record in records:
            total += record["ms_per_step"] / 1e3
            ends.append(total)
        losses = [record["loss"] for record in records]
        sent = records[-1].get("dp_wire_bytes", 0.0)
        rows.append(Row(name_of(result), result.tokens_per_second, sent, planned[key], losses, ends))
    return rows


def loss_at(row: Row, seconds: float) -> float:
    """Mean of the last ten losses by then."""
    known = [loss for loss, end in zip(row.losses, row.ends, strict=True) if end <= seconds] or row.losses[:1]
    return sum(known[-10:]) / len(known[-10:])


def table(rows: Sequence[Row]) -> list[str]:
    """In Markdown."""
    seconds = min(row.ends[-1] for row in rows)
    lines = [
        f"| | tokens/s | sent a step, MB | memory, MB | loss after {len(rows[0].losses)} steps | loss after {seconds:.1f} s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = f"{row.tokens_per_second:.0f} | {row.sent / 1e6:.2f} | {row.planned / 1e6:.1f}"
        lines.append(f"| {row.name} | {numbers} | {loss_at(row, row.ends[-1]):.4f} | {loss_at(row, seconds):.4f} |")
    return lines


LEFT, TOP, WIDTH, HEIGHT, LINE = 56.0, 62.0, 664.0, 190.0, 24.0


def draw(rows: Sequence[Row], path: Path, *, seconds: bool) -> None:
    """Losses over steps or over seconds, and bars of what is sent and kept."""
    sys.path.append(str(HERE.parents[1] / "docs" / "images"))
    from drawings.canvas import DARK, FAINT, INK, LIGHT, MUTED, RED, Drawing

    bottom = TOP + HEIGHT
    bars = bottom + 84
    unit = "seconds" if seconds else "steps"
    sizes = "; ".join(f"{row.name} {row.sent / 1e6:.2f} and {row.planned / 1e6:.1f}" for row in rows)
    drawing = Drawing(
        bars + LINE * len(rows) + 16,
        f"Training losses of six data-parallel strategies over {unit}; MB that each sends in a step and keeps: {sizes}.",
    )
    drawing.text(24, 26, f"Training loss over {unit}", size=14, align="left", bold=True)
    if not seconds:
        apart = max(max(losses) - min(losses) for losses in zip(*(row.losses for row in rows), strict=True))
        drawing.text(LEFT + WIDTH, 26, f"at most {apart:.4f} between the six", align="right", colour=MUTED)
    ends = [row.ends if seconds else [float(step + 1) for step in range(len(row.losses))] for row in rows]
    longest = max(each[-1] for each in ends)
    low, high = min(min(row.losses) for row in rows), max(max(row.losses) for row in rows)
    for part in range(5):
        loss = low + (high - low) * part / 4
        y = bottom - HEIGHT * part / 4
        drawing.line((LEFT, y), (LEFT + WIDTH, y), colour=FAINT)
        drawing.text(LEFT - 8, y, f"{loss:.1f}", size=11, align="right", colour=MUTED)
        drawing.text(LEFT + WIDTH * part / 4, bottom + 16, f"{longest * part / 4:.4g}", size=11, colour=MUTED)
    for index, (row, times) in enumerate(zip(rows, ends, strict=True)):
        # The first ones wide, so that those that coincide with them are seen on top.
        style = {"colour": (*DARK, RED, INK)[index], "line": 1.6 if seconds else 7.0 - index, "dashed": index == 5}
        points = [
            (LEFT + WIDTH * time / longest, bottom - HEIGHT * (loss - low) / (high - low or 1.0))
            for time, loss in zip(times, row.losses, strict=True)
        ]
        drawing.line(*points, **style)
        y = bars + LINE * index
        drawing.line((24, y + 8), (44, y + 8), **style)
        drawing.text(52, y + 8, row.name, align="left")
        for left, value, most in (
            (276, row.sent, max(r.sent for r in rows)),
            (516, row.planned, max(r.planned for r in rows)),
        ):
            drawing.box(left, y, max(2.0, 150 * value / most), 17, fill=LIGHT[0], radius=2)
            drawing.text(left + 212, y + 8, f"{value / 1e6:.2f}", align="right", colour=DARK[0])
    for left, what in ((276, "MB sent in a step"), (516, "MB of memory")):
        drawing.text(left, bars - 22, what, align="left", bold=True)
    drawing.save(path)


def main(words: Sequence[str] | None = None) -> int:
    """Run what has not run yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/six_strategies"), help="folder of the results")
    parser.add_argument("--steps", type=int, help="of each run; default: those of sweep.yaml")
    parser.add_argument("--ranks", type=int, help="replicas; default: the GPUs, or those of sweep.yaml")
    flags = parser.parse_args(words)
    file, text = flags.output.with_suffix(".yaml"), flags.output.with_suffix(".bytes")
    write_sweep(file, text, steps=flags.steps, ranks=flags.ranks)
    status = sweep([str(file), "--output", str(flags.output), "--retry"])
    if status:
        return int(status)
    rows = read_rows(flags.output)
    lines = table(rows)
    flags.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for unit in ("steps", "seconds"):
        draw(rows, flags.output.with_name(f"{flags.output.name}_{unit}.svg"), seconds=unit == "seconds")
    print("\n".join(["", *lines]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
