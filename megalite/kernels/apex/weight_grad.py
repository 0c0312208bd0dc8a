"""Weight gradients by fused_weight_gradient_mlp_cuda."""

import fused_weight_gradient_mlp_cuda as kernels
import torch


def accumulate_weight_grad(main_grad: torch.Tensor, grad_y: torch.Tensor, x: torch.Tensor) -> None:
    """main_grad [o, i] += grad_yᵀ · x for grad_y [n, o], x [n, i] of one type.

    The product is summed in fp32 and added to a main gradient in fp32 or in the type of x. The kernel reads plain
    memory: rows that are not dense are copied.
    """
    assert main_grad.is_contiguous(), main_grad.stride()
    if x.shape[0] == 0:
        return
    if main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(x.contiguous(), grad_y.contiguous(), main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(x.contiguous(), grad_y.contiguous(), main_grad)
