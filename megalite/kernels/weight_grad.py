"""Weight gradient of a linear layer, accumulated in the main gradient's precision."""

import torch


def accumulate_weight_grad(main_grad: torch.Tensor, grad_y: torch.Tensor, x: torch.Tensor) -> None:
    """main_grad [o, i] += grad_yᵀ · x for grad_y [n, o], x [n, i].

    With one dtype the GEMM itself accumulates (beta = 1): no temporary, no zero fill. bf16 and fp16 inputs with an
    fp32 main gradient use cuBLAS's fp32 output on CUDA, which keeps the product unrounded; on CPU the product is
    rounded to the input type before it is added.
    """
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(grad_y.t(), x)
    elif x.is_cuda:
        torch.addmm(main_grad, grad_y.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.add_(grad_y.t() @ x)
