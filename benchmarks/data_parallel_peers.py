"""The peers of data_parallel.py: the same GPT as plain_gpt.py's, trained by torch's own data parallelism.

DDP (also with its fp16 hook, since it refuses bf16 on gloo, and its PowerSGD hook), FSDP2 with a unit a layer, and ZeroRedundancyOptimizer over DDP. The
batch, the clipping and AdamW are those of our runs.
"""

import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import plain_gpt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

SETTINGS: dict[str, Any] = {
    "num_layers": plain_gpt.LAYERS,
    "hidden_size": plain_gpt.HIDDEN,
    "num_attention_heads": plain_gpt.HEADS,
    "vocab_size": plain_gpt.VOCAB,
    "seq_length": plain_gpt.SEQ,
    "micro_batch_size": plain_gpt.MICRO,
    "global_batch_size": plain_gpt.BATCH,
    "mock_data": True,
    "lr": 1e-4,
    "train_iters": 1000,
}
"""The same run for megalite."""

Built = tuple[nn.Module, torch.optim.Optimizer]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _ddp() -> Built:
    model = DistributedDataParallel(plain_gpt.GPT())
    return model, _adamw(model)


def _ddp_fp16() -> Built:
    model, optimizer = _ddp()
    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model, optimizer


def _powersgd() -> Built:
    model, optimizer = _ddp()
    assert isinstance(model, DistributedDataParallel)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, optimizer


def _zero() -> Built:
    model = DistributedDataParallel(plain_gpt.GPT())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return model, optimizer


def _fsdp2() -> Built:
    model = plain_gpt.GPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, _adamw(model)


PEERS: dict[str, Callable[[], Built]] = {
    "torch DDP": _ddp,
    "torch DDP, fp16 hook": _ddp_fp16,
    "torch DDP, PowerSGD hook": _powersgd,
    "torch ZeroRedundancyOptimizer": _zero,
    "torch FSDP2": _fsdp2,
}


def train_peer(case: dict[str, Any], recorder: Any) -> None:
    """A case of one of `PEERS`."""
    torch.manual_seed(0)
    model, optimizer = PEERS[case["system"]]()
    counts = plain_gpt.BATCH // plain_gpt.MICRO // dist.get_world_size()
    recorder.begin(case)
    for step in range(1, case["steps"] + 1):
        for index in range(counts):
            tokens = torch.randint(0, plain_gpt.VOCAB, (plain_gpt.MICRO, plain_gpt.SEQ + 1))
            with _without_reduction(model, last=index == counts - 1):
                (model(tokens[:, :-1], tokens[:, 1:]) / counts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(step=step, phase="gradients")
    recorder.write(done=True, memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _without_reduction(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    if not last and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()
