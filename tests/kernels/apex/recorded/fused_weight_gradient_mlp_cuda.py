"""Stand-in for apex's extension of this name: csrc/megatron/fused_weight_gradient_dense*.cu."""

from typing import Any

import torch

from tests.kernels.apex.signatures import FLOATS, HALF_TYPES, check_kinds, contiguous, not_empty, of_type, require


def _add(arguments: tuple[Any, ...], types: tuple[torch.dtype, ...], main: torch.dtype | None) -> None:
    check_kinds(arguments, "ttt")
    x, grad_y, main_grad = arguments
    contiguous(x, grad_y, main_grad)  # raw pointers: strides are ignored
    of_type(x, *types)
    of_type(grad_y, x.dtype)
    of_type(main_grad, main or x.dtype)
    rows = x.view(-1, x.shape[-1])
    grads = grad_y.view(-1, grad_y.shape[-1])
    require(tuple(main_grad.shape) == (grads.shape[1], rows.shape[1]) and len(grads) == len(rows), "unexpected sizes")
    not_empty(len(rows))
    main_grad.copy_(main_grad.float() + grads.float().t() @ rows.float())


def wgrad_gemm_accum_fp32(*arguments: Any) -> None:
    _add(arguments, FLOATS, torch.float32)


def wgrad_gemm_accum_fp16(*arguments: Any) -> None:
    _add(arguments, HALF_TYPES, None)
