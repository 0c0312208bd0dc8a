"""Send tokens to the ranks of their experts, and the experts' outputs back.

The source rank sorts the kept (token, expert) pairs by expert. An all-to-all over ep sends each row to the rank of its
expert; if experts are split over expert_tp, all ranks of that group then gather their rows. The way back mirrors this,
and the source rank sums each token's k outputs with the router's weights.

The host waits for the device at most once, for the numbers of rows, and only with ep or dropped tokens. With padding
the numbers are fixed: each rank sends as many rows per expert as its capacity allows, with zeros in empty slots.

All sums have a fixed order: over the k choices of a token, and over the ranks of expert_tp in rank order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.bases import Function
from megalite.kernels.matmul import GroupSizes
from megalite.models.moe_router import Routing
from megalite.topology.group import Group, Half, Work, conjugate
from megalite.topology.host_memory import HostCopy, shared_stream


@dataclass(frozen=True, eq=False, kw_only=True)
class RowCounts:
    """Number of rows that each rank sends to each expert, after the ranks have exchanged it.

    A recomputed forward reuses the counts of the first one: it neither communicates nor waits."""

    table: Tensor  # [etp, ep, E/ep]: rows for each local expert, from each rank of ep to each rank of expert_tp
    copy: HostCopy  # the [E] numbers of rows that this rank sends, then the table, unless both are the same

    def await_on_device(self) -> None:
        """Make the device wait for the table, which is computed on a side stream."""
        shared_stream(self.table.device).await_on_device(self.copy.done)

    def on_host(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of rows sent [ep, E/ep] and the table. The host waits for their copy."""
        etp, ep, local = self.table.shape
        counts = self.copy.read().view(-1, ep, local)
        return counts[0], counts[-etp:]

    def of_experts(self) -> list[int]:
        """Return the rows of each local expert, on the host."""
        return self.on_host()[1].sum(dim=(0, 1)).tolist()


@dataclass(frozen=True, eq=False, kw_only=True)
class Route:
    """Routes of one microbatch's rows from and to this rank. Reading its lists may make the host wait."""

    order: Tensor  # [n·k]: all pairs (token·k + choice) by expert, the dropped ones last
    drops: bool
    padded: bool  # `order` is [E·slots] instead, with n·k in empty slots
    counts: RowCounts
    ep: Group
    expert_tp: Group

    @cached_property
    def _known(self) -> list[int] | None:
        """Rows of each rank of expert_tp if they do not depend on the choice of experts, else None."""
        return None if self.drops or self.ep.size > 1 else [self.order.numel()] * self.expert_tp.size

    @cached_property
    def pairs(self) -> Tensor:
        """[m]: the kept pairs, or the slots, by expert; rows are sent in this order."""
        return self.order[: sum(self.sent)] if self.drops else self.order

    @cached_property
    def sent(self) -> list[int]:
        """Number of rows to each rank of ep."""
        return self._known[:1] if self._known else self.counts.on_host()[0].sum(dim=1).tolist()

    @cached_property
    def received(self) -> list[int]:
        """Number of rows from each rank of ep."""
        return self._known[:1] if self._known else self.counts.on_host()[1][self.expert_tp.rank].sum(dim=1).tolist()

    @cached_property
    def gathered(self) -> list[int]:
        """Number of rows that each rank of expert_tp received; these are gathered before the experts."""
        return self._known or self.counts.on_host()[1].sum(dim=(1, 2)).tolist()

    @cached_property
    def by_expert(self) -> Tensor | None:
        """Permutation that sorts the gathered rows by expert; None: they are sorted already."""
        table = self.counts.table
        if self.expert_tp.size * self.ep.size == 1:
            return None
        self.counts.await_on_device()
        labels = torch.arange(table.shape[2], device=table.device).repeat(self.expert_tp.size * self.ep.size)
        return labels.repeat_interleave(table.flatten(), output_size=sum(self.gathered)).argsort(stable=True)

    @cached_property
    def sizes(self) -> GroupSizes:
        """Number of rows of each local expert."""
        self.counts.await_on_device()
        return GroupSizes(self.counts.table.sum(dim=(0, 1)), self.counts.of_experts)


def plan_route(
    routing: Routing, *, experts: int, ep: Group, expert_tp: Group, counts: RowCounts | None = None
) -> Route:
    """Sort this rank's pairs by expert and, without `counts`, exchange the numbers of rows with the other ranks.

    Collectives: without `counts` and padding an all-to-all of E counts over ep and an all-gather of E counts over
    expert_tp, int64 / none."""
    chosen = routing.chosen.flatten()
    if routing.kept is not None:
        chosen = torch.where(routing.kept.flatten(), chosen, experts)  # move dropped pairs to the end
    ordered, slots = chosen.sort(stable=True), routing.slots
    if slots is None:
        order = ordered.indices
        counts = counts or _count_rows(ordered.values, experts, ep, expert_tp)
    else:
        order = _in_slots(ordered.values, ordered.indices, experts, slots)
        shape = expert_tp.size, ep.size, experts // ep.size
        copy = HostCopy(torch.full((1 + shape[0], *shape[1:]), slots))
        counts = RowCounts(table=torch.full(shape, slots, device=order.device), copy=copy)
    drops, padded = routing.kept is not None, slots is not None
    return Route(order=order, drops=drops, padded=padded, counts=counts, ep=ep, expert_tp=expert_tp)


def _in_slots(chosen: Tensor, pairs: Tensor, experts: int, slots: int) -> Tensor:
    """Return [E·slots]: up to `slots` pairs of each expert; empty slots contain the number of pairs."""
    bounds = torch.searchsorted(chosen, torch.arange(experts + 1, device=chosen.device))
    at = bounds[:-1, None] + torch.arange(slots, device=chosen.device)
    order = pairs[at.clamp(max=pairs.numel() - 1)]
    return order.masked_fill_(at >= bounds[1:, None], pairs.numel()).flatten()


def _count_rows(chosen: Tensor, experts: int, ep: Group, expert_tp: Group) -> RowCounts:
    """Exchange the counts and copy them to the host, on a side stream."""
    shape = expert_tp.size, ep.size, experts // ep.size
    # Start of each expert's run; `bincount` would make the host wait for the largest value.
    sent = torch.searchsorted(chosen, torch.arange(experts + 1, device=chosen.device)).diff()
    stream = shared_stream(sent.device)
    if ep.size * expert_tp.size == 1:
        with stream.overlapped():
            copy = ep.copy_to_host(sent)
        return RowCounts(table=sent.view(shape), copy=copy)
    received, table = torch.empty_like(sent), sent.new_empty(expert_tp.size, experts)
    with stream.overlapped():
        ep.all_to_all(received, sent, [shape[2]] * ep.size, [shape[2]] * ep.size)
        expert_tp.all_gather(table.view(-1), received)
        copy = ep.copy_to_host(torch.cat((sent[None], table)))
    stream.keep_until_copied(sent)
    stream.keep_until_copied(received)
    return RowCounts(table=table.view(shape), copy=copy)


def send_to_experts(
    x: Tensor, route: Route, *, topk: int, ep: Group, expert_tp: Group, meanwhile: Callable[[], None]
) -> Tensor:
    """Send tokens [n, h] to experts -> the rows of this rank's experts [Σ counts, h], sorted by expert.

    Args:
        meanwhile: called during the exchange of rows; its backward runs during the exchange of their gradients.

    Collectives: all-to-all over ep, all-gather of unequal parts over expert_tp / reduce-scatter over expert_tp,
    all-to-all over ep."""
    # Launched before the host waits for the numbers of rows, to keep the device busy. Work to overlap with the exchange
    # must come after it, because NCCL starts when all previously launched work is done.
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
    """Return outputs of experts [Σ counts, h], partial over expert_tp, to their tokens -> Σ_k weight·output [n, h].

    Args:
        weights: [n, k]; dropped pairs count as zero.
        meanwhile: see `send_to_experts`.

    Collectives: reduce-scatter of unequal parts over expert_tp, all-to-all over ep / all-to-all over ep, all-gather
    over expert_tp."""
    rows = rows if route.by_expert is None else _Reorder.apply(rows, route.by_expert, True)
    if expert_tp.size > 1:
        gather, reduce = _of_unequal_parts(route.gathered, expert_tp)
        rows = conjugate(rows, reduce, gather)
    rows = _all_to_all(rows, route.sent, route.received, ep, meanwhile)
    return _Combine.apply(rows, weights, route.pairs, route.padded)


class _TakeTokens(Function):
    """Take the token of each pair, 0 for empty slots; a token's gradient is the sum over its k pairs, in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Tensor, topk: int, padded: bool) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.shape = x.shape[0], topk
        return _with_zeros(x, padded)[pairs // topk]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _by_choice(grad, *ctx.saved_tensors, *ctx.shape).sum(dim=1), None, None, None


class _Combine(Function):
    """Compute out[t] = Σ_j weights[t, j] · (row of pair t·k + j, 0 if dropped) in the weights' precision."""

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
    """Append a row of zeros to x [n, h] if padded, for slots without a pair."""
    return F.pad(x, (0, 0, 0, 1)) if padded else x


def _by_choice(rows: Tensor, pairs: Tensor, tokens: int, topk: int) -> Tensor:
    """Scatter rows to their pairs [tokens, topk, h]; dropped pairs get 0, rows of empty slots are discarded."""
    whole = rows.new_zeros(tokens * topk + 1, rows.shape[1])
    whole[pairs] = rows
    return whole[:-1].view(tokens, topk, -1)


class _Reorder(Function):
    """Permute rows by `order`, or by its inverse; each is the gradient of the other."""

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
    """Exchange rows over a group, with `meanwhile` between start and wait.

    The backward starts the gradients' exchange where the forward waited, runs the backward of `meanwhile`, then waits.
    """
    if group.size == 1:
        meanwhile()
        return rows
    under_way: list[tuple[Work, Tensor, Tensor]] = []

    def start(x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        output, x = x.new_empty(sum(received), x.shape[1]), x.contiguous()
        # The input must stay alive until the wait.
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
        return grad  # placeholder for the received gradient, which has another shape

    output = conjugate(rows, lambda x: start(x, received, sent), lambda _: finish())
    meanwhile()
    return conjugate(output, wait, start_back)


def _exchanged(rows: Tensor, received: list[int], sent: list[int], group: Group) -> Tensor:
    output = rows.new_empty(sum(received), rows.shape[1])
    group.all_to_all(output, rows.contiguous(), received, sent)
    return output


def _of_unequal_parts(parts: list[int], group: Group) -> tuple[Half, Half]:
    """Return all-gather and reduce-scatter of rows, `parts[i]` of them on rank i."""
    own = parts[group.rank]

    def gather(rows: Tensor) -> Tensor:
        # all_gather does not support unequal parts; an all-to-all of copies moves the same bytes.
        return _exchanged(rows.repeat(group.size, 1), parts, [own] * group.size, group)

    def reduce_scatter(rows: Tensor) -> Tensor:
        received = _exchanged(rows, [own] * group.size, parts, group)
        return received.view(group.size, own, rows.shape[1]).sum(dim=0)

    return gather, reduce_scatter
