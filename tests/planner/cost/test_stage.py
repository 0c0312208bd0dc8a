"""Costs of operations and stages, and their arrays."""

from dataclasses import replace

import numpy as np
import pytest

from megalite.partition.pipeline import plan_stages
from megalite.planner.cost.operations import (
    Pricing,
    attention_core,
    attention_projections,
    dense_mlp,
    head,
    norm,
    rotation,
)
from megalite.planner.cost.rates import Parts, stacked, workload_of
from megalite.planner.cost.stage import StageCost, layer_seconds, stage_cost, stage_costs
from megalite.planner.hardware import Cluster, SoftwareStack, load_stack
from tests.planner.cost.machines import BASE, ENDLESS, STACK, cluster_with, config_of, without_host

UNFUSED = load_stack("unfused")
SLOW_MEMORY = cluster_with(multiprocessors=1, memory_bandwidth=1.0, memory=1.0, kernel_seconds=0.0)  # bytes are seconds


def test_fused_attention_has_no_scores_and_half_the_products() -> None:
    work = workload_of(config_of(1))
    compute = cluster_with(memory_bandwidth=ENDLESS, gemm=0.5)
    core = attention_core(Pricing.of(work, compute, replace(STACK, attention_efficiency=0.8)))
    flops = 4 * 1024 * 2048 * 1024 / 2
    assert core.forward.gemm == pytest.approx(flops / (312e12 * 0.5 * 0.8))
    assert core.input_gradient.gemm == pytest.approx(2.5 * core.forward.gemm)
    window = replace(work, keys=256.0)
    narrow = attention_core(Pricing.of(window, compute, replace(STACK, attention_efficiency=0.8)))
    assert narrow.forward.gemm == pytest.approx(core.forward.gemm * (256 * (1 - 256 / 2048)) / 512)


def test_each_pass_over_keys_starts_and_ends_tiles() -> None:
    compute = cluster_with(memory_bandwidth=ENDLESS, gemm=0.5)

    def keys_seen(cluster: Cluster = compute, **settings: object) -> tuple[float, float]:
        """Keys per query that take the core's time, forward and backward."""
        work = workload_of(config_of(4, cp=4, seq_length=8192, **settings))
        core = attention_core(Pricing.of(work, cluster, STACK))
        each = 4 * 2048 * 2048 / (312e12 * cluster.efficiency.gemm * 0.75)
        return core.forward.gemm / each, core.input_gradient.gemm / (2.5 * each)

    assert keys_seen() == pytest.approx((4096 + 3 * 180, 4096 + 3 * 330))
    assert keys_seen(cp_comm_type="a2a") == pytest.approx((4096, 4096))
    assert keys_seen(cp_comm_type="allgather") == pytest.approx((4096 + 180, 4096 + 330))
    halves = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
    assert keys_seen(**halves) == pytest.approx((4096 + 180, 4096 + 330))
    # A window of a block reaches into one other block.
    seen = 2048 * (1 - 2048 / 16384)
    assert keys_seen(sliding_window=2048) == pytest.approx((seen + 180, seen + 330))
    assert keys_seen(cluster_with(memory_bandwidth=ENDLESS, multiprocessors=1)) == pytest.approx((4096, 4096))


def test_sparse_attention_computes_all_scores_twice() -> None:
    """The indexer's products, at half the rate, are added to those with all keys; the backward repeats the forward."""
    sparse = {"multi_latent_attention": True, "experimental_attention_variant": "dsa"}
    sizes = {"dsa_indexer_n_heads": 16, "dsa_indexer_head_dim": 128, "qk_head_dim": 64, "v_head_dim": 128}
    work = workload_of(config_of(1, seq_length=2048, **sparse, **sizes))
    dense, core = (attention_core(Pricing.of(each, BASE, UNFUSED)) for each in (replace(work, index_heads=0.0), work))
    more = Pricing.of(work, BASE, UNFUSED).gemm(2048 * 16, 2048, 128, times=0.5).gemm
    assert more > 2 * 2 * 16 * 128 * 2048 * 2048 / 312e12
    assert core.forward.gemm == pytest.approx(dense.forward.gemm + more)
    assert core.input_gradient.gemm == pytest.approx(dense.input_gradient.gemm + 2 * more + core.forward.gemm)
    assert core.forward.memory > dense.forward.memory


def test_results_of_blocks_of_keys_are_summed_in_memory() -> None:
    """Bytes beyond those of one rank, in bf16, per query and per key and value of one rank."""
    sizes = {"seq_length": 4096, "num_query_groups": 4}
    queries, keys_and_values = 2048 * 2048, 2048 * 2 * 4 * 128

    def moved(stack: SoftwareStack, **settings: object) -> tuple[float, float]:
        work = workload_of(config_of(2, cp=2, **sizes, **settings))
        core = attention_core(Pricing.of(work, SLOW_MEMORY, stack))
        return core.forward.memory, core.input_gradient.memory

    # One reads a result and writes a sum; two read both and write the sum. Keys and values are copied, then exchanged.
    one, two = 2 + 2, 2 + 2 + 2
    half = replace(STACK, half_ring=True)
    found = queries * (one + two) + keys_and_values * 4, (queries + keys_and_values) * (one + two)
    assert moved(half) == pytest.approx(found)
    # fp32: cleared and rounded (4; 4 + 2); per block scaled (4 + 4) and added to (4 + 2 + 4). Gradients are not scaled.
    added = 4 + 4 + 2 + 2 * (4 + 2 + 4)
    found = queries * (added + 2 * 8) + keys_and_values * 4, (queries + keys_and_values) * added
    assert moved(STACK) == pytest.approx(found)
    # Gathered keys and values are put in order (read, written); their gradients cleared, summed and put in order as well.
    gathered = moved(STACK, cp_comm_type="allgather")
    assert gathered[0] - moved(STACK)[0] == pytest.approx(keys_and_values * 2 * 2 * 2)
    assert gathered[1] - moved(STACK)[1] == pytest.approx(keys_and_values * 2 * 2 * (2 + 2 * 4))
    # Heads are put in order before an all-to-all, positions after it.
    copied = (2 * queries + keys_and_values) * 2 * 4
    assert moved(STACK, cp_comm_type="a2a") == pytest.approx((copied, copied))


def test_ring_sends_gradients_in_the_precision_of_its_sums() -> None:
    work = workload_of(config_of(2, cp=2, seq_length=4096, num_query_groups=4))
    slow = cluster_with(link_bandwidth=1e6, link_latency=0.0, link=1.0, small_groups=1.0)
    exact, half = (
        attention_core(Pricing.of(work, slow, replace(STACK, half_ring=half))).input_gradient for half in (False, True)
    )
    # In the backward, gradients follow keys and values: in fp32 with twice as many bytes, else with as many.
    sent = 2048 * 2 * 4 * 128 * 2 / 1e6
    assert exact.context == pytest.approx(3 * sent - exact.gemm)
    assert half.context == pytest.approx(2 * sent - half.gemm)
    gathers = workload_of(config_of(2, cp=2, seq_length=4096, num_query_groups=4, cp_comm_type="allgather"))
    costs = (attention_core(Pricing.of(gathers, slow, replace(STACK, half_ring=half))) for half in (False, True))
    assert next(costs).input_gradient.context == pytest.approx(1.5 * next(costs).input_gradient.context)


def test_time_of_an_mlp_is_that_of_its_flops() -> None:
    work = workload_of(config_of(2, tp=2, activation="swiglu", ffn_hidden_size=6144))
    machine = cluster_with(multiprocessors=1, memory_bandwidth=ENDLESS, gemm=1.0)
    products, _ = dense_mlp(Pricing.of(work, machine, STACK), work.ffn)
    flops = 2 * 1024 * 3 * 2048 * 6144 / 2
    for part in (products.forward, products.input_gradient, products.weight_gradient):
        assert part.gemm == pytest.approx(flops / 312e12)


def test_sequence_parallelism_sends_as_much_and_computes_less() -> None:
    stack = replace(STACK, overlap_tensor_gradients=False, overlap_gathers=False)
    plain = layer_seconds(workload_of(config_of(4, tp=4)), cluster_with(link_latency=0.0), stack)
    split = layer_seconds(
        workload_of(config_of(4, tp=4, sequence_parallel=True)), cluster_with(link_latency=0.0), stack
    )
    # An all-reduce is a reduce-scatter and an all-gather; each half of the backward gathers the input again.
    assert split.forward_parts.tensor == pytest.approx(plain.forward_parts.tensor)
    assert split.backward_parts.tensor == pytest.approx(1.5 * plain.backward_parts.tensor)
    assert split.parts.memory < plain.parts.memory


def test_communication_overlaps_only_if_the_stack_does() -> None:
    parts = Parts(gemm=3.0, tensor=2.0, memory=1.0)
    assert parts.device_seconds(BASE, without_host()) == 6.0
    assert parts.device_seconds(BASE, replace(without_host(), overlap_tensor_parallel=1.0)) == 4.0
    assert parts.device_seconds(BASE, replace(without_host(), overlap_tensor_parallel=0.25)) == 5.5
    assert Parts(gemm=1.0, tensor=2.0).exposed_tensor(replace(STACK, overlap_tensor_parallel=1.0)) == 1.0


def test_fp8_gathers_send_half_the_bytes() -> None:
    work = workload_of(config_of(8, tp=8, sequence_parallel=True))
    cluster = cluster_with(link_latency=0.0)
    wide, narrow = (Pricing.of(work, cluster, replace(STACK, float8_gathers=eight)) for eight in (False, True))
    assert narrow.enter().tensor == pytest.approx(wide.enter().tensor / 2)
    assert narrow.leave().tensor == wide.leave().tensor


def test_backward_overlaps_collectives_with_its_products() -> None:
    apart = replace(without_host(), overlap_tensor_gradients=False, overlap_gathers=False)
    beside = replace(apart, overlap_tensor_gradients=True, overlap_gathers=True)

    def tensor(stack: SoftwareStack, cluster: Cluster, **settings: object) -> tuple[float, float]:
        cost = layer_seconds(workload_of(config_of(4, tp=4, **settings)), cluster, stack)
        return float(cost.forward_parts.tensor), float(cost.backward_parts.tensor)

    fast = cluster_with(link_bandwidth=3e12, link_latency=0.0)
    forward, backward = tensor(apart, fast)
    assert tensor(beside, fast) == (forward, 0.0)
    # With sequence parallelism, the output gradient is gathered before any product starts.
    forward, backward = tensor(apart, fast, sequence_parallel=True)
    assert tensor(beside, fast, sequence_parallel=True) == (forward, pytest.approx(backward / 3))
    gathers = replace(apart, overlap_gathers=True)
    assert tensor(gathers, fast, sequence_parallel=True) == (forward, pytest.approx(backward * 2 / 3))
    assert tensor(gathers, fast) == tensor(apart, fast)
    # Slow links: the weight gradients' time limits the overlap.
    slow = cluster_with(link_bandwidth=1e9)
    forward, backward = tensor(apart, slow)
    price = Pricing.of(workload_of(config_of(4, tp=4)), slow, apart)
    products = attention_projections(price) + dense_mlp(price, price.work.ffn)[0]
    assert tensor(beside, slow) == (forward, pytest.approx(backward - products.weight_gradient.gemm))
    # A CPU that sends cannot compute.
    cpu = cluster_with(asynchronous=False)
    assert tensor(beside, cpu) == tensor(apart, cpu)


def test_fused_softmax_needs_multiples_of_batch_times_heads() -> None:
    def operations(tp: int, b: int, stack: SoftwareStack = UNFUSED) -> float:
        work = workload_of(config_of(8, tp=tp, micro_batch_size=b, attention_dropout=0.1))
        return float(attention_core(Pricing.of(work, BASE, stack)).forward.operations)

    assert UNFUSED.softmax_multiple == 4
    fused = operations(4, 1)
    assert operations(8, 2) == fused  # 16 heads: 2 on each of 8 ranks
    assert operations(8, 1) == operations(8, 3) == fused + 4
    assert operations(8, 1, replace(UNFUSED, softmax_multiple=1)) == fused
    assert operations(4, 1, replace(UNFUSED, fused_softmax=False)) == fused + 4


def test_memory_passes_cost_their_bytes() -> None:
    """Bytes per element of scores in memory, and of an unfused norm and loss."""
    config = config_of(2, tp=2, micro_batch_size=3, attention_dropout=0.1, position_embedding_type="rope")
    price = Pricing.of(workload_of(config), SLOW_MEMORY, UNFUSED)
    scores, turned = 3 * 16 / 2 * 1024 * 1024, 2 * 2 * 3 * 1024 * (4 * 16 * 128 / 2)
    core = attention_core(price)
    # Softmax reads and writes 2 bytes each; dropout too, plus a byte of mask.
    assert core.forward.memory == pytest.approx(scores * (2 + 2 + 2 + 2 + 1) + turned)
    # Softmax reads its output and gradient and writes one; dropout reads gradient and mask and writes one.
    assert core.input_gradient.memory == pytest.approx(scores * (3 * 2 + 2 * 2 + 1) + turned)
    fused = Pricing.of(price.work, SLOW_MEMORY, replace(UNFUSED, fused_loss=True))
    more = [head(price).forward.memory - head(fused).forward.memory]
    more.append(head(price).input_gradient.memory - head(fused).input_gradient.memory)
    # Transposed (read, write), then five passes in fp32; one and a half in the backward.
    assert more == pytest.approx([3 * 1024 * 51200 / 2 * (2 * 2 + 5 * 4), 3 * 1024 * 51200 / 2 * (3 * 2 + 4)])
    steps = Pricing.of(price.work, SLOW_MEMORY, replace(STACK, fused_norm=False))
    # To fp32 (2 + 4 bytes), squares (8), mean (4), product (8), back (6), weight (4). To fp32, rotation, back.
    assert norm(steps, 2048).forward.memory == pytest.approx(3 * 1024 * 2048 * 36)
    turns = rotation(steps, 1e6)
    assert turns.forward.memory == turns.input_gradient.memory == pytest.approx(1e6 * (6 + 8 + 6))


def test_registered_loss_gathers_logits_and_passes_over_all() -> None:
    slow = replace(SLOW_MEMORY, node=replace(SLOW_MEMORY.node, link_latency=0.0))
    work = workload_of(config_of(4, tp=4))
    ours, built_in = (head(Pricing.of(each, slow, STACK)) for each in (replace(work, gathers_logits=1.0), work))
    logits = 1024 * 51200
    assert ours.forward.memory - built_in.forward.memory == pytest.approx(logits * 3 / 4 * (2 + 4 * 4))
    assert ours.input_gradient.memory - built_in.input_gradient.memory == pytest.approx(logits * 3 / 4 * 2 * 4)
    sent = [4 * 3 * 1024 * 4, logits * 2]  # three fp32 numbers of each token from each rank; bf16 logits
    assert ours.forward.tensor / built_in.forward.tensor == pytest.approx(sent[1] / sent[0])


def test_fp8_products_are_faster_and_cast_operands() -> None:
    work = workload_of(config_of(1))
    compute = cluster_with(memory_bandwidth=ENDLESS, gemm=0.5)
    float8 = replace(without_host(), float8_rate=1.5)
    usual, fast = (Pricing.of(work, compute, stack).linear(4096, 8192, 2048) for stack in (without_host(), float8))
    for part in ("forward", "input_gradient", "weight_gradient"):
        assert getattr(usual, part).gemm == pytest.approx(1.5 * getattr(fast, part).gemm)
    head_of = [head(Pricing.of(work, compute, stack)).forward.gemm for stack in (without_host(), float8)]
    assert head_of[0] == head_of[1]
    quick = Pricing.of(work, compute, replace(without_host(), product_rate=1.1)).linear(4096, 8192, 2048)
    assert usual.forward.gemm == pytest.approx(1.1 * quick.forward.gemm)
    cast = Pricing.of(work, SLOW_MEMORY, float8).linear(4096, 8192, 2048)
    assert cast.forward.memory == pytest.approx((2 + 2 + 1) * (4096 + 8192) * 2048)
    assert cast.input_gradient.memory == pytest.approx((2 + 2 + 1) * 4096 * 8192)
    # Weights are cast once for all microbatches, unless they are gathered for each.
    batch = {"micro_batch_size": 1, "global_batch_size": 16}
    four, gathered = (workload_of(config_of(4, dp_strategy=name, **batch)) for name in ("all-reduce", "fully-sharded"))
    assert (four.weight_uses, gathered.weight_uses) == (4, 1)
    cast = Pricing.of(four, SLOW_MEMORY, float8).linear(4096, 8192, 2048)
    assert cast.forward.memory == pytest.approx((2 + 2 + 1) * (4096 + 8192 / 4) * 2048)


def test_head_does_not_hide_host_time() -> None:
    """The layers wait for the host, the head for the device: the times add up."""
    stack = replace(without_host(UNFUSED), operation_seconds=1e-3)
    price = Pricing.of(workload_of(config_of(1, micro_batch_size=8)), BASE, stack)
    layers, whole = stage_cost(price, dense=4), stage_cost(price, dense=4, has_head=1.0)
    assert layers.total == pytest.approx(layers.parts.host_seconds(stack), rel=0.01)
    alone = stage_cost(price, has_head=1.0)
    assert whole.total == pytest.approx(layers.total + alone.total)
    assert whole.total > 1.03 * whole.parts.seconds(BASE, stack)


def test_recompute_hides_host_time_of_the_backward() -> None:
    work = workload_of(config_of(1, recompute_granularity="full", micro_batch_size=4))
    stack = replace(without_host(UNFUSED), operation_seconds=2e-4)
    cost = layer_seconds(work, BASE, stack)
    both = cost.backward_parts + cost.recompute_parts
    assert cost.backward + cost.recompute == pytest.approx(both.seconds(BASE, stack))
    apart = cost.backward_parts.seconds(BASE, stack) + cost.recompute_parts.seconds(BASE, stack)
    assert cost.backward + cost.recompute < 0.999 * apart


def test_host_time_of_a_collective_grows_with_its_ranks() -> None:
    stack = replace(without_host(), collective_seconds=1.0)
    hosts = [
        layer_seconds(workload_of(config_of(8, tp=tp)), BASE, stack).forward_parts.host_seconds(stack)
        for tp in (1, 2, 4, 8)
    ]
    assert hosts == [0.0, 2.0, 4.0, 8.0]


def test_time_combines_host_and_device() -> None:
    stack = replace(without_host(), operation_seconds=1.0)
    gpu = cluster_with(kernel_seconds=0.0)
    assert Parts(gemm=100.0, operations=1.0).seconds(gpu, stack) == pytest.approx(100.0)
    assert Parts(gemm=1.0, operations=100.0).seconds(gpu, stack) == pytest.approx(100.0)
    assert Parts(gemm=10.0, operations=10.0).seconds(gpu, stack) > 10.0
    cpu = cluster_with(kernel_seconds=0.0, asynchronous=False)
    assert Parts(gemm=10.0, operations=7.0).seconds(cpu, stack) == 17.0


def test_cost_of_recompute() -> None:
    def cost(**settings: object) -> StageCost:
        config = config_of(1, **settings)
        return stage_costs(config, plan_stages(config), BASE, without_host(UNFUSED))[0]

    none, full = cost(), cost(recompute_granularity="full")
    assert none.recompute == 0.0
    price = Pricing.of(workload_of(config_of(1)), BASE, without_host(UNFUSED))
    layers = stage_cost(price, dense=8)
    assert full.recompute == pytest.approx(layers.forward)
    block = cost(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    assert block.recompute == pytest.approx(full.recompute / 4)
    core = cost(recompute_granularity="selective")
    alone = attention_core(price).forward * 8
    assert core.recompute == pytest.approx(alone.seconds(BASE, without_host(UNFUSED)))
    mlp = cost(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    assert core.recompute < mlp.recompute < full.recompute


def test_cost_of_experts_is_that_of_their_tokens() -> None:
    settings = {"num_experts": 8, "moe_router_topk": 2, "ffn_hidden_size": 4096}
    work = workload_of(config_of(1, **settings))
    machine = cluster_with(multiprocessors=1, memory_bandwidth=ENDLESS)
    one, two = (layer_seconds(replace(work, topk=float(k)), machine, without_host(), moe=True) for k in (1, 2))
    dense = layer_seconds(work, machine, without_host())
    rate = 312e12 * machine.efficiency.gemm
    router, expert = 6 * 1024 * 2048 * 8 / rate, 6 * 1024 * 2 * 2048 * 4096 / rate
    assert one.parts.gemm == pytest.approx(dense.parts.gemm + router)
    assert two.parts.gemm == pytest.approx(one.parts.gemm + expert)
    spread = layer_seconds(workload_of(config_of(4, **settings, ep=4)), BASE, without_host(), moe=True)
    assert two.parts.expert == 0.0
    assert spread.parts.expert > 0.0


@pytest.mark.parametrize("stack", [STACK, UNFUSED], ids=["fused", "unfused"])
def test_arrays_over_layouts_equal_their_elements(stack: object) -> None:
    configs = [
        config_of(8, tp=tp, pp=pp, micro_batch_size=b, num_layers=8, recompute_granularity=r, sequence_parallel=tp > 2)
        for tp, pp, b, r in ((1, 1, 1, "none"), (2, 2, 2, "full"), (4, 2, 1, "selective"), (8, 1, 4, "full"))
    ]
    works = [workload_of(config) for config in configs]
    layers = np.array([8.0 / config.parallel.pp for config in configs])
    heads = np.array([1.0, 0.0, 1.0, 0.0])
    together = stage_cost(Pricing.of(stacked(works), BASE, stack), dense=layers, has_head=heads)
    for at, work in enumerate(works):
        alone = stage_cost(Pricing.of(work, BASE, stack), dense=layers[at], has_head=heads[at])
        for name in ("forward", "input_gradient", "weight_gradient", "recompute"):
            assert getattr(together, name)[at] == pytest.approx(getattr(alone, name), rel=1e-12)
