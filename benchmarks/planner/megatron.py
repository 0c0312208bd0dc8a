"""Accuracy of the planner on NVIDIA's own tables of Megatron on H100, B200 and GB200.

    python -m benchmarks.planner.megatron [--json FILE] [--write FOLDER]

megatron.csv, in this folder, has their rows: model, layout, tokens per second and GPU, or FLOP/s per GPU.

lm           Megatron-LM's README, July 2024: 1.7B to 462B in bf16 on 48 to 6,144 H100
nemo         performance summary of NeMo 24.12: GPT-3, Llama and Nemotron in fp8 on 8 to 512 H100
long         the same page: Llama 2 7B with sequences of 4,096 to 1,048,576 on 4 to 1,024 H100
bridge       that of Megatron Bridge, 25.11 to 26.04: Llama 3 in fp8 on 64 and 1,024 H100
b200, gb200  NeMo 25.02 and 25.04: the same models in fp8
b200_long    NeMo's page on long sequences, 25.04.rc2: Llama 3 8B, 8,192 to 1,048,576 on 2 to 256 B200
b200_bridge  Megatron Bridge 25.09 and 25.11, and gb200_bridge up to 26.06: Llama 3 in fp8, one scale per tensor
b200_mx      the same, and gb200_mx, with a scale per 32 numbers (MXFP8)
bf16         NVIDIA/dgxc-benchmarking's llama3.1/README.md of 2025: Llama 3.1 405B in bf16 on 128 and 256 GB200

Blackwell is fitted on b200_long, b200_bridge and gb200_bridge, and tested on the other tables; --write writes the files.

The published FLOP/s check the size of each model. If the table gives no microbatch size or number of chunks (lm, b200_long), a
row has the fastest predicted ones that fit, as the published ones were tuned. Errors are predicted / measured - 1."""

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.planner.fsdp import report
from benchmarks.planner.step_times import Row, errors_of
from megalite.config.describe import replace as with_settings
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.shapes import flops_per_token
from megalite.planner.cost.calibrate import Calibration, Machine, Measured, fit
from megalite.planner.cost.step import predict
from megalite.planner.hardware import SoftwareStack, load_cluster, load_stack, save_cluster, save_stack

TABLE = Path(__file__).with_suffix(".csv")
GPT = {"vocab_size": 51200, "position_embedding_type": "learned_absolute"}
LLAMA = {"add_bias_linear": False, "normalization": "RMSNorm", "activation": "swiglu", "tie_embeddings": False}
LLAMA |= {"position_embedding_type": "rope"}
LLAMA_2, LLAMA_3 = LLAMA | {"vocab_size": 32000}, LLAMA | {"vocab_size": 128256, "num_query_groups": 8}
NEMOTRON = {"add_bias_linear": False, "activation": "squared_relu", "tie_embeddings": False, "vocab_size": 256000}
NEMOTRON |= {"position_embedding_type": "rope"}
GROUPED = {"num_query_groups": 8}
MODELS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "gpt3-5b": (24, 4096, 32, 16384, GPT),
    "gpt3-20b": (44, 6144, 48, 24576, GPT),
    "gpt3-175b": (96, 12288, 96, 49152, GPT),
    "llama2-7b": (32, 4096, 32, 11008, LLAMA_2),
    "llama2-13b": (40, 5120, 40, 13824, LLAMA_2),
    "llama2-70b": (80, 8192, 64, 28672, LLAMA_2 | GROUPED),
    "llama3-8b": (32, 4096, 32, 14336, LLAMA_3),
    "llama3-70b": (80, 8192, 64, 28672, LLAMA_3),
    "llama3-405b": (126, 16384, 128, 53248, LLAMA_3),
    "nemotron-8b": (32, 4096, 32, 16384, NEMOTRON),
    "nemotron-15b": (32, 6144, 48, 24576, NEMOTRON | GROUPED),
    "nemotron-22b": (40, 6144, 48, 24576, NEMOTRON),
    "nemotron-340b": (96, 18432, 96, 73728, NEMOTRON | GROUPED),
}
"""Layers, hidden size, heads, MLP width, other settings."""
WEAK = {"1.7b": (24, 2048, 16), "7.1b": (30, 4096, 32), "16b": (32, 6144, 48), "32b": (48, 7168, 56)}
WEAK |= {"70b": (84, 8192, 64), "119b": (92, 10240, 80), "177b": (96, 12288, 96), "314b": (96, 16384, 128)}
WEAK |= {"462b": (112, 18432, 144)}
MODELS |= {name: (*shape, 4 * shape[1], GPT | {"vocab_size": 131072}) for name, shape in WEAK.items()}


def _even(layers: int, stages: int) -> list[int]:
    """Equal numbers of layers per stage, one less on the first and the last if they do not divide."""
    missing = -layers % stages
    each, ends = (layers + missing) // stages, {1: (-1,), 2: (0, -1)}
    cut = [each] * stages
    for at in ends.get(missing, ()):
        cut[at] -= 1
    return cut


def configs(line: dict[str, str]) -> Iterator[RunConfig]:
    """Configs of the row; if the table gives no microbatch size or chunks, one for each that divides."""
    layers, hidden, heads, ffn, more = MODELS[line["model"]]
    sizes = {name: int(line[name]) for name in ("gpus", "batch", "seq", "tp", "pp", "cp")}
    world, batch, pp = sizes["gpus"], sizes["batch"], sizes["pp"]
    dp = world // (sizes["tp"] * pp * sizes["cp"])
    settings = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": ffn, **more}
    settings |= {"seq_length": sizes["seq"], "global_batch_size": batch, "precision": "bf16", "mock_data": True}
    settings |= {"tp": sizes["tp"], "pp": pp, "cp": sizes["cp"], "dp": dp, "sequence_parallel": sizes["tp"] > 1}
    settings |= {"dp_strategy": "distributed-optimizer", "overlap_grad_reduce": True, "overlap_param_gather": True}
    if line["part"] not in ("lm", "b200_mx", "gb200_mx", "bf16") and dp * sizes["cp"] > 1:  # fp8 recipes gather in fp8
        settings |= {"fp8": True, "fp8_param_gather": True}
    micro = [int(line["micro_batch"])] if line["micro_batch"] else [1, 2, 4]
    chunks = [int(line["vpp"])] if line["vpp"] else [n for n in range(1, layers + 1) if layers % (n * pp) == 0]
    for each, vpp in itertools.product(micro, chunks if pp > 1 else [1]):
        if (batch // dp) % each or (vpp > 1 and (batch // dp // each) % pp):
            continue
        cut = {"micro_batch_size": each, "vpp": vpp, "pipeline_layers": _even(layers, pp * vpp) if pp > 1 else None}
        yield validate(with_settings(RunConfig(), **settings, **cut), world)


def read_rows(path: Path, machine: Mapping[str, Machine]) -> dict[str, list[Row]]:
    """Part -> rows. Raises ValueError if a model's FLOPs differ from the table's."""
    found: dict[str, list[Row]] = {}
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            part, tokens, world = line["part"], int(line["batch"]) * int(line["seq"]), int(line["gpus"])
            tried = [(each, predict(each, *machine[machine_of(part)])) for each in configs(line)]
            room = machine[machine_of(part)].cluster.accelerator.memory_bytes
            fits = [pair for pair in tried if max(rank.total_bytes for rank in pair[1].memory) <= room]
            config = min(fits or tried, key=lambda pair: pair[1].step_seconds)[0]
            # Megatron Bridge counts only the unmasked half of attention, the others count all of it.
            counts = "megatron" if part.endswith(("bridge", "mx")) else "palm"
            flops = flops_per_token(config.model, int(line["seq"]), counts)
            rate = float(line["tflops_per_gpu"]) * 1e12
            speed = float(line["tokens_per_s_per_gpu"] or rate / flops)
            if abs(speed * flops / rate - 1.0) > 0.02:
                raise ValueError(f"{line}: {speed * flops / 1e12:.0f} TFLOP/s by this model's FLOPs")
            p, micro = config.parallel, config.training.micro_batch_size
            label = f"{line['model']} on {world}, sequence {line['seq']}: tp{p.tp} pp{p.pp} vpp{p.vpp} cp{p.cp}, micro {micro}"
            measured = Measured(config, tokens / speed / world)
            found.setdefault(part, []).append(Row(measured, line["model"], (world,), label))
    return found


def machine_of(part: str) -> str:
    return part.partition("_")[0]


COMMON = {"overlap_tensor_parallel": 1.0, "half_gradients": True, "half_ring": True}


def machines() -> dict[str, Machine]:
    """Megatron-LM of 2024 with attention of that year; the others have cuDNN's, and 8 bits. All overlap tensor parallelism."""
    names = ("flash-2023-h100", "float8-2025", "float8-blackwell")
    older, float8, blackwell = (replace(load_stack(name), **COMMON) for name in names)
    hopper = load_cluster("dgx-h100")
    found = {part: Machine(hopper, float8) for part in ("nemo", "long", "bridge")}
    found |= {part: Machine(load_cluster(f"dgx-{part}"), blackwell) for part in ("b200", "gb200")}
    found["bf16"] = Machine(found["gb200"].cluster, replace(blackwell, float8_rate=0.0))
    return {"lm": Machine(hopper, older), **found}


BLACKWELL = {"b200": ["gemm", "attention_efficiency"], "gb200": ["gemm"]}


def fit_blackwell(rows: Sequence[Row], kind: str, stack: SoftwareStack, source: str = "") -> Calibration:
    """Fit with H100's constants as initial values; attention of the stack is that of B200."""
    cluster = replace(load_cluster(f"dgx-{kind}"), efficiency=load_cluster("dgx-h100").efficiency)
    return fit([row.measured for row in rows], cluster, stack, source=source, only=BLACKWELL[kind])


def blackwell(rows: Mapping[str, Sequence[Row]], folder: Path | None) -> list[dict[str, Any]]:
    """Each table left out of B200's fit once, and each model out of GB200's, which has one table; all of them for the files."""
    found, stack = [], replace(load_stack("float8-2025"), **COMMON)
    for kind, parts in {"b200": ("b200_long", "b200_bridge"), "gb200": ("gb200_bridge",)}.items():
        groups = [(part if len(parts) > 1 else row.size, row) for part in parts for row in rows[part]]
        for left in dict.fromkeys(group for group, _ in groups):
            others, mine = ([row for group, row in groups if (group == left) is out] for out in (False, True))
            judged = fit_blackwell(others, kind, stack)
            found.append(report(f"{kind}, {left} left out", "the other rows", mine, errors_of(mine, judged)))
            if left == "b200_bridge":  # software of spring 2025, as in the tested table
                errors = errors_of(rows["b200"], judged)
                found.append(report("b200, 25.02", "b200_long alone", rows["b200"], errors))
        source = "steps of Llama 3 in 8 bits (NeMo's and Megatron Bridge's tables; benchmarks/planner/megatron.py)"
        whole = fit_blackwell([row for _, row in groups], kind, stack, source)
        stack = whole.stack
        found[-1]["constants"] = {name: round(Machine(whole.cluster, stack).value(name), 4) for name in BLACKWELL[kind]}
        print(f"  {kind}: {found[-1]['constants']}")
        if folder:
            write(whole, folder)
    return found


def write(fitted: Calibration, folder: Path) -> None:
    """Write the cluster; and the stack, without the features of these tables."""
    known = load_stack("float8-blackwell")
    text = {"name": known.name, "description": known.description, "spread": known.spread}
    text |= {name: getattr(known, name) for name in COMMON}
    sources = {**known.provenance, **{name: fitted.stack.provenance[name] for name in BLACKWELL["b200"][1:]}}
    rate = round(fitted.stack.attention_efficiency, 4)
    save_stack(replace(fitted.stack, **text, provenance=sources, attention_efficiency=rate), folder / f"{known.name}.yaml")
    efficiency = replace(fitted.cluster.efficiency, gemm=round(fitted.cluster.efficiency.gemm, 4))
    save_cluster(replace(fitted.cluster, efficiency=efficiency), folder / f"{fitted.cluster.name}.yaml")


def measure(folder: Path | None = None) -> list[dict[str, Any]]:
    machine = machines()
    rows = read_rows(TABLE, machine)
    seen = {"b200_long", "b200_bridge", "gb200_bridge"}
    found = []
    for part, mine in rows.items():
        fitted_on = "these rows among others" if part in seen else "nothing of this table"
        found.append(report(part, fitted_on, mine, errors_of(mine, Calibration(*machine[machine_of(part)], (), ()))))
    long, names = rows["long"], ["attention_efficiency"]
    errors = []
    for at, row in enumerate(long):
        others = [each.measured for each in [*long[:at], *long[at + 1 :]]]
        errors += list(errors_of([row], fit(others, *machine["long"], only=names)))
    found.append(report("long", "attention on the other lengths, each left out once", long, np.array(errors)))
    return [*found, *blackwell(rows, folder)]


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, json_help="write the results there")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write Blackwell's cluster and stack files there")
    arguments = parser.parse_args(words)
    common.write_json(arguments.json, "planner.megatron", words, {"parts": measure(arguments.write)})


if __name__ == "__main__":
    main()
