"""Linear attention: Gated DeltaNet, with a state that each token corrects (arXiv 2412.06464), and Mamba-2, with one to
which each token adds (arXiv 2405.21060). Both let the state decay."""

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.context_parallel.attention import heads_to_sequence, sequence_to_heads
from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.bases import Function, Module
from megalite.kernels.linear_attention import linear_attention
from megalite.models.context import ForwardContext, KeyValueCache, document_position_ids
from megalite.models.norm import Norm
from megalite.models.recompute import Recompute, recomputed
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import ParameterFactory


class LinearAttention(Module):
    """Linear attention of one layer, split over tp by key head.

    A key head has a query and a key of dk channels. It serves r value heads of dv channels, which have an output gate of
    dv channels, a decay and, for the delta rule, a write strength. Rows of `in_proj` are ordered by key head: query, key,
    values, output gates, strengths, decays. Queries, keys and values pass a causal depthwise convolution and SiLU before `_mix`.

    With context parallelism an all-to-all splits the key heads over cp instead of the sequence, whatever `cp_comm_type`.
    The backward recomputes everything between the two projections."""

    conv_has_bias: ClassVar[bool] = False

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory, recompute: Recompute) -> None:
        super().__init__()
        self.name, self.cp, self.dtype, saves = name, factory.cp, factory.dtype, recompute.saves
        self._in_qkv, self._in_core, self._in_proj = map(saves.runner, ("qkv_linear", "core_attn", "attn_proj"))
        keys, values, taps = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_conv_kernel_dim
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        self.values = values // keys  # value heads per key head
        exact = torch.float32 if factory.dtype in HALF_TYPES else factory.dtype
        scan = factory.kernels.get("delta_scan", device=factory.device, dtype=exact, size=self.key_size)
        self._attend = partial(linear_attention, scan=scan)
        self.convolved = 2 * self.key_size + self.values * self.value_size
        self.channels = self.convolved, self.values * self.value_size, *[self.values] * (1 + config.linear_corrects)
        h, std = config.hidden_size, config.hidden_std
        rows = keys * sum(self.channels)
        self.in_proj = ColumnParallelLinear(f"{name}.in_proj", (rows, h), std=std, bias=False, factory=factory)
        self._split: dict[str, Any] = {"shard_dim": 0, "decay": False}
        shape = (keys * self.convolved, taps)
        self.conv = factory.parameter(f"{name}.conv.weight", shape, shard_dim=0, std=1 / math.sqrt(3 * taps))
        self.conv_bias = (
            factory.parameter(f"{name}.conv.bias", shape[:1], **self._split) if self.conv_has_bias else None
        )
        self.a_log = factory.parameter(f"{name}.a_log", (values,), std=1.0, transform=_log_uniform, **self._split)
        self._add_parameters(config, factory)
        shape, std = (h, values * self.value_size), config.residual_std
        self.out = RowParallelLinear(f"{name}.out", shape, std=std, bias=False, factory=factory)

    def _add_parameters(self, config: ModelConfig, factory: ParameterFactory) -> None:
        """Make the parameters that only this kind has."""
        raise NotImplementedError

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, scalars: list[Tensor], **settings: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the gated and normalized values and the last state.

        q, k: [b, key heads, s, dk]; v [b, key heads, r, s, dv]; scalars [b, key heads, r, s]; gates [s, b, value heads, dv];
        the result like gates."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, context: ForwardContext, cache: KeyValueCache | None = None, *, add_late_bias: bool = True
    ) -> Tensor:
        """[s/cp, b, h] -> [s/cp, b, h], split over tp as well with sequence parallelism.

        Collectives, forward and backward: those of the two linear layers and two all-to-alls over cp."""
        packed = self._in_qkv(self._project, x, context)
        if cache is None and torch.is_grad_enabled():
            mixed = self._in_core(recomputed, self._core, packed, context)
        else:
            mixed = self._core(packed, context, cache)
        if self.cp.size > 1:
            mixed = heads_to_sequence(mixed, cp=self.cp, spans=context.spans)
        return self._in_proj(self.out, mixed.flatten(2), add_late_bias=add_late_bias)

    def _project(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the channels of this rank's key heads over the whole sequence, [s, b, key heads, channels]."""
        packed: Tensor = self.in_proj(x).unflatten(2, (-1, sum(self.channels)))
        return sequence_to_heads(packed, cp=self.cp, spans=context.spans) if self.cp.size > 1 else packed

    def _core(self, packed: Tensor, context: ForwardContext, cache: KeyValueCache | None = None) -> Tensor:
        """[s, b, key heads, channels] -> [s, b, value heads, dv], in fp32 (fp64) up to the norm."""
        exact = packed.float() if packed.dtype in HALF_TYPES else packed
        mixed, gates, *scalars = exact.split(self.channels, dim=3)
        state, offsets = None, None
        before = mixed.new_zeros(self.conv.shape[1] - 1, *mixed.shape[1:])
        if cache is not None and context.next_tokens is not None:
            before, state = cache.state(self.name)
            before = before.movedim(1, 0)
        mixed = torch.cat((before, mixed))
        if context.visibility.document_starts is not None:
            offsets = _places_in_documents(len(packed), context.visibility.document_starts, packed.device)
        if context.lengths is not None:  # padding neither changes the state nor lets it decay
            padded = (torch.arange(len(packed), device=packed.device).unsqueeze(1) >= context.lengths)[..., None, None]
            scalars = [each.masked_fill(padded, -torch.inf) for each in scalars]
        convolved = F.silu(self._convolve(mixed, offsets)).permute(1, 2, 0, 3)
        q, k, v = convolved.split((self.key_size, self.key_size, self.channels[1]), dim=3)
        heads = v.unflatten(3, (self.values, -1)).transpose(2, 3)
        gates = gates.unflatten(3, (self.values, -1)).flatten(2, 3)
        scalars = [each.permute(1, 2, 3, 0) for each in scalars]
        result, state = self._mix(q, k, heads, gates, scalars, state=state, offsets=offsets)
        if cache is not None:
            cache.set_state(self.name, self._last(mixed, context.lengths), state)
        return result.to(packed.dtype)

    def _per_head(self, parameter: Tensor, like: Tensor) -> Tensor:
        """Return this cp rank's part of a parameter with one number per value head, [key heads, r, 1]."""
        return self._own(parameter).to(like.dtype).view(-1, self.values, 1)

    def _own(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that belongs to the key heads of this cp rank."""
        return parameter.chunk(self.cp.size)[self.cp.rank]

    def _convolve(self, x: Tensor, offsets: Tensor | None) -> Tensor:
        """Sum the last tokens' channels [taps - 1 + s, b, key heads, channels] by weight -> [s, ...], within documents."""
        taps = self.conv.shape[1]
        distances = range(taps - 1, 0, -1)
        seen = None if offsets is None else [(offsets >= distance)[..., None, None] for distance in distances]
        weight = self._own(self.conv).to(x.dtype).view(-1, self.convolved, taps)
        bias = None if self.conv_bias is None else self._own(self.conv_bias).to(x.dtype).view(-1, self.convolved)
        return _Convolution.apply(x, weight, bias, seen)

    def _last(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Return each row's last taps - 1 tokens before its padding, [b, taps - 1, key heads, channels]."""
        count, rows = self.conv.shape[1] - 1, torch.arange(x.shape[1], device=x.device)
        ends = torch.full_like(rows, len(x) - count) if lengths is None else lengths
        return x[ends.unsqueeze(1) + torch.arange(count, device=x.device), rows.unsqueeze(1)]


class GatedDeltaNet(LinearAttention):
    """The gated delta rule. A value head has a write strength and a decay; queries and keys are normalized. The result is
    normalized per head and multiplied by SiLU of the output gates."""

    def _add_parameters(self, config: ModelConfig, factory: ParameterFactory) -> None:
        values = config.linear_num_value_heads
        self.dt_bias = factory.parameter(f"{self.name}.dt_bias", (values,), value=1.0, **self._split)
        plain = replace(config, normalization="RMSNorm", norm_zero_centered=False, apply_wd_to_qk_layernorm=False)
        self.norm = Norm(f"{self.name}.norm", plain, factory=factory, size=self.value_size, per_head=True)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, scalars: list[Tensor], **settings: Any
    ) -> tuple[Tensor, Tensor]:
        strengths, decays = scalars
        steps = F.softplus(decays + self._per_head(self.dt_bias, q))
        q, k, decays = (
            _normalized(q, 1 / math.sqrt(self.key_size)),
            _normalized(k),
            -self._per_head(self.a_log, q).exp() * steps,
        )
        result, state = self._attend(q, k, v, decays, strengths=strengths.sigmoid(), **settings)
        heads = _heads(result).to(self.dtype, memory_format=torch.contiguous_format)
        return self.norm(heads) * F.silu(gates), state


class Mamba2(LinearAttention):
    """The state space of Mamba-2; its C, B and x are the queries, keys and values. A value head has a time step, by which
    its values and the decay's rate are multiplied, and adds a multiple of its values to the result. That is multiplied
    by SiLU of the output gates and normalized over the value heads of a key head together."""

    conv_has_bias = True

    def _add_parameters(self, config: ModelConfig, factory: ParameterFactory) -> None:
        values, name = config.linear_num_value_heads, self.name
        self.dt_bias = factory.parameter(f"{name}.dt_bias", (values,), std=1.0, transform=_step_bias, **self._split)
        self.skip = factory.parameter(f"{name}.skip", (values,), value=1.0, **self._split)
        self.norm_weight = factory.parameter(
            f"{name}.norm.weight", (values * self.value_size,), value=1.0, **self._split
        )
        self.eps = config.norm_epsilon

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, scalars: list[Tensor], **settings: Any
    ) -> tuple[Tensor, Tensor]:
        steps = F.softplus(scalars[0] + self._per_head(self.dt_bias, q))
        decays = -self._per_head(self.a_log, q).exp() * steps
        result, state = self._attend(q, k, v * steps.unsqueeze(-1), decays, **settings)
        skipped = v * self._per_head(self.skip, q).unsqueeze(-1)
        heads = (_heads(result + skipped) * F.silu(gates)).unflatten(2, (-1, self.values)).flatten(3)
        inverse = torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + self.eps)
        weight = self._own(self.norm_weight).to(heads.dtype).view(heads.shape[2:])
        return (heads * inverse * weight).view(gates.shape), state


KINDS = {"gated_delta_net": GatedDeltaNet, "mamba2": Mamba2}
"""`experimental_attention_variant` -> its layer."""


def _heads(result: Tensor) -> Tensor:
    """[b, key heads, r, s, dv] -> [s, b, value heads, dv]."""
    return result.permute(3, 0, 1, 2, 4).flatten(2, 3)


def _log_uniform(normal: Tensor) -> Tensor:
    """Map numbers of a standard normal distribution to logarithms of uniform ones from 1 to 16."""
    return torch.log(1 + 15 * torch.special.ndtr(normal))


def _step_bias(normal: Tensor) -> Tensor:
    """Map numbers of a standard normal distribution to inverse softplus of steps, log-uniform from 0.001 to 0.1."""
    steps = torch.exp(math.log(1e-3) + math.log(100) * torch.special.ndtr(normal))
    return steps + torch.log(-torch.expm1(-steps))


def _normalized(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * (torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) * scale)


class _Convolution(Function):
    """Causal depthwise convolution [taps - 1 + s, ...] -> [s, ...] by `weight` [..., taps], plus a bias. `seen`: by tap, 1
    where the token is in the same document. Slices of autograd would each take several passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seen: list[Tensor] | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seen, ctx.has_bias, last = seen, bias is not None, weight.shape[-1] - 1
        newest = x[last:], weight[..., last]
        total = torch.mul(*newest) if bias is None else torch.addcmul(bias, *newest)
        for tap in range(last):
            part = x[tap : tap + len(total)]
            total.addcmul_(part if seen is None else part * seen[tap], weight[..., tap])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        last = weight.shape[-1] - 1
        grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
        for tap in range(last + 1):
            part = grad if ctx.seen is None or tap == last else grad * ctx.seen[tap]
            grad_x[tap : tap + len(grad)].addcmul_(part, weight[..., tap])
            grad_weight[..., tap] = (part * x[tap : tap + len(grad)]).sum((0, 1))
        return grad_x, grad_weight, grad.sum((0, 1)) if ctx.has_bias else None, None


@lru_cache(maxsize=8)
def _places_in_documents(length: int, starts: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the cache outlives the caller's mode
        return document_position_ids(torch.arange(length, device=device), starts)
