"""Cluster and stack files: the included ones load, survive writing, and errors name the field."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.config.errors import ConfigError
from megalite.config.reading import plain
from megalite.planner import hardware
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import workload_of
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Efficiency, cluster_names, load_cluster, load_stack, save_cluster, save_stack
from tests.planner.cost.machines import config_of, from_flags


def test_included_files_round_trip(tmp_path: Path) -> None:
    machines = {
        "dgx-a100",
        "dgx-a100-40gb",
        "dgx-h100",
        "dgx-h200",
        "dgx-b200",
        "dgx-gb200",
        "mi300x",
        "v100",
        "cpu-box",
    }
    assert machines <= set(cluster_names())
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.name == name
        save_cluster(cluster, tmp_path / f"{name}.yaml")
        assert load_cluster(str(tmp_path / f"{name}.yaml")) == cluster
        sources = (cluster.provenance.get(f"efficiency.{each}", "assumed") for each in Efficiency.__dataclass_fields__)
        assert all(text.startswith(("vendor", "measured", "fitted", "assumed")) for text in sources)
        assert {"accelerator", "accelerator.host_bandwidth"} & {*hardware.assumed_figures(cluster.provenance)}
    for name in (path.stem for path in (Path(hardware.__file__).parent / "stacks").glob("*.yaml")):
        stack = load_stack(name)
        save_stack(stack, tmp_path / f"stack-{name}.yaml")
        assert load_stack(str(tmp_path / f"stack-{name}.yaml")) == stack


def test_figures_of_an_a100() -> None:
    cluster = load_cluster("dgx-a100")
    assert cluster.peak("fp16") == 312e12
    assert cluster.accelerator.memory_bandwidth == 2.039e12
    assert cluster.nic_share == 25e9
    assert cluster.host_share == 12.5e9  # two share a switch


def test_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown cluster dgx-a10: did you mean dgx-a100\?"):
        load_cluster("dgx-a10")
    with pytest.raises(ConfigError, match=r"unknown stack fussed: did you mean fused\?"):
        load_stack("fussed")
    with pytest.raises(ConfigError, match=r"cluster file none\.yaml does not exist"):
        load_cluster("none.yaml")
    with pytest.raises(ConfigError, match=r"v100 has no peak for bf16.*use --fp16"):
        load_cluster("v100").peak("bf16")
    with pytest.raises(ConfigError, match=r"cannot write .*none/c\.yaml: No such file"):
        save_cluster(load_cluster("dgx-a100"), tmp_path / "none" / "c.yaml")


FAULTS: list[tuple[str, Any, str]] = [
    ("node.link_bandwith", 1.0, r"node: unknown key link_bandwith: did you mean link_bandwidth\?"),
    ("node.link_latency", None, r"node: link_latency is missing; add `link_latency: 1.0e-6`"),
    ("efficiency", None, "efficiency is missing"),
    ("node.accelerators", 8.5, r"node: accelerators takes a whole number such as 8, got 8\.5"),
    ("node.accelerators", True, "accelerators takes a whole number"),
    ("node.link_bandwidth", "fast", "link_bandwidth takes a number such as 1.0e9, got 'fast'"),
    ("node.link_bandwidth", 0, "link_bandwidth is 0; it must be above 0"),
    ("node.link_latency", -1e-6, "link_latency is -1e-06; it must be 0 or more"),
    ("node.ranks_per_core", 0.5, "ranks_per_core is 0.5; it must be 1 or more"),
    ("network.nic_bandwidth", float("inf"), "nic_bandwidth is inf; it must be above 0 and finite"),
    ("network.oversubscription", 0.5, "network: oversubscription is 0.5; it must be 1 or more"),
    ("network.oversubscription", 7.0, "oversubscription has no effect without pod_nodes; add e.g. pod_nodes: 32"),
    ("efficiency.device_deviation", 0.02, "provenance: efficiency.device_deviation is missing; set it to vendor"),
    ("efficiency.gemm", 1.2, "efficiency: gemm is 1.2; it is at most 1"),
    ("accelerator.peak_flops.fp17", 1e12, "peak_flops: unknown name fp17: did you mean fp1?6"),
    ("accelerator.peak_flops", {}, "peak_flops is empty"),
    ("accelerator.asynchronous", "yes", "asynchronous takes true or false"),
    ("name", 7, "name takes text, got 7"),
    ("node", [8], "node takes `key: value` lines"),
    ("accelerator.power_limit", 300.0, r"power_limit has no effect without watts; add e\.g\. watts"),
    ("provenance/efficiency.link", None, "provenance: efficiency.link is missing; set it to vendor"),
    ("provenance/efficiency.links", "vendor", "provenance: unknown name efficiency.links"),
]
"""(place in the file, its value (None: removed), part of the error)."""


@pytest.mark.parametrize(("place", "value", "message"), FAULTS, ids=[str(at) for at in range(len(FAULTS))])
def test_each_bad_field_is_named(place: str, value: Any, message: str, tmp_path: Path) -> None:
    tree = part = plain(load_cluster("dgx-a100"))
    del tree["accelerator"]["watts"]
    *folders, key = place.split("/" if "/" in place else ".")
    for name in folders:
        part = part[name]
    if value is None:
        del part[key]
    else:
        part[key] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(str(path))
    assert "mine.yaml" in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, message in (("", "found nothing"), ("a: b: c", "is not YAML"), ("a: 1\na: 2", "a is given twice")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            load_cluster(str(path))
    text = yaml.safe_dump(plain(load_cluster("dgx-a100")))
    path.write_text(text.replace("link_bandwidth: 300000000000.0", "link_bandwidth: 3e11"), encoding="utf-8")
    assert "3e11" in path.read_text(), "YAML reads it as text"
    assert load_cluster(str(path)) == load_cluster("dgx-a100")
    tree = plain(load_stack("fused"))
    del tree["provenance"]["step_seconds"]
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match="provenance: step_seconds is missing"):
        load_stack(str(path))


def test_power_limit_slows_only_products(tmp_path: Path) -> None:
    cluster = load_cluster("dgx-h100")
    held = replace(cluster, accelerator=replace(cluster.accelerator, power_limit=cluster.accelerator.watts / 8))
    assert cluster.accelerator.clock == 1.0
    assert held.accelerator.clock == pytest.approx(0.5)
    assert replace(held.accelerator, power_limit=2e3).clock == 1.0
    work, stack = workload_of(config_of(1)), load_stack("fused")
    full, slow = (Pricing.of(work, each, stack) for each in (cluster, held))
    assert slow.gemm(8192, 8192, 65536).gemm == pytest.approx(2 * full.gemm(8192, 8192, 65536).gemm, rel=0.05)
    assert slow.moved(1e9).memory == full.moved(1e9).memory
    save_cluster(held, tmp_path / "mine.yaml")
    assert load_cluster(str(tmp_path / "mine.yaml")) == held


@pytest.mark.parametrize(("ranks", "tokens"), [(8, 5762.0), (128, 5605.0)])
def test_torchtitan_on_h100_limited_to_500_watts(ranks: int, tokens: float) -> None:
    """Tokens per second and GPU of Llama 3 8B with FSDP, two sequences of 8,192 per rank, selective recompute, HBM of
    2.4 TB/s, without torch.compile, so that RMSNorm is Python (torchtitan, December 2024). Not used in fits."""
    line = f"--preset llama3-8b --seq-length 8192 --bf16 --dp-strategy fully-sharded --dp {ranks} --micro-batch-size 2 "
    line += f"--global-batch-size {2 * ranks} --recompute-granularity selective --recompute-modules mlp_act"
    stack, cluster = (
        replace(load_stack("flash-2023-h100"), half_gradients=False, fused_norm=False),
        load_cluster("dgx-h100"),
    )
    held = replace(cluster, accelerator=replace(cluster.accelerator, memory_bandwidth=2.4e12, power_limit=500.0))
    full, found = (
        predict(from_flags(line, ranks), each, stack).step_seconds * tokens / (2 * 8192) for each in (cluster, held)
    )
    assert found == pytest.approx(1.0, abs=0.06)
    assert full < found - 0.08
