"""Accuracy of the planner's step times, with constants fitted on a part of measured ones.

    python -m benchmarks.planner.step_times --data FOLDER [--json FILE] [--write FOLDER] [--seed N] [--only PART ...]

FOLDER has a100_multi_node.csv and a100_single_node.csv: rows of layout and iteration time in ms. Parts:

multi      each model size of the multi-node file is left out in turn: fitted on the others and on 50 single-node rows
single     fitted on 50 rows of the single-node file, tested on the rest
published  Korthikanti et al. 2022 table 5 and the 1T row of SC'21, with constants fitted on neither; and each model of
           table 5 as newer software (stack unfused-2022), its one constant fitted on the table's other models
all        fitted on the multi-node file and 50 single-node rows; what --write writes

Errors are predicted / measured - 1; 80 % are within `most`. The regret of a group (model, GPUs, batch) is the measured time of
the layout that the model selects over the best measured one, less 1."""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from megalite.config.describe import replace as with_settings
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner.cost import calibrate
from megalite.planner.cost.calibrate import Calibration, Measured
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, SoftwareStack, load_cluster, load_stack, save_cluster, save_stack

COLUMNS = {"hidden size": "hidden_size", "attention heads": "num_attention_heads", "# layers": "num_layers"}
COLUMNS |= {"sequence length": "seq_length", "micro batch": "micro_batch_size", "global batch": "global_batch_size"}
COLUMNS |= {"tensor parallelism": "tp", "data parallelism": "dp", "pipeline parallelism": "pp"}
"""Column -> setting."""

CONSTANTS = ("gemm", "memory", "link", "small_groups", "network")
CONSTANTS += ("operation_seconds", "collective_seconds", "microbatch_seconds", "step_seconds")
fit = partial(calibrate.fit, only=CONSTANTS)


@dataclass(frozen=True)
class Row:
    """A measured step and its config."""

    measured: Measured
    size: str  # the model: rows of one size are left out together
    group: tuple[int, ...]  # the planner's question: model, GPUs, batch
    label: str


def _config(world: int, **settings: object) -> RunConfig:
    """fp16, full recompute, 1F1B and dropout, as the stacks of those years; layers cut evenly."""
    layers, vpp = int(str(settings["num_layers"])), int(str(settings.get("vpp", 1)))
    stages = int(str(settings["pp"])) * vpp
    common = {"vocab_size": 51200, "precision": "fp16", "hidden_dropout": 0.1, "attention_dropout": 0.1}
    common |= {"recompute_granularity": "full", "pipeline_layers": [layers // stages] * stages}
    return validate(with_settings(RunConfig(), **{**common, **settings}), world)


def read_rows(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            settings = {name: int(line[column]) for column, name in COLUMNS.items()}
            world = int(line["# GPUs"])
            config = _config(world, **settings)
            name = line.get("Parameters (billion)")
            size = f"{name}B" if name else f"h{settings['hidden_size']}"
            names = ("hidden_size", "num_layers", "seq_length", "global_batch_size")
            short = zip("tpdb", ("tp", "pp", "dp", "micro_batch_size"))
            layout = " ".join(f"{key}{settings[name]}" for key, name in short)
            label = f"{size} {world} GPUs batch {settings['global_batch_size']} {layout}"
            measured = Measured(config, float(line["iteration time (ms)"]) / 1e3)
            rows.append(Row(measured, size, (world, *(settings[name] for name in names)), label))
    return rows


_TABLE_5 = (  # Korthikanti et al. 2022, table 5; tp 8, A100-80GB
    # name, layers, hidden, heads, GPUs, pp, vpp, micro batch, batch, seconds full, seconds selective
    ("22B", 48, 6144, 64, 8, 1, 1, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 64, 8, 3, 1, 64, 18.13, 13.75),
    ("530B", 105, 20480, 128, 280, 35, 3, 1, 280, 49.05, 37.83),
    ("1T", 128, 25600, 160, 512, 64, 1, 1, 512, 94.42, 71.49),
)


def published() -> list[Row]:
    """Table 5 of Korthikanti et al. 2022, full recompute and sequence parallel with selective, and the 1T row of
    Narayanan et al. 2021 (163 TFLOP/s per GPU on 3,072)."""
    rows = []
    names = ["num_layers", "hidden_size", "num_attention_heads", "pp", "vpp"]
    names += ["micro_batch_size", "global_batch_size"]
    for name, layers, hidden, heads, world, *layout, full, selective in _TABLE_5:
        settings = dict(zip(names, (layers, hidden, heads, *layout), strict=True))
        other = {"recompute_granularity": "selective", "sequence_parallel": True}
        for kind, extra, seconds in (("full", {}, full), ("selective", other, selective)):
            config = _config(int(world), **{**settings, **extra}, tp=8, dp=1, seq_length=2048)
            measured = Measured(config, float(seconds))
            rows.append(Row(measured, f"table 5 {kind}", (int(world),), f"{name} {kind}"))
    sizes = {"num_layers": 128, "hidden_size": 25600, "num_attention_heads": 160, "seq_length": 2048}
    batch = {"micro_batch_size": 1, "global_batch_size": 3072}
    config = _config(3072, **sizes, **batch, tp=8, pp=64, dp=6)
    rows.append(Row(Measured(config, sc21_seconds()), "SC'21", (3072,), "1T on 3,072"))
    return rows


def sc21_seconds() -> float:
    """96·B·s·L·h²·(1 + s/6h + V/16Lh) FLOPs at 163 TFLOP/s per GPU."""
    batch, s, layers, h, vocabulary = 3072, 2048, 128, 25600, 51200
    flops = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    return flops / (163e12 * 3072)


FITTED_SINGLE = 50
PARTS = ("multi", "single", "published", "all")
TOGETHER = "multi-node, every size left out once"
LEFT_OUT = "table 5, each model left out once"

EFFICIENCIES = {"gemm": 0.8, "memory": 0.8, "link": 0.66, "network": 0.5, "p2p": 0.4, "small_groups": 0.6}
HOST = common.settings("operation_seconds=5e-5 collective_seconds=4e-5 microbatch_seconds=5e-4 step_seconds=3e-3")
"""Initial values and priors of fits: not the files' own constants, which were fitted on all rows."""


def start() -> tuple[Cluster, SoftwareStack]:
    """A100 nodes with the stack of the measured rows, before any fit."""
    cluster = load_cluster("dgx-a100")
    cluster = replace(cluster, efficiency=replace(cluster.efficiency, **EFFICIENCIES))
    return cluster, replace(load_stack("unfused"), **HOST)


def errors_of(rows: Sequence[Row], found: Calibration) -> np.ndarray:
    predicted = [predict(row.measured.config, found.cluster, found.stack).step_seconds for row in rows]
    return np.array(predicted) / [row.measured.seconds for row in rows] - 1.0


def summary(errors: np.ndarray) -> dict[str, float]:
    size = np.abs(errors) * 100
    found = {
        "mean": size.mean(),
        "median": np.median(size),
        "most": np.quantile(size, 0.8),
        "bias": errors.mean() * 100,
        "worst": size.max(),
    }
    return {"rows": len(size), **{name: round(float(value), 2) for name, value in found.items()}}


def regrets(rows: Sequence[Row], errors: np.ndarray) -> list[dict[str, Any]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row.group, []).append(at)
    found = []
    for members in groups.values():
        if len(members) < 2:
            continue
        seconds = {at: rows[at].measured.seconds for at in members}
        pick = min(members, key=lambda at: seconds[at] * (1.0 + errors[at]))
        best = min(members, key=lambda at: seconds[at])
        names = {"pick": rows[pick].label, "best": rows[best].label, "layouts": len(members)}
        found.append({**names, "regret": seconds[pick] / seconds[best] - 1.0})
    return sorted(found, key=lambda each: -each["regret"])


def constants(found: Calibration) -> dict[str, float]:
    efficiency = {name: round(value, 4) for name, value in vars(found.cluster.efficiency).items()}
    return {**efficiency, **{name: float(f"{getattr(found.stack, name):.3g}") for name in HOST}}


def report(title: str, fitted_on: str, rows: Sequence[Row], found: Calibration, worst: int = 5) -> dict[str, Any]:
    """Print a part's errors and return them."""
    errors = errors_of(rows, found)
    order = np.argsort(-np.abs(errors))[:worst]
    result: dict[str, Any] = {"part": title, "fitted_on": fitted_on, "constants": constants(found)}
    result |= {"errors_percent": summary(errors), "regret": regrets(rows, errors)}
    result["worst"] = [[rows[at].label, round(rows[at].measured.seconds, 3), round(errors[at] * 100, 1)] for at in order]
    print(f"\n{title}: fitted on {fitted_on}\n  constants {result['constants']}")
    print(f"  errors (%) {result['errors_percent']}")
    for label, seconds, error in result["worst"]:
        print(f"    {label}: {seconds} s, {error:+.1f} %")
    if result["regret"]:
        values = [each["regret"] for each in result["regret"]]
        first = result["regret"][0]
        of = f"mean {np.mean(values):.1%}, worst {values[0]:.1%}"
        print(f"  regret over {len(values)} groups: {of} (picked {first['pick']}, best {first['best']})")
    return result


def newer(found: Calibration) -> SoftwareStack:
    """The software of table 5: as fitted, but with gathers of inputs overlapped with products (the paper, section 4.2.2)."""
    known = load_stack("unfused-2022")
    text = {"name": known.name, "description": known.description}
    return replace(found.stack, **text, overlap_gathers=known.overlap_gathers)


def with_product_rate(rows: Sequence[Row], found: Calibration, source: str) -> SoftwareStack:
    """The newer software with its one constant, the speedup of products, fitted on these rows."""
    stack = newer(found)
    faster = fit([row.measured for row in rows], found.cluster, stack, only=["gemm"])
    rate = faster.cluster.efficiency.gemm / found.cluster.efficiency.gemm
    return replace(stack, product_rate=rate, provenance={**stack.provenance, "product_rate": f"fitted on {source}"})


def leave_one_model_out(rows: Sequence[Row], found: Calibration) -> dict[str, Any]:
    """Predict each model of a table with a product rate fitted on the others."""
    errors: dict[str, float] = {}
    rates: dict[str, float] = {}
    for model in dict.fromkeys(row.label.split()[0] for row in rows):
        others = [row for row in rows if row.label.split()[0] != model]
        mine = [row for row in rows if row.label.split()[0] == model]
        stack = with_product_rate(others, found, f"all models but {model}")
        judged = replace(found, stack=stack)
        errors |= dict(zip((row.label for row in mine), map(float, errors_of(mine, judged))))
        rates[model] = round(stack.product_rate, 4)
    result = {
        "part": LEFT_OUT,
        "fitted_on": "as above, and the product rate on the other three models of the table",
        "product_rates": rates,
        "errors_percent": summary(np.array(list(errors.values()))),
        "rows": {label: round(error * 100, 1) for label, error in errors.items()},
    }
    print(
        f"\n{result['part']}: fitted on {result['fitted_on']} {rates}\n  errors (%) {result['errors_percent']}\n"
        f"  {result['rows']}"
    )
    return result


def multi_node(multi: Sequence[Row], few: Sequence[Row]) -> list[dict[str, Any]]:
    """Each model size left out of the fit once."""
    cluster, stack = start()
    results, together = [], []
    for size in dict.fromkeys(row.size for row in multi):
        others = [*(row for row in multi if row.size != size), *few]
        found = fit([row.measured for row in others], cluster, stack)
        tested = [row for row in multi if row.size == size]
        names = ", ".join(dict.fromkeys(row.size for row in others))
        results.append(report(f"multi-node, {size} left out", f"{len(others)} rows of {names}", tested, found))
        together.append(errors_of(tested, found))
    pooled = summary(np.concatenate(together))
    picks = sorted((each["regret"] for result in results for each in result["regret"]), reverse=True)
    print(f"\nmulti-node, every size left out once: errors (%) {pooled}")
    return [*results, {"part": TOGETHER, "errors_percent": pooled, "regret": picks}]


def tables(found: Calibration, source: str) -> list[dict[str, Any]]:
    rows, results = published(), []
    for size in dict.fromkeys(row.size for row in rows):
        mine = [row for row in rows if row.size == size]
        results.append(report(size, source, mine, found, worst=len(mine)))
    return [*results, leave_one_model_out([row for row in rows if row.size != "SC'21"], found)]


def write(found: Calibration, folder: Path) -> None:
    """Write megalite's files, fitted on all rows; the newer stack's one constant is fitted on all of table 5."""
    rows = [row for row in published() if row.size != "SC'21"]
    stacks = found.stack, with_product_rate(rows, found, "table 5 of Korthikanti et al. 2022")
    save_cluster(found.cluster, folder / f"{found.cluster.name}.yaml")
    for stack in stacks:
        save_stack(stack, folder / f"{stack.name}.yaml")


def measure(data: Path, parts: Sequence[str] = PARTS, *, seed: int = 0, folder: Path | None = None) -> list[dict[str, Any]]:
    """The parts' results, printed as they complete.

    Args:
        data: folder with the two CSV files.
        seed: selects the single-node rows of the fit.
        folder: for the fitted files."""
    multi = read_rows(data / "a100_multi_node.csv")
    single = read_rows(data / "a100_single_node.csv")
    random.Random(seed).shuffle(single)
    few, rest = single[:FITTED_SINGLE], single[FITTED_SINGLE:]
    results = []
    if "multi" in parts:
        results += multi_node(multi, few)
    if "single" in parts:
        found = fit([row.measured for row in few], *start())
        results.append(report("single node", f"{len(few)} of its rows", rest, found))
    if "published" in parts or "all" in parts:
        source = f"A100 steps of 2 to 512 GPUs ({len(multi)} multi-node, {len(few)} single-node rows)"
        found = fit([row.measured for row in [*multi, *few]], *start(), source=source)
        if "all" in parts:
            results.append(report("all multi-node rows, in sample", source, multi, found))
        if "published" in parts:
            results += tables(found, source)
        if folder:
            write(found, folder)
    return results


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, json_help="write the results there")
    parser.add_argument("--data", type=Path, required=True, help="folder with the two CSV files")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the fitted cluster and stack files there")
    parser.add_argument("--seed", type=int, default=0, help="which single-node rows are fitted on")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    arguments = parser.parse_args(words)
    results = measure(arguments.data, arguments.only, seed=arguments.seed, folder=arguments.write)
    common.write_json(arguments.json, "planner.step_times", words, {"parts": results})


if __name__ == "__main__":
    main()
