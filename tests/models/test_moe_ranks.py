"""The mixture-of-experts layer split over ranks in every way, against one rank and the loop over experts."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.models.context import AuxiliaryLosses, ForwardContext
from megalite.models.moe_layer import MoELayer
from megalite.models.recompute import Recompute
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group, Work
from megalite.topology.topology import Topology
from tests.models.moe_reference import draw, expected
from tests.models.test_moe import (
    AUX,
    GATED,
    GPT_OSS,
    NAME,
    SHARED,
    SWITCHED,
    TIGHT,
    H,
    Z,
    build,
    config_of,
    leaves,
    with_biases,
)
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import assemble

S, SEQUENCES = 16, 4
PADDED = {**TIGHT, "moe_pad_expert_input_to_capacity": True}
CONFIGS: list[dict[str, Any]] = [
    {**GATED, **SHARED},
    {**GPT_OSS, "moe_router_topk": 3},
    {"moe_router_topk": 3, **TIGHT, "moe_router_pre_softmax": True},
    {"moe_router_topk": 1, "moe_router_pre_softmax": True, **PADDED, "moe_token_drop_policy": "position", **GATED},
    {**GPT_OSS, **PADDED, **SHARED},
    {**SWITCHED, "moe_aux_loss_coeff": 0.0},
    {"moe_router_sinkhorn": True, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.0, **TIGHT},
    {"moe_router_force_load_balancing": True, "moe_router_topk": 3, "num_experts": 8, **GATED},
]  # several per call: the pool's workers create their groups once


def config_at(index: int) -> Any:
    return config_of(**{"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z, **CONFIGS[index]})


def global_input(lonely: bool) -> Tensor:
    """Draw [s, sequences, h]; with `lonely` all tokens choose the first experts (see `set_lonely`)."""
    x = draw(1, S, SEQUENCES, H)
    return x.abs() if lonely else x


def set_lonely(layer: MoELayer) -> None:
    layer.router.weight.data.copy_(-torch.arange(4.0)[:, None].expand(4, H))


def zigzag(topology: Topology) -> Tensor:
    """Return the positions of this cp rank: chunks r and 2cp-1-r."""
    chunks = torch.arange(S).chunk(2 * topology.cp.size)
    return torch.cat((chunks[topology.cp.rank], chunks[2 * topology.cp.size - 1 - topology.cp.rank]))


def make_layer(topology: Topology, index: int, *, sequence_parallel: bool) -> MoELayer:
    factory = ParameterFactory(
        tp=topology.tp,
        cp=topology.cp,
        tp_cp=topology.tp_cp,
        ep=topology.ep,
        expert_tp=topology.expert_tp,
        seed=3,
        dtype=torch.float64,
        device=torch.device("cpu"),
        sequence_parallel=sequence_parallel,
    )
    return with_biases(MoELayer(NAME, config_at(index), factory=factory, recompute=Recompute()))


def run_layer(topology: Topology, index: int, *, sequence_parallel: bool, lonely: bool) -> dict[str, Any]:
    """Run one microbatch with all sequences of this rank: output, gradients (summed like the strategies) and losses."""
    layer = make_layer(topology, index, sequence_parallel=sequence_parallel)
    if lonely:
        set_lonely(layer)
    positions = zigzag(topology)
    own = slice(topology.dp.rank, SEQUENCES, topology.dp.size)
    rows = positions.chunk(topology.tp.size)[topology.tp.rank] if sequence_parallel else positions
    x = global_input(lonely)[rows, own].clone().requires_grad_()
    auxiliary = AuxiliaryLosses(1 / SEQUENCES, 1 / (S * SEQUENCES), 1.0, torch.device("cpu"))
    context = ForwardContext(seq_length=S, spans=(), positions=positions, position_ids=positions, auxiliary=auxiliary)
    y = layer(x, context)
    (y * draw(9, S, SEQUENCES, H)[rows, own]).sum().backward()
    assert x.grad is not None
    grads = {}
    for parameter in layer.parameters():
        info, grad = parameter.info, parameter.grad
        if info.partial_over_tp:
            topology.tp.all_reduce(grad)
        (topology.expert_dp if info.expert else topology.dp_cp).all_reduce(grad)
        grads[info.spec.name.removeprefix(f"{NAME}.")] = (info.spec.global_shape, info.spec.slice, grad.numpy())
    weights = {
        p.info.spec.name.removeprefix(f"{NAME}."): (p.info.spec.global_shape, p.info.spec.slice, p.detach().numpy())
        for p in layer.parameters()
    }
    totals = torch.stack(list(auxiliary.totals.values())[:2])
    topology.world.all_reduce(totals)
    place = (rows.numpy(), np.arange(SEQUENCES)[own])
    return {
        "y": (place, y.detach().numpy()),
        "x": (place, x.grad.numpy()),
        "grads": grads,
        "weights": weights,
        "totals": totals.tolist(),
    }


def on_rank(
    context: RankContext, axes: dict[str, int], options: dict[str, Any], indices: list[int]
) -> list[dict[str, Any]]:
    topology = context.topology(**axes)
    return [run_layer(topology, index, **options) for index in indices]


def check(ranks: list[dict[str, Any]], index: int, lonely: bool) -> None:
    config = config_at(index)
    solo = build(config)
    if lonely:
        set_lonely(solo)
    weights = leaves(solo)
    if not lonely:
        # The initial weights are those of one rank, in any split.
        for name, values in assemble([rank["weights"] for rank in ranks]).items():
            np.testing.assert_array_equal(values, weights[name].detach().numpy(), err_msg=name)
    x = global_input(lonely).requires_grad_()
    want = expected(x, weights, config)
    balance = want.balance * config.moe_aux_loss_coeff / SEQUENCES
    z = want.z * Z / (S * SEQUENCES)
    ((want.y * draw(9, S, SEQUENCES, H)).sum() + balance + z).backward()
    for what, full in (("y", want.y.detach()), ("x", x.grad)):
        for rank in ranks:
            (rows, own), values = rank[what]
            np.testing.assert_allclose(values, full[rows][:, own], rtol=1e-11, atol=1e-12, err_msg=what)
    for rank in ranks:
        assert rank["totals"] == pytest.approx([balance.item(), z.item()], rel=1e-12)
    for name, values in assemble([rank["grads"] for rank in ranks]).items():
        grad = weights[name].grad
        np.testing.assert_allclose(
            values, torch.zeros_like(weights[name]) if grad is None else grad, rtol=1e-10, atol=1e-11, err_msg=name
        )


LAYOUTS: list[tuple[int, dict[str, int], bool]] = [
    (2, {"tp": 2}, False),
    (2, {"tp": 2}, True),
    (2, {"tp": 2, "etp": 1, "ep": 2}, True),
    (2, {"cp": 2}, False),
    (4, {"dp": 4, "ep": 2, "etp": 2}, False),
    (4, {"tp": 2, "cp": 2, "ep": 2}, True),
    (4, {"tp": 2, "cp": 2, "etp": 1, "ep": 4}, False),
    (4, {"tp": 2, "dp": 2, "etp": 4}, False),
]


@pytest.mark.parametrize(("world", "axes", "sequence_parallel"), LAYOUTS, ids=str)
def test_every_split_equals_one_rank(world: int, axes: dict[str, int], sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel, "lonely": False}
    indices = list(range(len(CONFIGS)))
    found = run_ranks(world, on_rank, axes, options, indices)
    for index in indices:
        check([rank[index] for rank in found], index, False)


@pytest.mark.parametrize("axes", [{"dp": 4, "ep": 4}, {"dp": 4, "ep": 2, "etp": 2}], ids=str)
def test_ranks_without_rows_for_their_experts(axes: dict[str, int]) -> None:
    options = {"sequence_parallel": False, "lonely": True}
    check([rank[0] for rank in run_ranks(4, on_rank, axes, options, [0])], 0, True)


def test_shared_expert_overlaps_the_exchange_of_rows() -> None:
    forward, backward = (
        ["start", "up", "wait", "start", "down", "wait"],
        ["start", "down", "wait", "start", "up", "wait"],
    )
    assert run_ranks(2, events_of_a_layer) == [forward + backward] * 2


def events_of_a_layer(context: RankContext) -> list[str]:
    """Record exchanges of rows, and the shared expert's two layers, forward and backward."""
    topology = context.topology(dp=2, ep=2)
    events: list[str] = []
    start = Group.all_to_all_async

    class Noted:
        def __init__(self, work: Work) -> None:
            self.work = work
            events.append("start")

        def wait(self) -> None:
            events.append("wait")
            self.work.wait()

    def noted(group: Group, output: Tensor, tensor: Tensor, *splits: list[int]) -> Work:
        work = start(group, output, tensor, *splits)
        return Noted(work) if tensor.dim() == 2 else work  # otherwise it would be the number of rows to come

    layer = make_layer(topology, 0, sequence_parallel=False)
    assert layer.shared is not None
    for name, module in (("up", layer.shared.up), ("down", layer.shared.down)):
        module.register_forward_pre_hook(lambda *_, name=name: events.append(name))
        module.register_full_backward_pre_hook(lambda *_, name=name: events.append(name))
    x, positions = draw(1, S, 2, H).requires_grad_(), torch.arange(S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_to_all_async", noted)
        context_of = ForwardContext(seq_length=S, spans=(), positions=positions, position_ids=positions)
        layer(x, context_of).sum().backward()
    return events
