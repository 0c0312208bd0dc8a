"""The effect of section `compute` on the layers of a stage, and the numbers that must not change."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.kernels.attention import causal_attention
from megalite.kernels.quantization import Fp8Products
from megalite.models import compute
from megalite.models.attention import Attention
from megalite.models.compute import apply_compute
from megalite.models.gpt import GPTStage
from megalite.models.recompute import Recompute
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import Group
from megalite.topology.topology import Topology
from megalite.training.replica import build_replica
from tests.models.stages import build
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, Runner, tiny_config

GPT = {"hidden_dropout": 0.2, "attention_dropout": 0.0}
NONE, FULL = Recompute(), Recompute(granularity="full", method="uniform", num_layers=2)
SELECTIVE = Recompute(granularity="selective", modules=frozenset(("core_attn", "layernorm", "mlp_act")))
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}


def stage_of(config: RunConfig, *, topology: Topology | None = None, recompute: Recompute = NONE) -> GPTStage:
    """Build the whole model on this rank, with main gradients in at least fp32."""
    model, dtype = config.model, DTYPES[config.training.precision]
    stage = build(
        model,
        topology=topology,
        dtype=dtype,
        recompute=recompute,
        sequence_parallel=config.parallel.sequence_parallel,
        seq_length=config.training.seq_length,
        seed=3,
    )
    wide = torch.promote_types(dtype, torch.float32)
    for parameter in stage.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=wide)
    return stage


def numbers(stage: GPTStage, config: RunConfig) -> dict[str, Tensor]:
    """Return a microbatch's losses, and each weight's gradient from `grad` or `main_grad`."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 90, (2, config.training.seq_length + 1), generator=generator)
    losses = stage(tokens[:, :-1], stage.context((4, 5)), labels=tokens[:, 1:])
    losses.sum().backward()
    found = {"loss": losses.detach()}
    for name, parameter in stage.named_parameters():
        assert isinstance(parameter, ShardedParameter) and parameter.main_grad is not None
        found[name] = parameter.main_grad if parameter.grad is None else parameter.grad
        assert float(found[name].abs().max()) > 0.0, name
    return found


def differ(ours: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert ours.keys() == others.keys()
    return max(
        float((ours[name].double() - other.double()).norm() / other.double().norm()) for name, other in others.items()
    )


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
def test_selected_attention_backend_is_used(backend: str) -> None:
    config = tiny_config(**LLAMA, num_layers=2, attention_backend=backend)
    stage, plain = stage_of(config), stage_of(config)
    said = "flash (torch's choice)" if backend == "auto" else f"{backend} (requested)"
    assert apply_compute(stage, config) == [f"attention {said}"]
    called = []
    for layer in (module for module in stage.modules() if isinstance(module, Attention)):
        if backend == "auto":
            assert layer.causal_attention is causal_attention
        kernel = layer.causal_attention

        def spy(*args: Any, kernel: Any = kernel, **kwargs: Any) -> Tensor:
            called.append(1)
            return kernel(*args, **kwargs)

        layer.causal_attention = spy
    assert differ(numbers(stage, config), numbers(plain, config)) <= 1e-12
    assert len(called) == 2


def test_log_names_layers_with_another_attention() -> None:
    config = tiny_config(multi_latent_attention=True, experimental_attention_variant="dsa", qk_pos_emb_head_dim=8)
    assert apply_compute(stage_of(config), config)[0].endswith("in memory, for experimental_attention_variant dsa")
    config = tiny_config(attention_dropout=0.1)
    assert apply_compute(stage_of(config), config) == [
        "attention with its probabilities in memory, for attention_dropout"
    ]
    config = tiny_config(sliding_window=4)
    assert apply_compute(stage_of(config), config) == ["attention in tiles that are merged, for sliding_window 4"]

    config = tiny_config(attn_logit_softcapping=5.0)
    assert apply_compute(stage_of(config), config) == [
        "attention in tiles that are merged, for attn_logit_softcapping 5"
    ]


def test_fp8_is_refused_without_support() -> None:
    config = tiny_config(precision="bf16", fp8=True)
    with pytest.raises(ConfigError, match=r"^fp8 cannot be used: cpu has no matrix products in fp8; remove it$"):
        apply_compute(stage_of(config), config)


@pytest.mark.parametrize(("recipe", "hidden"), [("tensorwise", 64), ("blockwise", 128)])
def test_fp8_is_used_in_the_inner_layers(recipe: str, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses torch's CPU product, which is as exact as it is slow."""
    monkeypatch.setattr(compute, "why_not_fp8", lambda device: None)
    settings: dict[str, Any] = {"precision": "bf16", "hidden_size": hidden, "init_method_std": 0.02, "seq_length": 128}
    config = tiny_config(**settings, fp8=True, fp8_recipe=recipe)
    stage, plain = stage_of(config), stage_of(config)
    lines = apply_compute(stage, config)
    assert lines[-1] == f"fp8 linear layers in layers 1 to 2 of 4, one scale per {recipe[:-4]}"
    for index, block in stage.layers.items():
        for linear in block.modules():
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                assert isinstance(linear.products, Fp8Products) == (index in "12"), index
    ours, exact = numbers(stage, config), numbers(plain, config)
    assert 0.0 < differ(ours, exact) <= 0.15
    assert abs(float(ours["loss"].mean() - exact["loss"].mean())) <= 5e-3 * float(exact["loss"].mean())
    assert all(grad.isfinite().all() for grad in ours.values())


@pytest.mark.parametrize("dp_strategy", ["all-reduce", "fully-sharded"])
def test_each_weight_is_rounded_once_per_step(dp_strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the forward and once for the backward, for any number of microbatches; sharded weights at each use. The
    weight of the next step is rounded again."""
    monkeypatch.setattr(compute, "why_not_fp8", lambda device: None)
    settings: dict[str, Any] = {"precision": "bf16", "hidden_size": 64, "global_batch_size": 4, "micro_batch_size": 2}
    runner = Runner(build_replica(tiny_config(**settings, fp8=True, dp_strategy=dp_strategy), Topology.solo()))
    inner = [name for name in "12" for _ in range(4)]
    weights = {
        linear.weight.data_ptr()
        for index in dict.fromkeys(inner)
        for linear in runner.replica.stages[0].layers[index].modules()
        if isinstance(linear, ColumnParallelLinear | RowParallelLinear)
    }
    rounded, seen = Fp8Products._rounded, Counter[int]()

    def counted(self: Fp8Products, x: Tensor, *rest: Any) -> Any:
        seen[x.data_ptr()] += 1
        return rounded(self, x, *rest)

    monkeypatch.setattr(Fp8Products, "_rounded", counted)
    for _ in range(2):
        seen.clear()
        runner.step()
        assert len(weights) == len(inner)
        assert {seen[weight] for weight in weights} == {2 if dp_strategy == "all-reduce" else 2 * 2}


def test_fp8_error_names_the_unsupported_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "why_not_fp8", lambda device: None)
    config = tiny_config(precision="bf16", fp8=True, ffn_hidden_size=40)
    with pytest.raises(ConfigError) as error:
        apply_compute(stage_of(config), config)
    assert str(error.value) == (
        "fp8 requires weight dimensions per rank that are multiples of 16, but layers.1.mlp.up.weight has 40 x 32; "
        "use other sizes or another tp"
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("family", "recompute"),
    [(GPT, NONE), (LLAMA, FULL), (LLAMA, SELECTIVE)],
    ids=["gpt, kept", "llama, full", "llama, selective"],
)
def test_compiled_layers_give_the_same_numbers(
    family: dict[str, Any], recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout and full recompute; torch's operators run the graphs, without code generation."""
    calls: list[str] = []
    real = torch.compile

    def traced(formula: Any, **how: Any) -> Any:
        assert how == {"fullgraph": True, "dynamic": False}
        graph = real(formula, backend="aot_eager", **how)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(formula.__name__)
            return graph(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", traced)
    compute._compile.cache_clear()
    torch.compiler.reset()  # what other tests compiled counts towards the limit of variants
    try:
        config = tiny_config(**family, num_layers=2, compile=True)
        stage, plain = stage_of(config, recompute=recompute), stage_of(config, recompute=recompute)
        assert apply_compute(stage, config)[-1].startswith("compiled: norms")
        assert apply_compute(stage, config)[-1].startswith("compiled: norms")
        assert differ(numbers(stage, config), numbers(plain, config)) <= 1e-11
    finally:
        compute._compile.cache_clear()
        torch.compiler.reset()
    expected = {"_rms_norm", "_swiglu", "apply_rope"} if family is LLAMA else {"layer_norm", "bias_gelu"}
    assert {"_add_dropped", *expected} <= set(calls)


def test_missing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "why_not_compile", lambda device: "RuntimeError: no C++ compiler")
    config = tiny_config(compile=True)
    with pytest.raises(ConfigError, match=r"^compile cannot be used: RuntimeError: no C\+\+ compiler; remove it$"):
        apply_compute(stage_of(config), config)


def overlapped(context: RankContext, tp: int) -> None:
    settings: dict[str, Any] = {**LLAMA, "num_layers": 2, "tp": tp, "sequence_parallel": True}
    config = tiny_config(tp, **settings, tp_comm_overlap=True)
    topology = context.topology(tp=tp)
    stage, plain = (stage_of(config, topology=topology) for _ in range(2))
    lines = apply_compute(stage, config)
    assert "in pieces" in lines[-1]
    exchanged = []
    rotate = Group.rotate_async
    try:
        Group.rotate_async = lambda *args: exchanged.append(1) or rotate(*args)  # type: ignore[method-assign]
        ours = numbers(stage, config)
    finally:
        Group.rotate_async = rotate  # type: ignore[method-assign]
    assert len(exchanged) == 2 * 4 * 2 * (tp - 1)  # layers, linear layers in each, ways
    assert differ(ours, numbers(plain, config)) <= 1e-12


def test_overlap_does_not_change_numbers() -> None:
    run_ranks(2, overlapped, 2)
