"""Operations of which autograd does not make the backward: cross-entropy, softmax, weight gradients, optimizers, the norm."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gpu_lamb import LAMB
from gpu_operations import DIFFERENTIABLE, Operation, Pass, Shape, Tensors, draw

ADAM: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 7,
}
STATE = ("param", "exp_avg", "exp_avg_sq")


def _loss_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    return {
        "logits": draw(shape.rows, shape.size, dtype=dtype, device=device),
        "labels": torch.randint(0, shape.size, (shape.rows,), device=device),
        "grad": torch.rand(shape.rows, device=device) + 0.5,
    }


def _loss_passes(kernel: Any, t: Tensors) -> list[Pass]:
    """The backward may write over what was saved, which is put back before each repetition."""
    forward, backward = kernel
    logits = t["logits"]
    saved = forward(logits, t["labels"], 0)[1]
    pristine = [tensor.clone() for tensor in saved]

    def restore() -> None:
        for tensor, value in zip(saved, pristine, strict=True):
            tensor.copy_(value)

    def back() -> torch.Tensor:
        # In the type of the logits, which is what autograd hands on.
        return backward(saved, t["labels"], 0, None, t["grad"]).to(logits.dtype)

    return [
        Pass("forward", lambda: forward(logits, t["labels"], 0), restore),
        Pass("backward", back, restore),
    ]


def _loss_outputs(kernel: Any, t: Tensors) -> Tensors:
    (_, total, picked), saved = kernel[0](t["logits"].clone(), t["labels"], 0)
    loss = total.log() - picked
    return {"loss": loss, "dlogits": kernel[1](saved, t["labels"], 0, None, t["grad"]).to(t["logits"].dtype)}


def _loss_formula(t: Tensors) -> Tensors:
    logsumexp = t["logits"].logsumexp(-1)
    index = t["labels"].long().unsqueeze(-1)
    dlogits = (t["logits"] - logsumexp.unsqueeze(-1)).exp()
    dlogits.scatter_add_(-1, index, -torch.ones_like(index, dtype=dlogits.dtype))
    return {
        "loss": logsumexp - t["logits"].gather(-1, index).squeeze(-1),
        "dlogits": dlogits.mul_(t["grad"].unsqueeze(-1)),
    }


def plain_loss_forward(
    logits: torch.Tensor, labels: torch.Tensor, first: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """By the formula: the logits are read, nothing of their size is written."""
    wide = logits.float()
    maximum = wide.amax(-1)
    total = (wide - maximum.unsqueeze(-1)).exp().sum(-1)
    picked = logits.gather(-1, (labels - first).unsqueeze(-1)).squeeze(-1).float() - maximum
    return torch.stack((maximum, total, picked)), (logits, maximum + total.log())


def plain_loss_backward(
    saved: Sequence[torch.Tensor],
    labels: torch.Tensor,
    first: int,
    logsumexp: torch.Tensor | None,
    grad: torch.Tensor,
) -> torch.Tensor:
    """By the formula, into a new tensor."""
    logits, own = saved
    columns = torch.arange(logits.shape[1], device=logits.device)
    hit = columns == (labels - first).unsqueeze(-1)
    probabilities = (logits.float() - (own if logsumexp is None else logsumexp).unsqueeze(-1)).exp()
    return ((probabilities - hit.float()) * grad.unsqueeze(-1)).to(logits.dtype)


def _layer_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """x [rows, size], grad_y [rows, 4·size], weight [4·size, size]."""
    rows, size = shape.rows, shape.size
    sizes = {"x": (rows, size), "grad_y": (rows, 4 * size), "weight": (4 * size, size)}
    return {name: draw(*each, dtype=dtype, device=device) for name, each in sizes.items()}


def _product_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """x [rows, size], grad_y [rows, 4·size]."""
    return {
        "main_grad": draw(4 * shape.size, shape.size, dtype=torch.float32, device=device),
        "grad_y": draw(shape.rows, 4 * shape.size, dtype=dtype, device=device),
        "x": draw(shape.rows, shape.size, dtype=dtype, device=device),
    }


def _product_outputs(kernel: Any, t: Tensors) -> Tensors:
    main = t["main_grad"].clone()
    kernel(main, t["grad_y"], t["x"])
    return {"added": main.double() - t["main_grad"].double()}


def _adam_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    n = shape.size
    return {
        "param": draw(n, dtype=torch.float32, device=device),
        "grad": draw(n, dtype=torch.float32, device=device),
        "exp_avg": draw(n, dtype=torch.float32, device=device) * 0.1,
        "exp_avg_sq": torch.rand(n, device=device) * 0.1 + 1e-3,
        "copy": draw(n, dtype=torch.bfloat16, device=device),
        "factor": torch.full((), 0.7, device=device),
    }


def _adam(kernel: Any, t: Tensors) -> None:
    kernel(
        *(t["param"], t["grad"], t["exp_avg"], t["exp_avg_sq"]),
        **ADAM,
        factor=t["factor"],
        copy=t["copy"],
    )


def _adam_passes(kernel: Any, t: Tensors) -> list[Pass]:
    """A kernel may scale the gradient where it lies: repeated, it would go to 0."""
    grad = t["grad"].clone()
    return [Pass("update", lambda: _adam(kernel, t), lambda: t["grad"].copy_(grad))]


def _adam_outputs(kernel: Any, t: Tensors) -> Tensors:
    own = {name: value.clone() for name, value in t.items()}
    _adam(kernel, own)
    copy, rounded = own["copy"].double(), own["param"].to(own["copy"].dtype).double()
    # Triton's interpreter cuts digits off where a device rounds.
    slack = 0.0 if own["param"].is_cuda else torch.finfo(own["copy"].dtype).eps
    if not bool(((copy - rounded).abs() <= slack * rounded.abs()).all()):
        raise ValueError("the copy is not what the parameters round to")
    return {name: own[name] for name in STATE}


def _adam_formula(t: Tensors) -> Tensors:
    g = t["grad"] * t["factor"]
    m = ADAM["beta1"] * t["exp_avg"] + (1.0 - ADAM["beta1"]) * g
    v = ADAM["beta2"] * t["exp_avg_sq"] + (1.0 - ADAM["beta2"]) * g.square()
    root = (v / (1.0 - ADAM["beta2"] ** ADAM["step"])).sqrt() + ADAM["eps"]
    p = t["param"] * (1.0 - ADAM["lr"] * ADAM["weight_decay"])
    p = p - ADAM["lr"] / (1.0 - ADAM["beta1"] ** ADAM["step"]) * m / root
    return {"param": p, "exp_avg": m, "exp_avg_sq": v}


def plain_adam(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: torch.Tensor,
    copy: torch.Tensor,
) -> None:
    """Operation by operation."""
    g = grad * factor
    exp_avg.lerp_(g, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    root = exp_avg_sq.sqrt() / math.sqrt(1.0 - beta2**step) + eps
    param.mul_(1.0 - lr * weight_decay).sub_(lr / (1.0 - beta1**step) * exp_avg / root)
    copy.copy_(param)


def plain_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of norms."""
    norms = [torch.linalg.vector_norm(x.float()) for x in tensors]
    return torch.linalg.vector_norm(torch.stack(norms).double())


def _norm_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Two buffers, as of a model with two buckets."""
    first = shape.size // 3
    return {
        "first": draw(first, dtype=dtype, device=device),
        "second": draw(shape.size - first, dtype=dtype, device=device),
    }


def _norm_of(kernel: Any, t: Tensors) -> torch.Tensor:
    return kernel([t["first"], t["second"]])


def _scores(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """[rows, 1, size, size]: `rows` heads."""
    of = (shape.rows, 1, shape.size, shape.size)
    return {"scores": draw(*of, dtype=dtype, device=device), "dp": draw(*of, dtype=dtype, device=device)}


SCALE = 0.125


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


def _softmax_formula(t: Tensors) -> Tensors:
    probabilities = plain_softmax_forward(t["scores"], SCALE)
    return {"p": probabilities, "dscores": plain_softmax_backward(t["dp"], probabilities, SCALE)}


def plain_softmax_forward(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal, by the formula."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    return (wide * scale).masked_fill(hidden, -math.inf).softmax(-1).to(scores.dtype)


def plain_softmax_backward(grad: torch.Tensor, probabilities: torch.Tensor, scale: float) -> torch.Tensor:
    """By the formula."""
    wide = probabilities.float() if probabilities.dtype in (torch.bfloat16, torch.float16) else probabilities
    product = wide * grad
    return (scale * (product - wide * product.sum(-1, keepdim=True))).to(probabilities.dtype)


FLAT: Mapping[str, Operation] = {
    "cross_entropy": Operation(
        make=_loss_inputs,
        passes=_loss_passes,
        outputs=_loss_outputs,
        formula=_loss_formula,
        rows=frozenset({"logits", "labels", "grad", "loss", "dlogits"}),
        bytes=lambda s, e: (s.rows * s.size * e, 2 * s.rows * s.size * e),
        plain=(plain_loss_forward, plain_loss_backward),
    ),
    "softmax": Operation(
        make=_scores,
        passes=_softmax_passes,
        outputs=_softmax_outputs,
        formula=_softmax_formula,
        rows=frozenset({"scores", "dp", "p", "dscores"}),
        # Half of what is read is hidden; all of what is written is written.
        bytes=lambda s, e: (s.rows * s.size**2 * e * 3 // 2, s.rows * s.size**2 * e * 2),
        plain=(plain_softmax_forward, plain_softmax_backward),
    ),
    "matmul": Operation(
        make=_layer_inputs,
        passes=lambda kernel, t: [
            Pass("output", lambda: kernel(t["x"], t["weight"].t())),
            Pass("input gradient", lambda: kernel(t["grad_y"], t["weight"])),
        ],
        outputs=lambda kernel, t: {
            "y": kernel(t["x"], t["weight"].t()),
            "grad_x": kernel(t["grad_y"], t["weight"]),
        },
        formula=lambda t: {"y": t["x"] @ t["weight"].t(), "grad_x": t["grad_y"] @ t["weight"]},
        rows=frozenset({"grad_y", "x", "y", "grad_x"}),
        bytes=lambda s, e: 2 * ((5 * s.rows * s.size + 4 * s.size**2) * e,),
        flops=lambda s: 2 * s.rows * s.size * 4 * s.size,
    ),
    "weight_grad": Operation(
        make=_product_inputs,
        passes=lambda kernel, t: [Pass("accumulate", lambda: kernel(t["main_grad"], t["grad_y"], t["x"]))],
        outputs=_product_outputs,
        formula=lambda t: {"added": t["grad_y"].t() @ t["x"]},
        rows=frozenset({"grad_y", "x"}),
        bytes=lambda s, e: (5 * s.rows * s.size * e + 2 * 4 * s.size**2 * 4,),
        flops=lambda s: 2 * s.rows * s.size * 4 * s.size,
    ),
    "adam": Operation(
        make=_adam_inputs,
        passes=_adam_passes,
        outputs=_adam_outputs,
        formula=_adam_formula,
        rows=frozenset({*STATE, "grad", "copy"}),
        bytes=lambda s, e: (30 * s.size,),
        plain=plain_adam,
        dtype=torch.float32,
    ),
    "lamb": LAMB,
    "l2norm": Operation(
        make=_norm_inputs,
        passes=lambda kernel, t: [Pass("norm", lambda: _norm_of(kernel, t))],
        outputs=lambda kernel, t: {"norm": _norm_of(kernel, t).view(1)},
        formula=lambda t: {"norm": (t["first"].square().sum() + t["second"].square().sum()).sqrt().view(1)},
        rows=frozenset(),
        bytes=lambda s, e: (s.size * e,),
        plain=plain_norm,
        dtype=torch.float32,
    ),
}

CASES: Mapping[str, Operation] = {**DIFFERENTIABLE, **FLAT}
"""Every case: an operation's name, and what is special after a comma."""


def operation_of(case: str) -> str:
    """The registry's name."""
    return case.partition(",")[0]
