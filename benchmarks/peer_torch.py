"""Plain PyTorch as a contender of step_vs_peers.py: alone, under DDP, with ZeRO-1, and with DTensor tensor parallelism.

The model is plain_gpt.py's. Its pipelines are in peer_torch_pipeline.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import plain_gpt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_case import CLIP, LR, Case, adamw, adamw_groups, plain_weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

MeanLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Loop:
    """The usual training loop: microbatches one after the other, clip, update.

    Args:
        forward: tokens and labels [b, s] -> mean loss; the model itself or a wrapper of it.
        rank: of data parallelism.
        around: a context in which each microbatch runs.
        parts: ranks that hold the same loss.
    """

    def __init__(
        self,
        case: Case,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        forward: MeanLoss,
        *,
        rank: int = 0,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        parts: int = 1,
    ) -> None:
        self._case, self._parameters, self._optimizer, self._forward = case, parameters, optimizer, forward
        self._rank, self._around, self._parts = rank, around, parts

    def step(self, tokens: torch.Tensor) -> float:
        """See `Contender`."""
        count = self._case.microbatches
        losses = []
        for index, part in enumerate(self._case.share(tokens, self._rank)):
            with self._without_reduction(last=index == count - 1), self._around():
                loss = self._forward(part[:, :-1], part[:, 1:]) / count
                loss.backward()
            losses.append(loss.detach())
        _clip(self._parameters)
        self._optimizer.step()
        self._optimizer.zero_grad()
        total = torch.stack([loss.to_local() if isinstance(loss, DTensor) else loss for loss in losses])
        return float(total.sum()) / self._case.layout.dp / self._parts

    def _without_reduction(self, *, last: bool) -> AbstractContextManager[Any]:
        if not last and isinstance(self._forward, DistributedDataParallel):
            return self._forward.no_sync()
        return nullcontext()


def _clip(parameters: list[nn.Parameter]) -> None:
    """By the norm of all; torch takes split and whole tensors apart only."""
    split = [parameter for parameter in parameters if isinstance(parameter.data, DTensor)]
    if not split:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        return
    whole = [parameter for parameter in parameters if not isinstance(parameter.data, DTensor)]
    groups = [part for part in (split, whole) if part]
    norms = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for part in groups:
        nn.utils.clip_grads_with_norm_(part, CLIP, total)


def plain_model(case: Case) -> plain_gpt.GPT:
    """The model with the contenders' common weights."""
    model = plain_gpt.GPT(case.size)
    model.load_state_dict(plain_weights(case))
    return model


def in_precision(case: Case, model: nn.Module) -> MeanLoss:
    """The model as the case wants it; in bf16: fp32 weights, products in bf16."""

    def autocast(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens, labels)

    return autocast if case.bf16 else model


def build_plain(case: Case, context: Any) -> Loop:
    """One rank."""
    model = plain_model(case)
    parameters = list(model.parameters())
    return Loop(case, parameters, adamw(parameters), in_precision(case, model))


def build_ddp(case: Case, context: Any) -> Loop:
    """DistributedDataParallel, its gradients views of its buckets."""
    model = DistributedDataParallel(plain_model(case), gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    return Loop(case, parameters, adamw(parameters), model, rank=context.rank)


def build_zero(case: Case, context: Any) -> Loop:
    """ZeroRedundancyOptimizer over DDP."""
    model = DistributedDataParallel(plain_model(case), gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(
        adamw_groups(parameters), torch.optim.AdamW, lr=LR, fused=True, parameters_as_bucket_view=True
    )
    return Loop(case, parameters, optimizer, model, rank=context.rank)


def build_dtensor(case: Case, context: Any) -> Loop:
    """Tensor parallelism by DTensor: heads, MLP, vocabulary and loss are split, norms and the residual stream are whole."""
    model = plain_model(case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {"word": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    for name in ("qkv", "up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("out", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    parameters = list(model.parameters())

    def forward(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(model.features(tokens), mesh, [Replicate()], run_check=False)
        logits = F.linear(whole, model.word.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    ranks = dist.get_world_size()
    return Loop(case, parameters, adamw(parameters), forward, around=loss_parallel, parts=ranks)
