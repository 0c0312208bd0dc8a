"""Tokens to their experts, wherever those are, and the experts' outputs back.

On the home rank the kept (token, expert) pairs are put in the order of experts. An all-to-all over ep takes each row to
the rank of its expert; where experts are split over expert_tp, every rank of that group then gets the rows of all of
its ranks. The way back mirrors this, and the home rank adds up each token's k outputs with the router's weights.

All sums have a fixed order: over the k choices of a token, and over the ranks of expert_tp in rank order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.models.moe.router import Routing
from megalite.topology.group import Group, Half, Work, conjugate


@dataclass(frozen=True, kw_only=True)
class Route:
    """How the rows of one microbatch travel, as seen by this rank."""

    pairs: Tensor  # [m]: the kept pairs (token·k + choice) in the order of experts; the order in which rows are sent
    sent: list[int]  # rows for each rank of ep
    received: list[int]  # rows from each rank of ep
    gathered: list[int]  # rows that each rank of expert_tp has received; all of them come together before the experts
    by_expert: Tensor | None  # the order of those by expert; None: they come in it
    counts: list[int]  # rows of each local expert


def plan_route(routing: Routing, *, experts: int, ep: Group, expert_tp: Group) -> Route:
    """Sort this rank's pairs by expert and agree with the other ranks on who sends how many rows.

    Collectives: an all-to-all of E counts over ep and an all-gather of E counts over expert_tp, int64 / none. The
    host waits once: it must know the numbers of rows.
    """
    chosen = routing.chosen.flatten()
    if routing.kept is not None:
        chosen = torch.where(routing.kept.flatten(), chosen, experts)  # dropped ones to the end
    sorted_pairs = chosen.sort(stable=True)
    # Where each expert's run begins; `bincount` would make the host wait for the largest value.
    ours = torch.searchsorted(sorted_pairs.values, torch.arange(experts + 1, device=chosen.device)).diff()
    per_rank = [experts // ep.size] * ep.size
    theirs = torch.empty_like(ours)
    ep.all_to_all(theirs, ours, per_rank, per_rank)
    table = torch.empty(expert_tp.size, experts, dtype=ours.dtype, device=ours.device)
    expert_tp.all_gather(table.view(-1), theirs)
    # The one place where the host waits. Rows of (rank of expert_tp, rank of ep, local expert), in the order in which
    # they come, behind those that are sent.
    with ep.heartbeat.synchronise():
        host = torch.cat((ours[None], table)).cpu()
    host_sent, host_table = host[0].view(ep.size, -1).sum(dim=1).tolist(), host[1:].view(expert_tp.size, ep.size, -1)
    gathered = host_table.sum(dim=(1, 2)).tolist()
    by_expert = None
    if expert_tp.size * ep.size > 1:
        labels = torch.arange(experts // ep.size, device=ours.device).repeat(expert_tp.size * ep.size)
        by_expert = labels.repeat_interleave(table.flatten(), output_size=sum(gathered)).argsort(stable=True)
    return Route(
        pairs=sorted_pairs.indices[: sum(host_sent)],
        sent=host_sent,
        received=host_table[expert_tp.rank].sum(dim=1).tolist(),
        gathered=gathered,
        by_expert=by_expert,
        counts=host_table.sum(dim=(0, 1)).tolist(),
    )


def send_to_experts(
    x: Tensor, route: Route, *, topk: int, ep: Group, expert_tp: Group, meanwhile: Callable[[], None]
) -> Tensor:
    """Tokens [n, h] -> the rows of this rank's experts [Σ counts, h], by expert.

    Args:
        meanwhile: called while the rows are on their way; its backward runs while their gradients are.

    Collectives: all-to-all over ep, all-gather of unequal parts over expert_tp / reduce-scatter over expert_tp,
    all-to-all over ep.
    """
    rows = _TakeTokens.apply(x, route.pairs, topk)
    rows = _all_to_all(rows, route.received, route.sent, ep, meanwhile)
    if expert_tp.size > 1:  # gradients of one row are summed over ranks
        gather, reduce = _of_unequal_parts(route.gathered, expert_tp)
        rows = conjugate(rows, gather, reduce)
    return rows if route.by_expert is None else _Reorder.apply(rows, route.by_expert, False)


def return_to_tokens(
    rows: Tensor, route: Route, weights: Tensor, *, ep: Group, expert_tp: Group, meanwhile: Callable[[], None]
) -> Tensor:
    """Outputs of this rank's experts [Σ counts, h] (partial sums over expert_tp) -> Σ_k weight·output of tokens [n, h].

    Args:
        weights: [n, k]; dropped pairs count as zero.
        meanwhile: see `send_to_experts`.

    Collectives: reduce-scatter of unequal parts over expert_tp, all-to-all over ep / all-to-all over ep, all-gather
    over expert_tp.
    """
    rows = rows if route.by_expert is None else _Reorder.apply(rows, route.by_expert, True)
    if expert_tp.size > 1:
        gather, reduce = _of_unequal_parts(route.gathered, expert_tp)
        rows = conjugate(rows, reduce, gather)
    rows = _all_to_all(rows, route.sent, route.received, ep, meanwhile)
    return _Combine.apply(rows, weights, route.pairs)


class _TakeTokens(torch.autograd.Function):
    """Row i is the token of pair i; a token's gradient is the sum over its k pairs, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.tokens, ctx.topk = x.shape[0], topk
        return x[pairs // topk]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (pairs,) = ctx.saved_tensors
        whole = grad.new_zeros(ctx.tokens * ctx.topk, grad.shape[1])
        whole[pairs] = grad
        return whole.view(ctx.tokens, ctx.topk, -1).sum(dim=1), None, None


class _Combine(torch.autograd.Function):
    """out[t] = Σ_j weights[t, j] · (row of pair t·k + j, or 0), summed in the weights' precision."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, pairs)
        tokens, topk = weights.shape
        whole = rows.new_zeros(tokens * topk, rows.shape[1])
        whole[pairs] = rows
        whole = whole.view(tokens, topk, -1)
        out = whole[:, 0] * weights[:, :1]
        for choice in range(1, topk):
            out.addcmul_(whole[:, choice].to(out.dtype), weights[:, choice : choice + 1])
        return out.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, pairs = ctx.saved_tensors
        grad_of_pair = grad[pairs // weights.shape[1]].to(weights.dtype)
        grad_rows = (grad_of_pair * weights.flatten()[pairs, None]).to(rows.dtype)
        grad_weights = torch.zeros_like(weights)
        grad_weights.view(-1)[pairs] = (grad_of_pair * rows).sum(dim=1)
        return grad_rows, grad_weights, None


class _Reorder(torch.autograd.Function):
    """Rows in `order`, or back from it; either is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.back = back
        return _reordered(rows, order, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _reordered(grad, order, not ctx.back), None, None


def _reordered(rows: Tensor, order: Tensor, back: bool) -> Tensor:
    if not back:
        return rows[order]
    output = torch.empty_like(rows)
    output[order] = rows
    return output


def _all_to_all(
    rows: Tensor, received: list[int], sent: list[int], group: Group, meanwhile: Callable[[], None]
) -> Tensor:
    """Rows to the ranks of a group; the gradient takes the same way back, started where the forward has waited.

    autograd runs what the forward did last first: between the two halves, the backward of `meanwhile`.
    """
    if group.size == 1:
        meanwhile()
        return rows
    under_way: list[tuple[Work, Tensor, Tensor]] = []

    def start(x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        output, x = x.new_empty(sum(received), x.shape[1]), x.contiguous()
        # The input must live until the wait.
        under_way.append((group.all_to_all_async(output, x, received, sent), x, output))
        return output

    def finish() -> Tensor:
        work, _, output = under_way.pop()
        work.wait()
        return output

    def wait(output: Tensor) -> Tensor:
        finish()
        return output

    def start_back(grad: Tensor) -> Tensor:
        start(grad, sent, received)
        return grad  # stands for what comes, which has another shape

    output = conjugate(rows, lambda x: start(x, received, sent), lambda _: finish())
    meanwhile()
    return conjugate(output, wait, start_back)


def _exchanged(rows: Tensor, received: list[int], sent: list[int], group: Group) -> Tensor:
    output = rows.new_empty(sum(received), rows.shape[1])
    group.all_to_all(output, rows.contiguous(), received, sent)
    return output


def _of_unequal_parts(parts: list[int], group: Group) -> tuple[Half, Half]:
    """All-gather and reduce-scatter of rows, of which each rank has so many."""
    own = parts[group.rank]

    def gather(rows: Tensor) -> Tensor:
        # An all-gather does not take unequal parts: a copy to each rank moves the same bytes.
        return _exchanged(rows.repeat(group.size, 1), parts, [own] * group.size, group)

    def reduce_scatter(rows: Tensor) -> Tensor:
        received = _exchanged(rows, [own] * group.size, parts, group)
        return received.view(group.size, own, rows.shape[1]).sum(dim=0)

    return gather, reduce_scatter
