"""Memory of all layouts against `partition.memory` for each."""

import itertools
import random

import pytest

from megalite.partition.memory import planned_memory
from megalite.partition.pipeline import schedule_of
from megalite.planner.search.features import Counter
from megalite.planner.search.search import config_of, survey
from megalite.planner.search.space import Layout
from tests.planner.search.asking import EXPERTS, TINY, Asked, asked

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 2"


def exact_bytes(request: Asked, layout: Layout) -> int:
    """Bytes of the fullest rank, by the code for one config."""
    config = config_of(request.request, layout.settings())
    schedule = schedule_of(config, layout.pipeline.microbatches)
    return max(memory.total_bytes for memory in planned_memory(config, schedule))


def sampled(request: Asked, count: int) -> list[tuple[Layout, float, int]]:
    """Yield layouts with their bytes by both methods."""
    found = survey(request.request, request.cluster, request.stack)
    draw, drawn = random.Random(3), []
    while len(drawn) < count:
        index = draw.randrange(len(found.space))
        layout = found.at(index)
        if layout.pipeline.pp * layout.pipeline.vpp * layout.pipeline.microbatches <= 600:
            drawn.append((layout, float(found.all_bytes[index]), exact_bytes(request, layout)))
    return drawn


@pytest.mark.parametrize(
    "flags",
    [
        f"{TINY} --gpus 8 --bf16",
        f"{TINY} --gpus 4 --precision fp32 {DROPOUT}",
        f"{TINY} --gpus 8 --bf16 --fp8",
        f"{TINY.replace('500', '40000')} --gpus 8 --bf16 --fix schedule=interleaved",  # the head is the largest part
        f"{EXPERTS} --gpus 8 --bf16 --optimizer muon",
        f"{EXPERTS} --gpus 32 --bf16 --fix dp_instances=2,4",
        "--preset gpt3-175b --cluster dgx-a100 --gpus 64 --global-batch-size 64 --optimizer sgd",
        "--preset gpt3-6.7b --cluster dgx-a100 --gpus 16 --global-batch-size 32 --optimizer soap --fix dp_instances=1,2,4",
        "--preset mixtral-8x7b --cluster dgx-h100 --gpus 32 --global-batch-size 32",
    ],
)
def test_bytes_equal_those_of_single_configs(flags: str) -> None:
    # Strategies without temporarily unsharded buckets.
    exact = asked(f"{flags} --fix strategy=all-reduce,distributed-optimizer")
    for layout, mine, theirs in sampled(exact, 15):
        vee = layout.pipeline.schedule in ("zb-v", "dualpipe-v")
        assert mine == pytest.approx(theirs, rel=0.05 if vee else 0.004, abs=4), layout


@pytest.mark.parametrize(
    "flags",
    [
        "--preset gpt3-175b --cluster dgx-a100 --gpus 64 --global-batch-size 64",
        "--preset deepseek-moe-16b --cluster dgx-h100 --gpus 16 --global-batch-size 16 --fix vpp=1",
    ],
)
def test_bytes_of_sharded_gradients_and_parameters(flags: str) -> None:
    for layout, mine, theirs in sampled(asked(f"{flags} --fix strategy=zero-2,fully-sharded"), 8):
        assert mine == pytest.approx(theirs, rel=0.02), layout


@pytest.mark.parametrize(
    "flags",
    [
        "--preset gpt3-6.7b --cluster dgx-a100 --gpus 16 --global-batch-size 32",
        "--preset deepseek-moe-16b --cluster dgx-h100 --gpus 16 --global-batch-size 16",
    ],
)
def test_bytes_with_host_memory(flags: str) -> None:
    """Including offloaded data: visiting pieces, and inputs of recomputed layers."""
    host = "--fix optimizer_cpu_offload=yes,no --fix cpu_offloading_num_layers=0,2,5 --fix recompute=none,full"
    drawn = sampled(asked(f"{flags} {host} --fix strategy=all-reduce,distributed-optimizer"), 25)
    for layout, mine, theirs in drawn:
        assert mine == pytest.approx(theirs, rel=0.06), layout
    assert {(layout.offload, layout.pipeline.offloaded > 0) for layout, _, _ in drawn} == {
        *itertools.product((False, True), repeat=2)
    }


def test_most_layouts_are_exact_to_the_byte() -> None:
    request = asked("--preset gpt3-1.3b --cluster dgx-a100 --gpus 16 --global-batch-size 32 --fix strategy=all-reduce")
    drawn = sampled(request, 20)
    assert sum(abs(mine - theirs) < 1 for _, mine, theirs in drawn) >= 18


def test_equal_ranks_are_computed_once() -> None:
    request = asked(
        "--preset gpt3-175b --cluster dgx-a100 --gpus 64 --global-batch-size 64 --pp 32 --fix schedule=1f1b"
    )
    found = survey(request.request, request.cluster, request.stack)
    counter = Counter(request.request.config)
    assert len(counter(found.space.blocks[0].pipelines[0])) < 8
