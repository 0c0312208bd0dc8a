"""Compare SOAP over flat shards with the paper's algorithm 3 in numpy, and AdamW for the rest."""

import numpy as np
import pytest
import torch

from megalite.config.optimizer import SQUARES, OptimizerConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.soap import SHIFT, SOAP
from megalite.topology.group import Group
from megalite.topology.layout import ShardSpec
from tests.optimizers.flats import drawn, flat_of, set_gradients, update, weights

MATRICES = {"wide": (6, 10), "tall": (12, 4), "stack": (2, 5, 4), "experts": (3, 2, 4, 4), "row": (1, 7)}
OTHERS = {"norm": (5,), "one": (1,)}
B1, B2, EPS, STEPS = 0.8, 0.9, 1e-8, 7


def tensors(seed: int) -> dict[str, torch.Tensor]:
    shapes = {**MATRICES, **OTHERS}
    return {name: drawn(seed + i, *shape, dtype=torch.float64) for i, (name, shape) in enumerate(shapes.items())}


def soap_of(name: str, frequency: int) -> SOAP:
    config = OptimizerConfig(optimizer=name, adam_beta1=B1, adam_beta2=B2, soap_frequency=frequency)
    matrices = flat_of({name: tensors(0)[name] for name in MATRICES}, decay=True, orthogonal=True)
    others = flat_of({name: tensors(0)[name] for name in OTHERS}, decay=False)
    return SOAP([matrices, others], config, group=Group.solo("tp-dp-cp"))


def eigenvectors(gram: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Run algorithm 4 with the shift, by Gram-Schmidt instead of reflections."""
    size = len(gram)
    columns: list[np.ndarray] = []
    for column in ((gram + SHIFT * np.trace(gram) / size * np.eye(size)) @ basis).T:
        for _ in range(2):
            column = column - sum((one * (one @ column) for one in columns), np.zeros(size))
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, axis=1)


def transcribed(weight: np.ndarray, gradients: list[np.ndarray], frequency: int, both: bool) -> np.ndarray:
    """Return one matrix after all gradients, by algorithm 3; a side without a basis has the identity."""
    rows, columns = weight.shape
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    left_basis, right_basis = np.eye(rows), np.eye(columns)
    for count, grad in enumerate(gradients, start=1):
        turned_grad = left_basis.T @ grad @ right_basis
        mean = B1 * mean + (1 - B1) * grad
        turned_mean = left_basis.T @ mean @ right_basis
        square = B2 * square + (1 - B2) * turned_grad * turned_grad
        change = turned_mean / (1 - B1**count) / (np.sqrt(square / (1 - B2**count)) + EPS)
        terms = update(count)
        weight = weight * (1 - terms.lr * terms.weight_decay) - terms.lr * left_basis @ change @ right_basis.T
        left = B2 * left + (1 - B2) * grad @ grad.T
        right = B2 * right + (1 - B2) * grad.T @ grad
        if count % frequency == 0:
            if both or rows <= columns:
                left_basis = eigenvectors(left, left_basis)
            if both or rows > columns:
                right_basis = eigenvectors(right, right_basis)
    return weight


class HostMemory(torch.Tensor):
    """A tensor with a `to` that copies, as from host memory to a GPU."""

    def to(self, *_: object) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.parametrize("kept_in", [torch.Tensor, HostMemory])
@pytest.mark.parametrize("name", ["soap", "one-sided-soap"])
@pytest.mark.parametrize("frequency", [1, 3])
def test_updates_equal_the_formulas_per_matrix(
    frequency: int, name: str, kept_in: type[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    square = SOAP._square
    monkeypatch.setattr(SOAP, "_square", lambda self, size: square(self, size).as_subclass(kept_in))
    soap = soap_of(name, frequency)
    for step in range(1, STEPS + 1):
        set_gradients(soap.parameters, tensors(100 * step))
        soap.step(update(step))
    both = name == "soap"
    for tensor, shape in MATRICES.items():
        batch = [tensors(seed)[tensor].reshape(-1, *shape[-2:]).numpy() for seed in range(0, 100 * STEPS + 1, 100)]
        wanted = [transcribed(first, gradients, frequency, both) for first, *gradients in zip(*batch, strict=True)]
        found = weights(soap)[tensor].reshape(-1, *shape[-2:]).numpy()
        np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-9, atol=1e-11, err_msg=tensor)


@pytest.mark.parametrize("name", ["soap", "one-sided-soap"])
def test_adam_until_the_first_basis_and_for_other_parameters(name: str) -> None:
    soap = soap_of(name, 100)
    flats = [
        flat_of({name: tensors(0)[name] for name in group}, decay=group is MATRICES) for group in (MATRICES, OTHERS)
    ]
    adam = AdamW(flats, soap.config)
    for step in range(1, 4):
        for each in (soap, adam):
            set_gradients(each.parameters, tensors(100 * step))
            each.step(update(step))
    for tensor, value in weights(adam).items():
        torch.testing.assert_close(weights(soap)[tensor], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["soap", "one-sided-soap"])
def test_basis_converges_and_stays_orthogonal(name: str) -> None:
    """The gradients have a fixed covariance."""
    first = drawn(1, 6, 40, dtype=torch.float64)
    factor = torch.diag(torch.tensor([8.0, 5.0, 3.0, 2.0, 1.0, 0.5], dtype=torch.float64))
    mixing = torch.linalg.qr(drawn(2, 6, 6, dtype=torch.float64))[0]
    config = OptimizerConfig(optimizer=name, adam_beta2=0.99, soap_frequency=1)
    matrices = flat_of({"w": first}, decay=True, orthogonal=True)
    soap = SOAP([matrices, flat_of({"norm": drawn(3, 5)}, decay=False)], config, group=Group.solo("all"))
    for step in range(1, 300):
        noise = drawn(100 + step, 6, 40, dtype=torch.float64)
        set_gradients(soap.parameters, {"w": mixing @ factor @ noise, "norm": drawn(3, 5)})
        soap.step(update(step))
    states = {state.name: state for state in soap.matrix_states()}
    assert set(states) == {
        f"{of}_{side}" for of in SQUARES for side in (("left", "right") if name == "soap" else ("left",))
    }
    assert states["eigenbasis_left"].spec == ShardSpec.whole("w", (1, 6, 6))
    basis = states["eigenbasis_left"].values[0]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6, dtype=torch.float64), rtol=0.0, atol=1e-12)
    assert (mixing.mT @ basis).abs().diagonal().min() > 0.97
