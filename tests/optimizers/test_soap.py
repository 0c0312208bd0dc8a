"""SOAP over flat shards is what numpy makes of the formulas; everything else is AdamW's."""

import numpy as np
import pytest
import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.soap import SHIFT, SOAP, STATES
from megalite.topology.group import Group
from tests.optimizers.flats import drawn, flat_of, set_gradients, update, weights

MATRICES = {"wide": (6, 10), "tall": (12, 4), "stack": (2, 5, 4), "experts": (3, 2, 4, 4), "row": (1, 7)}
OTHERS = {"norm": (5,), "one": (1,)}
B1, B2, EPS, STEPS = 0.8, 0.9, 1e-8, 7


def tensors(seed: int) -> dict[str, torch.Tensor]:
    shapes = {**MATRICES, **OTHERS}
    return {name: drawn(seed + i, *shape, dtype=torch.float64) for i, (name, shape) in enumerate(shapes.items())}


def soap_of(frequency: int) -> SOAP:
    config = OptimizerConfig(optimizer="one-sided-soap", adam_beta1=B1, adam_beta2=B2, soap_frequency=frequency)
    matrices = flat_of({name: tensors(0)[name] for name in MATRICES}, decay=True)
    others = flat_of({name: tensors(0)[name] for name in OTHERS}, decay=False)
    return SOAP([matrices], [others], config, STATES, group=Group.solo("tp-dp-cp"))


def transcribed(weight: np.ndarray, gradients: list[np.ndarray], frequency: int) -> np.ndarray:
    """One matrix after all gradients. The basis is found by Gram-Schmidt, not by reflections."""
    if weight.shape[0] > weight.shape[1]:
        return transcribed(weight.T, [grad.T for grad in gradients], frequency).T
    size = weight.shape[0]
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    gram, basis = np.zeros((size, size)), np.eye(size)
    for count, grad in enumerate(gradients, start=1):
        mean = B1 * mean + (1 - B1) * grad
        square = B2 * square + (1 - B2) * (basis.T @ grad) ** 2
        gram = B2 * gram + (1 - B2) * grad @ grad.T
        turned = (basis.T @ mean) / (1 - B1**count) / (np.sqrt(square / (1 - B2**count)) + EPS)
        terms = update(count)
        weight = weight * (1 - terms.lr * terms.weight_decay) - terms.lr * basis @ turned
        if count % frequency == 0:
            powered = (gram + SHIFT * np.trace(gram) / size * np.eye(size)) @ basis
            columns: list[np.ndarray] = []
            for column in powered.T:
                for _ in range(2):
                    column = column - sum((one * (one @ column) for one in columns), np.zeros(size))
                columns.append(column / np.linalg.norm(column))
            basis = np.stack(columns, axis=1)
    return weight


@pytest.mark.parametrize("frequency", [1, 3])
def test_updates_are_those_of_the_formulas_matrix_by_matrix(frequency: int) -> None:
    soap = soap_of(frequency)
    for step in range(1, STEPS + 1):
        set_gradients(soap.parameters, tensors(100 * step))
        soap.step(update(step))
    for name, shape in MATRICES.items():
        batch = [tensors(seed)[name].reshape(-1, *shape[-2:]).numpy() for seed in range(0, 100 * STEPS + 1, 100)]
        wanted = [transcribed(first, gradients, frequency) for first, *gradients in zip(*batch, strict=True)]
        found = weights(soap)[name].reshape(-1, *shape[-2:]).numpy()
        np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-9, atol=1e-11, err_msg=name)


def test_everything_else_and_all_until_the_first_basis_is_adams() -> None:
    soap = soap_of(100)
    flats = [
        flat_of({name: tensors(0)[name] for name in group}, decay=group is MATRICES) for group in (MATRICES, OTHERS)
    ]
    adam = AdamW(flats, soap.config)
    for step in range(1, 4):
        for each in (soap, adam):
            set_gradients(each.parameters, tensors(100 * step))
            each.step(update(step))
    for name, value in weights(adam).items():
        torch.testing.assert_close(weights(soap)[name], value, rtol=1e-12, atol=1e-13)


def test_the_basis_becomes_that_of_the_gradients_and_stays_orthogonal() -> None:
    """Of gradients with one fixed covariance."""
    first = drawn(1, 6, 40, dtype=torch.float64)
    factor = torch.diag(torch.tensor([8.0, 5.0, 3.0, 2.0, 1.0, 0.5], dtype=torch.float64))
    mixing = torch.linalg.qr(drawn(2, 6, 6, dtype=torch.float64))[0]
    config = OptimizerConfig(optimizer="one-sided-soap", adam_beta2=0.99, soap_frequency=1)
    matrices = flat_of({"w": first}, decay=True)
    soap = SOAP([matrices], [flat_of({"norm": drawn(3, 5)}, decay=False)], config, STATES, group=Group.solo("all"))
    for step in range(1, 300):
        noise = drawn(100 + step, 6, 40, dtype=torch.float64)
        set_gradients(soap.parameters, {"w": mixing @ factor @ noise, "norm": drawn(3, 5)})
        soap.step(update(step))
    basis = soap.state(matrices.param)["eigenbasis"][:36].view(6, 6)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6, dtype=torch.float64), rtol=0.0, atol=1e-12)
    assert (mixing.mT @ basis).abs().diagonal().min() > 0.97
