"""A rank's memory against adding up by hand."""

import pytest

from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.shapes import parameter_count
from megalite.partition.activations import deferred_bytes, stage_activation_bytes
from megalite.partition.memory import activation_peaks, rank_memory
from megalite.partition.pipeline import plan_stages
from megalite.pipeline.ir.generators.one_chunk import gpipe, one_f_one_b, zb_h1

GPT = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 3 --vocab-size 512"


def config_of(flags: str, world_size: int) -> RunConfig:
    return validate(parse_arguments(flags.split()).config, world_size)


@pytest.mark.parametrize(("precision", "total"), [("bf16", 18), ("fp16", 18), ("fp32", 16), ("fp64", 32)])
@pytest.mark.parametrize("sharded", [False, True])
def test_state_of_one_rank(precision: str, total: int, sharded: bool) -> None:
    strategy = "--use-distributed-optimizer" if sharded else ""
    config = config_of(f"{GPT} --precision {precision} {strategy}", 4)
    stages = plan_stages(config)
    memory = rank_memory(config, stages, 2 * stage_activation_bytes(config, stages[0]))
    count = parameter_count(config.model)
    optimizer = {"bf16": 12, "fp16": 12, "fp32": 8, "fp64": 16}[precision]
    assert memory.parameters == count
    expected = (total - optimizer + optimizer / (4 if sharded else 1)) * count
    assert memory.total_bytes - memory.activation_bytes == pytest.approx(expected, abs=1)
    assert memory.activation_bytes == 2 * stage_activation_bytes(config, stages[0])
    assert memory.workspace_bytes == 0


def test_parameters_of_ranks_add_up() -> None:
    config = config_of(f"{GPT} --pp 2 --tp 2 --activation swiglu --normalization RMSNorm --disable-bias-linear", 4)
    stages = plan_stages(config)
    on_ranks = sum(2 * rank_memory(config, [plan], 0).parameters for plan in stages)
    # Both tensor-parallel ranks hold norms and positions, both ends of the pipeline the tied embedding.
    norms = (2 * 4 + 1) * 64
    assert on_ranks == parameter_count(config.model) + norms + 32 * 64 + 512 * 64


def test_experts_are_split_over_ep_and_their_own_data_parallel_size() -> None:
    flags = f"{GPT} --num-experts 4 --use-distributed-optimizer --bf16 --disable-bias-linear"
    one, four = config_of(flags, 4), config_of(f"{flags} --ep 4", 4)
    before, after = (rank_memory(config, plan_stages(config), 0) for config in (one, four))
    expert = 4 * 2 * 4 * 64 * 256
    assert before.parameters - after.parameters == expert * 3 // 4
    # Divided by dp 4 before, by ep 4 after: the same optimizer state.
    assert before.optimizer_bytes == after.optimizer_bytes


def test_peak_of_a_schedule_is_by_weight_and_knows_its_halves() -> None:
    config = config_of(f"{GPT} --pp 2 --global-batch-size 18", 2)
    stages = plan_stages(config)
    first, last = (stage_activation_bytes(config, plan) for plan in stages)
    assert activation_peaks(config, stages, one_f_one_b(2, 6)) == [2 * first, last]
    assert activation_peaks(config, stages, gpipe(2, 6)) == [6 * first, 6 * last]
    waiting = deferred_bytes(config, stages[1])
    # Rank 1 of ZB-H1: the graph of one microbatch, and what the W of the one before it waits with.
    assert activation_peaks(config, stages, zb_h1(2, 6))[1] == last + waiting
