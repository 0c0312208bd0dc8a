"""Compare AdamW and SGD over flat shards with torch's over parameters, with decoupled decay on some of them."""

from typing import Any

import pytest
import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import SGD, Optimizer
from tests.optimizers.flats import drawn, flats_of, set_gradients, update, weights

SHAPES = {"matrix": (7, 5), "one": (1,), "norm": (5,), "bias": (3,)}
DECAYED = ("matrix", "one")
ADAM: dict[str, Any] = {"lr": 1e-2, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-4}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {name: drawn(seed + i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}


def made(**settings: Any) -> Optimizer:
    kind = SGD if settings.get("optimizer") == "sgd" else AdamW
    return kind(flats_of(tensors(0), DECAYED), OptimizerConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        ADAM,
        *(
            {"optimizer": "sgd", "sgd_momentum": m, "sgd_nesterov": n}
            for m, n in ((0.0, False), (0.9, False), (0.9, True))
        ),
    ],
    ids=str,
)
def test_steps_equal_torch_per_tensor(settings: dict[str, Any]) -> None:
    ours = made(**settings)
    small = {name: torch.nn.Parameter(value) for name, value in tensors(0).items()}
    theirs: torch.optim.Optimizer = torch.optim.AdamW(
        small.values(), weight_decay=0.0, betas=(0.8, 0.95), eps=1e-4, foreach=False
    )
    if "optimizer" in settings:
        momentum, nesterov = settings["sgd_momentum"], settings["sgd_nesterov"]
        theirs = torch.optim.SGD(small.values(), lr=1.0, momentum=momentum, nesterov=nesterov, foreach=False)
    for step in range(1, 5):
        set_gradients(ours.parameters, tensors(100 * step))
        ours.step(update(step))
        for name, parameter in small.items():
            parameter.grad = tensors(100 * step)[name]
            if name in DECAYED:
                parameter.data.mul_(1 - update(step).lr * update(step).weight_decay)
        theirs.param_groups[0]["lr"] = update(step).lr
        theirs.step()
    for name, values in weights(ours).items():
        torch.testing.assert_close(values, small[name].data, rtol=1e-12, atol=1e-12)
    assert ours.updates == 4
