"""Measured steps as configs: rows of CSV files of iteration times, and published tables."""

import csv
from dataclasses import dataclass
from pathlib import Path

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner.cost.calibrate import Measured

COLUMNS = {
    "hidden size": "hidden_size",
    "attention heads": "num_attention_heads",
    "# layers": "num_layers",
    "sequence length": "seq_length",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
    "micro batch": "micro_batch_size",
    "global batch": "global_batch_size",
}
"""Column -> setting."""


@dataclass(frozen=True)
class Row:
    """A measured step and what it was of."""

    measured: Measured
    size: str
    """The model: rows of one size are left out together."""
    group: tuple[int, ...]
    """What a planner would be asked: model, GPUs, batch."""
    label: str


def _config(world: int, **settings: object) -> RunConfig:
    """fp16, full recompute, 1F1B and dropout as the stacks of those years had them; layers cut evenly."""
    layers, stages = (
        int(str(settings["num_layers"])),
        int(str(settings["pp"])) * int(str(settings.get("vpp", 1))),
    )
    common = {"vocab_size": 51200, "precision": "fp16", "hidden_dropout": 0.1, "attention_dropout": 0.1}
    common |= {"recompute_granularity": "full", "pipeline_layers": [layers // stages] * stages}
    return validate(replace(RunConfig(), **{**common, **settings}), world)


def read_rows(path: Path) -> list[Row]:
    """The rows of one file."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            settings = {name: int(line[column]) for column, name in COLUMNS.items()}
            world = int(line["# GPUs"])
            config = _config(world, **settings)
            name = line.get("Parameters (billion)")
            size = f"{name}B" if name else f"h{settings['hidden_size']}"
            names = ("hidden_size", "num_layers", "seq_length", "global_batch_size")
            layout = " ".join(
                f"{key}{settings[name]}" for key, name in zip("tpdb", ("tp", "pp", "dp", "micro_batch_size"))
            )
            rows.append(
                Row(
                    Measured(config, float(line["iteration time (ms)"]) / 1e3),
                    size,
                    (world, *(settings[name] for name in names)),
                    f"{size} {world} GPUs batch {settings['global_batch_size']} {layout}",
                )
            )
    return rows


_TABLE_5 = (
    # name, layers, hidden, heads, GPUs, pp, vpp, micro batch, batch, seconds full, seconds selective
    ("22B", 48, 6144, 64, 8, 1, 1, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 64, 8, 3, 1, 64, 18.13, 13.75),
    ("530B", 105, 20480, 128, 280, 35, 3, 1, 280, 49.05, 37.83),
    ("1T", 128, 25600, 160, 512, 64, 1, 1, 512, 94.42, 71.49),
)
"""Korthikanti et al. 2022, table 5; tp 8, A100-80GB."""


def published() -> list[Row]:
    """Table 5 of Korthikanti et al. 2022, full recompute and sequence parallel with selective, and the 1T row of
    Narayanan et al. 2021 (163 TFLOP/s a GPU on 3,072)."""
    rows = []
    for name, layers, hidden, heads, world, pp, vpp, micro, batch, full, selective in _TABLE_5:
        settings = {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "tp": 8,
            "dp": 1,
        }
        settings |= {
            "pp": pp,
            "vpp": vpp,
            "micro_batch_size": micro,
            "global_batch_size": batch,
            "seq_length": 2048,
        }
        other = {"recompute_granularity": "selective", "sequence_parallel": True}
        for kind, extra, seconds in (("full", {}, full), ("selective", other, selective)):
            config = _config(world, **{**settings, **extra})
            rows.append(Row(Measured(config, seconds), f"table 5 {kind}", (world,), f"{name} {kind}"))
    settings = {
        "num_layers": 128,
        "hidden_size": 25600,
        "num_attention_heads": 160,
        "tp": 8,
        "pp": 64,
        "dp": 6,
    }
    config = _config(3072, **settings, micro_batch_size=1, global_batch_size=3072, seq_length=2048)
    rows.append(Row(Measured(config, sc21_seconds()), "SC'21", (3072,), "1T on 3,072"))
    return rows


def sc21_seconds() -> float:
    """96·B·s·L·h²·(1 + s/6h + V/16Lh) FLOPs at 163 TFLOP/s a GPU."""
    batch, s, layers, h, vocabulary = 3072, 2048, 128, 25600, 51200
    flops = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    return flops / (163e12 * 3072)
