"""Gated DeltaNet: linear attention with a state that decays and that each token corrects (arXiv 2412.06464)."""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.context_parallel.attention import heads_to_sequence, sequence_to_heads
from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.bases import Function, Module
from megalite.kernels.delta_rule import delta_rule
from megalite.models.context import ForwardContext, KeyValueCache, document_position_ids
from megalite.models.norm import Norm
from megalite.models.recompute import Recompute, recomputed
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import ParameterFactory


class GatedDeltaNet(Module):
    """Linear attention of one layer, split over tp by key head.

    A key head has a query and a key of dk channels. It serves r value heads of dv channels, which have an output gate of
    dv channels, a write strength and a decay. Rows of `in_proj` are ordered by key head: query, key, values, output
    gates, strengths, decays. Queries, keys and values pass a causal depthwise convolution and SiLU; queries and keys are
    normalized. The result of `delta_rule` is normalized per head and multiplied by SiLU of the output gates.

    With context parallelism an all-to-all splits the key heads over cp instead of the sequence, whatever `cp_comm_type`.
    The backward recomputes everything between the two projections."""

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory, recompute: Recompute) -> None:
        super().__init__()
        self.name, self.cp, saves = name, factory.cp, recompute.saves
        self._in_qkv, self._in_core, self._in_proj = map(saves.runner, ("qkv_linear", "core_attn", "attn_proj"))
        keys, values, taps = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_conv_kernel_dim
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        self.values = values // keys  # value heads per key head
        exact = torch.float32 if factory.dtype in HALF_TYPES else factory.dtype
        self._scan = factory.kernels.get("delta_scan", device=factory.device, dtype=exact, size=self.key_size)
        self.convolved = 2 * self.key_size + self.values * self.value_size
        self.channels = self.convolved, self.values * self.value_size, self.values, self.values
        h, std = config.hidden_size, config.hidden_std
        rows = keys * sum(self.channels)
        self.in_proj = ColumnParallelLinear(f"{name}.in_proj", (rows, h), std=std, bias=False, factory=factory)
        shape = (keys * self.convolved, taps)
        self.conv = factory.parameter(f"{name}.conv.weight", shape, shard_dim=0, std=1 / math.sqrt(3 * taps))
        split: dict[str, Any] = {"shard_dim": 0, "decay": False}
        self.a_log = factory.parameter(f"{name}.a_log", (values,), std=1.0, transform=_log_uniform, **split)
        self.dt_bias = factory.parameter(f"{name}.dt_bias", (values,), value=1.0, **split)
        plain = replace(config, normalization="RMSNorm", norm_zero_centered=False, apply_wd_to_qk_layernorm=False)
        self.norm = Norm(f"{name}.norm", plain, factory=factory, size=self.value_size, per_head=True)
        shape, std = (h, values * self.value_size), std / math.sqrt(2 * config.num_layers)
        self.out = RowParallelLinear(f"{name}.out", shape, std=std, bias=False, factory=factory)

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
        mixed, gates, strengths, decays = exact.split(self.channels, dim=3)
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
            strengths, decays = strengths.masked_fill(padded, -torch.inf), decays.masked_fill(padded, -torch.inf)
        a_log, dt_bias = (self._own(each).to(exact.dtype).view(-1, self.values) for each in (self.a_log, self.dt_bias))
        convolved = F.silu(self._convolve(mixed, offsets)).permute(1, 2, 0, 3)
        q, k, v = convolved.split((self.key_size, self.key_size, self.channels[1]), dim=3)
        result, state = delta_rule(
            *(_normalized(q, 1 / math.sqrt(self.key_size)), _normalized(k)),
            v.unflatten(3, (self.values, -1)).transpose(2, 3),
            strengths.sigmoid().permute(1, 2, 3, 0),
            (-a_log.exp() * F.softplus(decays + dt_bias)).permute(1, 2, 3, 0),
            scan=self._scan,
            state=state,
            offsets=offsets,
        )
        if cache is not None:
            cache.set_state(self.name, self._last(mixed, context.lengths), state)
        heads = result.permute(3, 0, 1, 2, 4).flatten(2, 3)
        normed = self.norm(heads.to(packed.dtype, memory_format=torch.contiguous_format))
        return (normed * F.silu(gates.unflatten(3, (self.values, -1)).flatten(2, 3))).to(packed.dtype)

    def _own(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that belongs to the key heads of this cp rank."""
        return parameter.chunk(self.cp.size)[self.cp.rank]

    def _convolve(self, x: Tensor, offsets: Tensor | None) -> Tensor:
        """Sum the last tokens' channels [taps - 1 + s, b, key heads, channels] by weight -> [s, ...], within documents."""
        taps = self.conv.shape[1]
        distances = range(taps - 1, 0, -1)
        seen = None if offsets is None else [(offsets >= distance)[..., None, None] for distance in distances]
        return _Convolution.apply(x, self._own(self.conv).to(x.dtype).view(-1, self.convolved, taps), seen)

    def _last(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Return each row's last taps - 1 tokens before its padding, [b, taps - 1, key heads, channels]."""
        count, rows = self.conv.shape[1] - 1, torch.arange(x.shape[1], device=x.device)
        ends = torch.full_like(rows, len(x) - count) if lengths is None else lengths
        return x[ends.unsqueeze(1) + torch.arange(count, device=x.device), rows.unsqueeze(1)]


def _log_uniform(normal: Tensor) -> Tensor:
    """Map numbers of a standard normal distribution to logarithms of uniform ones from 1 to 16."""
    return torch.log(1 + 15 * torch.special.ndtr(normal))


def _normalized(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * (torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) * scale)


class _Convolution(Function):
    """Causal depthwise convolution [taps - 1 + s, ...] -> [s, ...] by `weight` [..., taps]. `seen`: by tap, 1 where the
    token is in the same document. Slices of autograd would each take several passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: list[Tensor] | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seen, last = seen, weight.shape[-1] - 1
        total = x[last:] * weight[..., last]
        for tap in range(last):
            part = x[tap : tap + len(total)]
            total.addcmul_(part if seen is None else part * seen[tap], weight[..., tap])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        last = weight.shape[-1] - 1
        grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
        for tap in range(last + 1):
            part = grad if ctx.seen is None or tap == last else grad * ctx.seen[tap]
            grad_x[tap : tap + len(grad)].addcmul_(part, weight[..., tap])
            grad_weight[..., tap] = (part * x[tap : tap + len(grad)]).sum((0, 1))
        return grad_x, grad_weight, None


@lru_cache(maxsize=8)
def _places_in_documents(length: int, starts: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the cache outlives the caller's mode
        return document_position_ids(torch.arange(length, device=device), starts)
