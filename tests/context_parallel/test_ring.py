"""Ring attention against dense attention: values, gradients, saved tensors and the order of messages."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.context_parallel import attention as module
from megalite.context_parallel.attention import ring_attention
from megalite.context_parallel.tiles import Visibility
from megalite.topology.group import Group
from tests.context_parallel.dense import dense_attention, drawn, rows_of, zigzag
from tests.support.ranks import RankContext, run_ranks

B, S, D = 2, 48, 6

Tensors = list[Tensor]


@dataclass(frozen=True)
class Case:
    heads: int = 4
    groups: int = 2
    window: int | None = None
    starts: tuple[tuple[int, ...], ...] | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def visibility(self) -> Visibility:
        return Visibility(window=self.window, document_starts=self.starts)

    def whole(self) -> Tensors:
        """Draw q, k, v and the output's gradient for whole sequences."""
        q, grad = (drawn(seed, B, self.heads, S, D) for seed in (0, 3))
        k, v = (drawn(seed, B, self.groups, S, D) for seed in (1, 2))
        return [q, k, v, grad]

    @property
    def sink(self) -> Tensor | None:
        return drawn(4, self.heads) if self.sinks else None


DOCUMENTS = ((0, 5, 6, 31), (0, 24, 47))
CASES = [
    Case(groups=4),
    Case(),
    Case(groups=1),
    Case(window=1),
    Case(window=7),
    Case(window=30),
    Case(window=S),
    Case(starts=DOCUMENTS),
    Case(starts=((0,), (0,))),
    Case(groups=1, window=10, starts=DOCUMENTS),
    Case(softcap=0.7),
    Case(window=7, starts=DOCUMENTS, softcap=1.5),
    Case(sinks=True),
    Case(groups=4, window=7, sinks=True),
    Case(groups=1, window=10, starts=DOCUMENTS, softcap=1.5, sinks=True),
]


def ours_on(group: Group, case: Case, dtype: torch.dtype, gathers: bool = False) -> Tensors:
    """Return this rank's output and gradients of q, k, v and sinks."""
    spans = zigzag(S, group.size)
    local = [rows_of(tensor, group.rank, group.size, 2).to(dtype) for tensor in case.whole()]
    # As in the model, where they are views of activations [s, b, ...].
    q, k, v, grad = (tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for tensor in local)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, case.sink) if tensor is not None]
    settings = {"softcap": case.softcap, "sink": leaves[3].to(dtype) if case.sinks else None, "gathers": gathers}
    out = ring_attention(*leaves[:3], cp=group, spans=spans, visibility=case.visibility, **settings)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def every_case(context: RankContext, cp: int, gathers: bool) -> list[Tensors]:
    group = context.topology(cp=cp).cp if cp > 1 else Group.solo("cp")
    return [ours_on(group, case, torch.float64, gathers) for case in CASES]


def expected(case: Case) -> Tensors:
    q, k, v, grad = case.whole()
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, case.sink) if tensor is not None]
    out = dense_attention(q, k, v, case.window, case.starts, case.softcap, *leaves[3:])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("cp, gathers", [(1, False), (2, False), (3, False), (4, False), (2, True), (3, True)])
def test_values_and_gradients_equal_dense_attention(cp: int, gathers: bool) -> None:
    by_rank = run_ranks(cp, every_case, cp, gathers)
    for index, case in enumerate(CASES):
        for name, tensor, *parts in zip(
            ("out", "dq", "dk", "dv", "dsink")[: 4 + case.sinks],
            expected(case),
            *(ranks[index] for ranks in by_rank),
            strict=True,
        ):
            if name == "dsink":
                torch.testing.assert_close(sum(parts), tensor, rtol=1e-10, atol=1e-11)
                continue
            for rank, part in enumerate(parts):
                torch.testing.assert_close(
                    part,
                    rows_of(tensor, rank, cp, 2),
                    rtol=1e-10,
                    atol=1e-11,
                    msg=lambda text, at=(name, case, rank): f"{at}: {text}",
                )


def in_bf16(context: RankContext, cp: int, case: Case) -> Tensors:
    found = ours_on(context.topology(cp=cp).cp, case, torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found[:4])
    return [tensor.double() for tensor in found]


@pytest.mark.parametrize("case", [Case(), Case(groups=1, window=10, starts=DOCUMENTS), Case(window=9, sinks=True)])
def test_bf16_is_within_its_rounding(case: Case) -> None:
    by_rank = run_ranks(4, in_bf16, 4, case)
    for tensor, *parts in zip(expected(case), *by_rank, strict=True):
        if tensor.dim() == 1:  # sinks
            assert (sum(parts) - tensor).norm() < 0.02 * tensor.norm()
            continue
        for rank, part in enumerate(parts):
            exact = rows_of(tensor, rank, 4, 2)
            assert (part - exact).norm() < 0.02 * exact.norm()


def kept(context: RankContext, cp: int, gathers: bool) -> tuple[list[tuple[int, ...]], list[bool], bool]:
    """Return shapes of saved tensors, whether q, k, v and out are saved uncopied, and out's memory is [s, b, ...]."""
    group = context.topology(cp=cp).cp
    q, k, v, _ = (rows_of(tensor, group.rank, cp, 2) for tensor in replace(Case(), window=9).whole())
    saved: Tensors = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rule = Visibility(window=9)
        out = ring_attention(*leaves, cp=group, spans=zigzag(S, cp), visibility=rule, gathers=gathers)
    themselves = [any(tensor.data_ptr() == one.data_ptr() for tensor in saved) for one in (q, k, v, out)]
    return [tuple(tensor.shape) for tensor in saved], themselves, out.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("cp, gathers", [(1, False), (2, False), (2, True)])
def test_only_q_k_v_out_and_logsumexp_are_saved(cp: int, gathers: bool) -> None:
    queries, keys = (B, 4, S // cp, D), (B, 2, S // cp, D)
    for shapes, themselves, as_activation in run_ranks(cp, kept, cp, gathers):
        assert shapes == [queries, keys, keys, queries, queries[:3]]
        assert all(themselves)
        assert as_activation


def recorded(context: RankContext, cp: int) -> tuple[list[str], list[str], dict[str, int]]:
    """Return this rank's actions in forward and backward, in order, and the sent elements by kind."""
    group = context.topology(cp=cp).cp
    events: list[str] = []
    elements = {"forward": 0, "backward": 0, "gradients": 0}
    phase = "forward"

    class Recorder(Group):
        def rotate_async(self, tensor: Tensor) -> tuple[Tensor, Any]:
            what = "gradients" if tensor.dtype == torch.float32 else "keys"
            elements["gradients" if what == "gradients" else phase] += tensor.numel()
            events.append(f"start {what}")
            received, work = super().rotate_async(tensor)

            class Waited:
                def wait(self) -> None:
                    events.append(f"wait {what}")
                    work.wait()

            return received, Waited()

    def watched(name: str) -> Any:
        original = getattr(module, name)

        def tile(*given: Any) -> Any:
            events.append("tile")
            return original(*given)

        return original, tile

    originals = {}
    for name in ("tile_forward", "tile_backward"):
        originals[name], replacement = watched(name)
        setattr(module, name, replacement)
    try:
        cp_group = Recorder(group.name, group.ranks, group.rank, group.process_group)
        q, k, v, grad = (rows_of(t, group.rank, cp, 2).bfloat16() for t in Case().whole())
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = ring_attention(*leaves, cp=cp_group, spans=zigzag(S, cp), visibility=Visibility())
        forward, events = list(events), []
        phase = "backward"
        torch.autograd.grad(out, leaves, grad)
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
    return forward, events, elements


@pytest.mark.parametrize("cp", [2, 4])
def test_exchanges_overlap_with_tiles_and_have_the_documented_size(cp: int) -> None:
    block = 2 * B * 2 * (S // cp) * D  # k and v of one rank
    exchange = ["start keys", "tile", "wait keys"]
    steps_with_gradients = [
        event
        for step in range(1, cp)
        for event in (
            *(["start keys"] if step < cp - 1 else []),
            "tile",
            *(["wait gradients"] if step > 1 else []),
            "start gradients",
            *(["wait keys"] if step < cp - 1 else []),
        )
    ]
    for forward, backward, elements in run_ranks(cp, recorded, cp):
        assert forward == [*exchange * (cp - 1), "tile"]
        assert backward == [*exchange, *steps_with_gradients, "wait gradients"]
        assert elements == {name: (cp - 1) * block for name in ("forward", "backward", "gradients")}
