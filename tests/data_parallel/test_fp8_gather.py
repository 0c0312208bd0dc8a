"""Test that gathers in fp8 give the bits of gathers in bf16, with half the bytes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.data_parallel import zero
from megalite.kernels.quantization import Fp8Products
from megalite.models import compute
from megalite.partition.memory import rank_memory
from megalite.partition.pipeline import plan_stages
from megalite.planner.communication import step_volumes
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.training.non_finite import NonFiniteError
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, hashed, hashes, save_run
from tests.support.tiny import LATENT, LLAMA, MOE, Z1, Runner, build, tiny_config, words
from tests.support.traffic import counted

Settings = dict[str, Any]

FP8: Settings = words(
    "num_layers=3 precision=bf16 fp8 dp_strategy=fully-sharded micro_batch_size=1 global_batch_size=4"
)
GATHERED: Settings = {"fp8_param_gather": True}
SIXTEENS: Settings = {"num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64}
"""Sizes of a Llama model that work in fp8 on two ranks."""
TP2: Settings = {**LLAMA, **SIXTEENS, "tp": 2, "sequence_parallel": True}
SHARED: Settings = {**MOE, **SIXTEENS, "moe_shared_expert_intermediate_size": 32}


def runner_of(context: RankContext, world: int, settings: Settings, load: str | None = None) -> Runner:
    """Build a runner with torch's fp8 matmul for CPUs, which is exact and slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "why_not_fp8", lambda device: None)
        config = tiny_config(world, **{**FP8, **settings, "load": load})
        return continued(context, config, load) if load else Runner(build(context, config))


def kept_of(runner: Runner) -> dict[str, str]:
    """Return all stored tensors, and the weights outside a forward: each rank stores all or a part of them."""
    found = {name: value for name, value in hashes(runner.replica).items() if not name.endswith(" weights")}
    buckets = runner.replica.strategy.all_buckets()  # whole and exact, as `wait_for_parameters` was called
    return found | {f"{number} weights": hashed(bucket.data.clone()) for number, bucket in enumerate(buckets)}


def steps(context: RankContext, world: int, settings: Settings, piece: int) -> dict[str, Any]:
    """Return the results of two steps and an evaluation, all tensors after them, and the bytes sent in the last step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "PIECE", piece)
        runner = runner_of(context, world, settings)
        results = [runner.step() for _ in range(2)]
        found = [(result.loss, result.grad_norm) for result in results]
        evaluation = runner.evaluate()
        kept = kept_of(runner)
        runner.replica.strategy.close()
    same = {"steps": found, "evaluation": evaluation, "kept": kept}
    return {"same": same, "sent": results[-1].wire_bytes}


CASES: list[tuple[int, Settings]] = [
    (2, {}),
    (4, {**TP2, "sanitize_communication": True}),
    (4, {"dp_instances": 2, "ddp_bucket_size": 1, "reduction_order": "rank", "overlap_param_gather": False}),
    (2, {**SHARED, "ep": 2, "ema_decay": 0.5, "eval_ema": True, "recompute_granularity": "full"}),
    # With one tensor per bucket, both runs have the same buckets, so the norm's sum has the same order.
    (2, {**Z1, "ddp_bucket_size": 1}),
    (4, {**Z1, **TP2, "shard_gradients": True, "main_params": "split", "ddp_bucket_size": 1}),
    (4, Z1 | words("pp=2 num_layers=4 overlap_param_gather=false sanitize_communication ddp_bucket_size=1")),
]


@pytest.mark.parametrize(("world", "settings"), CASES, ids=str)
def test_fp8_gather_equals_a_bf16_gather(world: int, settings: Settings) -> None:
    plain = run_ranks(world, steps, world, settings, 1 << 20)
    ours = run_ranks(world, steps, world, {**settings, **GATHERED}, 100)
    for theirs, found in zip(plain, ours, strict=True):
        assert found["same"] == theirs["same"]
        assert found["sent"] < theirs["sent"]


def volumes(context: RankContext, world: int, settings: Settings) -> dict[str, Any]:
    runner = runner_of(context, world, settings)
    runner.step()
    with counted() as (found, _):
        runner.step()
        runner.replica.strategy.wait_until_idle()
    own = sum(values.nbytes for values in runner.replica.strategy._own.values())
    return {"pp": runner.replica.topology.pp.rank, "volumes": dict(found), "own": own}


@pytest.mark.parametrize(("world", "settings"), [CASES[1], (4, {"pp": 2, "num_layers": 4}), CASES[5]], ids=str)
def test_bytes_of_a_step_equal_the_formulas(world: int, settings: Settings) -> None:
    settings = {**settings, **GATHERED, "sanitize_communication": False}
    config = tiny_config(world, **{**FP8, **settings})
    assert config.parallel.dp is not None
    count = 4 // config.parallel.dp
    for rank in run_ranks(world, volumes, world, settings):
        assert rank["volumes"] == dict(step_volumes(config, rank["pp"], count))
        if config.parallel.dp_strategy == "distributed-optimizer":
            without = dataclasses.replace(config.parallel, fp8_param_gather=False)
            plain, ours = (
                rank_memory(each, plan_stages(each)).workspace_bytes
                for each in (dataclasses.replace(config, parallel=without), config)
            )
            assert rank["own"] == ours - plain > 0


def flagged(context: RankContext, world: int, settings: Settings) -> tuple[set[str], set[str]]:
    replica = runner_of(context, world, settings).replica
    modules = [module for stage in replica.stages.values() for module in stage.modules()]
    linears = [module for module in modules if isinstance(module, ColumnParallelLinear | RowParallelLinear)]
    multiply = {each.weight.info.spec.name for each in linears if isinstance(each.products, Fp8Products)}
    every = [each for stage in replica.stages.values() for each in stage.parameters()]
    gathered = {each.info.spec.name for each in every if isinstance(each, ShardedParameter) and each.info.fp8}
    return multiply, gathered


@pytest.mark.parametrize("family", [{}, {**LLAMA, **SIXTEENS}, LATENT, SHARED], ids=["gpt", "llama", "latent", "moe"])
def test_weights_with_fp8_matmuls_are_gathered_in_fp8(family: Settings) -> None:
    sizes = {"qk_head_dim": 12, "v_head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "num_attention_heads": 4}
    settings = {"num_layers": 4, **family, **GATHERED, **(sizes if family is LATENT else {})}
    for multiply, gathered in run_ranks(2, flagged, 2, settings):
        assert multiply == gathered
        assert len(gathered) >= 8
        assert {name.split(".")[1] for name in gathered} == {"1", "2"}


def continue_from(context: RankContext, world: int, settings: Settings, folder: str) -> list[dict[str, str]]:
    """Return all tensors after two steps and a save, after a third step, and after a third step of a resumed run."""
    runner = runner_of(context, world, settings)
    for _ in range(2):
        runner.step()
    save_run(runner, folder)
    found = [kept_of(runner)]
    runner.step()
    again = runner_of(context, world, settings, folder)
    again.step()
    return [*found, kept_of(runner), kept_of(again)]


@pytest.mark.parametrize("settings", [{}, {**Z1, "main_params": "split", "ddp_bucket_size": 1}], ids=str)
def test_checkpoint_has_the_exact_weights(settings: Settings, tmp_path: Path) -> None:
    plain = run_ranks(2, continue_from, 2, settings, str(tmp_path / "plain"))
    ours = run_ranks(2, continue_from, 2, {**settings, **GATHERED}, str(tmp_path / "fp8"))
    assert ours == plain
    for _, third, again in ours:
        assert third == again


def spoilt(context: RankContext, world: int) -> str:
    runner = runner_of(context, world, GATHERED)
    strategy = runner.replica.strategy
    shard = next(shard for shard in strategy.shards if shard.bucket.kind.fp8)
    if context.rank == 0:
        strategy.weights(shard).values[0] = torch.inf
    with pytest.raises(NonFiniteError) as error:
        runner.step()
    return str(error.value)


def test_infinite_weight_is_an_error() -> None:
    for text in run_ranks(2, spoilt, 2):
        assert text.startswith("step 1: loss nan, gradient norm nan")
        assert "weight are not finite on rank 0" in text
