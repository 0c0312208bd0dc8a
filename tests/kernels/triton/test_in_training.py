"""Training steps with all Triton kernels against torch's."""

from typing import Any

import pytest
import torch

from megalite.config.compute import OPERATIONS
from megalite.kernels.registry import IMPLEMENTATIONS
from megalite.parity.trajectory import Runner
from megalite.topology.topology import Topology
from megalite.training.replica import build_replica
from tests.support.tiny import LLAMA, tiny_config, words

TORCH = [f"{operation}=torch" for operation in OPERATIONS]
TRITON = [f"{operation}={'triton' if 'triton' in IMPLEMENTATIONS[operation] else 'torch'}" for operation in OPERATIONS]
SMALL = words(
    "num_layers=1 hidden_size=32 num_attention_heads=2 num_query_groups=null seq_length=8 global_batch_size=2 "
    "adam_eps=1e-2"
)
"""With a small eps, Adam's first steps are just as large for gradients of only rounding errors."""


def run(
    settings: dict[str, Any], kernels: list[str], device: torch.device
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, str]]:
    """Return losses and norms of two steps, the weights after them, and the chosen kernels."""
    config = tiny_config(**{**settings, **SMALL}, kernels=kernels, device=device.type)
    runner = Runner(build_replica(config, Topology.solo(device)))
    numbers = []
    for _ in range(2):
        result = runner.step()
        numbers += [result.loss, result.grad_norm]
    weights = {
        name: parameter.detach().clone()
        for stage in runner.replica.stages.values()
        for name, parameter in stage.named_parameters()
    }
    return numbers, weights, runner.replica.kernels.summary()


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32", "hidden_dropout": 0.1},
        {"precision": "fp32", **LLAMA},
        {"precision": "fp32", "optimizer": "lamb"},
        {"precision": "bf16", **LLAMA, "activation": "geglu"},
    ],
    ids=["gpt, dropout", "llama", "lamb", "bf16"],
)
def test_steps_with_triton_equal_steps_with_torch(settings: dict[str, Any], device: torch.device) -> None:
    theirs, their_weights, backends = run(settings, TORCH, device)
    assert set(backends.values()) == {"torch"}
    ours, weights, backends = run(settings, TRITON, device)
    others = [name for name, backend in backends.items() if backend != "triton"]
    assert others == ["matmul", "weight_grad"]
    half = settings["precision"] == "bf16"
    # The interpreter truncates to bf16.
    assert ours == pytest.approx(theirs, rel=4e-2 if half else 1e-5)
    for name, weight in weights.items():
        distance = (weight.float() - their_weights[name].float()).abs().max()
        assert distance < (1e-2 if half else 1e-5), (name, float(distance))
