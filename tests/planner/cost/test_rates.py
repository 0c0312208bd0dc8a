"""Collectives, messages and the roofline of matrix products against hand-computed numbers."""

from dataclasses import replace

import numpy as np
import pytest

from megalite.planner.cost.rates import (
    CORNER,
    RAMP,
    collective_seconds,
    gemm_seconds,
    link_rate,
    members_within,
    message_seconds,
    slowest_share,
    spine_crosses,
)
from megalite.planner.hardware import Cluster
from tests.planner.cost.machines import ENDLESS, cluster_with

CLUSTER = cluster_with(
    accelerators=8, link_bandwidth=200.0, link_latency=0.5, nics=4, nic_bandwidth=20.0, latency=3.0,
    link=0.5, network=0.5, p2p=0.25, small_groups=1.0,
)  # fmt: skip
"""Within a node 100 bytes per second; across nodes 5 for each member of a group in the node."""


def test_group_members_per_node() -> None:
    assert members_within(8, 4, 1) == 4
    assert members_within(8, 16, 1) == 8
    assert members_within(8, 16, 4) == 2
    assert members_within(8, 16, 64) == 1


def test_rate_of_rings_inside_a_node() -> None:
    assert collective_seconds("all-reduce", 400.0, 4, 1, CLUSTER) == pytest.approx(2 * 3 / 4 * 4.0 + 2 * 3 * 0.5)
    assert collective_seconds("all-gather", 400.0, 4, 2, CLUSTER) == pytest.approx(3 / 4 * 4.0 + 3 * 0.5)
    assert collective_seconds("send", 400.0, 4, 1, CLUSTER) == pytest.approx(4.0 + 0.5)


def test_few_accelerators_have_fewer_rings() -> None:
    cluster = replace(CLUSTER, efficiency=replace(CLUSTER.efficiency, small_groups=0.49))
    assert [float(link_rate(n, cluster)) for n in (2, 4, 8)] == pytest.approx([49.0, 70.0, 100.0])
    pair = replace(cluster, node=replace(cluster.node, accelerators=2))
    assert link_rate(2, pair) == pytest.approx(100.0)


def test_groups_across_nodes_use_the_adapters_of_their_members() -> None:
    # 16 ranks, all 8 of each of two nodes: 8 shares of 5, and one hop between nodes in each direction.
    expected = 2 * 15 / 16 * 400.0 / 40.0 + 2 * (7 * 0.5 + 1 * 3.0)
    assert collective_seconds("all-reduce", 400.0, 16, 1, CLUSTER) == pytest.approx(expected)
    # One rank on each of 16 nodes: its own share, 4 hops deep.
    expected = 2 * 15 / 16 * 400.0 / 5.0 + 2 * 4 * 3.0
    assert collective_seconds("all-reduce", 400.0, 16, 8, CLUSTER) == pytest.approx(expected)


def test_all_to_all_uses_each_ranks_share_of_the_adapter() -> None:
    expected = 400.0 * (8 / 16) / 5.0 + 7 * 0.5 + 3.0
    assert collective_seconds("all-to-all", 400.0, 16, 1, CLUSTER) == pytest.approx(expected)


def test_group_across_pods_uses_its_share_of_the_spine() -> None:
    """Pods of two nodes, each with adapters of 80 bytes per second and links of 20 to the others."""
    spine = replace(CLUSTER, network=replace(CLUSTER.network, pod_nodes=2, oversubscription=4.0))
    assert collective_seconds("all-reduce", 400.0, 16, 1, spine) == collective_seconds(
        "all-reduce", 400.0, 16, 1, CLUSTER
    )
    # All of four pods in one ring, which leaves each pod once: a pod's rate is half of its nodes' sum.
    assert collective_seconds("all-gather", 400.0, 64, 1, spine) == pytest.approx(
        63 / 64 * 400.0 / 20.0 + 7 * 0.5 + 3 * 3.0
    )
    # Sixteen rings, of one rank in each pod.
    assert collective_seconds("all-gather", 400.0, 4, 16, spine) == pytest.approx(3 / 4 * 400.0 / 1.25 + 2 * 3.0)
    assert collective_seconds("all-to-all", 400.0, 32, 1, spine) == pytest.approx(
        400.0 * 16 / 32 / 1.25 + 7 * 0.5 + 2 * 3.0
    )
    # Messages of the last of four, of two stages in a pod; of the only one.
    assert [float(spine_crosses(stride, 8, spine)) for stride in (4, 8, 16, 64)] == [1.0, 2.0, 4.0, 4.0]
    assert message_seconds(100.0, 4.0, spine) == (3.0, pytest.approx(100.0 / (2.5 * 0.25)))


@pytest.mark.parametrize(("ranks", "largest"), [(1, 0.0), (2, 0.5642), (10, 1.5388), (100, 2.5076), (1000, 3.2414)])
def test_expected_slowest_of_many(ranks: int, largest: float) -> None:
    """Expected maximum of n standard normal variables (Tippett, 1925)."""
    cluster = cluster_with(device_deviation=0.1)
    assert slowest_share(ranks, cluster) == pytest.approx(0.1 * largest, rel=0.045)
    assert slowest_share(ranks, cluster) < slowest_share(ranks + 1, cluster)
    assert slowest_share(ranks, CLUSTER) == 0.0


def test_group_of_one_sends_nothing() -> None:
    for operation in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"):
        assert collective_seconds(operation, 1e9, 1, 1, CLUSTER) == 0.0


def test_time_of_messages() -> None:
    assert message_seconds(100.0, True, CLUSTER) == (3.0, pytest.approx(100.0 / (10.0 * 0.25)))
    assert message_seconds(100.0, False, CLUSTER) == (0.5, pytest.approx(100.0 / (200.0 * 0.25)))
    quick = replace(CLUSTER, node=replace(CLUSTER.node, message_steps=0.2))
    assert message_seconds(100.0, True, quick)[0] == 3.0
    assert message_seconds(100.0, False, quick)[0] == pytest.approx(0.2 * 0.5)


def test_arrays_equal_their_elements() -> None:
    sizes, strides = np.array([1.0, 2.0, 8.0, 32.0]), np.array([[1.0], [8.0]])
    found = collective_seconds("all-gather", 1e3, sizes, strides, CLUSTER)
    assert found.shape == (2, 4)
    for i in range(2):
        for j in range(4):
            alone = collective_seconds("all-gather", 1e3, float(sizes[j]), float(strides[i, 0]), CLUSTER)
            assert found[i, j] == alone


PEAK = 1e12


def _seconds(cluster: Cluster, m: float, n: float, k: float, batch: float = 1.0) -> float:
    return float(gemm_seconds(m, n, k, batch=batch, element=2.0, peak=PEAK, cluster=cluster))


def test_products_use_the_best_tile_and_whole_waves() -> None:
    cluster = cluster_with(multiprocessors=2, gemm=0.5, memory_bandwidth=ENDLESS)
    # One tile of 256 x 128 would leave one of two multiprocessors idle; two of 128 x 128 fill both, at 95 %.
    one_wave = 2 * 128 * 128 * 2 * (1000 + RAMP) / (0.5 * PEAK) / 0.95
    assert _seconds(cluster, 256, 128, 1000) == pytest.approx(one_wave)
    # Four tiles of 256 x 128 are two full waves of the fastest tile.
    two_waves = 2 * 2 * 256 * 128 * 2 * (1000 + RAMP) / (0.5 * PEAK)
    assert _seconds(cluster, 512, 256, 1000) == pytest.approx(two_waves)
    assert _seconds(cluster, 256, 128, 1000, batch=4) == pytest.approx(two_waves)


def test_extra_row_costs_a_wave_or_smaller_tiles() -> None:
    cluster = cluster_with(multiprocessors=108, memory_bandwidth=ENDLESS)
    full, more = _seconds(cluster, 108 * 256, 128, 4096), _seconds(cluster, 108 * 256 + 1, 128, 4096)
    assert more > 1.04 * full


def test_small_products_are_bound_by_bytes() -> None:
    cluster = cluster_with(multiprocessors=1, gemm=1.0, memory=0.5, memory_bandwidth=100.0)
    size = (2 * 3 + 3 * 5 + 2 * 5) * 2.0
    assert _seconds(cluster, 2, 5, 3) == pytest.approx(size / 50.0)


def test_roofline_corner_is_rounded() -> None:
    m = n = k = 600.0
    compute = 2 * m * n * k / PEAK
    cluster = cluster_with(multiprocessors=1, gemm=1.0, memory=1.0, memory_bandwidth=6 * m * n / compute)
    assert _seconds(cluster, m, n, k) == pytest.approx(compute * 2 ** (1 / CORNER))
