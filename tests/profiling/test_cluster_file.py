"""Cluster files from measurements of a machine with known constants."""

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.planner.cost.rates import collective_seconds, gemm_seconds, message_seconds, tensor_seconds, workload_of
from megalite.planner.hardware import Cluster, assumed_figures, load_cluster, load_stack, save_cluster, save_stack
from megalite.profiling.collectives import OPERATIONS
from megalite.profiling.run import describe, fit_cluster, fit_gemm, fit_stack, operation_seconds, stand_in
from tests.planner.cost.machines import config_of
from tests.profiling.made_up import CPU, collectives, cpu_cluster, fitted_to, gemms, measurements, took

BASE = load_cluster("cpu-box")
TRUTH = cpu_cluster(BASE)
GPU = replace(
    CPU,
    device_type="cuda",
    device_name="NVIDIA A100-SXM4-80GB",
    memory_bytes=85_000_000_000,
    multiprocessors=108,
    nodes=1,
    ranks_per_node=8,
    accelerators_per_node=8,
)


@pytest.fixture(scope="module")
def fitted() -> Cluster:
    cluster, errors = fit_cluster(measurements(TRUTH, CPU), BASE, nominal=False, name="mine", source="measured")
    assert set(errors) == {"gemm fp32", "memory", "inside", "across"} and max(errors.values()) < 0.02
    return cluster


def test_products_take_the_measured_time(fitted: Cluster) -> None:
    """Peak and efficiency are fitted as one product, separate from the start of an operation."""
    assert fitted.peak("fp32") * fitted.efficiency.gemm == pytest.approx(0.8 * 9e10, rel=0.03)
    assert fitted.accelerator.kernel_seconds == pytest.approx(3e-6, rel=0.3)
    rate = fitted.accelerator.memory_bandwidth * fitted.efficiency.memory
    assert rate == pytest.approx(1e10, rel=0.01)
    mnk = (512.0, 3072.0, 768.0)
    ours, theirs = (
        gemm_seconds(*mnk, element=4.0, peak=cluster.peak("fp32"), cluster=cluster) for cluster in (fitted, TRUTH)
    )
    assert float(ours) == pytest.approx(float(theirs), rel=0.03)


def test_collectives_and_messages_take_the_measured_time(fitted: Cluster) -> None:
    """Message efficiency is fitted across nodes, or inside a node if there is only one, since it has one figure."""
    for operation in OPERATIONS:
        for ranks, stride in ((2, 1), (4, 1), (2, 4)):
            for size in (1 << 10, 1 << 26):
                ours, theirs = (
                    float(collective_seconds(operation, size, ranks, stride, each)) for each in (fitted, TRUTH)
                )
                assert ours == pytest.approx(theirs, rel=1e-6), operation
    inside = [time for time in collectives(TRUTH, CPU) if time.place == "inside"]
    alone = fitted_to(replace(measurements(TRUTH, replace(CPU, nodes=1)), collectives=inside), BASE)
    for cluster, crosses in ((fitted, True), (alone, False)):
        ours, theirs = ([*map(float, message_seconds(1 << 20, crosses, each))] for each in (cluster, TRUTH))
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_shared_memory_collectives_take_the_measured_time(fitted: Cluster) -> None:
    """Groups across nodes, and runs without shared memory, keep the links' figures."""
    assert fitted.node.shared_memory_bandwidth is None
    node = replace(TRUTH.node, shared_memory_bandwidth=8e9, shared_memory_latency=2e-5)
    truth = replace(TRUTH, node=node)
    cluster = fitted_to(measurements(truth, CPU), BASE)
    assert cluster.node.shared_memory_bandwidth == pytest.approx(8e9)
    assert cluster.node.shared_memory_latency == pytest.approx(2e-5)
    work = workload_of(config_of(8, tp=4, precision="fp32"))
    for operation, passes in (("all-reduce", 5), ("all-gather", 1.25), ("reduce-scatter", 2)):
        links = collective_seconds(operation, 1 << 20, 4, 1, cluster)
        assert tensor_seconds(operation, 1 << 20, work, cluster) == pytest.approx(2e-5 + passes * 2**20 / 8e9)
        assert tensor_seconds(operation, 1 << 20, replace(work, shared_memory=0.0), cluster) == links
        across = collective_seconds(operation, 1 << 20, 8.0, 1, cluster)
        assert tensor_seconds(operation, 1 << 20, replace(work, tp=8.0), cluster) == across
    links = collective_seconds("all-to-all", 1 << 20, 4, 1, cluster)
    assert tensor_seconds("all-to-all", 1 << 20, work, cluster) == links


def test_second_dtype_has_a_separate_rate() -> None:
    """The rate is fitted to all products, not to the fastest."""
    measured = measurements(TRUTH, CPU, ("fp32", "bf16"))
    *others, last = measured.gemms
    lucky = replace(last, timing=took(last.timing.seconds / 2))
    measured = replace(measured, gemms=(*others, lucky))
    cluster = fitted_to(measured, BASE)
    assert cluster.peak("bf16") * cluster.efficiency.gemm == pytest.approx(0.8 * 3e10, rel=0.05)


def test_file_describes_the_measurement(fitted: Cluster, tmp_path: Path) -> None:
    save_cluster(fitted, tmp_path / "mine.yaml")
    assert load_cluster(str(tmp_path / "mine.yaml")) == fitted
    assert assumed_figures(fitted.provenance) == ["accelerator.host_bandwidth"]
    assert "4 ranks" not in fitted.description
    assert (
        "8 ranks on 2 nodes, 1 thread per rank; all ranks of a node measured at once on 4 shared cores"
        in fitted.description
    )


def test_one_process_assumes_links_and_network() -> None:
    alone = replace(CPU, nodes=1, ranks_per_node=1, accelerators_per_node=1)
    cluster = fitted_to(measurements(TRUTH, alone), BASE)
    assumed = {key for key, text in cluster.provenance.items() if text == "assumed, from cluster cpu-box"}
    assert assumed == {"node", "network", "efficiency.link", "efficiency.network", "efficiency.p2p"}
    assert (cluster.network, cluster.node.link_bandwidth) == (BASE.network, BASE.node.link_bandwidth)
    assert "at once" not in describe(alone)


def test_known_accelerator_keeps_the_vendor_peaks() -> None:
    """Efficiencies are shares of the vendor's peaks, recovered through tiles and waves."""
    base, nominal = stand_in(GPU, None)
    assert (base.name, nominal) == ("dgx-a100", True)
    truth = replace(
        base,
        accelerator=replace(base.accelerator, kernel_seconds=4e-6),
        efficiency=replace(base.efficiency, gemm=0.61, memory=0.82, link=0.55, p2p=0.33, small_groups=1.0),
    )
    measured = measurements(truth, GPU, ("bf16",))
    cluster = fitted_to(measured, base, nominal=True)
    assert cluster.accelerator.peak_flops == base.accelerator.peak_flops
    assert cluster.accelerator.memory_bandwidth == base.accelerator.memory_bandwidth
    assert cluster.efficiency.gemm == pytest.approx(0.61, rel=0.02)
    assert cluster.efficiency.memory == pytest.approx(0.82, rel=0.01)
    assert cluster.efficiency.link == pytest.approx(0.55, rel=0.01)
    assert cluster.efficiency.small_groups == 1.0
    assert (
        cluster.provenance["accelerator"]
        == "vendor, from cluster dgx-a100; kernel_seconds measured; host_bandwidth assumed"
    )


def test_outlier_product_does_not_change_the_fit() -> None:
    times = gemms(TRUTH, "fp32")
    clean = fit_gemm(times, TRUTH)
    slow = replace(times[5].timing, seconds=times[5].timing.seconds * 20)
    times[5] = replace(times[5], timing=slow)
    assert fit_gemm(times, TRUTH)[:2] == pytest.approx(clean[:2], rel=0.02)


def test_accelerators_are_recognized_by_name_and_memory() -> None:
    h200 = replace(GPU, device_name="NVIDIA H200", memory_bytes=150_000_000_000)
    for machine, known in (
        (replace(GPU, device_name="NVIDIA H100 80GB HBM3"), "dgx-h100"),
        (h200, "dgx-h200"),
        (CPU, "cpu-box"),
    ):
        base, nominal = stand_in(machine, None)
        assert (base.name, nominal) == (known, machine is not CPU)
    for changes in ({"device_name": "NVIDIA H100 PCIe"}, {"memory_bytes": 60_000_000_000}, {"device_name": "RTX 4090"}):
        machine = replace(GPU, **changes)
        with pytest.raises(ConfigError, match=r"is in no cluster file; give --like .*dgx-h100"):
            stand_in(machine, None)
        base, nominal = stand_in(machine, "dgx-h100")
        assert (base.name, nominal) == ("dgx-h100", False)


BASE_STACK = load_stack("fused")
CLUSTER = cpu_cluster(load_cluster("cpu-box"))
MEASURED = measurements(CLUSTER, CPU)


def test_constants_equal_the_measured_ones(tmp_path: Path) -> None:
    stack = fit_stack(MEASURED, CLUSTER, BASE_STACK, name="mine", source="measured")
    assert stack.attention_efficiency == pytest.approx(0.5, rel=1e-6)
    assert stack.microbatch_seconds == pytest.approx(2e-5)
    assert stack.step_seconds == 5e-5
    assert stack.collective_seconds == 0.0
    assert stack.fused_attention == BASE_STACK.fused_attention
    save_stack(stack, tmp_path / "stack.yaml")
    assert load_stack(str(tmp_path / "stack.yaml")) == stack


def test_shared_cores_are_reported_and_have_no_overlap(fitted: Cluster) -> None:
    assert fitted.node.ranks_per_core == 1.0
    crowded = measurements(TRUTH, replace(CPU, cores=2))
    node = fitted_to(crowded, BASE).node
    assert (node.ranks_per_core, node.accelerators) == (2.0, 4)
    overlaps = ("overlap_gradients", "overlap_tensor_gradients", "overlap_gathers")
    for measured, hides in ((crowded, False), (MEASURED, True)):
        stack = fit_stack(measured, CLUSTER, BASE_STACK, name="mine", source="measured")
        assert all(getattr(stack, name) == hides for name in overlaps)


def test_operation_time_is_its_share_of_a_tiny_layer() -> None:
    """0.6 ms over the operations of a layer have the same total, whether host or device takes them."""
    asynchronous = replace(CLUSTER, accelerator=replace(CLUSTER.accelerator, asynchronous=True))
    hosts = operation_seconds(MEASURED.overheads, asynchronous, BASE_STACK, "fp32")
    count = 6e-4 / hosts
    assert count == pytest.approx(round(count))
    assert 20 < count < 60
    # On a CPU the device time, 3 µs per operation and little computation, is subtracted.
    host = operation_seconds(MEASURED.overheads, CLUSTER, BASE_STACK, "fp32")
    assert host == pytest.approx(hosts - 3e-6, abs=1e-6)
    assert host < hosts - 3e-6
    faster = replace(MEASURED.overheads, layer=1e-9)
    assert operation_seconds(faster, CLUSTER, BASE_STACK, "fp32") == 0.0
