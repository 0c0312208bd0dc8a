"""A rehearsed rank equals a real one in operations, memory and host waits."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.optimizers.schedules import Progress
from megalite.partition.memory import rank_memory
from megalite.partition.pipeline import plan_stages
from megalite.rehearsal.device import Memory, allocated
from megalite.rehearsal.run import Rehearsal, rehearse
from megalite.topology.group import Group
from megalite.training.replica import build_replica
from megalite.training.saving import save
from megalite.watchdog.heartbeat import Heartbeat, Lane, Waitable
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, Runner, build, tiny_config

Z1 = {"dp_strategy": "distributed-optimizer"}
MOE = {"num_experts": 4, "moe_router_topk": 2, "num_layers": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-sp-pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "pp2-second-token": (2, {"pp": 2, **LLAMA, "mtp_num_layers": 1}),
    "zb-v": (2, {"pp": 2, "vpp": 2, "pipeline_schedule": "zb-v"}),
    "tp2-dp2-zero": (4, {"tp": 2, "dp": 2, **Z1}),
    "cp2-dp2-zero-llama": (4, {"cp": 2, "dp": 2, **Z1, **LLAMA}),
    "dp2-zero3": (2, {"dp": 2, "dp_strategy": "fully-sharded"}),
    "dp2-ep2": (2, {"dp": 2, "ep": 2, **MOE}),
    "tp2-ep2": (2, {"tp": 2, "etp": 1, "ep": 2, **MOE}),
}


def rehearsed(layout: str, rank: int, **changes: Any) -> Rehearsal:
    world, settings = LAYOUTS[layout]
    return rehearse(tiny_config(world, **settings, **changes), rank)


class Recording(Heartbeat):
    """Records what each group starts: (kind, operation, bytes)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, int]] = []

    def lane(self, kind: str, ranks: tuple[int, ...]) -> Lane:
        return _RecordingLane("edge" if kind.startswith("pp edge") else kind, self.found)


class _RecordingLane(Lane):
    def __init__(self, kind: str, found: list[tuple[str, str, int]]) -> None:
        self._kind, self._found = kind, found

    def start(self, begin: Any, operation: str, size: int = 0) -> Waitable:
        self._found.append((self._kind, operation, size))
        return begin()


def real_operations(context: RankContext, world: int, settings: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Operations of the second step on gloo."""
    config, recording = tiny_config(world, **settings), Recording()
    topology = context.topology_of(config)
    groups = {
        field.name: dataclasses.replace(value, heartbeat=recording)
        for field in dataclasses.fields(topology)
        if isinstance(value := getattr(topology, field.name), Group)
    }
    edges = {pair: dataclasses.replace(edge, heartbeat=recording) for pair, edge in topology.edges.items()}
    runner = Runner(build_replica(config, dataclasses.replace(topology, **groups, edges=edges)))
    runner.step()
    recording.found.clear()
    runner.step()
    return recording.found


@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"tp2-dp2-zero"}))
def test_operations_equal_a_real_step(layout: str) -> None:
    """Each group has the same operations in the same order on every rank; for uneven parts only their number is equal."""
    world, settings = LAYOUTS[layout]
    for rank, real in enumerate(run_ranks(world, real_operations, world, settings)):
        found = rehearsed(layout, rank)
        ours = [
            (one.kind, one.name.split()[0], one.nbytes)
            for one in found.journal.operations[found.second_step : found.save.first]
        ]
        for kind in {kind for kind, _, _ in (*real, *ours)}:
            wanted = [(name, size) for of, name, size in real if of == kind]
            mine = [(name, size) for of, name, size in ours if of == kind]
            unequal = {place for place, (_, size) in enumerate(wanted) if not size}
            assert [(name, 0 if place in unequal else size) for place, (name, size) in enumerate(mine)] == wanted, (
                rank,
                kind,
            )


class CpuMemory(TorchDispatchMode):
    """`Memory` for real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.memory.add(leaf, str(func))
        return found


def real_memory(context: RankContext, world: int, settings: dict[str, Any]) -> tuple[int, int]:
    """(built, peak) of two real steps on the CPU, without shared-memory buffers."""
    settings, watched = {**settings, "shared_memory_collectives": False}, CpuMemory()
    with watched:
        runner = Runner(build(context, tiny_config(world, **settings)))
        built = watched.memory.live
        runner.step()
        runner.step()
    return built, watched.memory.peak


@pytest.mark.parametrize("layout", ["tp2-sp-pp2", "zb-v", "dp2-ep2"])
def test_memory_equals_a_real_step(layout: str) -> None:
    """Without ZeRO, of which the exchange on gloo takes a buffer that NCCL does not need."""
    world, settings = LAYOUTS[layout]
    larger = {"hidden_size": 128, "seq_length": 64, "precision": "fp32", "ffn_hidden_size": 512}
    for rank, (built, peak) in enumerate(run_ranks(world, real_memory, world, {**settings, **larger})):
        found = rehearsed(layout, rank, **larger)
        assert found.built_bytes == pytest.approx(built, rel=0.02), rank
        assert found.peak_bytes == pytest.approx(peak, rel=0.05), rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_equals_the_formula(layout: str) -> None:
    """For a model with tensors much larger than the allocator's blocks."""
    larger = {"hidden_size": 2048, "ffn_hidden_size": 8192, "vocab_size": 32000, "precision": "bf16"}
    world, settings = LAYOUTS[layout]
    config = tiny_config(world, **{**settings, **larger, "ddp_bucket_size": 40_000_000})
    found = rehearse(config, 0)
    planned = rank_memory(config, [plan for plan in plan_stages(config) if plan.rank == 0])
    held = planned.parameter_bytes + planned.gradient_bytes + planned.optimizer_bytes
    assert found.parameters == planned.parameters
    assert found.end_bytes == pytest.approx(held, rel=0.01)


def test_sharded_model_is_never_whole() -> None:
    """ZeRO-3 initialises, shards and frees a unit before the next one is allocated."""
    larger = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_layers": 16, "vocab_size": 1024, "precision": "bf16"}
    found = rehearse(tiny_config(64, dp=64, dp_strategy="fully-sharded", global_batch_size=64, **larger), 0)
    weights = 2 * found.parameters
    assert found.build_peak_bytes < weights / 2


def test_host_waits_once_per_step() -> None:
    assert list(rehearsed("tp2-dp2-zero", 0).synchronisations.values()) == [1]


BF16: dict[str, Any] = {**MOE, "precision": "bf16"}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
EXPERTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "here": (1, BF16, 0),
    "split": (2, {**BF16, "tp": 2, "etp": 2}, 0),
    "elsewhere": (2, {**BF16, "dp": 2, "ep": 2}, 1),
    "elsewhere, split": (4, {**BF16, "tp": 2, "dp": 2, "ep": 2, "etp": 2}, 1),
    "with a capacity": (1, {**BF16, "moe_expert_capacity_factor": 1.0}, 1),
    "one by one": (1, MOE, 1),
    "padded": (4, {**MOE, **PADDED, "tp": 2, "dp": 2, "ep": 2, "etp": 2}, 0),
}
AGAIN: dict[str, dict[str, Any]] = {
    "kept": {},
    "full": {"recompute_granularity": "full"},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
}


@pytest.mark.parametrize(
    ("experts", "again"),
    [*((experts, "kept") for experts in EXPERTS), *itertools.product(("here", "elsewhere"), ("full", "selective"))],
)
def test_host_waits_once_for_the_counts_of_exchanged_rows(experts: str, again: str) -> None:
    """The host waits in the forward of each MoE layer and microbatch, except when recomputed; the backward reads copies
    that arrived long before."""
    world, settings, waits = EXPERTS[experts]
    found = rehearse(tiny_config(world, **settings, **AGAIN[again]), 0)
    passes = 2 * 8 // settings.get("dp", 1)
    in_dispatch = [
        count for (place, _), count in found.synchronisations.items() if place.startswith("models/moe_dispatch.py")
    ]
    assert sum(in_dispatch) == waits * passes
    if experts == "padded":  # for loss and norm only
        assert list(found.synchronisations.values()) == [1]
    late = list(found.late_reads.values())
    assert [count for count, _ in late] == [] if waits or experts == "padded" else [passes]
    assert all(kernels > 20 for _, kernels in late)


def test_recomputed_stage_reuses_the_counts_of_rows() -> None:
    settings = {**BF16, "dp": 2, "ep": 2, "pp": 2, "recompute_granularity": "full", "recompute_ahead": True}
    found = rehearse(tiny_config(4, **settings), 0)
    in_dispatch = [
        place for place, _ in found.synchronisations.elements() if place.startswith("models/moe_dispatch.py")
    ]
    assert len(in_dispatch) == 4
    counts = [one for one in found.journal.operations[found.second_step :] if one.kind == "ep" and one.dtype == "int64"]
    assert len(counts) == 4


def real_save(context: RankContext, world: int, settings: dict[str, Any], folder: str) -> None:
    runner = Runner(build(context, tiny_config(world, **settings)))
    runner.step()
    runner.step()
    save(runner.replica, Path(folder), Progress(2, 16), tokenizer=None)


@pytest.mark.parametrize("layout", ["tp2-dp2-zero", "dp2-ep2", "zb-v"])
def test_save_writes_the_files_of_a_real_one(layout: str, tmp_path: Path) -> None:
    world, settings = LAYOUTS[layout]
    run_ranks(world, real_save, world, settings, str(tmp_path))
    written = {path.name: path.stat().st_size for path in tmp_path.glob("step-*/*.safetensors")}
    found = [rehearsed(layout, rank).save for rank in range(world)]
    assert {name: size for save in found for name, size in save.files.items()} == written
    # Each tensor is copied to the host when it is written, and all are first checked for finite values.
    entries = [sum(save.synchronisations.values()) for save in found]
    assert all(count > 10 for count in entries)


def test_async_save_holds_copies_of_all_written_data() -> None:
    world, settings = LAYOUTS["tp2-dp2-zero"]
    config = tiny_config(world, **settings, async_save=True, save="checkpoints", save_interval=1)
    found = rehearse(config, 1).save
    assert found.copies_bytes == rehearsed("tp2-dp2-zero", 1).save.copies_bytes
    assert found.copies_bytes == pytest.approx(sum(found.files.values()), rel=0.1)
    assert sum(found.synchronisations.values()) == 4  # the finite check, the exchange of its result, and the copies


def test_memory_is_rounded_as_by_the_allocator_and_reused() -> None:
    sizes = {0: 0, 1: 512, 512: 512, 513: 1024, (1 << 20) - 1: 1 << 20, 1 << 20: 2 << 20, (2 << 20) + 1: 4 << 20}
    assert {size: allocated(size) for size in sizes} == sizes
    memory = Memory()
    tensor = torch.empty(1 << 20, device="meta")
    memory.add(tensor, "here")
    memory.add(tensor.view(2, -1), "view")
    assert memory.live == memory.peak == 4 << 20 and memory.peak_place == "here"
    tensor.untyped_storage().resize_(0)
    memory.resized(tensor.untyped_storage(), "freed")
    assert memory.live == 0
    del tensor
    assert memory.live == 0 and memory.peak == 4 << 20
