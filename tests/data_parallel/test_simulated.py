"""What several processes do is what one does that plays them all, to the bit: sums in the order of ranks."""

import torch

from tests.data_parallel.toy import NO_DECAY, SHAPES, gradient, initial, trajectory
from tests.support.ranks import run_ranks

STEPS = 3


def summed(step: int, ranks: int) -> dict[str, torch.Tensor]:
    """The gradient of a step, added up by rank."""
    return {
        name: torch.stack([gradient(name, step, rank) for rank in range(ranks)]).sum(dim=0) for name in SHAPES
    }


def adam(ranks: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Torch's own AdamW over the summed gradients."""
    weights = {name: torch.nn.Parameter(value) for name, value in initial().items()}
    groups = [
        {"params": [weights[name] for name in SHAPES if (name in NO_DECAY) == plain], "weight_decay": decay}
        for plain, decay in ((False, 0.1), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, fused=True)
    found = []
    for step in range(1, steps + 1):
        for name, grad in summed(step, ranks).items():
            weights[name].grad = grad
        optimizer.step()
        found.append({name: weight.detach().clone() for name, weight in weights.items()})
    return found


def assert_same(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    for step, (one, other) in enumerate(zip(found, wanted, strict=True), start=1):
        for name in SHAPES:
            assert torch.equal(one[name], other[name]), f"{name} after step {step}"


def test_all_reduce_by_rank() -> None:
    settings = {"dp_strategy": "all-reduce", "reduction_order": "rank"}
    for found in run_ranks(4, trajectory, 4, settings, STEPS):
        assert_same(found, adam(4))


def test_distributed_optimizer() -> None:
    for found in run_ranks(4, trajectory, 4, {"dp_strategy": "distributed-optimizer"}, STEPS):
        assert_same(found, adam(4))
