"""Seconds in closed form against the simulator."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalite.pipeline.ir.generators import SCHEDULES
from megalite.planner.cost.step import predict
from megalite.planner.hardware import load_cluster, save_cluster
from megalite.planner.search.search import Survey, config_of, survey
from megalite.planner.search.space import Layout
from tests.planner.search.asking import Asked, asked

GPT = "--preset gpt3-6.7b --cluster dgx-a100 --gpus 32 --global-batch-size 64 --max-memory 10TB"
PLAIN = (
    "--fix strategy=distributed-optimizer --fix recompute=selective --fix mbs=1,2 --fix tp=2 --fix cp=1 --fix sp=true"
)

WIDE = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 128256 --cluster dgx-a100 "
    "--gpus 32 --global-batch-size 64 --max-memory 10TB --fix strategy=all-reduce,distributed-optimizer "
    "--fix recompute=none --fix cp=1 --fix mbs=1 --fix sp=false --fix tp=1,4 --fix schedule=1f1b"
)


def surveyed(flags: str) -> tuple[Asked, Survey]:
    request = asked(flags)
    return request, survey(request.request, request.cluster, request.stack)


def both(request: Asked, layout: Layout, mine: float) -> tuple[float, float]:
    config = config_of(request.request, layout.settings())
    return mine, predict(config, request.cluster, request.stack).step_seconds


def assert_near(flags: str, rel: float, count: int = 3) -> None:
    """Compare random layouts of the space."""
    request, found = surveyed(flags)
    for index in random.Random(2).sample(range(len(found.all_seconds)), min(count, len(found.all_seconds))):
        layout = found.at(index)
        mine, simulated = both(request, layout, float(found.all_seconds[index]))
        assert mine == pytest.approx(simulated, rel=rel), layout


@pytest.mark.parametrize("stack", ["fused", "unfused"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_times_are_near_the_simulator(schedule: str, stack: str) -> None:
    assert_near(f"{GPT} {PLAIN} --stack {stack} --fix schedule={schedule} --fix pp=2,4,8 --fix vpp=1,2,4", 0.08)


@pytest.mark.parametrize(("schedule", "rel"), [("zb-h2", 0.08), ("zb-v", 0.08), ("looped-bfs", 0.02)])
def test_times_with_few_microbatches(schedule: str, rel: float) -> None:
    """Weight gradients do not fill the ramps. The embedding's gradients are part of the last exchange of a loop."""
    flags = f"{GPT} {PLAIN} --fix schedule={schedule} --fix pp=4,8 --fix vpp=1,2,4"
    assert_near(flags.replace("batch-size 64", "batch-size 16"), rel, 8)


def test_times_of_zb_h1_on_two_ranks() -> None:
    """The first gradient waits for an input gradient longer than a weight gradient."""
    flags = (
        "--preset gpt3-1.3b --cluster dgx-h100 --gpus 8 --global-batch-size 64 --max-memory 10TB --fix tp=1 --fix pp=2"
    )
    assert_near(
        f"{flags} --fix strategy=distributed-optimizer --fix recompute=none --fix mbs=1,2,4 --fix schedule=zb-h1", 0.01
    )


def test_times_with_messages_between_chunks(tmp_path: Path) -> None:
    """A few more microbatches than ranks do not fill a chunk's way over slow links."""
    found = load_cluster("dgx-a100")
    network = replace(found.network, nic_bandwidth=found.network.nic_bandwidth / 10)
    save_cluster(replace(found, network=network), tmp_path / "slow.yaml")
    flags = (
        f"{GPT} --no-tie-embeddings --fix strategy=distributed-optimizer --fix recompute=none --fix mbs=1 --fix cp=1"
    )
    flags = f"{flags} --fix tp=8 --fix sp=true --fix pp=4 --fix schedule=looped-bfs --fix vpp=2,4"
    assert_near(flags.replace("dgx-a100", str(tmp_path / "slow.yaml")).replace("size 64", "size 5"), 0.03)


def test_times_of_unequal_chunks() -> None:
    """Each chunk of looped-bfs takes as long as its largest stage."""
    flags = "--preset llama3-8b --bf16 --cluster dgx-h100 --gpus 64 --global-batch-size 256 --max-memory 10TB"
    fixed = PLAIN.replace("mbs=1,2", "mbs=1").replace("tp=2", "tp=1,2").replace("sp=true", "sp=false")
    assert_near(f"{flags} {fixed} --fix schedule=looped-bfs --fix pp=2,4,8 --fix vpp=2,3,4", 0.03)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_times_with_slow_links(schedule: str, tmp_path: Path) -> None:
    """Each microbatch waits for its way there and back."""
    found = load_cluster("dgx-a100")
    node = replace(found.node, link_bandwidth=found.node.link_bandwidth / 30)
    network = replace(found.network, nic_bandwidth=found.network.nic_bandwidth / 10)
    save_cluster(replace(found, node=node, network=network), tmp_path / "slow.yaml")
    flags = f"{GPT} {PLAIN} --fix schedule={schedule} --fix pp=2,4,8".replace("batch-size 64", "batch-size 256")
    flags = (
        flags.replace("tp=2", "tp=1").replace("sp=true", "sp=false").replace("dgx-a100", str(tmp_path / "slow.yaml"))
    )
    assert_near(flags, 0.03)


@pytest.mark.parametrize("strategy", ["zero-2", "fully-sharded"])
@pytest.mark.parametrize("pp", ["1", "4"])
def test_times_with_exchanges_in_each_microbatch(strategy: str, pp: str) -> None:
    """With and without instances, which sum their gradients after the last microbatch."""
    flags = f"{GPT} --no-tie-embeddings --fix schedule=1f1b --fix mbs=1,2 --fix cp=1 --fix pp={pp}"
    for number in ("1", "2,4"):
        assert_near(f"{flags} --fix strategy={strategy} --fix dp_instances={number}", 0.03, 6)


def test_times_with_fp8_products() -> None:
    """Weights are cast once per step: once per microbatch would take 4 % more."""
    flags = f"{GPT} {PLAIN} --stack float8-2025 --fix schedule=1f1b --fix pp=4,8"
    assert_near(flags.replace("mbs=1,2", "mbs=1"), 0.02)


def test_times_with_fp8_products_do_not_depend_on_other_pipelines() -> None:
    """Weights are cast once per step, so more microbatches make each cheaper."""
    flags = "--preset llama3-8b --cluster dgx-h100 --stack float8-2025 --gpus 16 --global-batch-size 64 --fix cp=1"
    both, *each = (surveyed(f"{flags} --fix pp={pp}")[1].all_seconds for pp in ("1,4", "1", "4"))
    np.testing.assert_array_equal(both, np.concatenate(each))


def test_times_with_weights_gathered_in_fp8() -> None:
    """Nothing overlaps the gathers: in 16 bits they would take 7 % more of a step."""
    assert_near(f"{GPT} {PLAIN} --fp8 --fp8-param-gather --no-overlap-param-gather --fix pp=1", 0.02)


@pytest.mark.parametrize("optimizer", ["muon", "soap"])
def test_times_with_whole_matrix_optimizers(optimizer: str) -> None:
    """Exchange and updates of matrices are more than half of these steps."""
    assert_near(f"{GPT} {PLAIN} --fix schedule=1f1b --fix pp=1,4 --optimizer {optimizer}", 0.01)


@pytest.mark.parametrize("pp", ["1", "4"])
def test_times_with_an_untied_output_layer(pp: str) -> None:
    """The embedding and the output layer have 131 of 563 million parameters each: on one rank, or at both ends."""
    assert_near(f"{WIDE} --untie-embeddings-and-output-weights --fix pp={pp}", 0.04)


def test_times_with_a_tied_embedding_at_both_ends() -> None:
    """The ends of the pipeline sum the gradient of an embedding of 131 million parameters."""
    assert_near(f"{WIDE} --fix pp=4", 0.04)


@pytest.mark.parametrize("latency", [2e-6, 1e-2])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_times_with_shared_cores(schedule: str, latency: float, tmp_path: Path) -> None:
    """With negligible messages, and with messages that take a part of the step, which the cores also process."""
    crowded = load_cluster("dgx-a100")
    node = replace(crowded.node, accelerators=32, ranks_per_core=2.0, link_latency=2e-6, message_steps=latency / 2e-6)
    save_cluster(replace(crowded, node=node), tmp_path / "crowded.yaml")
    flags = f"{GPT} {PLAIN} --fix schedule={schedule} --fix pp=2,4,8 --fix vpp=1,2"
    assert_near(flags.replace("dgx-a100", str(tmp_path / "crowded.yaml")), 0.12)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_times_with_stragglers_and_a_narrow_spine(schedule: str, tmp_path: Path) -> None:
    found = load_cluster("dgx-a100")
    network = replace(found.network, pod_nodes=2, oversubscription=8.0)
    efficiency = replace(found.efficiency, device_deviation=0.1)
    sources = {**found.provenance, "efficiency.device_deviation": "assumed"}
    save_cluster(replace(found, network=network, efficiency=efficiency, provenance=sources), tmp_path / "pods.yaml")
    flags = f"{GPT} {PLAIN} --no-tie-embeddings --fix schedule={schedule} --fix pp=2,4,8 --fix vpp=1,2"
    assert_near(flags.replace("dgx-a100", str(tmp_path / "pods.yaml")), 0.1)


def test_best_by_closed_form_is_near_the_optimum() -> None:
    request, found = surveyed(f"{GPT} {PLAIN} --fix schedule=1f1b,interleaved,zb-v --fix pp=1,4 --fix vpp=1,2")
    ranked = [both(request, layout, seconds) for layout, seconds in found.fastest()]
    simulated = [each for _, each in ranked]
    assert [mine for mine, _ in ranked] == sorted(mine for mine, _ in ranked)
    assert min(simulated[:5]) <= 1.005 * min(simulated)


def test_times_without_overlap() -> None:
    _, hidden = surveyed(f"{GPT} {PLAIN} --fix pp=1")
    _, shown = surveyed(f"{GPT} {PLAIN} --fix pp=1 --no-overlap-grad-reduce --no-overlap-param-gather")
    assert all((a <= b).all() for a, b in zip(hidden.seconds, shown.seconds, strict=True))
    assert shown.seconds[0].min() > 1.001 * hidden.seconds[0].min()


def test_layout_that_does_not_fit_has_no_time() -> None:
    _, found = surveyed(f"{GPT.replace('10TB', '20GB')} {PLAIN}")
    for held, seconds in zip(found.memory, found.seconds, strict=True):
        assert (np.isfinite(seconds) == (held <= 20e9)).all()
    assert 0 < found.fitting < len(found.space)


def test_frontier_trades_memory_for_speed() -> None:
    _, found = surveyed(GPT)
    points = found.frontier()
    assert len(points) > 3
    assert points == sorted(points)
    assert [seconds for _, seconds in points] == sorted((seconds for _, seconds in points), reverse=True)
    fastest = next(found.fastest())[1]
    assert points[-1][1] == pytest.approx(fastest, rel=1e-5)
    assert points[0][0] == pytest.approx(found.leanest()[1])
