"""Megatron-LM's own training program on a CPU, with a record of each step's data:

    torchrun cpu_megatron.py PATH/pretrain_gpt.py FLAGS --distributed-backend gloo

Its arithmetic is not changed: cuda devices are replaced by the CPU, streams and memory statistics are empty, and no
kernel is compiled. Folder $RECORD gets `rank-N.json`: per step the tokens, learning rate of the update, loss and
gradient norm. Needs megatron-core, psutil and, from Megatron-LM's repository at the same version, all but megatron/core."""

import contextlib
import json
import os
import runpy
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_AT_ONCE = (torch.Tensor.cuda, torch.Tensor.pin_memory)


class CudaIsCpu(TorchFunctionMode):
    """Create tensors for cuda on the CPU, but let them report cuda."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AT_ONCE:
            return args[0]
        place = [CPU if _is_cuda(each) else each for each in args] if func is torch.Tensor.to else args
        named = {name: CPU if name == "device" and _is_cuda(value) else value for name, value in (kwargs or {}).items()}
        found = func(*place, **named)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else found


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


class Stream:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def constant(value: Any) -> Any:
    """Return a new function per name, as torch.compile's tables require."""
    return lambda *_: value


def replace_cuda() -> None:
    empty = contextlib.nullcontext
    values: dict[str, Any] = {
        **{name: constant(None) for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")},
        **{name: constant(0) for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")},
        **{name: constant(0) for name in ("max_memory_reserved", "device_memory_used")},
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: CPU,
        "get_device_properties": lambda *_: types.SimpleNamespace(major=8, minor=0, total_memory=1 << 30, name="cpu"),
        "get_device_capability": lambda *_: (8, 0),
        "memory_stats": lambda *_: dict.fromkeys(("num_alloc_retries",), 0),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "Stream": lambda *_, **__: Stream(),
        "Event": lambda *_, **__: Stream(),
        "current_stream": lambda *_: Stream(),
        "stream": lambda *_: empty(),
        "device": lambda *_: empty(),
    }
    for name, value in values.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = values["get_rng_state"]


def record(folder: Path) -> None:
    """Record inputs and results of each step."""
    from megatron.training import training, utils

    steps: list[dict[str, Any]] = []
    tokens: list[list[list[int]]] = []
    batch_of, step_of = utils.get_batch_on_this_tp_rank, training.train_step

    def batch(*args: Any, **kwargs: Any) -> Any:
        found = batch_of(*args, **kwargs)
        if found["tokens"] is not None:
            tokens.append(found["tokens"].tolist())
        return found

    def step(forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        tokens.clear()
        lr = optimizer.param_groups[0]["lr"]
        found = step_of(forward, data, model, optimizer, *args, **kwargs)
        losses = {name: value.item() for name, value in found[0].items()}
        steps.append(
            {
                "tokens": [row for rows in tokens for row in rows],
                "lr": lr,
                "loss": losses.get("lm loss"),
                "grad_norm": found[5],
            }
        )
        (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(steps))
        return found

    utils.get_batch_on_this_tp_rank, training.train_step = batch, step


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    program = Path(sys.argv[1]).resolve()
    sys.argv = [str(program), *sys.argv[2:]]
    sys.path.insert(0, str(program.parent))
    torch.set_num_threads(1)
    replace_cuda()
    CudaIsCpu().__enter__()
    from megatron.core.datasets import utils as compiled
    from megatron.core.tensor_parallel import random
    from megatron.legacy import fused_kernels

    compiled.compile_helpers = lambda: None  # the installed package has them
    fused_kernels.load = lambda args: None
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if "RECORD" in os.environ:
        record(Path(os.environ["RECORD"]))
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
