"""Memory predicted by the planner, compared with real runs on this machine.

    OMP_NUM_THREADS=1 python -m benchmarks.planner.memory [--solo] [--json FILE]

Tiny GPTs of several families train a few steps on one to four gloo ranks. Bytes of weights, gradients and
optimizer state are those of the storages of strategy and optimizer; bytes of activations those of the
distinct storages that autograd's saved tensors keep alive at the peak of a step, without parameters. The prediction is
that of `--dry-run --rank`."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import settings
from benchmarks.live_bytes import SavedBytes, state_bytes
from megalite.config.batch import microbatch_counts
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.parity.pool import RankContext, RankPool
from megalite.parity.trajectory import Runner
from megalite.partition.memory import activation_peaks, held_buckets
from megalite.partition.pipeline import layout_of, plan_stages, schedule_of
from megalite.training.replica import build_replica

TINY = settings(
    "num_layers=4 hidden_size=256 num_attention_heads=8 vocab_size=512 seq_length=128 micro_batch_size=2 "
    "global_batch_size=8 train_iters=10 precision=bf16 device=cpu eod_mask_loss=true"
)
DROPOUT = settings("hidden_dropout=0.1 attention_dropout=0.1")
LLAMA = settings(
    "normalization=RMSNorm activation=swiglu ffn_hidden_size=512 num_query_groups=2 add_bias_linear=false "
    "position_embedding_type=rope tie_embeddings=false"
)
MOE = settings("num_experts=4 moe_ffn_hidden_size=256 add_bias_linear=false moe_aux_loss_coeff=0.1")


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def _full(method: str, count: int) -> dict[str, Any]:
    return settings(f"recompute_granularity=full recompute_method={method} recompute_num_layers={count}")


SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pp": 2, "pipeline_layers": [2, 2]}
Z3 = {"dp_strategy": "fully-sharded"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # name -> ranks, and changes from TINY
    "gpt": (1, {}),
    "gpt, dropout": (1, DROPOUT),
    "gpt, dropout, core_attn recomputed": (1, {**DROPOUT, **_selective("core_attn")}),
    "gpt, mlp and core_attn recomputed": (1, _selective("mlp", "core_attn")),
    "gpt, mlp_act recomputed": (1, _selective("mlp_act")),
    "gpt, full recompute by two": (1, _full("uniform", 2)),
    "gpt, full recompute of two": (1, _full("block", 2)),
    "gpt, fp32, sgd": (1, {"precision": "fp32", "optimizer": "sgd"}),
    "gpt, moments in bf16": (1, settings("exp_avg_dtype=bf16 exp_avg_sq_dtype=bf16 stochastic_rounding=true")),
    "llama": (1, LLAMA),
    "llama, mlp recomputed": (1, {**LLAMA, **_selective("mlp")}),
    "experts": (1, MOE),
    "experts, moe recomputed": (1, {**MOE, **_selective("moe")}),
    "gpt, tp 2": (2, {"tp": 2, **DROPOUT}),
    "llama, tp 2, sequence parallel": (2, {**LLAMA, **SEQUENCE_PARALLEL}),
    "gpt, tp 2, sequence parallel, core_attn": (2, {**SEQUENCE_PARALLEL, **DROPOUT, **_selective("core_attn")}),
    "gpt, pp 2": (2, PP2),
    "gpt, pp 2, gpipe": (2, {**PP2, "pipeline_schedule": "gpipe"}),
    "gpt, pp 2, vpp 2": (2, {"pp": 2, "vpp": 2, "pipeline_layers": [1, 1, 1, 1]}),
    "gpt, pp 2, full recompute": (2, {**PP2, **_full("uniform", 1)}),
    "llama, cp 2": (2, {**LLAMA, "cp": 2}),
    "gpt, dp 2, zero-1": (2, {"dp_strategy": "distributed-optimizer"}),
    "gpt, dp 2, zero-3": (2, Z3),
    "gpt, dp 4, zero-3 in two instances": (4, {**Z3, "dp_instances": 2}),
    "gpt, dp 4, zero-1 in two instances": (4, {"dp_strategy": "distributed-optimizer", "dp_instances": 2}),
    "llama, pp 2, vpp 2, dp 2, zero-3": (4, {**LLAMA, **Z3, "pp": 2, "vpp": 2, "pipeline_layers": [1, 1, 1, 1]}),
    "experts, pp 2, ep 2, zero-3": (4, {**MOE, **Z3, **PP2, "ep": 2}),
}


def tiny(name: str) -> RunConfig:
    world_size, changes = CASES[name]
    return validate(replace(RunConfig(), **{**TINY, **changes}), world_size)


def measure(context: RankContext, name: str) -> dict[str, float]:
    """Measured and predicted bytes on this rank."""
    config = tiny(name)
    runner = Runner(build_replica(config, context.topology_of(config)))
    replica = runner.replica
    runner.step()
    state = state_bytes(replica)
    besides: list[torch.Tensor] = [p for stage in replica.stages.values() for p in stage.parameters()]
    # Tables of positions are built once per run.
    micro_batch = tuple(range(config.training.micro_batch_size))
    for stage in replica.stages.values():
        stage_context = stage.context(micro_batch)
        besides += [stage_context.positions, *(stage_context.rope or ())]
    with SavedBytes(besides) as saved:
        runner.step()
    replica.strategy.close()
    rank = replica.topology.rank
    return {**predicted(config, rank), "state_bytes": state, "activation_bytes": saved.peak}


def predicted(config: RunConfig, rank: int) -> dict[str, float]:
    """The prediction of `--dry-run --rank`."""
    schedule = schedule_of(config, microbatch_counts(config)[-1])
    buckets = held_buckets(config, rank)
    state = sum(held.parameter_bytes + held.gradient_bytes + held.optimizer_bytes for held in buckets)
    place = layout_of(config).coordinate(rank).pp
    peak = activation_peaks(config, plan_stages(config), schedule)[place]
    return {"predicted_state_bytes": state, "predicted_activation_bytes": peak}


def measured_rows(pool: RankPool | None, names: Iterable[str]) -> list[dict[str, Any]]:
    """A row per case, of the rank with the largest error."""
    rows = []
    for name in names:
        size = CASES[name][0]
        ranks = [measure(RankContext(0), name)] if pool is None or size == 1 else pool.run(size, measure, name)
        found = [{"case": name, "ranks": size, "rank": rank, **row} for rank, row in enumerate(ranks)]
        for row in found:
            held = row["state_bytes"] + row["activation_bytes"]
            row["error"] = (row["predicted_state_bytes"] + row["predicted_activation_bytes"]) / held - 1
            row["activation_error"] = row["predicted_activation_bytes"] / row["activation_bytes"] - 1
        rows.append(max(found, key=lambda row: abs(row["activation_error"])))
    return rows


def show(measured: list[dict[str, Any]]) -> None:
    print(f"{'case':<42}{'ranks':>6}{'state, KiB':>22}{'activations, KiB':>22}{'error':>9}")
    print(f"{'':<42}{'':>6}{'predicted':>11}{'held':>11}{'predicted':>11}{'held':>11}{'of all':>9}")
    keys = ("predicted_state_bytes", "state_bytes", "predicted_activation_bytes", "activation_bytes")
    for row in measured:
        cells = "".join(f"{row[key] / 1024:>11.1f}" for key in keys)
        print(f"{row['case']:<42}{row['ranks']:>6}{cells}{row['error']:>+9.2%}")
    total, alone = (max(abs(row[key]) for row in measured) for key in ("error", "activation_error"))
    print(f"largest error: {total:.2%} of all that is held, {alone:.2%} of the activations alone")


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, json_help="write all numbers there")
    parser.add_argument("--solo", action="store_true", help="cases of one rank alone")
    arguments = parser.parse_args(words)
    if arguments.solo:
        measured = measured_rows(None, [name for name, (size, _) in CASES.items() if size == 1])
    else:
        with RankPool(4) as pool:
            measured = measured_rows(pool, CASES)
    show(measured)
    common.write_json(arguments.json, "planner.memory", words, {"measured": measured})


if __name__ == "__main__":
    main()
