"""Compare LAMB over flat shards with the paper's algorithm, tensor by tensor."""

from unittest import mock

import pytest
import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers import lamb
from megalite.optimizers.base import Update
from megalite.optimizers.lamb import LAMB
from megalite.topology.group import Group
from tests.optimizers.flats import drawn, flats_of, set_gradients, tensors_of, update, weights

CONFIG = OptimizerConfig(
    optimizer="lamb", adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-4, lamb_min_coeff=0.02, lamb_max_coeff=5.0
)
SHAPES = {"matrix": (9, 5), "stack": (2, 4, 3), "one": (1,), "huge": (4, 4), "tiny": (3, 6), "norm": (5,)}
SIZES = {"huge": 1e3, "tiny": 1e-4}


def initial() -> dict[str, torch.Tensor]:
    return {name: SIZES.get(name, 1.0) * value for name, value in gradients(0).items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    return {name: drawn(100 * step + seed, *shape) for seed, (name, shape) in enumerate(SHAPES.items())}


def lamb_of(tensors: dict[str, torch.Tensor]) -> LAMB:
    return LAMB(flats_of(tensors, set(SHAPES) - {"norm"}), CONFIG, group=Group.solo("world"))


def paper(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Run algorithm 2, tensor by tensor; return the weights, and the ratios of the last step."""
    found, ratios = {}, {}
    for name, x in initial().items():
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for step in range(1, steps + 1):
            g, terms = gradients(step)[name], update(step)
            m = 0.8 * m + 0.2 * g
            v = 0.95 * v + 0.05 * g * g
            u = (m / (1 - 0.8**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-4)
            ratio = 1.0
            if name != "norm":
                u = u + terms.weight_decay * x
                ratio = min(max(float(x.norm() / u.norm()), 0.02), 5.0)
                ratios[name] = ratio
            x = x - terms.lr * ratio * u
        found[name] = x
    return found, ratios


@pytest.mark.parametrize("block", [None, 4])
def test_updates_equal_the_paper(block: int | None) -> None:
    with mock.patch.dict(lamb.BLOCKS, {"cpu": block or lamb.BLOCKS["cpu"]}):
        ours = lamb_of(initial())
    for step in range(1, 5):
        set_gradients(ours.parameters, gradients(step))
        ours.step(update(step))
    wanted, ratios = paper(4)
    for name, value in weights(ours).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-14)
    for flat in ours.parameters:  # the step must not change gradients, which are logged and compared later
        for name, grad in tensors_of(flat, flat.param.grad).items():
            assert torch.equal(grad, gradients(4)[name]), name
    assert ours.trust_ratios == pytest.approx(ratios, rel=1e-12)
    assert (ratios["huge"], ratios["tiny"]) == (5.0, 0.02)
    assert 0.02 < ratios["matrix"] < 5.0
    assert ours.updates == 4


def test_ratio_is_one_if_a_norm_is_zero() -> None:
    tensors = {"matrix": torch.zeros(9, 5), "one": torch.ones(1), "norm": torch.ones(5)}
    ours = lamb_of({name: value.double() for name, value in tensors.items()})
    set_gradients(ours.parameters, {"matrix": drawn(1, 9, 5), "one": torch.zeros(1), "norm": torch.zeros(5)})
    ours.step(Update(step=1, lr=0.5, weight_decay=0.0))
    found = weights(ours)
    grad = drawn(1, 9, 5)
    torch.testing.assert_close(found["matrix"], -0.5 * grad / (grad.abs() + 1e-4), rtol=1e-12, atol=0.0)
    assert torch.equal(found["one"], tensors["one"].double())
    assert torch.equal(found["norm"], tensors["norm"].double())
    assert ours.trust_ratios == {"matrix": 1.0, "one": 1.0}
    ours.step(Update(step=2, lr=0.5, weight_decay=0.1))
    assert all(value.isfinite().all() for value in weights(ours).values())
    assert ours.trust_ratios["one"] == pytest.approx(5.0), "only decay moves it: 1/0.1, and at most 5"


def test_norms_of_large_tensors_are_accurate() -> None:
    """An fp32 sum of three million squares would be off in the fifth digit."""
    tensors = {"matrix": 0.02 * drawn(0, 1500, 2000, dtype=torch.float32), "norm": torch.ones(4)}
    ours = lamb_of(tensors)
    grad = drawn(1, 1500, 2000, dtype=torch.float32)
    set_gradients(ours.parameters, {"matrix": grad, "norm": torch.zeros(4)})
    ours.step(Update(step=1, lr=0.1, weight_decay=0.0))
    u = grad.double() / (grad.double().abs() + 1e-4)
    wanted = float(tensors["matrix"].double().norm() / u.norm())
    assert ours.trust_ratios["matrix"] == pytest.approx(wanted, rel=5e-7)
