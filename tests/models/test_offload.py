"""Activations of a stage's first layers in host memory: the same bits, and fewer bytes on the device."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch

from megalite.config.rules.compute import OFFLOAD_MODULES
from megalite.models import compute, recompute
from megalite.partition.memory import host_peaks, planned_memory
from megalite.partition.pipeline import plan_stages, schedule_of
from megalite.rehearsal.run import rehearse
from megalite.topology.host_memory import pinned
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LATENT, LLAMA, SPARSE, Runner, build, tiny_config
from tests.topology.test_host_memory import LateStream


def steps(context: RankContext, world: int, settings: dict[str, Any]) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Return results and weights of two steps."""
    runner = Runner(build(context, tiny_config(world, **settings)))
    found = []
    for _ in range(2):
        result = runner.step()
        strategy = runner.replica.strategy
        strategy.wait_for_parameters()
        weights = {f"{n}": bucket.data.clone() for n, bucket in enumerate(strategy.all_buckets())}
        found.append((f"{result.loss} {result.grad_norm}", weights))
    strategy.close()
    return found


class Late(LateStream):
    """Track activations: freed tensors are really freed."""

    def keep_until_copied(self, tensor: torch.Tensor) -> None: ...


FULL: dict[str, Any] = {"recompute_granularity": "full"}
LAYERS: dict[str, Any] = {"cpu_offloading_num_layers": 2}


def again(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def saved_by(*modules: str) -> dict[str, Any]:
    return {"fine_grained_activation_offloading": True, "offload_modules": list(modules)}


NORMS, ALL = ("attn_norm", "mlp_norm"), OFFLOAD_MODULES[:5] + OFFLOAD_MODULES[6:]
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt": (1, {"hidden_dropout": 0.1, "attention_dropout": 0.1, "precision": "bf16"}),
    "zero-3": (2, {"dp": 2, "dp_strategy": "fully-sharded"}),
    "full": (1, {**FULL, "recompute_num_layers": 2, "num_layers": 5, "hidden_dropout": 0.1}),
    "selective": (2, {**LLAMA, **again("core_attn", "layernorm", "mlp_act"), "tp": 2, "sequence_parallel": True}),
    "latents": (2, {**LATENT, **again("mla_up_proj", "layernorm", "mlp"), "pp": 2, "pipeline_schedule": "zb-h1"}),
    "ahead": (2, {**FULL, "recompute_ahead": True, "pp": 2, "hidden_dropout": 0.1, "precision": "bf16"}),
    "modules": (2, {**LLAMA, "qk_norm": True, "pp": 2, "vpp": 2, "hidden_dropout": 0.1, **saved_by(*ALL)}),
    "modules, recomputed": (1, {**LATENT, **again("mla_up_proj", "layernorm"), **saved_by("qkv_linear", "attn_norm")}),
}


def both(context: RankContext, world: int, settings: dict[str, Any]) -> list[str]:
    """Return the numbers of offloaded layers that change a bit."""
    plain = {name: value for name, value in settings.items() if "offload" not in name}
    wanted = steps(context, world, plain)
    found = []
    for late, count in ((False, 1), (True, 2)) if "vpp" not in settings else ((True, 1),):
        with pytest.MonkeyPatch.context() as patch:
            if late:
                patch.setattr(recompute, "CopyStream", Late)
            ours = steps(context, world, {**settings, "cpu_offloading_num_layers": count})
        same = (torch.equal(b[key], a[key]) for (_, a), (_, b) in zip(wanted, ours, strict=True) for key in a)
        if [text for text, _ in ours] != [text for text, _ in wanted] or not all(same):
            found.append(f"{count}, late {late}")
    return found


@pytest.mark.parametrize("case", CASES)
def test_offload_does_not_change_bits(case: str) -> None:
    world, settings = CASES[case]
    assert run_ranks(world, both, world, settings) == [[]] * world


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the tracer looks at
def test_tensors_of_compiled_kernels_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operators run the graphs, without code generation."""
    form = saved_by(*ALL)
    gone: list[int] = []

    def counted(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        gone.append(size)
        return pinned(size, dtype, device)

    monkeypatch.setattr(recompute, "pinned", counted)
    monkeypatch.setattr(compute, "why_not_compile", lambda device: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = []
    for settings in ({}, form, {"compile": True}, {"compile": True, **form}):
        compute._compile.cache_clear()
        torch.compiler.reset()
        gone.clear()
        taken = steps(RankContext(0), 1, {**LLAMA, "num_layers": 1, "precision": "bf16", **settings})
        found.append((taken, len(gone)))
    compute._compile.cache_clear()
    torch.compiler.reset()
    (_, none), (_, plain), (wanted, _), (ours, some) = found
    assert none == 0 < plain and some >= plain / 2
    for (text, weights), (same, others) in zip(wanted, ours, strict=True):
        assert text == same and all(torch.equal(values, others[name]) for name, values in weights.items())


BYTES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({**FULL, "recompute_num_layers": 2}, {"cpu_offloading_num_layers": 3}),
    "block": ({**FULL, "recompute_method": "block", "recompute_num_layers": 2}, {"cpu_offloading_num_layers": 3}),
    "mlp": (again("layernorm", "mlp"), LAYERS),
    "latents": ({**LATENT, **again("mla_up_proj", "layernorm")}, LAYERS),
    "latents, modules": ({**LATENT, **again("mla_up_proj", "core_attn", "layernorm")}, saved_by("qkv_linear")),
    "sparse": (SPARSE, LAYERS),
    "sparse, modules": ({**SPARSE, **again("mla_up_proj")}, saved_by("qkv_linear")),
    "sparse, core": (SPARSE, saved_by("core_attn")),
    "without the output": ({}, saved_by("core_attn")),
    "with the output": ({}, {**saved_by("core_attn", "attn_proj"), **LAYERS}),
    "output alone": ({"attention_dropout": 0.1}, saved_by("attn_proj")),
    "norms": ({"hidden_dropout": 0.1}, saved_by(*NORMS)),
    "every module": (LLAMA, saved_by(*ALL)),
    "made again": ({**LLAMA, **again("layernorm", "mlp_act")}, saved_by("attn_norm", "mlp_act")),
    "experts": (
        {"num_experts": 4, "moe_router_topk": 2, **again("mlp_act")},
        saved_by("expert_fc1", "mlp_act", "core_attn"),
    ),
}


@pytest.mark.parametrize("case", BYTES)
def test_pinned_bytes_equal_the_plan(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, form = BYTES[case]
    config = tiny_config(1, precision="bf16", num_layers=4, **settings, **form)
    now, most = 0, 0

    def counted(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal now, most
        made = pinned(size, dtype, device)
        now += made.nbytes
        most = max(most, now)
        weakref.finalize(made.untyped_storage(), gone, made.nbytes)
        return made

    def gone(size: int) -> None:
        nonlocal now
        now -= size

    monkeypatch.setattr(recompute, "pinned", counted)
    Runner(build(RankContext(0), config)).step()
    assert config.training.global_batch_size is not None
    schedule = schedule_of(config, config.training.global_batch_size // config.training.micro_batch_size)
    assert host_peaks(config, plan_stages(config), schedule) == [most] and most > 0 and now == 0


SHAPE: dict[str, Any] = {"hidden_size": 64, "seq_length": 64, "num_layers": 8, "precision": "bf16"}


FORMS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (0, {}, saved_by(*ALL)),
    (1, {**FULL, "pipeline_schedule": "gpipe"}, {"cpu_offloading_num_layers": 4}),
    (0, {**FULL, "recompute_ahead": True}, {"cpu_offloading_num_layers": 3}),
    (1, {**FULL, "recompute_ahead": True, "pipeline_schedule": "gpipe"}, saved_by(*ALL)),
    (0, again("layernorm", "core_attn"), {"cpu_offloading_num_layers": 3}),
]


@pytest.mark.parametrize("rank, settings, form", FORMS, ids=str)
def test_host_and_device_bytes_equal_the_plan(rank: int, settings: dict[str, Any], form: dict[str, Any]) -> None:
    """Measures one of two ranks; each storage uses whole blocks of 512 bytes."""
    settings = {"pipeline_schedule": "1f1b", **SHAPE, **settings}
    config, plain = (tiny_config(2, pp=2, **{**settings, **more}) for more in (form, {}))
    schedule = schedule_of(config, 8)
    plan, without = (planned_memory(each, schedule)[rank] for each in (config, plain))
    ours, theirs = rehearse(config, rank), rehearse(plain, rank)
    assert ours.host_bytes == pytest.approx(plan.host_bytes, rel=0.03)
    assert theirs.peak_bytes - ours.peak_bytes == pytest.approx(without.total_bytes - plan.total_bytes, rel=0.15)
