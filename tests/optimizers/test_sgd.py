"""SGD over flat shards is torch's SGD tensor by tensor, with weight decay decoupled."""

import pytest
import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.sgd import SGD
from tests.optimizers.flats import drawn, flat_of, set_gradients, update, weights

SHAPES = {"matrix": (7, 5), "one": (1,), "norm": (5,), "bias": (3,)}
DECAYED = ("matrix", "one")


def initial() -> dict[str, torch.Tensor]:
    return {name: drawn(seed, *shape) for seed, (name, shape) in enumerate(SHAPES.items())}


def gradients(step: int) -> dict[str, torch.Tensor]:
    return {name: drawn(100 * step + seed, *shape) for seed, (name, shape) in enumerate(SHAPES.items())}


def sgd_of(config: OptimizerConfig) -> SGD:
    flats = [
        flat_of({name: value for name, value in initial().items() if (name in DECAYED) == decay}, decay=decay)
        for decay in (True, False)
    ]
    return SGD(flats, config)


def advance(sgd: SGD, steps: range) -> None:
    for step in steps:
        set_gradients(sgd.parameters, gradients(step))
        sgd.step(update(step))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_steps_are_those_of_torch_tensor_by_tensor(momentum: float, nesterov: bool) -> None:
    torch.set_num_threads(1)
    sgd = sgd_of(OptimizerConfig(optimizer="sgd", sgd_momentum=momentum, sgd_nesterov=nesterov))
    advance(sgd, range(1, 5))

    small = {name: torch.nn.Parameter(value) for name, value in initial().items()}
    theirs = torch.optim.SGD(list(small.values()), lr=1.0, momentum=momentum, nesterov=nesterov, foreach=False)
    for step in range(1, 5):
        terms = update(step)
        for name, parameter in small.items():
            parameter.grad = gradients(step)[name]
            if name in DECAYED:
                parameter.data.mul_(1 - terms.lr * terms.weight_decay)
        theirs.param_groups[0]["lr"] = terms.lr
        theirs.step()
    for name, ours in weights(sgd).items():
        torch.testing.assert_close(ours, small[name].data, rtol=1e-14, atol=1e-14)
    assert sgd.updates == 4


def test_weights_decay_by_the_rate_alone_whatever_the_momentum() -> None:
    sgd = sgd_of(OptimizerConfig(optimizer="sgd", sgd_momentum=0.9))
    for step in (1, 2):
        sgd.step(update(step))  # no gradient at all
    share = (1 - update(1).lr * update(1).weight_decay) * (1 - update(2).lr * update(2).weight_decay)
    for name, value in weights(sgd).items():
        wanted = initial()[name] * (share if name in DECAYED else 1.0)
        torch.testing.assert_close(value, wanted, rtol=1e-15, atol=0.0)
