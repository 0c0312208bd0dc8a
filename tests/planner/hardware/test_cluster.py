"""Cluster and stack files: those that come along load, survive writing, and faults are named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.reading import plain
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import workload_of
from megalite.planner.cost.step import predict
from megalite.planner.hardware import (
    Efficiency,
    cluster_names,
    load_cluster,
    load_stack,
    save_cluster,
    save_stack,
    stack_names,
)


def test_the_promised_files_are_there() -> None:
    clusters = {
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
    assert clusters <= set(cluster_names())
    generations = {"unfused", "unfused-2022", "flash-2023", "flash-2023-h100", "flash-2025", "float8-2025"}
    assert {"fused", *generations} <= set(stack_names())


@pytest.mark.parametrize("name", cluster_names())
def test_clusters_survive_writing_and_say_where_figures_are_from(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    save_cluster(cluster, tmp_path / "again.yaml")
    assert load_cluster(str(tmp_path / "again.yaml")) == cluster
    for each in Efficiency.__dataclass_fields__:
        text = cluster.provenance.get(f"efficiency.{each}", "assumed")
        assert text.startswith(("vendor", "measured", "fitted", "assumed"))


@pytest.mark.parametrize("name", stack_names())
def test_stacks_survive_writing(name: str, tmp_path: Path) -> None:
    stack = load_stack(name)
    save_stack(stack, tmp_path / "again.yaml")
    assert load_stack(str(tmp_path / "again.yaml")) == stack


def test_the_vendors_figures_of_an_a100() -> None:
    cluster = load_cluster("dgx-a100")
    assert cluster.peak("fp16") == 312e12
    assert cluster.accelerator.memory_bandwidth == 2.039e12
    assert cluster.nic_share == 25e9
    assert cluster.host_share == 12.5e9  # two share a switch


def test_unknown_names_get_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown cluster dgx-a10: did you mean dgx-a100\?"):
        load_cluster("dgx-a10")
    with pytest.raises(ConfigError, match=r"unknown stack fussed: did you mean fused\?"):
        load_stack("fussed")
    with pytest.raises(ConfigError, match=r"cluster file none\.yaml does not exist"):
        load_cluster("none.yaml")


def test_a_precision_that_the_accelerator_lacks() -> None:
    with pytest.raises(ConfigError, match=r"v100 has no peak for bf16.*use --fp16"):
        load_cluster("v100").peak("bf16")


def _set(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = to

    return change


def _drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        del tree[keys[-1]]

    return change


FAULTS = [
    (_set("node", "link_bandwith", to=1.0), r"node: unknown key link_bandwith: did you mean link_bandwidth\?"),
    (_drop("node", "link_latency"), r"node: link_latency is missing; add `link_latency: 1.0e9`"),
    (_drop("efficiency"), "efficiency is missing"),
    (_set("node", "accelerators", to=8.5), r"node: accelerators takes a whole number such as 8, got 8\.5"),
    (_set("node", "accelerators", to=True), "accelerators takes a whole number"),
    (_set("node", "link_bandwidth", to="fast"), "link_bandwidth takes a number such as 1.0e9, got 'fast'"),
    (_set("node", "link_bandwidth", to=0), "link_bandwidth is 0; it must be above 0"),
    (_set("node", "link_latency", to=-1e-6), "link_latency is -1e-06; it must be 0 or more"),
    (_set("node", "ranks_per_core", to=0.5), "ranks_per_core is 0.5; it must be 1 or more"),
    (_set("network", "nic_bandwidth", to=float("inf")), "nic_bandwidth is inf; it must be above 0 and finite"),
    (_set("efficiency", "gemm", to=1.2), "efficiency: gemm is 1.2; it is a share, at most 1"),
    (_set("accelerator", "peak_flops", "fp17", to=1e12), "peak_flops: unknown name fp17: did you mean fp1?6"),
    (_set("accelerator", "peak_flops", to={}), "peak_flops is empty"),
    (_set("accelerator", "asynchronous", to="yes"), "asynchronous takes true or false"),
    (_set("name", to=7), "name takes text, got 7"),
    (_set("node", to=[8]), "node takes `key: value` lines"),
    (_drop("provenance", "efficiency.link"), "provenance: efficiency.link is missing; say vendor"),
    (_set("provenance", "efficiency.links", to="vendor"), "provenance: unknown name efficiency.links"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=[str(at) for at in range(len(FAULTS))])
def test_each_fault_is_named(change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    tree = plain(load_cluster("dgx-a100"))
    change(tree)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(str(path))
    assert "mine.yaml" in str(caught.value)


def test_files_that_are_no_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, message in (("", "found nothing"), ("a: b: c", "is not YAML"), ("a: 1\na: 2", "a is given twice")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            load_cluster(str(path))


def test_numbers_without_a_point_are_numbers_too(tmp_path: Path) -> None:
    # YAML reads 3e11 as text.
    text = yaml.safe_dump(plain(load_cluster("dgx-a100"))).replace(
        "link_bandwidth: 300000000000.0", "link_bandwidth: 3e11"
    )
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    assert "3e11" in text
    assert load_cluster(str(path)) == load_cluster("dgx-a100")


def test_a_stack_without_provenance_is_refused(tmp_path: Path) -> None:
    tree = plain(load_stack("fused"))
    del tree["provenance"]["step_seconds"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match="provenance: step_seconds is missing"):
        load_stack(str(path))


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*none/c\.yaml: No such file"):
        save_cluster(load_cluster("dgx-a100"), tmp_path / "none" / "c.yaml")


def test_a_power_limit_slows_products_alone(tmp_path: Path) -> None:
    cluster = load_cluster("dgx-h100")
    held = replace(cluster, accelerator=replace(cluster.accelerator, power_limit=cluster.accelerator.watts / 8))
    assert cluster.accelerator.clock == 1.0
    assert held.accelerator.clock == pytest.approx(0.5)
    assert replace(held.accelerator, power_limit=2e3).clock == 1.0
    work, stack = workload_of(llama(8)), load_stack("fused")
    full, slow = (Pricing.of(work, each, stack) for each in (cluster, held))
    assert slow.gemm(8192, 8192, 65536).gemm == pytest.approx(2 * full.gemm(8192, 8192, 65536).gemm, rel=0.05)
    assert slow.moved(1e9).memory == full.moved(1e9).memory
    save_cluster(held, tmp_path / "mine.yaml")
    assert load_cluster(str(tmp_path / "mine.yaml")) == held
    tree = plain(held)
    del tree["accelerator"]["watts"]
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"power_limit has no effect without watts; add e\.g\. watts"):
        load_cluster(str(tmp_path / "other.yaml"))


def llama(ranks: int) -> RunConfig:
    """Llama 3 8B as torchtitan trains it: FSDP, two sequences of 8,192 per rank, part of the activations again."""
    line = (
        f"--preset llama3-8b --seq-length 8192 --bf16 --dp-strategy fully-sharded --dp {ranks} --micro-batch-size 2 "
        f"--global-batch-size {2 * ranks} --recompute-granularity selective --recompute-modules mlp_act"
    )
    return validate(parse_arguments(line.split()).config, ranks)


@pytest.mark.parametrize(("ranks", "tokens"), [(8, 5762.0), (128, 5605.0)])
def test_torchtitan_on_h100_held_to_500_watts(ranks: int, tokens: float) -> None:
    """Tokens per second and GPU without torch.compile, so that RMSNorm is Python, HBM of 2.4 TB/s, a limit of 500 W
    (torchtitan, benchmarks of December 2024). Nothing is fitted on them."""
    older = replace(load_stack("flash-2023-h100"), half_gradients=False)
    cluster, stack = load_cluster("dgx-h100"), replace(older, fused_norm=False)
    device = replace(cluster.accelerator, memory_bandwidth=2.4e12, power_limit=500.0)
    held = replace(cluster, accelerator=device)
    full, found = (
        predict(llama(ranks), each, stack, with_memory=False).step_seconds * tokens / (2 * 8192)
        for each in (cluster, held)
    )
    assert found == pytest.approx(1.0, abs=0.06)
    assert full < found - 0.08
