"""The pieces of a layer, its embedding and head: products, bytes, collectives and operations, forward and backward.

What is counted of the operations that only move bytes is what they read and write, in passes over [tokens, width]:
a norm 2 and 3 (forward, backward), an activation gates+1 and 2·gates+1, dropout with residual sum 3 and 2, and of
attention with scores in memory, b·a/t·s·s/cp of them, softmax 2 and 3 and dropout 2 and 2 with a byte of mask. A softmax
that is not fused, or has a b·a/t that the fused one does not take, has four operations more: two casts, scale and mask.
"""

from dataclasses import dataclass, replace

import numpy as np

from megalite.planner.cost.rates import Number, Parts, Workload, collective_seconds, gemm_seconds, tensor_seconds
from megalite.planner.hardware import Cluster, SoftwareStack


@dataclass(frozen=True, eq=False)
class Piece:
    """Forward, and the two halves of the backward."""

    forward: Parts
    input_gradient: Parts
    weight_gradient: Parts

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def __mul__(self, times: Number) -> "Piece":
        return Piece(self.forward * times, self.input_gradient * times, self.weight_gradient * times)


@dataclass(frozen=True, eq=False)
class Pricing:
    """A workload on a machine with a software stack: prices single operations."""

    work: Workload
    cluster: Cluster
    stack: SoftwareStack
    peak: float

    @classmethod
    def of(cls, work: Workload, cluster: Cluster, stack: SoftwareStack) -> "Pricing":
        """Raises ConfigError if the accelerator does not have the precision."""
        return cls(work, cluster, stack, cluster.peak(work.precision) * cluster.accelerator.clock)

    def gemm(self, m: Number, n: Number, k: Number, batch: Number = 1.0, *, times: float = 1.0) -> Parts:
        """`times`: as fast as other products, but no faster than the accelerator: its peak, or twice that in 8 bits."""
        most = (2.0 if times > 1.0 else 1.0) / self.cluster.efficiency.gemm
        peak = self.peak * min(self.stack.product_rate * times, most)
        seconds = gemm_seconds(m, n, k, batch=batch, element=self.work.element, peak=peak, cluster=self.cluster)
        return Parts(gemm=seconds, operations=1.0)

    def linear(self, m: Number, n: Number, k: Number, batch: Number = 1.0, *, wide: bool = False) -> Piece:
        """A product with weights [n, k] of m rows, and its two gradients; the weight's is added up in fp32. Not `wide`: in 8
        bits where the stack has them; then input and output's gradient, and weights once for all their uses, are read for
        their largest number, read again and written."""
        times = 1.0 if wide else self.stack.float8_rate or 1.0
        found = Piece(
            self.gemm(m, n, k, batch, times=times),
            self.gemm(m, k, n, batch, times=times),
            self.gemm(n, k, m, batch, times=times) + self.moved(8.0 * n * k * batch, 0.0),
        )
        if wide or not self.stack.float8_rate:
            return found
        cast = (2.0 * self.work.element + 1.0) * batch
        return found + Piece(
            self.moved(cast * (m * k + n * k / self.work.weight_uses), 2.0), self.moved(cast * m * n), Parts()
        )

    def moved(self, volume: Number, operations: Number = 1.0) -> Parts:
        rate = self.cluster.accelerator.memory_bandwidth * self.cluster.efficiency.memory
        return Parts(memory=volume / rate, operations=operations)

    def passes(self, forward: Number, backward: Number, elements: Number, operations: Number = 1.0) -> Piece:
        """An operation without weights: passes over so many elements."""
        size = elements * self.work.element * self.stack.elementwise_slowdown
        return Piece(self.moved(forward * size, operations), self.moved(backward * size, operations), Parts())

    def tensor(self, operation: str, volume: Number) -> Parts:
        seconds = tensor_seconds(operation, volume, self.work, self.cluster)
        return Parts(tensor=seconds, collectives=np.where(self.work.tp > 1, self.work.tp / 2.0, 0.0))

    def enter(self, width: Number = None) -> Parts:
        """Into a column-parallel layer, of so many channels; default: those of the hidden state."""
        narrower = self.work.element if self.stack.float8_gathers else 1.0
        return self.tensor("all-gather", self._bytes(width) / narrower) * self.work.sequence_parallel

    def leave(self, width: Number = None) -> Parts:
        """Out of a row-parallel layer."""
        parts = self.tensor("reduce-scatter", self._bytes(width)) * self.work.sequence_parallel
        return parts + self.tensor("all-reduce", self._bytes(width)) * (1.0 - self.work.sequence_parallel)

    def _bytes(self, width: Number) -> Number:
        work = self.work
        return work.activation_bytes if width is None else work.tokens * width * work.element

    def block_communication(self, products: Parts, entering: Number = None) -> Piece:
        """Of attention, or of a dense MLP: the backward gathers the input again for the weight's gradient. `products`:
        those of the weights' gradients, as long as those of the inputs'. Where the stack says so, the latter hide
        that gathering, and they themselves the sum of the input's gradient: as far as they last. On a CPU nothing is
        hidden: what moves the bytes there is what computes. `entering`: channels that the first products read, if not
        those of the hidden state."""
        gather, reduce = self.enter(entering), self.leave(entering)
        enter, leave = (gather, reduce) if entering is None else (self.enter(), self.leave())
        backward = gather + enter + reduce
        if self.cluster.accelerator.asynchronous:
            hidden = np.minimum(gather.tensor, products.gemm) * self.stack.overlap_gathers
            hidden = hidden + np.minimum(reduce.tensor, products.gemm) * self.stack.overlap_tensor_gradients
            backward = replace(backward, tensor=backward.tensor - hidden)
        return Piece(gather + leave, backward, Parts())


def norm(price: Pricing, width: Number) -> Piece:
    """Over rows of all tokens that together are `width` wide. Step by step: to fp32, squares, their mean, a product with
    it, back, the weight; and each one's gradient."""
    elements, exact = price.work.tokens * width, price.work.exact
    if price.stack.fused_norm:
        return price.passes(2.0, 3.0, elements)
    return price.passes(4.0 + 7.0 * exact, 8.0 + 16.0 * exact, elements, 6.0)


def rotation(price: Pricing, elements: Number, operations: Number = 1.0) -> Piece:
    """Rotary positions of queries or keys. Step by step: to fp32, the rotation, back."""
    passes = 2.0 if price.stack.fused_norm else 2.0 + 4.0 * price.work.exact
    return price.passes(passes, passes, elements, operations) * price.work.rope


def residual(price: Pricing) -> Piece:
    """Bias, dropout and residual sum at the end of a branch."""
    work, apart = price.work, 0.0 if price.stack.fused_elementwise else 1.0
    elements = work.tokens * work.hidden / work.split
    mask = work.hidden_dropout / work.element
    return price.passes(3.0 + apart * (2.0 + 2.0 * work.hidden_dropout) + mask, 2.0 + mask, elements, 1.0 + 2.0 * apart)


def activation(price: Pricing, rows: Number, width: Number) -> Piece:
    """The MLP's nonlinearity, to `width` channels."""
    gates, apart = price.work.gates, 0.0 if price.stack.fused_elementwise else 1.0
    return price.passes(gates + 1.0 + 2.0 * gates * apart, 2.0 * gates + 1.0, rows * width, 1.0 + apart)


def attention_core(price: Pricing) -> Piece:
    """q·kᵀ, softmax, P·v; with context parallelism what it sends. Its weights' half is empty: it has none."""
    core = _fused_core(price) if price.stack.fused_attention else _scores_in_memory(price)
    softcap = price.work.softcap
    if price.stack.fused_attention and np.any(np.asarray(softcap) > 0):
        core = core * (1.0 - softcap) + _scores_in_memory(price) * softcap
    return _with_context(price, core)


def _scores_in_memory(price: Pricing) -> Piece:
    work, stack = price.work, price.stack
    batch, rows = work.batch * work.heads / work.tp, work.sequence / work.cp
    apart = np.where(np.mod(batch, stack.softmax_multiple) > 0, 1.0, 0.0) if stack.fused_softmax else 1.0
    scores = price.gemm(rows, work.sequence, work.head_size, batch)
    context = price.gemm(rows, work.head_size, work.sequence, batch)
    backward = price.gemm(rows, work.sequence, work.head_size, batch)
    backward = backward + price.gemm(work.sequence, work.head_size, rows, batch) * 2.0
    backward = backward + price.gemm(rows, work.head_size, work.sequence, batch)
    elements = batch * rows * work.sequence
    dropout, mask = work.attention_dropout, work.attention_dropout / work.element
    softmax = price.passes(
        2.0 + 4.0 * apart + 2.0 * dropout + mask,
        3.0 + 4.0 * apart + 2.0 * dropout + mask,
        elements,
        1.0 + 4.0 * apart + dropout,
    )
    # Heads and sequence change places on the way in and out.
    width = (2.0 * work.heads + 2.0 * work.groups) * work.head_size / work.tp
    turned = price.passes(2.0, 2.0, work.tokens * width, 4.0)
    return Piece(scores + context, backward, Parts()) + softmax + turned


def _fused_core(price: Pricing) -> Piece:
    """Two products forward, five backward, over what the causal mask (and the window) leaves."""
    work = price.work
    seen = work.keys * (1.0 - work.keys / (2.0 * work.sequence))
    flops = 4.0 * work.tokens * work.heads / work.tp * work.head_size * seen
    rate = price.peak * price.cluster.efficiency.gemm * price.stack.attention_efficiency
    width = (2.0 * work.heads + 2.0 * work.groups) * work.head_size / work.tp
    io = price.passes(1.0, 2.0, work.tokens * width, 0.0)
    bounds = [
        np.maximum(flops * times / rate, moved.memory)
        for times, moved in ((1.0, io.forward), (2.5 / price.stack.attention_backward, io.input_gradient))
    ]
    forward, backward = (Parts(gemm=seconds, operations=1.0 + late) for late, seconds in enumerate(bounds))
    return Piece(forward, backward, Parts())


def _with_context(price: Pricing, core: Piece) -> Piece:
    """A ring hides behind the core as far as it goes; an exchange of heads does not, nor does a gathering."""
    work = price.work
    heads = np.minimum(work.heads_limit, work.cp)
    count = work.cp / heads  # ranks that keys and values come from
    groups = np.maximum(work.groups / work.tp, heads)
    keys_and_values = 2.0 * work.tokens * groups * work.head_size * work.element
    queries = work.tokens * work.heads / work.tp * work.head_size * work.element

    def sent(volume: Number) -> Number:
        return collective_seconds("send", volume, count, work.tp * heads, price.cluster) * (count - 1.0)

    def gathered(volume: Number) -> Number:
        return work.gathers_keys * collective_seconds(
            "all-gather", volume * count, count, work.tp * heads, price.cluster
        )

    def exchanged(volume: Number) -> Number:
        return collective_seconds("all-to-all", volume, heads, work.tp, price.cluster)

    narrower = work.value_size / work.head_size
    there_and_back = exchanged(queries + keys_and_values * (1.0 + narrower) / 2.0) + exchanged(queries * narrower)
    rings = 1.0 - work.gathers_keys
    forward = rings * np.maximum(sent(keys_and_values) - core.forward.gemm, 0.0) + gathered(keys_and_values)
    backward = np.maximum(sent(keys_and_values) + sent(work.exact * keys_and_values) - core.input_gradient.gemm, 0.0)
    backward = rings * backward + gathered(keys_and_values) + gathered(work.exact * keys_and_values)
    return core + Piece(Parts(context=forward + there_and_back), Parts(context=backward + there_and_back), Parts())


def attention_projections(price: Pricing) -> Piece:
    """Queries, keys and values in; out; and what turns or normalises them."""
    work = price.work
    if np.any(np.asarray(work.latent) > 0):
        return _latent_projections(price)
    queries, kv = work.heads * work.head_size / work.tp, 2.0 * work.groups * work.head_size / work.tp
    turned = work.tokens * (queries + kv / 2.0)
    # Ranks that share a key/value head exchange what the projection gives.
    share = price.tensor("all-to-all", work.tokens * (queries + 2.0 * work.head_size) * work.element)
    share = share * (work.groups < work.tp)
    sums = price.tensor("all-reduce", 4.0 * work.tokens) * (2.0 * work.qk_norm_all_heads)
    return (
        Piece(share, share, Parts())
        + price.linear(work.tokens, queries + kv, work.hidden)
        + price.linear(work.tokens, work.hidden, queries)
        + rotation(price, turned)
        + price.passes(2.0, 3.0, turned, 2.0) * work.qk_norm
        + Piece(sums, sums, Parts())
    )


def latent_width(work: Workload) -> Number:
    """Channels that enter the products of multi-latent attention after the first, and the shared key."""
    return np.where(work.q_rank > 0, work.q_rank, work.hidden) + work.kv_rank + work.shared_key


def _latent_projections(price: Pricing) -> Piece:
    """Down to the latents, norms, up to the heads, rope, the copies that put keys together, and out."""
    work = price.work
    rows, heads = work.tokens / work.split, work.heads / work.tp
    found = latent_up(price) + price.linear(rows, work.q_rank, work.hidden) * (work.q_rank > 0)
    found = found + price.linear(rows, work.kv_rank + work.shared_key, work.hidden)
    found = found + price.linear(work.tokens, work.hidden, heads * work.value_size)
    return found + price.passes(2.0, 3.0, rows * (work.q_rank + work.kv_rank), 2.0) * work.qk_norm


def latent_up(price: Pricing) -> Piece:
    """From the latents to the heads, with rope."""
    work = price.work
    heads, queries = work.heads / work.tp, np.where(work.q_rank > 0, work.q_rank, work.hidden)
    up = heads * (work.head_size - work.shared_key + work.value_size)
    found = price.linear(work.tokens, heads * work.head_size, queries) + price.linear(work.tokens, up, work.kv_rank)
    turned = rotation(price, work.tokens * (heads + 1.0) * work.shared_key, 2.0)
    # Queries are put together and scaled, keys put together, values padded.
    return found + turned + price.passes(2.0, 2.0, work.tokens * heads * 4.0 * work.head_size, 4.0)


def dense_mlp(price: Pricing, width: Number) -> tuple[Piece, Piece]:
    """(products, nonlinearity) of an MLP with `width` channels over all tp ranks."""
    work = price.work
    local = width / work.tp
    products = price.linear(work.tokens, work.gates * local, work.hidden)
    products = products + price.linear(work.tokens, work.hidden, local)
    return products, activation(price, work.tokens, local)


def experts(price: Pricing) -> tuple[Piece, Piece, Piece]:
    """(products, nonlinearity, exchange) of a MoE layer with evenly spread tokens."""
    work = price.work
    rows = work.tokens / work.tp * work.topk  # of this rank's share of the tokens
    local = np.maximum(work.experts / work.ep, 1.0)
    each, width = rows * work.expert_tp / local, work.expert_ffn / work.expert_tp
    products = price.linear(each, work.gates * width, work.hidden, local)
    products = products + price.linear(each, work.hidden, width, local)
    products = products + price.linear(work.tokens / work.tp, np.maximum(work.experts, 1.0), work.hidden, wide=True)
    # Rows are put in order by expert and back, and weighed.
    products = products + price.passes(4.0, 4.0, rows * work.hidden, 6.0)
    size = rows * work.hidden * work.element
    dispatch = collective_seconds("all-to-all", size, work.ep, work.tp, price.cluster)
    dispatch = dispatch + collective_seconds("all-to-all", size * work.expert_tp, work.expert_tp, 1.0, price.cluster)
    way = Parts(expert=2.0 * dispatch, collectives=np.where(work.ep * work.expert_tp > 1, 4.0, 0.0))
    way = way + price.tensor("all-gather", work.activation_bytes) * (1.0 - work.sequence_parallel)
    return products, activation(price, rows * work.expert_tp, width), Piece(way, way, Parts())


def under_shared_expert(price: Pricing, exchange: Piece, products: Piece) -> Piece:
    """What the exchange of rows takes less, since the shared expert's products run beside it."""

    def less(way: Parts, product: Parts) -> Parts:
        return Parts(expert=-np.minimum(way.expert, product.gemm)) * float(price.cluster.accelerator.asynchronous)

    backward = products.input_gradient + products.weight_gradient
    return Piece(less(exchange.forward, products.forward), less(exchange.input_gradient, backward), Parts())


def embedding(price: Pricing) -> Piece:
    """A lookup of rows, dropout, and their sum over tensor parallelism."""
    work = price.work
    moved = price.passes(
        2.0 + 2.0 * work.hidden_dropout, 2.0 + 2.0 * work.hidden_dropout, work.tokens * work.hidden, 3.0
    )
    return moved + Piece(price.leave(), price.enter(), Parts())


def mtp_inputs(price: Pricing) -> Piece:
    """Of a layer that predicts a further token: the lookup, two norms beside each other, and their projection."""
    work = price.work
    rows = work.tokens / work.split
    inputs = norm(price, 3.0 * work.hidden / work.split) + price.passes(2.0, 2.0, rows * 2.0 * work.hidden)
    return embedding(price) + inputs + price.linear(rows, work.hidden, 2.0 * work.hidden)


def head(price: Pricing) -> Piece:
    """Final norm, logits [tokens, V/t], and the loss: 4 passes over the logits in fp32 forward, 2 backward.

    A loss that is not fused turns the logits round and copies them (3 passes and one in fp32), reads the copy for its
    maximum and for the sum, reads and writes it for the difference, its exponential and the quotient; and in the
    backward once more for the product with the loss's gradient, on the way back to the logits."""
    work = price.work
    width, exact = work.vocabulary / work.tp, work.exact
    elements = work.tokens * width
    if price.stack.fused_loss:
        loss = price.passes(1.0 + 4.0 * exact, 2.0 * exact, elements, 6.0)
    else:
        loss = price.passes(3.0 + 9.0 * exact, 3.0 + 3.0 * exact, elements, 12.0)
    sums = price.tensor("all-gather", work.tp * 3.0 * work.tokens * 4.0)
    return (
        norm(price, work.hidden / work.split)
        + price.linear(work.tokens, width, work.hidden, wide=True)
        + loss
        + Piece(price.enter() + sums, price.enter() + price.leave(), Parts())
    )
