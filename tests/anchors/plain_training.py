"""Twenty steps of training written from the definitions, in plain torch without code of megalite.

Parity compares megalite with megalite, so a fault in every layout would pass there. All layouts must follow this run: weights,
samples, objective, clipping, AdamW and learning rate are all computed here, in float64. As a program it writes
`trajectory.json`."""

import json
import math
from pathlib import Path

import numpy as np
import torch

from tests.models.plain_gpt import Plain, Weights, losses

COMMITTED = Path(__file__).with_name("trajectory.json")

STEPS, BATCH, SEQUENCE, LAYERS, HIDDEN, HEADS, VOCABULARY, ROWS = 20, 8, 16, 4, 32, 4, 61, 64
"""Rows of the padded word embedding."""
END = 0
"""Ends a document; the token after it is not predicted."""
LR, MIN_LR, WARMUP = 5e-3, 5e-4, 4
BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP = 0.9, 0.95, 1e-5, 0.1, 1.0
ROPE_BASE = 10000.0

MODELS = {
    "gpt": Plain(layers=LAYERS, heads=HEADS, groups=HEADS, head_size=HIDDEN // HEADS, vocab_size=VOCABULARY),
    "llama": Plain(
        layers=LAYERS,
        heads=HEADS,
        groups=2,
        head_size=HIDDEN // HEADS,
        vocab_size=VOCABULARY,
        norm="RMSNorm",
        activation="swiglu",
        rope_base=ROPE_BASE,
        tied=False,
    ),
}


def sample(k: int) -> np.ndarray:
    """Sample k: int64 [SEQUENCE + 1], with small tokens more frequent; even samples end a document about every third token,
    odd ones rarely."""
    generator = np.random.Generator(np.random.Philox(key=1000 + k))
    tokens = 1 + ((VOCABULARY - 1) * generator.random(SEQUENCE + 1) ** 3).astype(np.int64)
    tokens[generator.random(SEQUENCE + 1) < (0.3 if k % 2 == 0 else 0.02)] = END
    return tokens


def shapes(model: Plain) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor of the model."""
    ffn, biases = 4 * HIDDEN, model.norm == "LayerNorm"
    found: dict[str, tuple[int, ...]] = {"embedding.word.weight": (ROWS, HIDDEN)}
    if model.rope_base is None:
        found["embedding.position.weight"] = (SEQUENCE, HIDDEN)
    norms = []
    for index in range(model.layers):
        name = f"layers.{index}"
        found[f"{name}.attention.qkv.weight"] = ((model.heads + 2 * model.groups) * model.head_size, HIDDEN)
        found[f"{name}.attention.out.weight"] = (HIDDEN, HIDDEN)
        found[f"{name}.mlp.up.weight"] = (ffn, HIDDEN) if biases else (2, ffn, HIDDEN)
        found[f"{name}.mlp.down.weight"] = (HIDDEN, ffn)
        norms += [f"{name}.attention_norm", f"{name}.mlp_norm"]
    if biases:
        found |= {name.replace("weight", "bias"): shape[:1] for name, shape in found.items() if "layers" in name}
    for name in (*norms, "final_norm"):
        found |= {f"{name}.{kind}": (HIDDEN,) for kind in ("weight", *(["bias"] if biases else []))}
    return found if model.tied else {**found, "head.weight": (ROWS, HIDDEN)}


def initial_weights(model: Plain) -> Weights:
    """float64 with the digits of float32; norms and biases are not one and zero, which would hide faults."""
    generator = np.random.Generator(np.random.Philox(key=7))
    weights = {}
    for name, shape in sorted(shapes(model).items()):
        drawn = torch.from_numpy(0.1 * generator.standard_normal(shape).astype(np.float32)).double()
        weights[name] = drawn + 1.0 if "norm.weight" in name else drawn
    return {name: weight.float().double() for name, weight in weights.items()}


def learning_rate(step: int) -> float:
    """Learning rate of step 1, 2, ...: a linear warm-up, then half a cosine down to MIN_LR in the last step."""
    if step <= WARMUP:
        return LR * step / WARMUP
    return MIN_LR + (LR - MIN_LR) * 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def objective(weights: Weights, first: int, model: Plain) -> torch.Tensor:
    """Mean loss over the predicted tokens of a batch."""
    batch = torch.from_numpy(np.stack([sample(k) for k in range(first, first + BATCH)]))
    inputs, labels = batch[:, :-1], batch[:, 1:]
    return losses(weights, inputs, labels, model)[inputs != END].mean()


def train(model: Plain) -> dict[str, list[float]]:
    """Loss and gradient norm (before clipping) of every step, and the loss of the batch after the last one."""
    weights = {name: weight.requires_grad_() for name, weight in initial_weights(model).items()}
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "evaluation": []}
    for step in range(1, STEPS + 1):
        loss = objective(weights, (step - 1) * BATCH, model)
        grads = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
        with torch.no_grad():
            for name, weight in weights.items():
                grad = grads[name] * min(1.0, CLIP / (norm + 1e-6))
                first[name] = BETA1 * first[name] + (1 - BETA1) * grad
                second[name] = BETA2 * second[name] + (1 - BETA2) * grad**2
                mean, square = first[name] / (1 - BETA1**step), second[name] / (1 - BETA2**step)
                decay = WEIGHT_DECAY if weight.dim() > 1 else 0.0
                weight -= learning_rate(step) * (mean / (square.sqrt() + EPS) + decay * weight)
        found["loss"].append(loss.item())
        found["grad_norm"].append(norm)
    with torch.no_grad():
        found["evaluation"].append(objective(weights, STEPS * BATCH, model).item())
    return found


if __name__ == "__main__":
    COMMITTED.write_text(json.dumps({name: train(model) for name, model in MODELS.items()}, indent=1) + "\n")
