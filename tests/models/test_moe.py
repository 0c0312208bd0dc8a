"""The mixture-of-experts layer on one rank against a plain loop over experts, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.models.context import AuxiliaryLosses, ForwardContext
from megalite.models.moe_layer import MoELayer
from megalite.models.moe_router import sinkhorn_offsets, within_capacity
from megalite.models.recompute import Recompute
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group
from tests.models.moe_reference import Expected, Weights, draw, expected, sinkhorn

S, B, H, F = 8, 2, 8, 12
AUX, Z = 0.3, 0.2
NAME = "layers.0.moe"
GATED = {"activation": "swiglu"}
SHARED = {"moe_shared_expert_intermediate_size": 4}
GPT_OSS: dict[str, Any] = {
    "activation": "quick_geglu",
    "activation_func_clamp_value": 0.7,
    "glu_linear_offset": 1.0,
    "moe_add_bias_linear": True,
}
TIGHT = {"moe_expert_capacity_factor": 0.75}
SWITCHED: dict[str, Any] = {"moe_router_sinkhorn": True, "moe_router_score_function": "sigmoid", "moe_router_topk": 1}
PADDED = {**TIGHT, "moe_pad_expert_input_to_capacity": True}


def config_of(**changes: Any) -> ModelConfig:
    base = {
        "num_layers": 2,
        "hidden_size": H,
        "num_attention_heads": 2,
        "ffn_hidden_size": F,
        "num_experts": 4,
        "init_method_std": 0.5,
        "add_bias_linear": False,
    }
    return ModelConfig(**{**base, **changes})


def build(config: ModelConfig, *, dtype: torch.dtype = torch.float64) -> MoELayer:
    factory = ParameterFactory(tp=Group.solo("tp"), seed=3, dtype=dtype, device=torch.device("cpu"))
    return with_biases(MoELayer(NAME, config, factory=factory, recompute=Recompute()))


def with_biases(layer: MoELayer) -> MoELayer:
    """Set nonzero biases, the same in every layout."""
    for parameter in layer.parameters():
        spec = parameter.info.spec
        if spec.name.endswith("bias"):
            drawn = draw(len(spec.name), *spec.global_shape)
            parameter.data.copy_(drawn[tuple(slice(*bounds) for bounds in spec.slice)])
    return layer


def context_of(auxiliary: AuxiliaryLosses | None = None, s: int = S) -> ForwardContext:
    positions = torch.arange(s)
    return ForwardContext(seq_length=s, spans=(), positions=positions, position_ids=positions, auxiliary=auxiliary)


def losses(scale: float = 1.0, together: int = 1) -> AuxiliaryLosses:
    return AuxiliaryLosses(1 / B, 1 / (S * B), scale, torch.device("cpu"), sequences_per_loss=together)


def leaves(layer: MoELayer) -> Weights:
    """Return the layer's weights as plain tensors by short name."""
    return {
        parameter.info.spec.name.removeprefix(f"{NAME}."): parameter.detach().clone().requires_grad_()
        for parameter in layer.parameters()
    }


def grads(layer: MoELayer) -> Weights:
    return {p.info.spec.name.removeprefix(f"{NAME}."): p.grad for p in layer.parameters()}


def close(ours: Tensor | None, theirs: Tensor | None, what: str) -> None:
    assert ours is not None and theirs is not None, what
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12, msg=lambda text: f"{what}: {text}")


def compare(layer: MoELayer, config: ModelConfig, x: Tensor, *, scale: float = 1.0, together: int = 1) -> Expected:
    """Return output, gradients and losses of a layer for x [s, b, h]."""
    auxiliary, upstream = losses(scale, together), draw(9, *x.shape)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = layer(ours, context_of(auxiliary))
    (y * upstream * scale).sum().backward()
    weights = leaves(layer)
    want = expected(theirs, weights, config, together=together)
    balance = want.balance * config.moe_aux_loss_coeff / B
    z = want.z * config.moe_z_loss_coeff / (S * B)
    (scale * ((want.y * upstream).sum() + balance + z)).backward()
    close(y, want.y, "y")
    close(ours.grad, theirs.grad, "x")
    found = grads(layer)
    assert sorted(found) == sorted(weights)
    for name, weight in weights.items():
        close(found[name], torch.zeros_like(weight) if weight.grad is None else weight.grad, name)
    close(auxiliary.totals["load_balancing_loss"], balance.detach(), "load balancing")
    close(auxiliary.totals["z_loss"], z.detach(), "z")
    return want


CASES = [
    {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    {"moe_router_topk": 1, "moe_router_pre_softmax": True, **TIGHT},
    {},
    {**GATED, **SHARED},
    {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    {"moe_router_topk": 3, **GATED, "moe_ffn_hidden_size": 5},
    {"moe_router_topk": 4, "activation": "gelu_tanh", "num_experts": 4},
    GPT_OSS,
    {**GPT_OSS, **SHARED, "moe_router_topk": 3, "activation_func_clamp_value": None},
    {"moe_add_bias_linear": True, "moe_router_pre_softmax": True, **TIGHT},
    {**TIGHT},
    {**TIGHT, "moe_token_drop_policy": "position", **SHARED},
    {**PADDED, **GPT_OSS, **SHARED},
    {**PADDED},
    {"moe_router_topk": 3, "moe_router_pre_softmax": True, "moe_expert_capacity_factor": 0.5, "num_experts": 8},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_layer_equals_a_loop_over_experts(changes: dict[str, Any]) -> None:
    config = config_of(moe_aux_loss_coeff=AUX, moe_z_loss_coeff=Z, **changes)
    want = compare(build(config), config, draw(1, S, B, H))
    pairs = S * B * config.moe_router_topk
    assert (want.kept.sum() < pairs) == (config.moe_expert_capacity_factor is not None)


@pytest.mark.parametrize("losses_of", [{"moe_aux_loss_coeff": AUX}, {"moe_z_loss_coeff": Z}])
def test_each_auxiliary_loss_separately_and_scaled(losses_of: dict[str, float]) -> None:
    config = config_of(**losses_of)
    compare(build(config), config, draw(1, S, B, H), scale=8.0)


def test_auxiliary_loss_over_sequences() -> None:
    """The loss of sequences together is lower: one sequence's surplus of an expert makes up for another's lack."""
    config = config_of(moe_aux_loss_coeff=AUX)
    each, both = (compare(build(config), config, draw(1, S, B, H), together=n).balance for n in (1, B))
    assert float(both.detach()) < 0.999 * float(each.detach())


def test_drop_policies_drop_different_tokens() -> None:
    kept = [
        expected(draw(1, S, B, H), leaves(build(config)), config).kept
        for config in (config_of(**TIGHT), config_of(**TIGHT, moe_token_drop_policy="position"))
    ]
    assert kept[0].sum() == kept[1].sum() and not torch.equal(*kept)


def test_experts_without_tokens() -> None:
    """Two of four experts have no rows: no gradient, but every weight still reports once."""
    config = config_of(moe_aux_loss_coeff=AUX, **GPT_OSS)
    layer, x = build(config), draw(1, S, B, H).abs()
    layer.router.weight.data.copy_(-torch.arange(4.0)[:, None].expand(4, H))
    layer.router.linear_bias.data.zero_()
    want = compare(layer, config, x)
    assert want.kept.sum((0, 1)).tolist() == [S * B, S * B, 0, 0]
    reports: dict[str, int] = {}
    for parameter in layer.parameters():
        name = parameter.info.spec.name
        expect, parameter.grad = parameter.grad, None
        parameter.main_grad = torch.full_like(parameter, 0.5)
        parameter.grad_ready = lambda name=name: reports.__setitem__(name, reports.get(name, 0) + 1)
        parameter.expect = expect
    y = layer(x, context_of(losses()))
    (y * draw(9, *x.shape)).sum().backward()
    for parameter in layer.parameters():
        name, found = parameter.info.spec.name, parameter.grad
        if name.endswith("weight"):  # a bias uses autograd instead
            assert found is None and parameter.main_grad is not None
            found = parameter.main_grad - 0.5
        close(found, parameter.expect, name)
    assert reports == {f"{NAME}.{matrix}.weight": 1 for matrix in ("router", "experts.up", "experts.down")}


def test_equal_logits_select_the_lower_index() -> None:
    config = config_of()
    layer = build(config)
    layer.router.weight.data[:] = layer.router.weight.data[:1]
    routing = layer.router(draw(1, S, B, H), torch.arange(S), context_of())
    assert torch.equal(routing.chosen, torch.tensor([0, 1]).expand(S, B, 2))
    assert torch.equal(routing.weights, torch.full((S, B, 2), 0.5, dtype=torch.float64))


def test_equal_weights_keep_the_lower_position() -> None:
    """The choice does not depend on the order of rows."""
    config = config_of(moe_router_topk=1, moe_expert_capacity_factor=1.0)
    layer = build(config)
    layer.router.weight.data[:] = layer.router.weight.data[:1]
    positions = torch.tensor([5, 4, 0, 1, 7, 6, 2, 3])
    kept = layer.router(draw(1, S, B, H), positions, context_of()).kept
    assert torch.equal(kept[:, :, 0], (positions < 2)[:, None].expand(S, B))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-15), (torch.float32, 1e-7)])
def test_weights_equal_up_to_rounding_count_as_equal(dtype: torch.dtype, rounding: float) -> None:
    """Otherwise the rank that computed a token, not the token, would decide which tokens are dropped."""
    weights = torch.full((4, 1, 1), 0.3, dtype=dtype)
    weights[3] += rounding
    chosen, positions = torch.zeros(4, 1, 1, dtype=torch.int64), torch.arange(4)
    kept = within_capacity(weights, chosen, positions, capacity=2, drop_last=False, sequence=Group.solo("tp-cp"))
    assert kept.flatten().tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    "changes",
    [SWITCHED, {"moe_router_sinkhorn": True, "moe_router_pre_softmax": True, "moe_router_topk": 3, "num_experts": 8}],
    ids=("one-expert", "three-experts"),
)
def test_sinkhorn_balances_each_sequence_in_training(changes: dict[str, Any]) -> None:
    config = config_of(moe_z_loss_coeff=Z, **changes)
    layer, x, positions = build(config), draw(1, 64, B, H), torch.arange(64)
    layer.router.weight.data[0] += 0.2 * layer.router.weight.data.norm()
    compare(layer, config, x)
    routing = layer.router(x, positions, context_of(losses(), 64))
    alone = layer.router(x[:, 1:], positions, context_of(losses(), 64))
    assert torch.equal(alone.chosen, routing.chosen[:, 1:])

    logits = x @ layer.router.weight.t()
    plain = layer.eval().router(x, positions, context_of(s=64))
    assert torch.equal(plain.chosen, logits.topk(config.moe_router_topk).indices)
    most = [part.chosen[:, 0].flatten().bincount().max().item() for part in (plain, routing)]
    assert most[1] < most[0] and most[1] < 1.3 * 64 * config.moe_router_topk / config.num_experts


def test_forced_balance_is_even_in_training_only() -> None:
    config = config_of(moe_z_loss_coeff=Z, moe_router_force_load_balancing=True, moe_router_topk=3, num_experts=8)
    layer, x = build(config), draw(1, S, B, H)
    compare(layer, config, x)
    forced = layer.router(x, torch.arange(S), context_of(losses()))
    assert all(forced.chosen[:, i].flatten().bincount(minlength=8).tolist() == [3] * 8 for i in range(B))
    plain = layer.eval().router(x, torch.arange(S), context_of())
    assert torch.equal(plain.chosen, (x @ layer.router.weight.t()).topk(3).indices)


@pytest.mark.parametrize("size", (0.5, 3.0))
def test_sinkhorn_stops_at_the_tolerance_of_megatron(size: float) -> None:
    """The last step changes the factors by up to 1e-4, so a step more or less is seen."""
    logits = size * draw(3, 64, B, 8)
    offsets = sinkhorn_offsets(logits, sequence=Group.solo("tp-cp"))
    for i in range(B):
        of_rows = sinkhorn(logits[:, i]).log() - logits[:, i] - offsets[i]
        torch.testing.assert_close(of_rows, of_rows[:, :1].expand_as(of_rows), rtol=0, atol=1e-6)


def test_sinkhorn_of_extreme_logits_is_finite() -> None:
    """exp(1000) overflows, and an expert that no token wants has a share of zero."""
    logits = 1000 * torch.randn(64, 2, 4, generator=torch.Generator().manual_seed(1))
    logits[..., 2] = -1e6
    assert sinkhorn_offsets(logits, sequence=Group.solo("tp-cp")).isfinite().all()


def test_evaluation_has_no_auxiliary_losses() -> None:
    config = config_of(moe_aux_loss_coeff=AUX, moe_z_loss_coeff=Z)
    layer, x = build(config), draw(1, S, B, H)
    with torch.no_grad():
        assert torch.equal(layer(x, context_of()), layer(x, context_of(losses())))


def test_bf16_routes_in_fp32() -> None:
    """Weights and losses equal those of fp32 for the same rounded numbers."""
    config = config_of(moe_z_loss_coeff=Z)
    half = build(config, dtype=torch.bfloat16)
    x = draw(1, S, B, H).bfloat16()
    routing = half.router(x, torch.arange(S), context_of())
    logits = x.float() @ half.router.weight.float().t()
    best = logits.topk(2).values.softmax(-1)
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights, best, rtol=1e-6, atol=1e-7)
