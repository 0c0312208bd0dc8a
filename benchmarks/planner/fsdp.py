"""Accuracy of the planner on training of 2023 and 2024: FSDP on A100 and H100, with constants fitted on a part of it.

    python -m benchmarks.planner.fsdp --data FOLDER [--json FILE] [--write FOLDER]

FOLDER has fsdp_h100_a100.csv, rows of llm-foundry's published table. Parts, by the GPU of the predicted rows:

A100-80GB   stack flash-2023, with each model left out of the fit once
H100-80GB   cluster dgx-h100, and attention of the stack of all rows on A100-80GB, with each model left out of the fit once
A100-40GB   the stack of A100-80GB, nothing fitted
others      steps published by others, nothing fitted

H100 500 W  torchtitan's tables of December 2024, nothing fitted
H100, fp8   four rows of the table in fp8, nothing fitted

--write writes stack and cluster, fitted on all rows of A100-80GB and of H100-80GB. Errors are predicted / measured - 1."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.planner.step_times import Row, errors_of, summary
from megalite.config.describe import replace as with_settings
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner.cost.calibrate import Calibration, Machine, Measured, fit
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, Efficiency, SoftwareStack, load_cluster, load_stack, save_cluster, save_stack

SIZES = {"125m": (12, 768, 12), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20)}
SIZES |= {"7b": (32, 4096, 32), "13b": (40, 5120, 40), "70b": (80, 8192, 64)}
MPT = {"add_bias_linear": False, "vocab_size": 50368}
LLAMA = {"add_bias_linear": False, "normalization": "RMSNorm", "activation": "swiglu", "tie_embeddings": False}
LLAMA |= {"position_embedding_type": "rope", "vocab_size": 128256, "num_query_groups": 8, "seq_length": 8192}
LLAMA_8B = {**LLAMA, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336}
LLAMA_405B = {**LLAMA, "num_layers": 126, "hidden_size": 16384, "num_attention_heads": 128, "ffn_hidden_size": 53248}
LLAMA_70B = {**LLAMA, "num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "ffn_hidden_size": 28672}
FULL, ACTIVATIONS = {"recompute_granularity": "full"}, {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]}

STACK = ("product_rate", "attention_efficiency", "attention_backward", "elementwise_slowdown")
STACK += ("optimizer_slowdown", "overlap_cost")
HOPPER = ("gemm", "memory", "network", "attention_efficiency")
PRIOR = {"product_rate": 1.0, "attention_efficiency": 0.6, "attention_backward": 0.8, "elementwise_slowdown": 1.2}
PRIOR |= {"optimizer_slowdown": 2.0, "overlap_cost": 0.2, "half_gradients": True, "recompute_stops_early": True}
"""Initial values and priors of the fit. Gradients are sent in bf16 (PyTorch's FSDP in pure mixed precision)."""


def _mpt(name: str) -> dict[str, Any]:
    layers, hidden, heads = SIZES[name]
    return {**MPT, "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}


def row(model: str, gpu: str, world: int, speed: float, micro: int, accumulation: int = 1, **settings: Any) -> Row:
    """A step of FSDP in bf16; `speed` is in tokens per second and GPU."""
    common = {"precision": "bf16", "dp_strategy": "fully-sharded", "micro_batch_size": micro}
    common |= {"dp": world, **settings}
    common["global_batch_size"] = micro * accumulation * common["dp"]
    config = validate(with_settings(RunConfig(), **common), world)
    length = config.training.seq_length
    label = f"{model} on {world} {gpu}, sequence {length}, {accumulation} x {micro}"
    seconds = common["global_batch_size"] * length / (speed * world)
    return Row(Measured(config, seconds), model, (world,), label)


def read_rows(path: Path, *, fp8: bool = False) -> dict[str, list[Row]]:
    """GPU -> rows in fp8, or all others."""
    found: dict[str, list[Row]] = {"a100_80gb": [], "a100_40gb": [], "h100_80gb": []}
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            settings = _mpt(line["model"]) | {"seq_length": int(line["seq"])}
            if line["full_recompute"] == "True":
                settings |= FULL
            if line["sharding"] == "SHARD_GRAD_OP":
                settings |= {"dp_strategy": "distributed-optimizer", "shard_gradients": True}
            sizes = [int(line[name]) for name in ("micro_batch", "accumulation")]
            if ("fp8" in line["precision"]) == fp8:
                speed = float(line["tokens_per_s_per_gpu"])
                found[line["gpu"]].append(row(line["model"], line["gpu"], int(line["gpus"]), speed, *sizes, **settings))
    return found


def others() -> list[tuple[str, bool, Row]]:
    """(source, whether gradients are sent in bf16, row) of steps that no constant was fitted on. torchtitan's selective recompute
    keeps products and attention; Llama 3 8B and 70B on A100 are its first published table."""
    source = "llm-foundry README"
    found = [(source, True, row("1b", "h100_80gb", 8, 45500.0, 14, seq_length=2048, **_mpt("1b")))]
    for model, speed, settings in (("8b", 2973.0, LLAMA_8B | ACTIVATIONS), ("70b", 323.0, LLAMA_70B | FULL)):
        found.append(("torchtitan, A100", False, row(f"llama3 {model}", "a100_80gb", 64, speed, 1, **settings)))
    return found


COMPILED, FLOAT8 = {"elementwise_slowdown": 1.0}, {"elementwise_slowdown": 1.0, "float8_rate": 1.8}
TITAN: dict[str, tuple[dict[str, Any], dict[int, tuple[float, float]]]] = {
    "eager": ({"fused_norm": False}, {8: (5762.0, 82.4), 128: (5605.0, 67.0)}),
    "compiled": (COMPILED, {8: (6667.0, 77.0), 128: (6514.0, 62.0)}),
    "compiled, fp8": (FLOAT8, {8: (8532.0, 76.8), 128: (8380.0, 61.8)}),
}
"""Llama 3.1 8B with FSDP on H100 at 500 W with memory of 2.4 TB/s, December 2024: changes from flash-2023-h100 (the
attention is the same); GPUs -> tokens per second and GPU, GiB of the fullest. RMSNorm is Python code, which torch.compile fuses."""


def held(kind: str) -> list[Row]:
    speeds = TITAN[kind][1]
    return [row("llama3 8b", "h100_500w", world, speed, 2, **LLAMA_8B | ACTIVATIONS) for world, (speed, _) in speeds.items()]


LARGE_GIB = (71.9, 67.6, 82.5, 72.7)
"""Published GiB of the fullest GPU for each row of `large`."""


def large() -> list[Row]:
    """Llama 3.1 70B and 405B of the same source, in fp8; all but the first overlap collectives of tensor parallelism with
    products (asynchronous). 405B has as many microbatches as stages, torchtitan's default."""
    full = {**FULL, "tp": 8, "sequence_parallel": True, "seq_length": 8192}
    found = []
    for speed in (829.0, 876.0):
        found.append(row("llama3 70b", "h100_500w", 256, speed, 16, dp=32, **LLAMA_70B | full))
    for vpp, speed in ((1, 100.0), (2, 128.0)):
        # With a pipeline FSDP keeps parameters after the forward, and sums gradients once.
        layout = {"dp": 8, "pp": 8, "vpp": vpp, "dp_strategy": "distributed-optimizer"}
        found.append(row("llama3 405b", "h100_500w", 512, speed, 4, 8, **LLAMA_405B | full | layout))
    return found


ASYNC: dict[str, tuple[float, float]] = {"bf16": (597.3, 652.4), "fp8": (809.8, 942.4)}
"""Llama 3.1 70B as in `large`, June 2025: tokens per second and GPU if products wait for collectives, and if not."""


def asynchronous(kind: str) -> list[Row]:
    settings = {**LLAMA_70B, **FULL, "tp": 8, "sequence_parallel": True, "seq_length": 8192}
    return [row("llama3 70b", "h100_500w", 256, speed, 16, dp=32, **settings) for speed in ASYNC[kind]]


def hidden_share(cluster: Cluster, stack: SoftwareStack) -> float:
    """Share of the tensor-parallel collectives that asynchronous ones hide, relative to the predicted time in bf16."""
    waited, beside = asynchronous("bf16")
    collectives = predict(waited.measured.config, cluster, stack).parts["tensor"]
    return (waited.measured.seconds - beside.measured.seconds) / collectives


def judge(
    title: str, rows: Sequence[Row], fitted: Callable[[Sequence[Row]], Calibration], names: Sequence[str], files: Machine
) -> dict[str, Any]:
    """Each model left out of the fit once; and the included cluster and stack, fitted on all rows."""
    errors, tested, found = [], [], {}
    for model in dict.fromkeys(row.size for row in rows):
        mine = [row for row in rows if row.size == model]
        calibration = fitted([row for row in rows if row.size != model])
        machine = Machine(calibration.cluster, calibration.stack)
        found[model] = {name: round(machine.value(name), 4) for name in names}
        errors += list(errors_of(mine, calibration))
        tested += mine
    names = [each.name for each in files]
    shipped = summary(_errors(tested, *files))
    print(f"\n{title}: the files {' and '.join(names)} on the rows they are fitted on: {shipped}")
    more = {"constants": found, "shipped_files": names, "shipped_errors_percent": shipped}
    return report(title, "the other models, each left out once", tested, np.array(errors), **more)


def report(title: str, fitted_on: str, rows: Sequence[Row], errors: np.ndarray, **more: Any) -> dict[str, Any]:
    order = np.argsort(-np.abs(errors))[:5]
    worst = [[rows[at].label, round(rows[at].measured.seconds, 3), round(errors[at] * 100, 1)] for at in order]
    found = {"part": title, "fitted_on": fitted_on, "errors_percent": summary(errors), "worst": worst, **more}
    print(f"\n{title}: fitted on {fitted_on}\n  errors (%) {found['errors_percent']}")
    for label, seconds, error in worst:
        print(f"    {label}: {seconds} s, {error:+.1f} %")
    return found


def measure(data: Path, folder: Path | None = None) -> list[dict[str, Any]]:
    rows = read_rows(data / "fsdp_h100_a100.csv")
    ampere, vendor = load_cluster("dgx-a100"), load_cluster("dgx-h100")
    # The rows' nodes have 1.6 Tbit/s.
    narrow = replace(vendor, network=replace(vendor.network, nic_bandwidth=ampere.network.nic_bandwidth))
    shipped, narrow = narrow, replace(narrow, efficiency=ampere.efficiency, provenance={})

    def of_stack(chosen: Sequence[Row]) -> Calibration:
        source = "steps of FSDP on 8 to 64 A100-80GB (llm-foundry's published table)"
        stack = replace(load_stack("fused"), **PRIOR)
        return fit([each.measured for each in chosen], ampere, stack, source=source, only=STACK)

    stack = of_stack(rows["a100_80gb"]).stack

    def of_cluster(chosen: Sequence[Row]) -> Calibration:
        source = "steps of FSDP on 8 to 512 H100 (llm-foundry's published table)"
        return fit([each.measured for each in chosen], narrow, stack, source=source, only=HOPPER)

    hopper = of_cluster(rows["h100_80gb"])
    results = [
        judge("A100-80GB", rows["a100_80gb"], of_stack, STACK, Machine(ampere, load_stack("flash-2023"))),
        judge("H100-80GB", rows["h100_80gb"], of_cluster, HOPPER, Machine(shipped, load_stack("flash-2023-h100"))),
    ]
    unseen = _errors(rows["h100_80gb"], narrow, stack)
    results.append(report("H100-80GB, the source left out", "A100-80GB alone", rows["h100_80gb"], unseen))
    small = load_cluster("dgx-a100-40gb")
    results.append(report("A100-40GB", "A100-80GB", rows["a100_40gb"], _errors(rows["a100_40gb"], small, stack)))
    found = []
    for _, half, each in others():
        machine = (hopper.cluster, hopper.stack) if "h100" in each.label else (ampere, stack)
        found += list(_errors([each], machine[0], replace(machine[1], half_gradients=half)))
    results.append(report("others", "the rows above", [each for *_, each in others()], np.array(found)))
    device = replace(hopper.cluster.accelerator, memory_bandwidth=2.4e12, power_limit=500.0)
    capped = replace(hopper.cluster, accelerator=device, network=vendor.network)
    whole = replace(hopper.stack, half_gradients=False)
    for kind, (changes, _) in TITAN.items():
        errors = _errors(held(kind), capped, replace(whole, **changes))
        results.append(report(f"H100 of 500 W, {kind}", "the rows above", held(kind), errors))
    # torchtitan casts to fp8 before the gather.
    float8 = replace(whole, **FLOAT8, float8_gathers=True)
    share = hidden_share(capped, replace(whole, **COMPILED))
    beside = replace(float8, overlap_tensor_parallel=share)
    for title, several in (("70B and 405B in fp8", large()), ("70B in fp8, June 2025", asynchronous("fp8"))):
        errors = np.concatenate([_errors([each], capped, beside if at else float8) for at, each in enumerate(several)])
        source = "the rows above, and asynchronous collectives on 70B in bf16"
        results.append(report(f"H100 of 500 W, {title}", source, several, errors, hidden_share=round(share, 3)))
    eights = read_rows(data / "fsdp_h100_a100.csv", fp8=True)["h100_80gb"]
    older = replace(hopper.stack, float8_rate=FLOAT8["float8_rate"])
    results.append(report("H100-80GB, fp8", "the rows above", eights, _errors(eights, hopper.cluster, older)))
    results.append(memory(capped))
    if folder:
        write(hopper, stack, [round(result["errors_percent"]["most"] / 100, 3) for result in results[:2]], folder)
    return results


def memory(cluster: Cluster) -> dict[str, Any]:
    """GiB reserved by torch on the fullest GPU of torchtitan's rows, and the planner's memory for megalite."""
    published = [(each, gib) for kind, (_, rows) in TITAN.items() for each, (_, gib) in zip(held(kind), rows.values())]
    found = []
    print("\nMemory, GiB: published, counted")
    for each, gib in [*published, *zip(large(), LARGE_GIB, strict=True)]:
        ranks = predict(each.measured.config, cluster, load_stack("flash-2025")).memory
        counted = max(rank.total_bytes for rank in ranks) / 2**30
        found.append([each.label, gib, round(counted, 1)])
        print(f"    {each.label}: {gib} {counted:.1f} ({counted / gib - 1:+.1%})")
    return {"part": "memory of torchtitan's rows", "gib": found}


def _errors(rows: Sequence[Row], cluster: Cluster, stack: SoftwareStack) -> np.ndarray:
    return errors_of(rows, Calibration(cluster, stack, (), ()))


def write(hopper: Calibration, stack: SoftwareStack, spreads: Sequence[float], folder: Path) -> None:
    """Write both stacks and dgx-h100."""
    words = {"flash-2023": "", "flash-2023-h100": " on H100, not optimised for it"}
    for (name, where), each, spread in zip(words.items(), (stack, hopper.stack), spreads):
        rounded = {constant: round(getattr(each, constant), 4) for constant in STACK}
        text = f"PyTorch's FSDP with flash attention, kernels of 2023{where}"
        sources = {**each.provenance, "spread": "measured: the same steps, each model left out of the fit once"}
        named = replace(each, name=name, description=text, spread=spread, provenance=sources, **rounded)
        save_stack(named, folder / f"{name}.yaml")
    efficiency = Efficiency(**{name: round(value, 4) for name, value in vars(hopper.cluster.efficiency).items()})
    cluster, fitted = load_cluster("dgx-h100"), hopper.cluster.provenance
    sources = dict(cluster.provenance)
    for key in (f"efficiency.{each}" for each in vars(efficiency)):
        assumed = "assumed, the constants of dgx-a100; nothing was measured on this machine"
        sources[key] = fitted.get(key, assumed)
    save_cluster(replace(cluster, efficiency=efficiency, provenance=sources), folder / "dgx-h100.yaml")


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, json_help="write the results there")
    parser.add_argument("--data", type=Path, required=True, help="folder with the CSV file")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the fitted cluster and stack files there")
    arguments = parser.parse_args(words)
    results = measure(arguments.data, arguments.write)
    common.write_json(arguments.json, "planner.fsdp", words, {"parts": results})


if __name__ == "__main__":
    main()
