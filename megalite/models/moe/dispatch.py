"""Tokens to their experts, wherever those are, and the experts' outputs back.

On the home rank the kept (token, expert) pairs are put in the order of experts. An all-to-all over ep takes each row to
the rank of its expert; where experts are split over expert_tp, every rank of that group then gets the rows of all of
its ranks. The way back mirrors this, and the home rank adds up each token's k outputs with the router's weights.

The host waits for the device only to exchange rows over ep, or where tokens are dropped: once, for how many there will be.
With padding it knows: each expert gets as many rows of each rank as its capacity allows, of zeros where there is no pair.

All sums have a fixed order: over the k choices of a token, and over the ranks of expert_tp in rank order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.bases import Function
from megalite.kernels.matmul import GroupSizes
from megalite.models.moe.router import Routing
from megalite.topology.group import Group, Half, Work, conjugate
from megalite.topology.host_memory import HostCopy, shared_stream


@dataclass(frozen=True, eq=False, kw_only=True)
class RowCounts:
    """How many rows each rank sends to each expert, as the ranks have exchanged it.

    A forward that runs again in the backward takes those of the first time: it neither exchanges nor waits.
    """

    table: Tensor  # [etp, ep, E/ep]: what each rank of expert_tp gets from each rank of ep for each local expert
    copy: HostCopy  # [E] that this rank sends, and behind it the table, unless that is the same

    def await_on_device(self) -> None:
        """The table comes beside what the device computes: before it is read there."""
        shared_stream(self.table.device).await_on_device(self.copy.done)

    def on_host(self) -> tuple[Tensor, Tensor]:
        """Rows that are sent [ep, E/ep], and the table. The host waits if they have not come yet."""
        etp, ep, local = self.table.shape
        found = self.copy.read().view(-1, ep, local)
        return found[0], found[-etp:]

    def of_experts(self) -> list[int]:
        """Rows of each local expert, on the host."""
        return self.on_host()[1].sum(dim=(0, 1)).tolist()


@dataclass(frozen=True, eq=False, kw_only=True)
class Route:
    """How the rows of one microbatch travel, as seen by this rank. Its lists are known on the host once it has waited."""

    order: Tensor  # [n·k]: all pairs (token·k + choice) by expert, the dropped ones last
    drops: bool
    padded: bool  # the order is [E·places] instead, n·k where a place is empty
    counts: RowCounts
    ep: Group
    expert_tp: Group

    @cached_property
    def _known(self) -> list[int] | None:
        """Rows of each rank of expert_tp, which no rank has to ask for; None: it depends on what was chosen."""
        return None if self.drops or self.ep.size > 1 else [self.order.numel()] * self.expert_tp.size

    @cached_property
    def pairs(self) -> Tensor:
        """[m]: the kept pairs, or the places, in the order of experts; the order in which rows are sent."""
        return self.order[: sum(self.sent)] if self.drops else self.order

    @cached_property
    def sent(self) -> list[int]:
        """Rows for each rank of ep."""
        return self._known[:1] if self._known else self.counts.on_host()[0].sum(dim=1).tolist()

    @cached_property
    def received(self) -> list[int]:
        """Rows from each rank of ep."""
        return self._known[:1] if self._known else self.counts.on_host()[1][self.expert_tp.rank].sum(dim=1).tolist()

    @cached_property
    def gathered(self) -> list[int]:
        """Rows that each rank of expert_tp has received; all of them come together before the experts."""
        return self._known or self.counts.on_host()[1].sum(dim=(1, 2)).tolist()

    @cached_property
    def by_expert(self) -> Tensor | None:
        """The order of those by expert; None: they come in it."""
        table = self.counts.table
        if self.expert_tp.size * self.ep.size == 1:
            return None
        self.counts.await_on_device()
        labels = torch.arange(table.shape[2], device=table.device).repeat(self.expert_tp.size * self.ep.size)
        return labels.repeat_interleave(table.flatten(), output_size=sum(self.gathered)).argsort(stable=True)

    @cached_property
    def sizes(self) -> GroupSizes:
        """Rows of each local expert."""
        self.counts.await_on_device()
        return GroupSizes(self.counts.table.sum(dim=(0, 1)), self.counts.of_experts)


def plan_route(
    routing: Routing, *, experts: int, ep: Group, expert_tp: Group, counts: RowCounts | None = None
) -> Route:
    """Sort this rank's pairs by expert and agree with the other ranks on who sends how many rows, unless that was done.

    Collectives: without `counts` and padding an all-to-all of E counts over ep and an all-gather of E counts over
    expert_tp, int64 / none.
    """
    chosen = routing.chosen.flatten()
    if routing.kept is not None:
        chosen = torch.where(routing.kept.flatten(), chosen, experts)  # dropped ones to the end
    ordered, places = chosen.sort(stable=True), routing.places
    if places is None:
        order = ordered.indices
        counts = counts or _count_rows(ordered.values, experts, ep, expert_tp)
    else:
        order = _in_places(ordered.values, ordered.indices, experts, places)
        shape = expert_tp.size, ep.size, experts // ep.size
        copy = HostCopy(torch.full((1 + shape[0], *shape[1:]), places))
        counts = RowCounts(table=torch.full(shape, places, device=order.device), copy=copy)
    drops, padded = routing.kept is not None, places is not None
    return Route(order=order, drops=drops, padded=padded, counts=counts, ep=ep, expert_tp=expert_tp)


def _in_places(chosen: Tensor, pairs: Tensor, experts: int, places: int) -> Tensor:
    """[E·places]: for each expert its pairs, no more than `places`, and in the rest the number behind the last pair."""
    bounds = torch.searchsorted(chosen, torch.arange(experts + 1, device=chosen.device))
    at = bounds[:-1, None] + torch.arange(places, device=chosen.device)
    order = pairs[at.clamp(max=pairs.numel() - 1)]
    return order.masked_fill_(at >= bounds[1:, None], pairs.numel()).flatten()


def _count_rows(chosen: Tensor, experts: int, ep: Group, expert_tp: Group) -> RowCounts:
    """Beside what the device computes next: the exchange of counts, and their way to the host."""
    shape = expert_tp.size, ep.size, experts // ep.size
    # Where each expert's run begins; `bincount` would make the host wait for the largest value.
    ours = torch.searchsorted(chosen, torch.arange(experts + 1, device=chosen.device)).diff()
    aside = shared_stream(ours.device)
    if ep.size * expert_tp.size == 1:
        with aside.beside():
            copy = ep.copy_to_host(ours)
        return RowCounts(table=ours.view(shape), copy=copy)
    theirs, table = torch.empty_like(ours), ours.new_empty(expert_tp.size, experts)
    with aside.beside():
        ep.all_to_all(theirs, ours, [shape[2]] * ep.size, [shape[2]] * ep.size)
        expert_tp.all_gather(table.view(-1), theirs)
        copy = ep.copy_to_host(torch.cat((ours[None], table)))
    aside.keep_until_copied(ours)
    aside.keep_until_copied(theirs)
    return RowCounts(table=table.view(shape), copy=copy)


def send_to_experts(
    x: Tensor, route: Route, *, topk: int, ep: Group, expert_tp: Group, meanwhile: Callable[[], None]
) -> Tensor:
    """Tokens [n, h] -> the rows of this rank's experts [Σ counts, h], by expert.

    Args:
        meanwhile: called while the rows are on their way; its backward runs while their gradients are.

    Collectives: all-to-all over ep, all-gather of unequal parts over expert_tp / reduce-scatter over expert_tp,
    all-to-all over ep.
    """
    # The host waits for the numbers of rows behind this, so that the device has something to do; what runs under the
    # exchange cannot come before it, since NCCL starts when all that was asked for before has been computed.
    rows = _TakeTokens.apply(x, route.pairs, topk, route.padded)

    def under() -> None:
        _ = route.by_expert
        meanwhile()

    rows = _all_to_all(rows, route.received, route.sent, ep, under)
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
    return _Combine.apply(rows, weights, route.pairs, route.padded)


class _TakeTokens(Function):
    """Row i is the token of pair i, or 0; a token's gradient is the sum over its k pairs, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Tensor, topk: int, padded: bool) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.shape = x.shape[0], topk
        return _with_zeros(x, padded)[pairs // topk]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _by_choice(grad, *ctx.saved_tensors, *ctx.shape).sum(dim=1), None, None, None


class _Combine(Function):
    """out[t] = Σ_j weights[t, j] · (row of pair t·k + j, or 0), summed in the weights' precision."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, pairs: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(rows, weights, pairs)
        ctx.padded = padded
        whole = _by_choice(rows, pairs, *weights.shape)
        out = whole[:, 0] * weights[:, :1]
        for choice in range(1, weights.shape[1]):
            out.addcmul_(whole[:, choice].to(out.dtype), weights[:, choice : choice + 1])
        return out.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, pairs = ctx.saved_tensors
        grad_of_pair = _with_zeros(grad, ctx.padded)[pairs // weights.shape[1]].to(weights.dtype)
        of_pair = _with_zeros(weights.reshape(-1, 1), ctx.padded)[pairs]
        grad_rows = (grad_of_pair * of_pair).to(rows.dtype)
        grad_of_weight = (grad_of_pair * rows).sum(dim=1, keepdim=True)
        return grad_rows, _by_choice(grad_of_weight, pairs, *weights.shape).squeeze(2), None, None


def _with_zeros(x: Tensor, padded: bool) -> Tensor:
    """x [n, h], and if padded a row of zeros behind it, which is that of a place without a pair."""
    return F.pad(x, (0, 0, 0, 1)) if padded else x


def _by_choice(rows: Tensor, pairs: Tensor, tokens: int, topk: int) -> Tensor:
    """Row i for pair i, and 0 for pairs without one: [tokens, topk, h]. What is in places without a pair is left out."""
    whole = rows.new_zeros(tokens * topk + 1, rows.shape[1])
    whole[pairs] = rows
    return whole[:-1].view(tokens, topk, -1)


class _Reorder(Function):
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
