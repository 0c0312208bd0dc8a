"""LAMB, whose two halves are timed apart: between them a run sums norms over ranks."""

import math
from typing import Any

import torch
from gpu_operations import Operation, Pass, Shape, Tensors, draw

TERMS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "step": 7}
RATE = 1e-3
STATE = ("param", "exp_avg", "exp_avg_sq")


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    n = shape.size
    return {
        "param": draw(n, dtype=torch.float32, device=device),
        "grad": draw(n, dtype=torch.float32, device=device),
        "exp_avg": draw(n, dtype=torch.float32, device=device) * 0.1,
        "exp_avg_sq": torch.rand(n, device=device) * 0.1 + 1e-3,
    }


def _moments(kernel: Any, t: Tensors) -> tuple[torch.Tensor, ...]:
    found = kernel[0](t["param"], t["grad"], t["exp_avg"], t["exp_avg_sq"], **TERMS, norms=True)
    assert isinstance(found, tuple)
    return found


def _step(kernel: Any, t: Tensors) -> None:
    kernel[1](*(t[name] for name in STATE), **TERMS, rate=RATE)


def _outputs(kernel: Any, t: Tensors) -> Tensors:
    """The norms as squares, which are sums over elements."""
    own = {name: value.clone() for name, value in t.items()}
    norms = torch.stack(_moments(kernel, own))
    _step(kernel, own)
    return {**{name: own[name] for name in STATE}, "squares": norms.square()}


def _formula(t: Tensors) -> Tensors:
    m = TERMS["beta1"] * t["exp_avg"] + (1.0 - TERMS["beta1"]) * t["grad"]
    v = TERMS["beta2"] * t["exp_avg_sq"] + (1.0 - TERMS["beta2"]) * t["grad"].square()
    root = (v / (1.0 - TERMS["beta2"] ** TERMS["step"])).sqrt() + TERMS["eps"]
    u = m / (1.0 - TERMS["beta1"] ** TERMS["step"]) / root + TERMS["weight_decay"] * t["param"]
    squares = torch.stack([t["param"].square().sum(), u.square().sum()])
    return {"param": t["param"] - RATE * u, "exp_avg": m, "exp_avg_sq": v, "squares": squares}


def plain_lamb_moments(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    norms: bool,
) -> tuple[torch.Tensor, ...]:
    """Operation by operation."""
    exp_avg.lerp_(grad, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    root = exp_avg_sq.sqrt() / math.sqrt(1.0 - beta2**step) + eps
    u = exp_avg / (1.0 - beta1**step) / root + weight_decay * param
    return (param.square().sum().double().sqrt(), u.square().sum().double().sqrt()) if norms else ()


def plain_lamb_step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Operation by operation."""
    root = exp_avg_sq.sqrt() / math.sqrt(1.0 - beta2**step) + eps
    param.sub_(rate * (exp_avg / (1.0 - beta1**step) / root + weight_decay * param))


LAMB = Operation(
    make=_inputs,
    passes=lambda kernel, t: [
        Pass("moments", lambda: _moments(kernel, t)),
        Pass("step", lambda: _step(kernel, t)),
    ],
    outputs=_outputs,
    formula=_formula,
    rows=frozenset({*STATE, "grad"}),
    bytes=lambda s, e: (24 * s.size, 16 * s.size),
    plain=(plain_lamb_moments, plain_lamb_step),
    dtype=torch.float32,
)
