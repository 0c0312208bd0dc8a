"""A whole step: the simulator's time, and the parts that are added to it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.config.batch import microbatch_counts
from megalite.config.run import RunConfig
from megalite.models.shapes import flops_per_token, layer_shapes
from megalite.optimizers.matrix_optimizers import orthogonalise
from megalite.partition import pipeline
from megalite.partition.buckets import matrices_of_ranks
from megalite.partition.pipeline import lowered, plan_stages, schedule_of
from megalite.pipeline.ir.schedule import Kind
from megalite.pipeline.ir.simulate import simulate
from megalite.planner.communication import matrix_volumes
from megalite.planner.cost.rates import links_of, on_different_nodes, slowest_share
from megalite.planner.cost.stage import simulator_costs, stage_costs
from megalite.planner.cost.step import matrix_flops, predict
from tests.planner.cost.machines import BASE, ENDLESS, STACK, cluster_with, config_of, free_communication, without_host

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp": {"dp": 4, "global_batch_size": 16},
    "tp": {"tp": 8, "sequence_parallel": True},
    "1f1b": {"pp": 4, "pipeline_schedule": "1f1b", "dp": 4, "global_batch_size": 64},
    "interleaved": {"pp": 2, "vpp": 2, "dp": 2, "global_batch_size": 16},
    "zb-v": {"pp": 2, "vpp": 2, "pipeline_schedule": "zb-v", "dp": 2, "global_batch_size": 16},
    "zero-1": {"dp": 8, "dp_strategy": "distributed-optimizer", "global_batch_size": 16},
    "zero-3": {"dp": 16, "dp_strategy": "fully-sharded", "global_batch_size": 32},
    "experts": {"num_experts": 8, "ep": 4, "dp": 4, "tp": 2, "sequence_parallel": True, "global_batch_size": 8},
    "cp": {"cp": 4, "dp": 2, "seq_length": 4096, "global_batch_size": 4},
}


RATES = ("memory_bandwidth", "link_bandwidth", "nic_bandwidth", "gemm", "memory", "link", "network", "p2p")


def _config(name: str) -> RunConfig:
    settings = LAYOUTS[name]
    world = 1
    for axis in ("tp", "pp", "dp", "cp"):
        world *= settings.get(axis, 1)
    return config_of(world, **settings)


def test_cost_of_whole_matrix_optimizers() -> None:
    """FLOPs as counted by torch, on the rank with most of them; exchanges take the time of their links."""
    config = config_of(16, tp=2, dp=8, optimizer="muon", global_batch_size=16)
    shapes = [shape for shape in layer_shapes(config.model, 0) if len(shape.shape) > 1]
    for shape in shapes:
        parts = [2048] * 3 if "qkv" in shape.name else [shape.shape[-2]]
        with FlopCounterMode(display=False) as counter:
            for rows in parts:
                orthogonalise(torch.ones(rows, shape.shape[-1], device="meta"), config.optimizer.muon_steps)
        assert matrix_flops(config, shape) == counter.get_total_flops()
    most = max(
        sum(matrix_flops(config, shape) for shape in own) for own in matrices_of_ranks(config, plan_stages(config))
    )
    free, usual = (predict(config, cluster, STACK).parts["optimizer"] for cluster in (free_communication(), BASE))
    assert free >= most / (1.95e13 * BASE.efficiency.gemm)
    sent = max(map(sum, matrix_volumes(config, plan_stages(config)))) / BASE.nic_share
    assert usual - free > sent / 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_sum_to_the_step(name: str) -> None:
    found = predict(_config(name), BASE, STACK)
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds, rel=1e-9)
    assert all(value >= -1e-12 for value in found.parts.values())
    assert all(value >= -1e-12 for value in found.exposed.values())
    assert 0.0 <= found.bubble < 1.0
    assert len(found.memory) == _config(name).parallel.pp


@pytest.mark.parametrize("name", ["one", "1f1b", "interleaved", "zb-v"])
def test_step_with_free_communication_is_simulator_plus_optimizer(name: str) -> None:
    config, cluster = _config(name), free_communication()
    found = predict(config, cluster, without_host())
    stages = plan_stages(config)
    costs = simulator_costs(stage_costs(config, stages, cluster, without_host()), config)
    timeline = simulate(lowered(config, schedule_of(config, microbatch_counts(config)[-1])), costs)
    assert found.step_seconds == pytest.approx(timeline.makespan + found.parts["optimizer"], rel=1e-9)
    assert found.bubble == pytest.approx(timeline.bubble_fraction, abs=1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_faster_constants_are_never_slower(name: str) -> None:
    config, peaks = _config(name), BASE.accelerator.peak_flops
    base = predict(config, BASE, STACK).step_seconds
    better: dict[str, Any] = {"peak_flops": {precision: 1.2 * peak for precision, peak in peaks.items()}}
    for part in (BASE.accelerator, BASE.node, BASE.network, BASE.efficiency):
        better |= {figure: 1.2 * getattr(part, figure) for figure in RATES if hasattr(part, figure)}
    assert len(better) == 1 + len(RATES)
    for figure, value in better.items():
        found = predict(config, cluster_with(**{figure: value}), STACK).step_seconds
        assert found <= base * (1 + 1e-12), figure


@pytest.mark.parametrize("name", LAYOUTS)
def test_slower_devices_and_a_narrower_spine_are_never_faster(name: str) -> None:
    config = _config(name)
    base = predict(config, BASE, STACK)
    for figure, values in {"device_deviation": (0.0, 0.02, 0.05), "oversubscription": (1.0, 3.0, 7.0)}.items():
        found = [predict(config, cluster_with(pod_nodes=1, **{figure: value}), STACK) for value in values]
        assert found[0].parts == base.parts
        seconds = [each.step_seconds for each in found]
        assert seconds[0] == base.step_seconds
        assert seconds == sorted(seconds), figure


def test_step_waits_for_the_slowest_device_and_the_spine() -> None:
    many = {**LAYOUTS["1f1b"], "global_batch_size": 4_000}  # a step that is not simulated whole
    for name, config in {"zero-3": _config("zero-3"), "many": config_of(16, **many)}.items():
        cluster = cluster_with(device_deviation=0.05)
        found = predict(config, cluster, STACK)
        scale = microbatch_counts(config)[-1] / found.timeline.schedule.num_microbatches
        busy = scale * max(found.timeline.busy)
        assert found.parts["stragglers"] == pytest.approx(slowest_share(16, cluster) * busy)
        assert found.step_seconds == pytest.approx(
            predict(config, BASE, STACK).step_seconds + found.parts["stragglers"]
        )
        narrow = predict(config, cluster_with(pod_nodes=1, oversubscription=40.0), STACK)
        assert narrow.step_seconds > 1.2 * predict(config, BASE, STACK).step_seconds, name


@pytest.mark.parametrize("name", ["one", "tp", "1f1b", "experts", "cp"])
@pytest.mark.parametrize(("product_rate", "float8_rate"), [(1.0, 0.0), (9.0, 0.0), (1.0, 1.5), (9.0, 9.0)])
def test_mfu_is_at_most_the_rate_of_products(name: str, product_rate: float, float8_rate: float) -> None:
    """With any stack constants and everything else free, MFU is above neither the rate of products nor the peak, which
    doubles in 8 bits."""
    config, cluster = _config(name), free_communication(cluster_with(memory_bandwidth=ENDLESS, kernel_seconds=0.0))
    stack = replace(without_host(), attention_efficiency=1.0, product_rate=product_rate, float8_rate=float8_rate)
    found = predict(config, cluster, stack)
    most = min(cluster.efficiency.gemm * product_rate * max(float8_rate, 1.0), 2.0 if float8_rate else 1.0)
    assert 0.3 * most < found.mfu_causal <= most


def test_throughput_and_mfu_of_a_step() -> None:
    config = _config("1f1b")
    found = predict(config, BASE, STACK)
    tokens = 64 * 1024
    assert found.tokens_per_second == pytest.approx(tokens / found.step_seconds)
    for convention, mfu in (("palm", found.mfu), ("megatron", found.mfu_causal)):
        flops = flops_per_token(config.model, 1024, convention) * tokens
        assert mfu == pytest.approx(flops / (found.step_seconds * 16 * 312e12))


def test_reduction_overlaps_with_the_last_backward() -> None:
    config = config_of(16, dp=16, global_batch_size=32)
    hidden = predict(config, BASE, STACK)
    plain = predict(config, BASE, replace(STACK, overlap_gradients=False))
    off = predict(config_of(16, dp=16, global_batch_size=32, overlap_grad_reduce=False), BASE, STACK)
    assert 0.0 < hidden.exposed["gradients"] < plain.exposed["gradients"]
    assert plain.exposed["gradients"] == pytest.approx(off.exposed["gradients"])
    slow = cluster_with(nic_bandwidth=1e8)
    longest = predict(config, slow, replace(STACK, overlap_gradients=False)).exposed["gradients"]
    backward = hidden.stages[0].backward
    found = predict(config, slow, STACK).exposed["gradients"]
    assert longest - backward <= found < longest


def test_bf16_gradients_halve_the_reduction() -> None:
    config = config_of(16, dp=16, overlap_grad_reduce=False)
    cluster = cluster_with(link_latency=0.0, latency=0.0)
    full = predict(config, cluster, STACK).exposed["gradients"]
    assert predict(config, cluster, replace(STACK, half_gradients=True)).exposed["gradients"] == pytest.approx(full / 2)


def test_messages_cost_what_they_send() -> None:
    """Messages divided over tensor-parallel ranks, or compressed."""
    settings = {"tp": 8, "pp": 4, "global_batch_size": 16}
    whole = links_of(config_of(32, **settings, scatter_gather_tensors_in_pipeline=False), BASE)[0, 1]
    cut = links_of(config_of(32, **settings), BASE)[0, 1]
    assert cut.seconds_per_message == pytest.approx(whole.seconds_per_message / 8)
    assert cut.latency > whole.latency  # the parts are gathered
    plain, compressed = (
        links_of(config_of(4, pp=4, global_batch_size=16, **more), BASE)[0, 1].seconds_per_message
        for more in ({}, {"pipeline_compression": "topk:0.1"})
    )
    assert compressed == pytest.approx(0.1 * 6 / 2 * plain, rel=1e-3)


def test_pipeline_neighbours_on_other_nodes() -> None:
    assert not on_different_nodes(2, 0, 3, 8)  # ranks 0, 2, 4, 6 of 8
    assert on_different_nodes(2, 3, 4, 8)
    assert on_different_nodes(8, 0, 1, 8)
    assert on_different_nodes(3, 1, 2, 8)  # 3, 4, 5 and 6, 7, 8
    inside = links_of(config_of(4, pp=4, global_batch_size=8), BASE)[0, 1]
    whole = {"scatter_gather_tensors_in_pipeline": False}
    across = links_of(config_of(32, tp=8, pp=4, global_batch_size=8, **whole), BASE)[0, 1]
    assert across.seconds_per_message > 5 * inside.seconds_per_message


def test_step_of_many_microbatches_is_extrapolated() -> None:
    config = config_of(
        1024, num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, tp=8, pp=8,
        global_batch_size=12288, recompute_granularity="full", sequence_parallel=True,
    )  # fmt: skip
    found = predict(config, BASE, STACK)
    assert microbatch_counts(config)[-1] == 768
    assert len(found.timeline.events) <= pipeline.SIMULATED_ACTIONS + 64
    assert 0.25 < found.mfu < 0.7


def test_parameter_gathers_lengthen_the_step() -> None:
    settings = {"dp": 16, "dp_strategy": "distributed-optimizer", "global_batch_size": 32}
    cluster = cluster_with(link_latency=0.0, latency=0.0)
    hidden = predict(config_of(16, **settings), cluster, STACK)
    plain = predict(config_of(16, **settings, overlap_param_gather=False), cluster, STACK)
    gathered = plain.exposed["parameters"]
    # All parameters in bf16, of which a ring over two nodes of 8 receives 15 of 16 parts.
    rate = 8 * BASE.nic_share * BASE.efficiency.network
    elements = plain.memory[0].parameters
    assert gathered == pytest.approx(15 / 16 * 2 * elements / rate, rel=1e-3)
    # Gathered early, they overlap with the first forward.
    left = max(0.0, gathered - float(hidden.stages[0].forward))
    assert hidden.exposed["parameters"] == pytest.approx(left)
    assert plain.step_seconds == pytest.approx(hidden.step_seconds + gathered - left)


def test_gathers_of_a_chunk_overlap_until_its_first_forward() -> None:
    settings = {"pp": 2, "vpp": 2, "dp": 8, "dp_strategy": "distributed-optimizer", "global_batch_size": 32}
    cluster = cluster_with(link_latency=0.0, latency=0.0, link_bandwidth=3e10)
    plain = predict(config_of(16, **settings, overlap_param_gather=False), cluster, STACK)
    ahead = predict(config_of(16, **settings), cluster, STACK)
    whole, left = plain.exposed["parameters"], []
    for rank, memory in enumerate(ahead.memory):
        first = [
            e for e in ahead.timeline.events if e.rank == rank and e.action.kind is Kind.F and e.action.microbatch == 0
        ]
        share = memory.parameters / max(each.parameters for each in ahead.memory)
        left.append(whole * share - max(event.end for event in first))
    # The last chunk's are gathered last, and overlap with more than one forward per chunk.
    assert ahead.exposed["parameters"] >= max(left) - 1e-9
    forwards = min(sum(float(ahead.stages[stage].forward) for stage in (rank, rank + 2)) for rank in range(2))
    assert 0.0 < ahead.exposed["parameters"] < whole - forwards


def test_instances_inside_nodes_gather_over_node_links() -> None:
    settings = {"dp": 16, "dp_strategy": "distributed-optimizer", "global_batch_size": 32}
    settings["overlap_param_gather"] = False
    cluster = cluster_with(link_latency=0.0, latency=0.0)
    across, inside = (predict(config_of(16, **settings, dp_instances=n), cluster, STACK) for n in (1, 2))
    rate = cluster.node.link_bandwidth * cluster.efficiency.link
    assert inside.exposed["parameters"] == pytest.approx(7 / 8 * 2 * inside.memory[0].parameters / rate, rel=1e-3)
    assert inside.exposed["parameters"] < across.exposed["parameters"]
    # Two replicas of a shard in two nodes, each with its own adapter.
    slow = cluster_with(link_latency=0.0, latency=0.0, nic_bandwidth=1e8)
    assert predict(config_of(16, **settings, dp_instances=2), slow, STACK).exposed["gradients"] == pytest.approx(
        4 / 8 * inside.memory[0].parameters / (slow.nic_share * slow.efficiency.network), rel=0.1
    )
    # Sharded gradients are summed over instances after the last microbatch, and nothing hides that.
    sharded = predict(config_of(16, **settings, dp_instances=2, shard_gradients=True), cluster, STACK)
    summed = 4 / 8 * inside.memory[0].parameters / (cluster.nic_share * cluster.efficiency.network)
    assert summed < sharded.exposed["gradients"] < 1.5 * summed
    assert inside.exposed["gradients"] < summed


def test_tied_embedding_inside_a_node_uses_node_links() -> None:
    def gradients(world: int, nic_bandwidth: float, **settings: Any) -> float:
        cluster = cluster_with(nic_bandwidth=nic_bandwidth)
        found = predict(config_of(world, **settings), cluster, STACK)
        return found.parts["gradients"]

    inside = {"tp": 2, "pp": 4, "global_batch_size": 8}
    assert gradients(8, 2.5e10, **inside) == pytest.approx(gradients(8, 1e9, **inside))
    across = {"tp": 4, "pp": 4, "global_batch_size": 8}
    assert gradients(16, 1e9, **across) > 2 * gradients(16, 2.5e10, **across)


CROWDED = replace(BASE, node=replace(BASE.node, ranks_per_core=2.0))


@pytest.mark.parametrize("microbatches", [1, 16])
def test_waiting_ranks_free_their_cores(microbatches: int) -> None:
    """A pipeline with two ranks per core: never faster than all work, or than the longest chain on whole cores."""
    config = config_of(4, pp=4, pipeline_schedule="1f1b", pipeline_layers=[3, 2, 2, 1], global_batch_size=microbatches)
    apart, crowded = (predict(config, cluster, STACK) for cluster in (BASE, CROWDED))
    run = apart.timeline
    work, chain = sum(run.busy) / 4, run.makespan / 2
    taken = run.makespan - (apart.step_seconds - crowded.step_seconds)
    if microbatches == 1:  # one rank computes at a time; a message's time is not halved
        assert chain <= taken == pytest.approx(chain + apart.parts["pipeline"] / 2, rel=1e-6)
    else:
        assert work < taken < 0.95 * run.makespan
    assert crowded.parts["given"] == pytest.approx(taken - run.makespan, rel=1e-9)
    assert sum(crowded.parts.values()) == pytest.approx(crowded.step_seconds, rel=1e-9)
    assert crowded.bubble == pytest.approx(1 - work / taken, abs=1e-9)


@pytest.mark.parametrize("settings", [{"dp": 4}, {"tp": 4}, {"pp": 16}])
def test_ranks_in_lockstep_free_no_cores(settings: dict[str, Any]) -> None:
    """Without a pipeline no rank waits long; if a pipeline leaves its node, all ranks of a node may wait at once."""
    size = next(iter(settings.values()))
    config = config_of(size, num_layers=16, global_batch_size=64, **settings)
    apart, crowded = (predict(config, cluster, STACK) for cluster in (BASE, CROWDED))
    assert crowded.step_seconds == pytest.approx(apart.step_seconds, rel=1e-12)
