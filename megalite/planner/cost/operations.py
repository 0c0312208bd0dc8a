"""Price the parts of a layer, embedding and head: products, bytes, collectives and operations, forward and backward.

Elementwise operations count their reads and writes in passes over [tokens, width], (forward, backward): a norm (2, 3),
an activation (gates+1, 2·gates+1), dropout with residual sum (3, 2). Attention with scores in memory makes passes over
b·a/t·s·s/cp scores: softmax (2, 3), dropout (2, 2) with a byte of mask. A softmax that is not fused, or has a b·a/t
that the fused one does not support, adds four operations: two casts, scale and mask."""

from dataclasses import dataclass, replace

import numpy as np

from megalite.config.model import LINEAR_CHUNK
from megalite.planner.cost.rates import Number, Parts, Workload, collective_seconds, gemm_seconds, tensor_seconds
from megalite.planner.hardware import Cluster, SoftwareStack

# Keys that take as long as the start and end of a query's pass over keys, (forward, backward): by the rates of cuDNN on
# H100 for 512 to 8,192 tokens, heads of 128 channels (FlashAttention-3, arXiv 2407.08608, figures 5 and 6).
ATTENTION_RAMP = 180.0, 330.0


@dataclass(frozen=True, eq=False)
class PassCosts:
    """Costs of the forward and of the two halves of the backward."""

    forward: Parts
    input_gradient: Parts
    weight_gradient: Parts

    def __add__(self, other: "PassCosts") -> "PassCosts":
        return PassCosts(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def __mul__(self, times: Number) -> "PassCosts":
        return PassCosts(self.forward * times, self.input_gradient * times, self.weight_gradient * times)


@dataclass(frozen=True, eq=False)
class Pricing:
    """Prices operations of a workload on a cluster with a software stack."""

    work: Workload
    cluster: Cluster
    stack: SoftwareStack
    peak: float

    @classmethod
    def of(cls, work: Workload, cluster: Cluster, stack: SoftwareStack) -> "Pricing":
        """Raises ConfigError if the accelerator does not support the precision."""
        return cls(work, cluster, stack, cluster.peak(work.precision) * cluster.accelerator.clock)

    def gemm(self, m: Number, n: Number, k: Number, batch: Number = 1.0, *, times: float = 1.0) -> Parts:
        """Price a product; it is `times` as fast as others, up to the accelerator's peak (twice that in 8 bits)."""
        most = (2.0 if times > 1.0 else 1.0) / self.cluster.efficiency.gemm
        peak = self.peak * min(self.stack.product_rate * times, most)
        seconds = gemm_seconds(m, n, k, batch=batch, element=self.work.element, peak=peak, cluster=self.cluster)
        return Parts(gemm=seconds, operations=1.0)

    def linear(self, m: Number, n: Number, k: Number, batch: Number = 1.0, *, wide: bool = False) -> PassCosts:
        """Price a product of m rows with weights [n, k], and its two gradients; the weight gradient is accumulated in
        fp32. Unless `wide`, 8 bits are used if the stack has them: then the input and the output gradient, and weights
        once for all uses, are read for their maximum, read again and written."""
        times = 1.0 if wide else self.stack.float8_rate or 1.0
        found = PassCosts(
            self.gemm(m, n, k, batch, times=times),
            self.gemm(m, k, n, batch, times=times),
            self.gemm(n, k, m, batch, times=times) + self.moved(8.0 * n * k * batch, 0.0),
        )
        if wide or not self.stack.float8_rate:
            return found
        cast = (2.0 * self.work.element + 1.0) * batch
        return found + PassCosts(
            self.moved(cast * (m * k + n * k / self.work.weight_uses), 2.0), self.moved(cast * m * n), Parts()
        )

    def moved(self, volume: Number, operations: Number = 1.0) -> Parts:
        rate = self.cluster.accelerator.memory_bandwidth * self.cluster.efficiency.memory
        return Parts(memory=volume / rate, operations=operations)

    def passes(self, forward: Number, backward: Number, elements: Number, operations: Number = 1.0) -> PassCosts:
        """Price an operation without weights, by its passes over `elements`."""
        size = elements * self.work.element * self.stack.elementwise_slowdown
        return PassCosts(self.moved(forward * size, operations), self.moved(backward * size, operations), Parts())

    def tensor(self, operation: str, volume: Number) -> Parts:
        seconds = tensor_seconds(operation, volume, self.work, self.cluster)
        return Parts(tensor=seconds, collectives=np.where(self.work.tp > 1, self.work.tp / 2.0, 0.0))

    def enter(self, width: Number = None) -> Parts:
        """Price the entry to a column-parallel layer of `width` channels; default: the hidden size."""
        narrower = self.work.element if self.stack.float8_gathers else 1.0
        return self.tensor("all-gather", self._bytes(width) / narrower) * self.work.sequence_parallel

    def leave(self, width: Number = None) -> Parts:
        """Price the exit of a row-parallel layer."""
        parts = self.tensor("reduce-scatter", self._bytes(width)) * self.work.sequence_parallel
        return parts + self.tensor("all-reduce", self._bytes(width)) * (1.0 - self.work.sequence_parallel)

    def _bytes(self, width: Number) -> Number:
        work = self.work
        return work.activation_bytes if width is None else work.tokens * width * work.element

    def block_communication(self, products: Parts, entering: Number = None) -> PassCosts:
        """Price the communication of attention or a dense MLP; the backward gathers the input again for the weight
        gradient. `products`: the weight gradients' products, as long as the input gradients'. With the stack's overlap
        flags, the latter hide that gather, and the former the sum of the input gradient, up to their time. On a CPU
        nothing is hidden: the cores that compute also move the bytes. `entering`: channels that the first products
        read, if not the hidden size."""
        gather, reduce = self.enter(entering), self.leave(entering)
        enter, leave = (gather, reduce) if entering is None else (self.enter(), self.leave())
        backward = gather + enter + reduce
        if self.cluster.accelerator.asynchronous:
            hidden = np.minimum(gather.tensor, products.gemm) * self.stack.overlap_gathers
            hidden = hidden + np.minimum(reduce.tensor, products.gemm) * self.stack.overlap_tensor_gradients
            backward = replace(backward, tensor=backward.tensor - hidden)
        return PassCosts(gather + leave, backward, Parts())


def norm(price: Pricing, width: Number) -> PassCosts:
    """Price norms over all tokens with a total `width`. Unfused: cast to fp32, squares, their mean, a product with it,
    cast back, weight; and the gradient of each."""
    elements, exact = price.work.tokens * width, price.work.exact
    if price.stack.fused_norm:
        return price.passes(2.0, 3.0, elements)
    return price.passes(4.0 + 7.0 * exact, 8.0 + 16.0 * exact, elements, 6.0)


def rotation(price: Pricing, elements: Number, operations: Number = 1.0) -> PassCosts:
    """Price rotary positions of queries or keys. Unfused: cast to fp32, rotation, cast back."""
    passes = 2.0 if price.stack.fused_norm else 2.0 + 4.0 * price.work.exact
    return price.passes(passes, passes, elements, operations) * price.work.rope


def residual(price: Pricing) -> PassCosts:
    """Price bias, dropout and residual sum at the end of a branch."""
    work, extra = price.work, 0.0 if price.stack.fused_elementwise else 1.0
    elements = work.tokens * work.hidden / work.split
    mask = work.hidden_dropout / work.element
    return price.passes(3.0 + extra * (2.0 + 2.0 * work.hidden_dropout) + mask, 2.0 + mask, elements, 1.0 + 2.0 * extra)


def activation(price: Pricing, rows: Number, width: Number) -> PassCosts:
    """Price the MLP's nonlinearity with `width` output channels."""
    gates, extra = price.work.gates, 0.0 if price.stack.fused_elementwise else 1.0
    return price.passes(gates + 1.0 + 2.0 * gates * extra, 2.0 * gates + 1.0, rows * width, 1.0 + extra)


def attention_core(price: Pricing) -> PassCosts:
    """Price q·kᵀ, softmax, P·v and the exchanges of context parallelism; there are no weight gradients."""
    if np.any(np.asarray(price.work.index_heads) > 0):
        return _with_context(price, _sparse_core(price))
    core = _fused_core(price) if price.stack.fused_attention else _scores_in_memory(price)
    softcap = price.work.softcap
    if price.stack.fused_attention and np.any(np.asarray(softcap) > 0):
        core = core * (1.0 - softcap) + _scores_in_memory(price) * softcap
    return _with_context(price, core)


def _scores_in_memory(price: Pricing) -> PassCosts:
    work, stack = price.work, price.stack
    batch, rows = work.batch * work.heads / work.tp, work.sequence / work.cp
    extra = np.where(np.mod(batch, stack.softmax_multiple) > 0, 1.0, 0.0) if stack.fused_softmax else 1.0
    scores = price.gemm(rows, work.sequence, work.head_size, batch)
    context = price.gemm(rows, work.head_size, work.sequence, batch)
    backward = price.gemm(rows, work.sequence, work.head_size, batch)
    backward = backward + price.gemm(work.sequence, work.head_size, rows, batch) * 2.0
    backward = backward + price.gemm(rows, work.head_size, work.sequence, batch)
    elements = batch * rows * work.sequence
    dropout, mask = work.attention_dropout, work.attention_dropout / work.element
    softmax = price.passes(
        2.0 + 4.0 * extra + 2.0 * dropout + mask,
        3.0 + 4.0 * extra + 2.0 * dropout + mask,
        elements,
        1.0 + 4.0 * extra + dropout,
    )
    # Heads and sequence are transposed on the way in and out.
    width = (2.0 * work.heads + 2.0 * work.groups) * work.head_size / work.tp
    transposed = price.passes(2.0, 2.0, work.tokens * width, 4.0)
    return PassCosts(scores + context, backward, Parts()) + softmax + transposed


def _sparse_core(price: Pricing) -> PassCosts:
    """Price attention with scores in memory, and the indexer's products, in fp32: of its heads (4 passes forward, 6 backward)
    and their sum (30 and 10: assumed), for the choice and the loss, with a sum over tp. The backward repeats the forward."""
    work = price.work
    rows, dense = work.sequence / work.cp, _scores_in_memory(price)
    product = price.gemm(rows * work.index_heads, work.sequence, work.index_size, work.batch, times=0.5)
    elements = work.tokens * work.sequence * work.exact
    found = PassCosts(product, product * 2.0, Parts())
    found = found + price.passes(4.0, 6.0, elements * work.index_heads, 4.0) + price.passes(30.0, 10.0, elements, 30.0)
    target = price.tensor("all-reduce", elements * work.element)
    found = dense + found + PassCosts(target, Parts(), Parts())
    return found + PassCosts(Parts(), found.forward, Parts())


def _ring(work: Workload) -> tuple[Number, Number, Number]:
    """Return how many context-parallel ranks exchange heads, from how many ranks keys and values come, and how many blocks of
    keys a query of the last rank passes over: those within the window, or two if they are gathered."""
    heads = np.minimum(work.heads_limit, work.cp)
    count = work.cp / heads
    passes = np.minimum(count, np.where(work.gathers_keys, 2.0, 1.0 + count * work.keys / work.sequence))
    return heads, count, passes


def _fused_core(price: Pricing) -> PassCosts:
    """Two products forward, five backward, over the positions that the causal mask (and the window) leaves. Efficiencies
    include one start and end per query; the passes over further blocks of keys add more, except on a CPU core."""
    work = price.work
    seen = work.keys * (1.0 - work.keys / (2.0 * work.sequence))
    flops = 4.0 * work.tokens * work.heads / work.tp * work.head_size  # per key
    more = (_ring(work)[2] - 1.0) * float(price.cluster.accelerator.multiprocessors > 1)
    rate = price.peak * price.cluster.efficiency.gemm * price.stack.attention_efficiency
    width = (2.0 * work.heads + 2.0 * work.groups) * work.head_size / work.tp
    io = price.passes(1.0, 2.0, work.tokens * width, 0.0)
    bounds = [
        np.maximum(flops * (seen + more * ramp) * times / rate, moved.memory)
        for times, ramp, moved in zip(
            (1.0, 2.5 / price.stack.attention_backward), ATTENTION_RAMP, (io.forward, io.input_gradient)
        )
    ]
    forward, backward = (Parts(gemm=seconds, operations=1.0 + late) for late, seconds in enumerate(bounds))
    return PassCosts(forward, backward, Parts())


def _with_context(price: Pricing, core: PassCosts) -> PassCosts:
    """Add context parallelism: a ring overlaps with the core, up to its time; exchanges of heads and gathers do not.
    Results of each block of keys, and its gradients, are added to sums; heads are copied in order."""
    work, stack = price.work, price.stack
    heads, count, passes = _ring(work)
    groups = np.maximum(work.groups / work.tp, heads)
    keys_and_values = 2.0 * work.tokens * groups * work.head_size * work.element
    queries = work.tokens * work.heads / work.tp * work.head_size * work.element
    wide = 1.0 if stack.half_ring else work.exact  # of the sums

    def sent(volume: Number) -> Number:
        return collective_seconds("send", volume, count, work.tp * heads, price.cluster) * (count - 1.0)

    def gathered(volume: Number) -> Number:
        return work.gathers_keys * collective_seconds(
            "all-gather", volume * count, count, work.tp * heads, price.cluster
        )

    def exchanged(volume: Number) -> Number:
        return collective_seconds("all-to-all", volume, heads, work.tp, price.cluster)

    narrower = work.value_size / work.head_size
    there, back = queries + keys_and_values * (1.0 + narrower) / 2.0, queries * narrower
    there_and_back = exchanged(there) + exchanged(back)
    rings = 1.0 - work.gathers_keys
    forward = rings * np.maximum(sent(keys_and_values) - core.forward.gemm, 0.0) + gathered(keys_and_values)
    backward = np.maximum(sent(keys_and_values) + sent(wide * keys_and_values) - core.input_gradient.gemm, 0.0)
    backward = rings * backward + gathered(keys_and_values) + gathered(wide * keys_and_values)
    core = core + PassCosts(Parts(context=forward + there_and_back), Parts(context=backward + there_and_back), Parts())
    # Fused: one pass per block, of which the first only writes. Else a sum is cleared, scaled, added to and rounded.
    each, ends = 1.0 + 2.0 * wide, -1.0 if stack.half_ring else 1.0 + 2.0 * wide
    scaled = 0.0 if stack.half_ring else 2.0 * wide
    out = price.passes(passes * (each + scaled) + ends, passes * each + ends, back / work.element, 4.0 * passes)
    whole = 2.0 * count * work.gathers_keys  # gathered keys and values are put in order, their gradients cleared too
    block = passes * each + ends + whole * (1.0 + 2.0 * wide)
    block = price.passes(2.0 + whole, block, keys_and_values / work.element, 0.0)  # keys and values side by side
    return (
        core + (out + block) * (passes > 1) + price.passes(4.0, 4.0, (there + back) / work.element, 8.0) * (heads > 1)
    )


def attention_projections(price: Pricing) -> PassCosts:
    """Price the projections of queries, keys and values and of the output, with rotations and norms."""
    work = price.work
    if np.any(np.asarray(work.latent) > 0):
        return _latent_projections(price)
    queries, kv = work.heads * work.head_size / work.tp, 2.0 * work.groups * work.head_size / work.tp
    gates = queries * work.output_gate
    rotated = work.tokens * (queries + kv / 2.0)
    # Ranks that share a key/value head exchange the projection's output.
    share = price.tensor("all-to-all", work.tokens * (queries + gates + 2.0 * work.head_size) * work.element)
    share = share * (work.groups < work.tp)
    sums = price.tensor("all-reduce", 4.0 * work.tokens) * (2.0 * work.qk_norm_all_heads)
    return (
        PassCosts(share, share, Parts())
        + price.linear(work.tokens, queries + gates + kv, work.hidden)
        + price.passes(5.0, 7.0, work.tokens * gates, 3.0) * work.output_gate
        + price.linear(work.tokens, work.hidden, queries)
        + rotation(price, rotated)
        + price.passes(2.0, 3.0, rotated, 2.0) * work.qk_norm
        + PassCosts(sums, sums, Parts())
    )


def linear_attention(price: Pricing) -> PassCosts:
    """Price the projections of linear attention, and what is between them in fp32: passes over the channels (20
    forward, 30 backward: assumed), products of chunks of 64 tokens, and over cp two all-to-alls. The backward repeats it."""
    work, chunk = price.work, float(LINEAR_CHUNK)
    heads, dv, dk = work.linear_values / work.tp, work.linear_value_size, work.linear_key_size
    width = work.linear_channels / work.tp
    batch = work.tokens * heads / chunk
    core = price.passes(20.0 * work.exact, 30.0 * work.exact, work.tokens * width, 30.0)
    core = core + price.passes(8.0 * work.exact, 10.0 * work.exact, work.tokens * heads * chunk, 6.0)
    corrects = work.linear_corrects
    products = price.gemm(chunk, dk + dv, chunk, batch, times=0.5) * (2.0 * corrects)  # in chunks
    products = products + price.gemm(chunk, dv, chunk, batch, times=0.5) * (1.0 - corrects)
    products = products + price.gemm(chunk, chunk, dk, batch, times=0.5) * (1.0 + corrects)
    products = products + price.gemm(chunk, dv, dk, batch, times=0.5) * (2.0 + corrects)  # from and to the state
    core = core + PassCosts(products, products * 2.0, Parts())
    there, back = (
        collective_seconds("all-to-all", work.tokens * each * work.element, work.cp, work.tp, price.cluster)
        for each in (width, heads * dv)
    )
    exchange = PassCosts(Parts(context=there + back), Parts(context=there + back), Parts())
    layers = price.linear(work.tokens, width, work.hidden) + price.linear(work.tokens, work.hidden, heads * dv)
    return layers + core + PassCosts(Parts(), core.forward, Parts()) + exchange


def latent_width(work: Workload) -> Number:
    """Channels that enter multi-latent attention's second products, and the shared key."""
    return np.where(work.q_rank > 0, work.q_rank, work.hidden) + work.kv_rank + work.shared_key


def _latent_projections(price: Pricing) -> PassCosts:
    """Price projections to the latents, norms, projections to the heads, RoPE, copies that join keys, and the output."""
    work = price.work
    rows, heads = work.tokens / work.split, work.heads / work.tp
    found = latent_up(price) + price.linear(rows, work.q_rank, work.hidden) * (work.q_rank > 0)
    found = found + price.linear(rows, work.kv_rank + work.shared_key, work.hidden)
    found = found + price.linear(work.tokens, work.hidden, heads * work.value_size)
    if np.any(np.asarray(work.index_heads) > 0):
        index = work.index_heads * work.index_size
        found = found + price.linear(rows, index, np.where(work.q_rank > 0, work.q_rank, work.hidden))
        found = found + price.linear(rows, work.index_size + work.index_heads, work.hidden)
        gathered = (index + work.index_size + work.index_heads) * work.tokens * work.element
        found = found + PassCosts(price.tensor("all-gather", gathered) * work.sequence_parallel, Parts(), Parts())
    return found + price.passes(2.0, 3.0, rows * (work.q_rank + work.kv_rank), 2.0) * work.qk_norm


def latent_up(price: Pricing) -> PassCosts:
    """Price the projections from the latents to the heads, with RoPE."""
    work = price.work
    heads, queries = work.heads / work.tp, np.where(work.q_rank > 0, work.q_rank, work.hidden)
    up = heads * (work.head_size - work.shared_key + work.value_size)
    found = price.linear(work.tokens, heads * work.head_size, queries) + price.linear(work.tokens, up, work.kv_rank)
    rotated = rotation(price, work.tokens * (heads + 1.0) * work.shared_key, 2.0)
    # Queries are joined and scaled, keys joined, values padded.
    return found + rotated + price.passes(2.0, 2.0, work.tokens * heads * 4.0 * work.head_size, 4.0)


def dense_mlp(price: Pricing, width: Number) -> tuple[PassCosts, PassCosts]:
    """Price (products, nonlinearity) of an MLP with `width` channels over all tp ranks."""
    work = price.work
    local = width / work.tp
    products = price.linear(work.tokens, work.gates * local, work.hidden)
    products = products + price.linear(work.tokens, work.hidden, local)
    return products, activation(price, work.tokens, local)


def experts(price: Pricing) -> tuple[PassCosts, PassCosts, PassCosts]:
    """Price (products, nonlinearity, exchange) of a MoE layer with evenly distributed tokens."""
    work = price.work
    rows = work.tokens / work.tp * work.topk  # tokens are divided over tp
    local = np.maximum(work.experts / work.ep, 1.0)
    each, width = rows * work.expert_tp / local, work.expert_ffn / work.expert_tp
    products = price.linear(each, work.gates * width, work.hidden, local)
    products = products + price.linear(each, work.hidden, width, local)
    products = products + price.linear(work.tokens / work.tp, np.maximum(work.experts, 1.0), work.hidden, wide=True)
    # Rows are sorted by expert and back, and weighted.
    products = products + price.passes(4.0, 4.0, rows * work.hidden, 6.0)
    size = rows * work.hidden * work.element
    dispatch = collective_seconds("all-to-all", size, work.ep, work.tp, price.cluster)
    dispatch = dispatch + collective_seconds("all-to-all", size * work.expert_tp, work.expert_tp, 1.0, price.cluster)
    way = Parts(expert=2.0 * dispatch, collectives=np.where(work.ep * work.expert_tp > 1, 4.0, 0.0))
    way = way + price.tensor("all-gather", work.activation_bytes) * (1.0 - work.sequence_parallel)
    return products, activation(price, rows * work.expert_tp, width), PassCosts(way, way, Parts())


def under_shared_expert(price: Pricing, exchange: PassCosts, products: PassCosts) -> PassCosts:
    """Return the (negative) time of the exchange of rows that overlaps with the shared expert's products."""

    def less(way: Parts, product: Parts) -> Parts:
        return Parts(expert=-np.minimum(way.expert, product.gemm)) * float(price.cluster.accelerator.asynchronous)

    backward = products.input_gradient + products.weight_gradient
    return PassCosts(less(exchange.forward, products.forward), less(exchange.input_gradient, backward), Parts())


def embedding(price: Pricing) -> PassCosts:
    """Price the lookup of rows, dropout, and their sum over tensor parallelism."""
    work = price.work
    moved = price.passes(
        2.0 + 2.0 * work.hidden_dropout, 2.0 + 2.0 * work.hidden_dropout, work.tokens * work.hidden, 3.0
    )
    return moved + PassCosts(price.leave(), price.enter(), Parts())


def mtp_inputs(price: Pricing) -> PassCosts:
    """Price the inputs of an MTP layer: the lookup, two norms side by side, and their projection."""
    work = price.work
    rows = work.tokens / work.split
    inputs = norm(price, 3.0 * work.hidden / work.split) + price.passes(2.0, 2.0, rows * 2.0 * work.hidden)
    return embedding(price) + inputs + price.linear(rows, work.hidden, 2.0 * work.hidden)


def head(price: Pricing) -> PassCosts:
    """Price the final norm, logits [tokens, V/t], and the loss: 4 passes over the logits in fp32 forward, 2 backward. A
    registered loss gathers the logits, and is priced as the same passes over all of them.

    An unfused loss transposes the logits and copies them (3 passes, one in fp32), reads the copy for its maximum and the
    sum, reads and writes it for the difference, its exponential and the quotient; in the backward it makes a further pass
    for the product with the loss gradient before the logits' gradient."""
    work = price.work
    width, exact = work.vocabulary / work.tp, work.exact
    elements = work.tokens * np.where(work.gathers_logits, work.vocabulary, width)
    if price.stack.fused_loss:
        loss = price.passes(1.0 + 4.0 * exact, 2.0 * exact, elements, 6.0)
    else:
        loss = price.passes(3.0 + 9.0 * exact, 3.0 + 3.0 * exact, elements, 12.0)
    sums = np.where(work.gathers_logits, work.vocabulary * work.element, work.tp * 3.0 * 4.0)
    return (
        norm(price, work.hidden / work.split)
        + price.linear(work.tokens, width, work.hidden, wide=True)
        + loss
        + PassCosts(
            price.enter() + price.tensor("all-gather", sums * work.tokens), price.enter() + price.leave(), Parts()
        )
    )
