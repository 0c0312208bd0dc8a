"""Stand-in for apex's extension amp_C: csrc/amp_C_frontend.cpp, multi_tensor_apply.cuh, multi_tensor_adam.cu,
multi_tensor_lamb_stage_1.cu."""

from typing import Any

import numpy as np
import torch

from tests.kernels.apex.signatures import FLOATS, check_kinds, contiguous, of_type, require

_MAX_TENSORS = {1: 110, 4: 36, 5: 30}
_MAX_BLOCKS = 320


def _chunks_run(chunk: int, noop: torch.Tensor, lists: list[list[torch.Tensor]], depth: int) -> list[int]:
    """Return the number of chunks run per tensor. Gathered chunks are lost if the lists end with an empty tensor."""
    require(len(lists) == depth, "tensor_lists.size() != depth")
    require(len(lists[0]) > 0, "tensor_lists[0].size() is not > 0")
    of_type(noop, torch.int32)
    require(noop.numel() >= 1, "expected a flag")
    for tensors in lists:
        require(len(tensors) == len(lists[0]), "Size mismatch among tensor lists")
        for tensor, first in zip(tensors, lists[0], strict=True):
            contiguous(tensor)
            require(tensor.numel() == first.numel(), "Size mismatch")
    run, gathered, tensors_held = [0] * len(lists[0]), [0] * len(lists[0]), 0
    for place, tensor in enumerate(lists[0]):
        tensors_held += 1
        chunks = -(-tensor.numel() // chunk)
        for number in range(chunks):
            gathered[place] += 1
            last_of_tensor = number == chunks - 1
            full = tensors_held == _MAX_TENSORS[depth] and last_of_tensor
            if full or sum(gathered) == _MAX_BLOCKS or (last_of_tensor and place == len(lists[0]) - 1):
                run = [before + now for before, now in zip(run, gathered, strict=True)]
                gathered, tensors_held = [0] * len(lists[0]), 0 if last_of_tensor else 1
    return run


def multi_tensor_adam(*arguments: Any) -> None:
    check_kinds(arguments, "itlffffiiif")
    chunk, noop, lists, lr, beta1, beta2, eps, step, mode, correct, decay = arguments
    run = _chunks_run(chunk, noop, lists, 4)
    require(mode in (0, 1) and correct in (0, 1) and step >= 1, "invalid mode, bias correction or step")
    lr, beta1, beta2, eps, decay = (np.float32(value) for value in (lr, beta1, beta2, eps, decay))
    first, second = 1.0, 1.0
    if correct:
        first, second = (float(np.float32(1 - float(beta) ** step)) for beta in (beta1, beta2))
    for place, (g, p, m, v) in enumerate(zip(*lists, strict=True)):
        of_type(lists[0][0], *FLOATS)
        of_type(g, lists[0][0].dtype)
        of_type(p, lists[0][0].dtype)
        of_type(m, torch.float32)
        of_type(v, torch.float32)
        count = min(run[place] * chunk, p.numel())
        g, p, m, v = (tensor[:count] for tensor in (g, p, m, v))
        grad = g.float() if mode else g.float() + float(decay) * p.float()
        m.copy_(float(beta1) * m + float(1 - beta1) * grad)
        v.copy_(float(beta2) * v + float(1 - beta2) * grad * grad)
        update = (m / first) / ((v / second).sqrt() + float(eps))
        if mode:
            update = update + float(decay) * p.float()
        p.copy_(p.float() - float(lr) * update)


def multi_tensor_lamb_stage1_cuda(*arguments: Any) -> None:
    check_kinds(arguments, "itltiffftf")
    chunk, noop, lists, decays, step, beta1, beta2, eps, norm, max_norm = arguments
    of_type(norm, torch.float32)
    require(norm.device.type == "cpu", "Segmentation fault: the host reads the norm")
    of_type(decays, torch.float32)
    run = _chunks_run(chunk, noop, lists, 5)
    require(decays.numel() == len(lists[0]) and decays.device == lists[0][0].device, "expected one decay per tensor")
    require(0 <= step < 2**31 - 1, "step + 1 overflows")
    for of in (0, 1, 4):
        of_type(lists[of][0], torch.float32, torch.float16)
    one, count = np.float32(1), np.float32(step + 1)
    beta1, beta2, eps = (np.float32(value) for value in (beta1, beta2, eps))
    first, second = (float(one - np.power(beta, count)) for beta in (beta1, beta2))
    largest = float(np.float32(max_norm))
    clip = float(norm[0]) / largest if float(norm[0]) > largest else 1.0
    for place, (g, p, m, v, update) in enumerate(zip(*lists, strict=True)):
        require(p.numel() < 2**31, "n is an int")
        of_type(g, lists[0][0].dtype)
        for tensor in (p, m, v):
            of_type(tensor, lists[1][0].dtype)
        of_type(update, lists[4][0].dtype)
        until = min(run[place] * chunk, p.numel())
        g, p, m, v, update = (tensor[:until] for tensor in (g, p, m, v, update))
        grad = g.to(p.dtype) / clip
        m.copy_(m * float(beta1) + float(one - beta1) * grad)
        v.copy_(v * float(beta2) + float(one - beta2) * grad * grad)
        update.copy_((m / first) / ((v / second).sqrt() + float(eps)) + float(decays[place]) * p)
