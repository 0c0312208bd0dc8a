"""Stand-in for apex's extension xentropy_cuda: apex/contrib/csrc/xentropy."""

from typing import Any

import torch

from tests.kernels.apex.signatures import FLOATS, check_kinds, contiguous, of_type, require


def forward(*arguments: Any) -> list[torch.Tensor]:
    check_kinds(arguments, "ttfb")
    logits, labels, smoothing, half_to_float = arguments
    contiguous(labels)
    of_type(labels, torch.int64)
    of_type(logits, *FLOATS)
    require(not half_to_float or logits.dtype == torch.float16, "conversion is supported for Half type only")
    require(logits.dim() == 2 and labels.shape == logits.shape[:1], "unexpected sizes")
    require(logits.numel() > 0, "Number of classes in input should not be 0")
    require(bool(((labels >= 0) & (labels < logits.shape[1])).all()), "CUDA error: illegal memory access")
    assert smoothing == 0
    log_sum = logits.float().logsumexp(-1)
    losses = log_sum - logits.float().gather(1, labels.unsqueeze(1)).squeeze(1)
    return [losses, log_sum if half_to_float else log_sum.to(logits.dtype)]


def backward(*arguments: Any) -> torch.Tensor:
    check_kinds(arguments, "ttttf")
    grad, logits, log_sum, labels, smoothing = arguments
    contiguous(log_sum, labels)
    contiguous(logits)  # the result gets its strides but is written as contiguous
    of_type(labels, torch.int64)
    half_to_float = grad.dtype != logits.dtype
    require(
        not half_to_float or (grad.dtype == torch.float32 and logits.dtype == torch.float16),
        "expected input and grad types to match, or input to be at::Half and grad to be at::Float",
    )
    of_type(log_sum, grad.dtype)
    require(grad.shape == log_sum.shape == labels.shape == logits.shape[:1], "unexpected sizes")
    assert smoothing == 0
    at_label = torch.arange(logits.shape[1]) == labels.unsqueeze(1)
    probabilities = (logits.float() - log_sum.float().unsqueeze(1)).exp()
    return (grad.float().unsqueeze(1) * (probabilities - at_label.float())).to(logits.dtype)
