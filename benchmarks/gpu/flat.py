"""Operations without a backward by autograd: cross-entropy, softmax, products, optimizers, the norm."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import common
from benchmarks.gpu.operations import DIFFERENTIABLE, Operation, Pass, Shape, Tensors, draw, widen
from megalite.kernels.optimizer_ops import lamb_moments, lamb_step

ADAM = common.settings("lr=1e-3 beta1=0.9 beta2=0.95 eps=1e-8 weight_decay=0.1 step=7")
LAMB = common.settings("beta1=0.9 beta2=0.95 eps=1e-6 weight_decay=0.1 step=7")
LAMB_RATE = 1e-3
STATE = ("param", "exp_avg", "exp_avg_sq")
SCALE = 0.125  # of the softmax


def _drawn(sizes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Tensors:
    return {name: draw(*size, dtype=dtype, device=device) for name, size in sizes.items()}


def _loss_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    return {
        "logits": draw(shape.rows, shape.size, dtype=dtype, device=device),
        "labels": torch.randint(0, shape.size, (shape.rows,), device=device),
        "grad": torch.rand(shape.rows, device=device) + 0.5,
    }


def _loss_passes(kernel: Any, t: Tensors) -> list[Pass]:
    """The backward may overwrite saved tensors, so they are restored before each repetition."""
    forward, backward = kernel
    saved = forward(t["logits"], t["labels"], 0)[1]
    pristine = [tensor.clone() for tensor in saved]

    def restore() -> None:
        for tensor, value in zip(saved, pristine, strict=True):
            tensor.copy_(value)

    def back() -> torch.Tensor:
        # Autograd passes it on in the type of the logits.
        return backward(saved, t["labels"], 0, None, t["grad"]).to(t["logits"].dtype)

    ahead = Pass("forward", lambda: forward(t["logits"], t["labels"], 0), restore)
    return [ahead, Pass("backward", back, restore)]


def _loss_outputs(kernel: Any, t: Tensors) -> Tensors:
    (_, total, picked), saved = kernel[0](t["logits"].clone(), t["labels"], 0)
    loss = total.log() - picked
    return {"loss": loss, "dlogits": kernel[1](saved, t["labels"], 0, None, t["grad"]).to(t["logits"].dtype)}


def plain_loss_forward(logits: torch.Tensor, labels: torch.Tensor, first: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Compute by the formula: reads the logits, writes nothing of their size."""
    wide = widen(logits)
    maximum = wide.amax(-1)
    total = (wide - maximum.unsqueeze(-1)).exp().sum(-1)
    picked = logits.gather(-1, (labels - first).unsqueeze(-1)).squeeze(-1).to(wide.dtype) - maximum
    return torch.stack((maximum, total, picked)), (logits, maximum + total.log())


def plain_loss_backward(
    saved: Sequence[torch.Tensor], labels: torch.Tensor, first: int, total: Any, grad: torch.Tensor
) -> torch.Tensor:
    """Compute by the formula, into a new tensor; `total`: the logarithm over all ranks, None: it is in `saved`."""
    logits, own = saved
    hit = torch.arange(logits.shape[1], device=logits.device) == (labels - first).unsqueeze(-1)
    probabilities = (widen(logits) - (own if total is None else total).unsqueeze(-1)).exp()
    return ((probabilities - hit.to(grad.dtype)) * grad.unsqueeze(-1)).to(logits.dtype)


def _layer_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    rows, n = shape.rows, shape.size
    return _drawn({"x": (rows, n), "grad_y": (rows, 4 * n), "weight": (4 * n, n)}, dtype, device)


def _product_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    main_grad = draw(4 * shape.size, shape.size, dtype=torch.float32, device=device)
    sizes = {"grad_y": (shape.rows, 4 * shape.size), "x": (shape.rows, shape.size)}
    return {"main_grad": main_grad, **_drawn(sizes, dtype, device)}


def _product_outputs(kernel: Any, t: Tensors) -> Tensors:
    main = t["main_grad"].clone()
    kernel(main, t["grad_y"], t["x"])
    return {"added": main.double() - t["main_grad"].double()}


def _optimizer_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    found = _drawn(dict.fromkeys(("param", "grad", "exp_avg"), (shape.size,)), torch.float32, device)
    found["exp_avg"] *= 0.1
    return {**found, "exp_avg_sq": torch.rand(shape.size, device=device) * 0.1 + 1e-3}


def _adam_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    copy = draw(shape.size, dtype=torch.bfloat16, device=device)
    factor = torch.full((), 0.7, device=device)
    return {**_optimizer_inputs(shape, dtype, device), "copy": copy, "factor": factor}


def _adam(kernel: Any, t: Tensors) -> None:
    state = (t["param"], t["grad"], t["exp_avg"], t["exp_avg_sq"])
    kernel(*state, **ADAM, factor=t["factor"], copy=t["copy"])


def _adam_passes(kernel: Any, t: Tensors) -> list[Pass]:
    """A kernel may scale the gradient in place; without restoring, it would become 0."""
    grad = t["grad"].clone()
    return [Pass("update", lambda: _adam(kernel, t), lambda: t["grad"].copy_(grad))]


def _adam_outputs(kernel: Any, t: Tensors) -> Tensors:
    own = {name: value.clone() for name, value in t.items()}
    _adam(kernel, own)
    copy, rounded = own["copy"].double(), own["param"].to(own["copy"].dtype).double()
    # Triton's interpreter truncates, a device rounds.
    slack = 0.0 if own["param"].is_cuda else torch.finfo(own["copy"].dtype).eps
    if not bool(((copy - rounded).abs() <= slack * rounded.abs()).all()):
        raise ValueError("the copy is not what the parameters round to")
    return {name: own[name] for name in STATE}


def plain_adam(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, *, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, step: int, factor: torch.Tensor, copy: torch.Tensor,
) -> None:  # fmt: skip
    g = grad * factor
    exp_avg.lerp_(g, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    root = exp_avg_sq.sqrt() / math.sqrt(1.0 - beta2**step) + eps
    param.mul_(1.0 - lr * weight_decay).sub_(lr / (1.0 - beta1**step) * exp_avg / root)
    copy.copy_(param)


def _lamb(kernel: Any, t: Tensors) -> torch.Tensor:
    """Run the first half of LAMB; a run sums its norms over ranks before the second."""
    return torch.stack(kernel[0](t["param"], t["grad"], t["exp_avg"], t["exp_avg_sq"], **LAMB, norms=True))


def _lamb_step(kernel: Any, t: Tensors) -> None:
    kernel[1](*(t[name] for name in STATE), **LAMB, rate=LAMB_RATE)


def _lamb_outputs(kernel: Any, t: Tensors) -> Tensors:
    """Return norms as squares, which are sums over elements."""
    own = {name: value.clone() for name, value in t.items()}
    norms = _lamb(kernel, own)
    _lamb_step(kernel, own)
    return {**{name: own[name] for name in STATE}, "squares": norms.square()}


def plain_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(widen(x)) for x in tensors]
    return torch.linalg.vector_norm(torch.stack(norms).double())


def _norm_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Return two buffers, like those of a model with two buckets; large ones have multiples of 64 elements, as buckets do."""
    first = shape.size // 4
    return _drawn({"first": (first,), "second": (shape.size - first,)}, dtype, device)


def _norm_of(kernel: Any, t: Tensors) -> torch.Tensor:
    return kernel([t["first"], t["second"]])


def _scores(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Return scores of `rows` heads, [rows, 1, size, size]."""
    return _drawn(dict.fromkeys(("scores", "dp"), (shape.rows, 1, shape.size, shape.size)), dtype, device)


def _softmax_passes(kernel: Any, t: Tensors) -> list[Pass]:
    forward, backward = kernel
    scores, dp = t["scores"].clone(), t["dp"].clone()
    probabilities = forward(t["scores"].clone(), SCALE).to(scores.dtype)
    return [
        Pass("forward", lambda: forward(scores, SCALE), lambda: scores.copy_(t["scores"])),
        Pass("backward", lambda: backward(dp, probabilities, SCALE), lambda: dp.copy_(t["dp"])),
    ]


def _softmax_outputs(kernel: Any, t: Tensors) -> Tensors:
    probabilities = kernel[0](t["scores"].clone(), SCALE).to(t["scores"].dtype)
    return {"p": probabilities, "dscores": kernel[1](t["dp"].clone(), probabilities, SCALE)}


def plain_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    wide = widen(scores)
    return (wide * scale).masked_fill(hidden, -math.inf).softmax(-1).to(scores.dtype)


def plain_softmax_backward(grad: torch.Tensor, probabilities: torch.Tensor, scale: float) -> torch.Tensor:
    wide = widen(probabilities)
    product = wide * grad
    return (scale * (product - wide * product.sum(-1, keepdim=True))).to(probabilities.dtype)


def plain_weight_grad(main_grad: torch.Tensor, grad_y: torch.Tensor, x: torch.Tensor) -> None:
    main_grad.add_(grad_y.t() @ x)


FLAT: Mapping[str, Operation] = {
    "cross_entropy": Operation(
        make=_loss_inputs,
        passes=_loss_passes,
        outputs=_loss_outputs,
        rows=frozenset({"logits", "labels", "grad", "loss", "dlogits"}),
        bytes=lambda s, e: (s.rows * s.size * e, 2 * s.rows * s.size * e),
        plain=(plain_loss_forward, plain_loss_backward),
    ),
    "softmax": Operation(
        make=_scores,
        passes=_softmax_passes,
        outputs=_softmax_outputs,
        rows=frozenset({"scores", "dp", "p", "dscores"}),
        # Half of the scores are masked and not read; all outputs are written.
        bytes=lambda s, e: (s.rows * s.size**2 * e * 3 // 2, s.rows * s.size**2 * e * 2),
        plain=(plain_softmax_forward, plain_softmax_backward),
    ),
    "matmul": Operation(
        make=_layer_inputs,
        passes=lambda kernel, t: [
            Pass("output", lambda: kernel(t["x"], t["weight"].t())),
            Pass("input gradient", lambda: kernel(t["grad_y"], t["weight"])),
        ],
        outputs=lambda f, t: {"y": f(t["x"], t["weight"].t()), "grad_x": f(t["grad_y"], t["weight"])},
        rows=frozenset({"grad_y", "x", "y", "grad_x"}),
        bytes=lambda s, e: 2 * ((5 * s.rows * s.size + 4 * s.size**2) * e,),
        flops=lambda s: 2 * s.rows * s.size * 4 * s.size,
        plain=torch.mm,
        fused=False,
    ),
    "weight_grad": Operation(
        make=_product_inputs,
        passes=lambda kernel, t: [Pass("accumulate", lambda: kernel(t["main_grad"], t["grad_y"], t["x"]))],
        outputs=_product_outputs,
        rows=frozenset({"grad_y", "x"}),
        bytes=lambda s, e: (5 * s.rows * s.size * e + 2 * 4 * s.size**2 * 4,),
        flops=lambda s: 2 * s.rows * s.size * 4 * s.size,
        plain=plain_weight_grad,
        fused=False,
    ),
    "adam": Operation(
        make=_adam_inputs,
        passes=_adam_passes,
        outputs=_adam_outputs,
        rows=frozenset({*STATE, "grad", "copy"}),
        bytes=lambda s, e: (30 * s.size,),
        plain=plain_adam,
        dtype=torch.float32,
    ),
    "lamb": Operation(
        make=_optimizer_inputs,
        passes=lambda kernel, t: [Pass("moments", lambda: _lamb(kernel, t)), Pass("step", lambda: _lamb_step(kernel, t))],
        outputs=_lamb_outputs,
        rows=frozenset({*STATE, "grad"}),
        bytes=lambda s, e: (24 * s.size, 16 * s.size),
        plain=(lamb_moments, lamb_step),
        dtype=torch.float32,
    ),
    "l2norm": Operation(
        make=_norm_inputs,
        passes=lambda kernel, t: [Pass("norm", lambda: _norm_of(kernel, t))],
        outputs=lambda kernel, t: {"norm": _norm_of(kernel, t).view(1)},
        rows=frozenset(),
        bytes=lambda s, e: (s.size * e,),
        plain=plain_norm,
        dtype=torch.float32,
    ),
}
CASES: Mapping[str, Operation] = {**DIFFERENTIABLE, **FLAT}
"""All cases by name: an operation, or an operation, a comma and a variant."""


def operation_of(case: str) -> str:
    return case.partition(",")[0]
